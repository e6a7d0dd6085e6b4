"""Timelines of pods, written by a node's daemons: stages of volumes and images of a pod's start.

A finished timeline goes to the store and to the collector, where reports of the start find it. One
thread of the process publishes all of them, one after the other, so that a store that does not
answer costs one thread and one connection however many pods start. Any thread may call `noted`.
"""

import contextlib
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from bootseer.kubernetes.pod_start import PodStart
from bootseer.linux.processes import ProcessId
from bootseer.profile.publish.note import Note, is_stored
from bootseer.profile.publish.round import publish
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

_WAITING_MAX = 1000
"""A note takes about 2 kB of memory. A node starts some hundred pods within one deadline of a
store at most."""


@contextlib.contextmanager
def noted(settings: Settings, start: PodStart, part: str) -> Iterator[Timeline | None]:
    """Open the timeline of one part of a pod, and have it published after the block.

    Nobody waits for the publishing. The timeline is None if nothing says which start the pod is of.

    Args:
        part: The name of the part in the pod. A pod that takes this one's place has parts of its
            own, whatever their names.
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
        _QUEUE.put(Note(settings, timeline.path, ProcessId(0, "")))


class _Queue:
    """Timelines that wait to be published, and the one thread that publishes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Note] = deque()
        self._is_running = False

    def put(self, note: Note) -> None:
        """Queue a timeline. If too many wait, the one that waits longest stays on the node."""
        with self._lock:
            if len(self._waiting) >= _WAITING_MAX:
                dropped = self._waiting.popleft()
                _log.warning("the timeline %s stays on this node: too many wait", dropped.timeline)
            self._waiting.append(note)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="timeline", daemon=True).start()
        except RuntimeError as error:
            # The next timeline starts the thread.
            with self._lock:
                self._is_running = False
            _log.warning("the timeline %s is not published yet: %s", note.timeline, error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                note = self._waiting.popleft()
            _publish(note)


_QUEUE = _Queue()


def _publish(note: Note) -> None:
    try:
        problems = publish([note], {}).problems
    except Exception:
        # It is missing in a report, no more.
        _log.exception("the timeline %s stays on this node", note.timeline)
        return
    for who, problem in problems.items():
        _log.warning("%s does not take the timeline %s: %s", who, note.timeline, problem)
    if is_stored(note.settings) and not problems:
        _remove(note.timeline, note.settings.timeline_dir)


def _remove(path: Path, top: Path) -> None:
    """Remove what the store has: nobody tidies up on a node after its pods."""
    with contextlib.suppress(OSError):
        path.unlink()
        for folder in path.parents:
            if folder == top:
                break
            folder.rmdir()
