"""Checkpoint stage of a start: mounts checkpoint folders while the other stages run.

Each folder has a server process (`fuse.striped.mounted.job_mount`), which mounts the folder or
takes over the mount that lingers from the job's last start.

Threads: call `start` while the process has one thread, then `finish` or `abandon` from that thread.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.base.urls import check_spelling
from bootseer.errors import BootseerError, DeadlineError, InvalidInputError
from bootseer.linux.processes import ProcessId
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import LIVE

if TYPE_CHECKING:
    # A start without checkpoints does not load these.
    from bootseer.fuse.striped.mounted.job_mount import JobMounted
    from bootseer.served.processes import Process

_log = logging.getLogger(__name__)

_BUSY_S = 5.0
# Time for a mount process to undo a mount that it has half made.
_END_S = 5.0


class CheckpointPath(Struct, frozen=True):
    """A remote folder and the directory where the job sees it."""

    url: str
    directory: str


def parse_checkpoint(text: str) -> CheckpointPath:
    """Return the parts of `URL:DIR`, where DIR is absolute. Pure. Raises: InvalidInputError."""
    url, _, directory = text.rpartition(":")
    if not url or not directory.startswith("/") or directory.startswith("//"):
        raise InvalidInputError(
            f"{public_url(text)!r} is not URL:DIR; "
            "write for example hdfs://namenode:8020/ckpt:/mnt/ckpt"
        )
    return CheckpointPath(check_spelling(url), directory)


def created_warning(url: str) -> str:
    """Return the warning that a mount has created its remote folder: the URL may be misspelt."""
    return f"warning: {public_url(url)} was not there: created, empty; it has no checkpoint"


class CheckpointMounts:
    """Mounts of checkpoint folders for the job that this process is going to be.

    With `aside` they are mounted in the folders of their services, to be bound into a container's
    root later.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Sequence[CheckpointPath],
        say: Callable[[str], None],
        *,
        aside: bool,
    ) -> None:
        self._settings = settings
        self._say = say
        self._paths = paths
        self._is_aside = aside
        self._processes: list[Process] = []
        self._answered: set[int] = set()
        self._mounted: dict[int, JobMounted] = {}

    def start(self) -> None:
        """Begin a mount process for each folder; do not wait. Raises: BootseerError."""
        if not self._paths:
            return
        from bootseer.fuse.striped.mounted.job_mount import JobMount
        from bootseer.served.processes import JOB_MOUNT, start

        directories = [Path(path.directory) for path in self._paths]
        for path, directory in zip(self._paths, directories, strict=True):
            process = start(JOB_MOUNT, self._settings.run_dir, copy=True)
            self._processes.append(process)
            others = [one for one in directories if one in directory.parents]
            process.tell(
                JobMount(
                    settings=self._settings,
                    url=path.url,
                    directory=None if self._is_aside else directory,
                    identity=process.identity,
                    user=ProcessId.of(os.getpid()),
                    inside=() if self._is_aside else tuple(others),
                )
            )
            process.go()

    def check(self) -> None:
        """Raise the error of a mount that has failed by now; do not wait."""
        for number, process in enumerate(self._processes):
            if process.is_answered():
                self._take_answer(number, 0.0)

    def finish(self) -> list[tuple[Path, str]]:
        """Wait for the mounts. Return (mounted directory, directory that the job wants) for each.

        The limit counts from this call, since the start may have spent hours on other stages.

        Raises: the error of a mount that failed; DeadlineError.
        """
        # Each mount has deadlines of its own, within which it succeeds or fails.
        limit_s = (_BUSY_S + 2 * self._settings.deadline_s) * len(self._paths)
        # Report a failed mount before waiting for a slow one.
        self.check()
        deadline_s = time.monotonic() + limit_s
        for number in range(len(self._processes)):
            self._take_answer(number, max(deadline_s - time.monotonic(), 0.0))
        found = [self._mounted[number].directory for number in range(len(self._paths))]
        return list(zip(found, (path.directory for path in self._paths), strict=True))

    def _take_answer(self, number: int, timeout_s: float) -> None:
        """Take the answer of one mount, unless it was taken before. Raises: as `finish`."""
        if number in self._answered:
            return
        self._answered.add(number)
        from bootseer.fuse.striped.mounted.job_mount import JobMounted

        try:
            mounted = self._processes[number].wait(timeout_s, JobMounted)
        except DeadlineError as error:
            raise DeadlineError(
                "the checkpoint folders were not mounted within the deadline; "
                "a larger --deadline gives them more"
            ) from error
        except BootseerError as error:
            raise type(error)(f"cannot mount a checkpoint folder: {error}") from error
        self._mounted[number] = mounted
        if mounted.made:
            self._say(created_warning(self._paths[number].url))

    def abandon(self) -> None:
        """Unmount the folders, since the start has failed. Never raises."""
        if not self._processes:
            return
        from bootseer.fuse.striped.mounted.mount import unmount_checkpoints
        from bootseer.served.ending import discard_server
        from bootseer.served.service import services_dir

        for number, process in enumerate(self._processes):
            with contextlib.suppress(BootseerError, OSError):
                if process.is_answered():
                    self._take_answer(number, 0.0)
            # A process that is still mounting learns from this that nobody waits for it.
            process.abandon()
        for number, process in enumerate(self._processes):
            mounted = self._mounted.get(number)
            if mounted is None:
                discard_server(services_dir(self._settings.run_dir) / process.identity, _END_S)
            elif mounted.how != LIVE:
                # A mount taken over from the last start stays for the next one.
                try:
                    unmount_checkpoints(self._settings.run_dir, mounted.directory, timeout_s=_END_S)
                except (BootseerError, OSError) as error:
                    _log.debug("cannot unmount %s: %s", mounted.directory, error)
