"""Stages of pods: the mounts of volumes and images, written to the timelines of the pods' starts.

The daemons of a node write them. A finished timeline is published to the store and the collector,
where reports find it. A process has one publishing thread, so a store that does not answer costs
one thread and one connection however many pods start. A stage that cannot be written is missing in
a report; nothing else fails. Thread-safe.

Whoever may create pods chooses the job, submission, attempt and rank of the stages, nothing else.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import BootseerError
from bootseer.kubernetes.containerd import container
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.snapshotter.snapshot import ImageMount
from bootseer.profile.publish.note import LauncherNote, is_stored
from bootseer.served.service import live_mounts
from bootseer.settings.config import Settings, launcher_rank
from bootseer.settings.values import as_count, as_name
from bootseer.timeline.otlp import Value
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

_WAITING_MAX = 1000
"""Most timelines, and most image mounts, that wait. Each takes about 2 kB of memory."""
_KNOWN_WITHIN_S = 30.0
"""CRI lists a container soon after its snapshot is made; it never lists a sandbox's snapshot."""
_FIRST_POLL_S, _POLL_MAX_S = 0.2, 5.0
"""The pause doubles: containerd logs each question for a container unknown to CRI as an error."""


class PodStart(Struct, frozen=True):
    """Pod, and the start that it belongs to."""

    pod: str = ""
    namespace: str = ""
    uid: str = ""
    job: str = ""
    submission: str = ""
    attempt: int = 0
    rank: int = 0


def start_of_volume(context: Mapping[str, str]) -> PodStart:
    """Return the start of the pod that a volume with these attributes is for."""
    return _start(context, "csi.storage.k8s.io/pod.", context)


def start_of_container(labels: Mapping[str, str], variables: Mapping[str, str]) -> PodStart:
    """Return the start of the pod whose container has these labels and variables."""
    identity = {
        name: variables.get(f"BOOTSEER_{name.upper()}", "")
        for name in ("job", "submission", "attempt")
    }
    identity["rank"] = launcher_rank(variables)
    return _start(labels, "io.kubernetes.pod.", identity)


def _start(pod: Mapping[str, str], prefix: str, identity: Mapping[str, str]) -> PodStart:
    name, namespace, uid = (pod.get(f"{prefix}{one}", "") for one in ("name", "namespace", "uid"))
    return PodStart(
        pod=name,
        namespace=namespace,
        uid=uid,
        job=as_name(identity.get("job") or name),
        submission=as_name(identity.get("submission") or uid),
        attempt=as_count(identity.get("attempt", "")),
        rank=as_count(identity.get("rank", "")),
    )


@contextlib.contextmanager
def pod_timeline(settings: Settings, start: PodStart, part: str) -> Iterator[Timeline | None]:
    """Open the timeline of one part of a pod, and queue it for publishing after the block.

    The timeline is None if the pod's start is unknown.

    Args:
        settings: Settings of the node.
        start: The pod and its start.
        part: Name of the part in the pod, such as that of a volume; each part has a file.
    """
    if not start.job:
        yield None
        return
    settings = replace(
        settings,
        job=start.job,
        submission=start.submission,
        attempt=start.attempt,
        rank=start.rank,
    )
    timeline = Timeline.start(
        settings.timeline_dir,
        job=start.job,
        submission=start.submission,
        attempt=start.attempt,
        node=settings.node,
        rank=start.rank,
        part=hashlib.sha256(part.encode()).hexdigest()[:8],
    ).with_resource(
        {
            "k8s.pod.name": start.pod,
            "k8s.pod.uid": start.uid,
            "k8s.namespace.name": start.namespace,
        }
    )
    try:
        yield timeline
    finally:
        _PUBLISHER.put(LauncherNote(settings, timeline.path, ProcessId(0, "")))


class _Publisher:
    """Queue of timelines, and the thread that publishes them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[LauncherNote] = deque()
        self._is_running = False
        self._idle = threading.Event()
        self._idle.set()

    def put(self, note: LauncherNote) -> None:
        """Queue a timeline; if the queue is full, drop the oldest one."""
        with self._lock:
            if len(self._waiting) >= _WAITING_MAX:
                dropped = self._waiting.popleft()
                _log.warning("timeline %s is not published: too many wait", dropped.timeline)
            self._waiting.append(note)
            if self._is_running:
                return
            self._is_running = True
            self._idle.clear()
        try:
            threading.Thread(target=self._run, name="timeline", daemon=True).start()
        except RuntimeError as error:
            # The next timeline starts the thread.
            with self._lock:
                self._is_running = False
                self._idle.set()
            _log.warning("timeline %s is not published yet: %s", note.timeline, error)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no timeline waits or is being published; return whether that is so."""
        return self._idle.wait(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    self._idle.set()
                    return
                note = self._waiting.popleft()
            try:
                _publish(note)
            except Exception:
                _log.exception("timeline %s is not published", note.timeline)


_PUBLISHER = _Publisher()


def wait_published(timeout_s: float) -> bool:
    """Wait until the timelines of this process are published or given up; return whether so."""
    return _PUBLISHER.wait(timeout_s)


def _publish(note: LauncherNote) -> None:
    # Here: pods wait until the fan-out's process has loaded this module.
    from bootseer.profile.publish.round import publish

    problems = publish([note], {}).problems
    for receiver, problem in problems.items():
        _log.warning("%s does not accept timeline %s: %s", receiver, note.timeline, problem)
    if problems or not is_stored(note.settings):
        return
    # The store has the timeline, and nobody cleans up on a node after its pods.
    with contextlib.suppress(OSError):
        note.timeline.unlink()
        for folder in note.timeline.parents:
            if folder == note.settings.timeline_dir:
                break
            folder.rmdir()


class ImageMountStages:
    """Stages of the image mounts of one snapshotter.

    A snapshotter does not know pods. It knows the containers that it prepared a root for, and
    containerd, a moment later, which pod each container belongs to.
    """

    def __init__(
        self, settings: Settings, socket: Path, known_within_s: float = _KNOWN_WITHIN_S
    ) -> None:
        """`socket` is containerd's, which knows each container within `known_within_s`."""
        self._settings = settings
        self._socket = socket
        self._known_within_s = known_within_s
        # Mounts whose container is not known yet, each with its deadline; the oldest are dropped.
        self._waiting: deque[tuple[ImageMount, float]] = deque(maxlen=_WAITING_MAX)
        self._wake = threading.Event()

    def start(self) -> None:
        """Start the thread that writes the stages."""
        threading.Thread(target=self._run, name="image-mounts", daemon=True).start()

    def add(self, mount: ImageMount) -> None:
        """Write the mount as a stage of the container's pod as soon as the pod is known."""
        self._waiting.append((mount, time.monotonic() + self._known_within_s))
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            pause_s = _FIRST_POLL_S
            while self._waiting:
                for _ in range(len(self._waiting)):
                    mount, until_s = self._waiting.popleft()
                    if not self._write(mount) and time.monotonic() < until_s:
                        self._waiting.append((mount, until_s))
                if self._waiting and self._wake.wait(pause_s):
                    self._wake.clear()
                    pause_s = _FIRST_POLL_S
                else:
                    pause_s = min(2 * pause_s, _POLL_MAX_S)

    def _write(self, mount: ImageMount) -> bool:
        """Write the stage; return False if the container is not known yet."""
        try:
            found = container(self._socket, mount.container)
            # A restarted container is not part of the start.
            if found.restart_count == 0:
                start = start_of_container(found.labels, found.variables)
                facts = self._facts(mount)
                with pod_timeline(self._settings, start, f"image of {found.name}") as timeline:
                    if timeline is not None:
                        timeline.note("image mount", mount.begin_ns, mount.duration_ns, facts)
        except BootseerError as error:
            _log.debug("no stage for container %s yet: %s", mount.container, error)
            return False
        except Exception:
            # The thread must go on for later starts.
            _log.exception("no stage for container %s", mount.container)
        return True

    def _facts(self, mount: ImageMount) -> dict[str, Value]:
        facts: dict[str, Value] = {"bootseer.how": "live" if mount.is_live else "mounted"}
        for service in live_mounts(self._settings.run_dir):
            if service.state.directory == str(mount.directory):
                with contextlib.suppress(BootseerError):
                    facts["bootseer.hit"] = service.ask("status")["prefetch"] is not None
        return facts
