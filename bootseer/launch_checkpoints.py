"""The checkpoint stage of a start: mounts in the background while other stages run.

Threading: `start` once, then `finish` or `abandon`, all from the thread that launches.
"""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.config import Settings
from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, from_oserror
from bootseer.redact import public_url
from bootseer.timeline.recorder import Timeline

if TYPE_CHECKING:
    from bootseer.fuse.striped.mount import MountedCheckpoints

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A remote folder and where the job sees it."""

    url: str
    directory: str


def parse_checkpoint(text: str) -> CheckpointPath:
    """From `URL:DIR`, where DIR is absolute. Pure. Raises: InvalidInputError."""
    url, _, directory = text.rpartition(":")
    if not url or not directory.startswith("/") or directory.startswith("//"):
        raise InvalidInputError(
            f"{public_url(text)!r} is not URL:DIR; write for example hdfs://namenode:8020/ckpt:/mnt/ckpt"
        )
    return CheckpointPath(url, directory)


class CheckpointMounts:
    """Mounts checkpoint folders for the job that this process is going to be.

    `aside`: they are mounted in the run directory, to be bound into a container's root later.
    """

    def __init__(self, settings: Settings, paths: Sequence[CheckpointPath], *, aside: bool) -> None:
        self._settings = settings
        self._paths = paths
        self._aside = settings.run_dir / "checkpoints" if aside else None
        self._mounted: list[MountedCheckpoints] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, timeline: Timeline) -> None:
        """Begin to mount; returns at once."""
        if self._paths:
            # Imported here, not in the thread: modules that import each other must not be loaded
            # by two threads at once.
            import bootseer.fuse.striped.mount  # noqa: F401

            self._thread = threading.Thread(
                target=self._work, args=(timeline,), name="checkpoints", daemon=True
            )
            self._thread.start()

    def _work(self, timeline: Timeline) -> None:
        try:
            self._sweep()
            for number, path in enumerate(self._paths):
                with timeline.span("checkpoint"):
                    self._mounted.append(self._mount(number, path))
        except BaseException as error:
            self._error = error

    def _sweep(self) -> None:
        """Remove mount points of starts that have ended; a mounted one is busy and stays."""
        for old in self._aside.iterdir() if self._aside and self._aside.is_dir() else ():
            try:
                old.rmdir()
            except OSError:
                continue

    def _mount(self, number: int, path: CheckpointPath) -> "MountedCheckpoints":
        from bootseer.fuse.striped.mount import mount_checkpoints

        directory = Path(path.directory)
        if self._aside is not None:
            directory = self._aside / f"{os.getpid()}-{number}"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise from_oserror(error, f"make the mount point {directory}") from error
        return mount_checkpoints(
            self._settings,
            path.url,
            directory,
            # The command in a container may be of another user than this process.
            allow_other=self._aside is not None and os.geteuid() == 0,
            lifetime_pid=os.getpid(),
            warm=True,
        )

    def finish(self) -> list[tuple[Path, str]]:
        """Wait for the mounts: (where it is mounted, where the job wants it).

        Raises: what a mount failed with; DeadlineError.
        """
        if self._thread is not None:
            # Each mount has deadlines of its own, within which it succeeds or fails.
            limit_s = 2 * self._settings.deadline_s * len(self._paths)
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise DeadlineError(f"the checkpoints were not mounted within {limit_s:.0f} s")
        if self._error is not None:
            raise self._error
        return [
            (mounted.directory, path.directory)
            for mounted, path in zip(self._mounted, self._paths, strict=True)
        ]

    def abandon(self) -> None:
        """Unmount what was mounted: the start has failed. Never raises."""
        for mounted in self._mounted:
            try:
                mounted.close()
            except (BootseerError, OSError) as error:
                _log.warning("cannot unmount %s: %s", mounted.directory, error)
