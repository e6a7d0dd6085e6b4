"""The mounts of images as stages of the pods that lie on them.

A snapshotter is not told of pods. It knows the containers that it has prepared a root for, and
containerd, a moment later, which pod each is of. A stage that cannot be noted is missing in a
report, no more. `take` from any thread; one thread of its own.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.kubernetes.cri import container
from bootseer.kubernetes.pod_start import of_container
from bootseer.kubernetes.timelines import noted
from bootseer.prefetch.snapshotter.snapshot import ImageMount
from bootseer.served.control import ask
from bootseer.served.folders import live_mounts
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import Value

_log = logging.getLogger(__name__)

_KNOWN_WITHIN_S = 30.0
"""A container is known to CRI when it is made, soon after its snapshot; a sandbox never is."""
_LOOK_S = 0.2
_WAITING_MAX = 1000


class ImageMounts:
    """The mounts that one snapshotter tells of."""

    def __init__(self, settings: Settings, socket: Path) -> None:
        """`socket`: where containerd answers."""
        self._settings = settings
        self._socket = socket
        # The oldest go where there are too many, each with the time until which it is looked for.
        self._waiting: deque[tuple[ImageMount, float]] = deque(maxlen=_WAITING_MAX)
        self._wake = threading.Event()

    def start(self) -> None:
        """Begin to note what is taken."""
        threading.Thread(target=self._run, name="image-mounts", daemon=True).start()

    def take(self, mount: ImageMount) -> None:
        """Note the mount as a stage of the container's pod, as soon as that is known."""
        self._waiting.append((mount, time.monotonic() + _KNOWN_WITHIN_S))
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                for _ in range(len(self._waiting)):
                    mount, until_s = self._waiting.popleft()
                    if not self._note(mount) and time.monotonic() < until_s:
                        self._waiting.append((mount, until_s))
                if self._waiting:
                    time.sleep(_LOOK_S)

    def _note(self, mount: ImageMount) -> bool:
        """Whether that is done with."""
        try:
            found = container(self._socket, mount.container)
            # A container that is started again in its pod is no part of the start.
            if found.restart_count == 0:
                start = of_container(found.labels, found.variables)
                said = self._said(mount)
                with noted(self._settings, start, f"image of {found.name}") as timeline:
                    if timeline is not None:
                        timeline.note("image mount", mount.begin_ns, mount.duration_ns, said)
        except BootseerError as error:
            _log.debug("no stage of the container %s yet: %s", mount.container, error)
            return False
        except Exception:
            # Without this thread no later start would have the stage.
            _log.exception("no stage of the container %s", mount.container)
        return True

    def _said(self, mount: ImageMount) -> dict[str, Value]:
        """What was done about the image, as far as its server knows by now."""
        said: dict[str, Value] = {"bootseer.how": "live" if mount.is_live else "mounted"}
        for folder, state in live_mounts(self._settings.run_dir):
            if state.directory == str(mount.directory):
                with contextlib.suppress(BootseerError):
                    said["bootseer.hit"] = ask(folder, "status")["prefetch"] is not None
        return said
