"""The checkpoint stage of a start: mounts in the background while other stages run.

A process of its own mounts, reports and ends, so that the servers are no children of the command
that this process is going to be: one that waits for all of its children would wait for ever.

Threading: `start` once, while there is one thread; then `finish` or `abandon` from the same.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.json_errors import Failure, error_of, failure_of
from bootseer.base.redact import public_url
from bootseer.base.urls import check_spelling
from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    InvalidInputError,
    UnavailableError,
    from_oserror,
)
from bootseer.launch.signals import STOPS
from bootseer.linux.private_files import make_directory
from bootseer.linux.processes import reap, wait_readable
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

# A job that starts again at once finds the mount of its previous start still being taken down.
_BUSY_S = 5.0
_POLL_S = 0.1
# For the process that mounts to take back what it has half done.
_END_S = 5.0
_ABANDONED_S = 3600.0
_REPORT_BYTES_MAX = 1 << 16
LIVE = "live"
"""How a stage is done of which all is there since the last start."""


class CheckpointPath(Struct, frozen=True):
    """A remote folder and where the job sees it."""

    url: str
    directory: str


def parse_checkpoint(text: str) -> CheckpointPath:
    """Parses `URL:DIR`, where DIR is absolute. Pure. Raises: InvalidInputError."""
    url, _, directory = text.rpartition(":")
    if not url or not directory.startswith("/") or directory.startswith("//"):
        raise InvalidInputError(
            f"{public_url(text)!r} is not URL:DIR; "
            "write for example hdfs://namenode:8020/ckpt:/mnt/ckpt"
        )
    return CheckpointPath(check_spelling(url), directory)


def made_sentence(url: str) -> str:
    """For people, of a remote folder that a mount has made: it may have been misspelt. Pure."""
    return f"warning: {public_url(url)} was not there: created, empty; there is no checkpoint in it"


class _Report(Struct, frozen=True):
    """What the process that mounts tells: of each mount, or of the one that failed."""

    mounted: int | None = None
    made: bool = False
    """Whether the remote folder was missing, and was made."""
    directory: str = ""
    """Where it is mounted."""
    how: str = ""
    """LIVE: as it has lingered since the last start; "changed": instead of that; "mounted"."""
    failure: Failure | None = None


def _send(report: int, message: _Report) -> None:
    # A start without checkpoints needs none of it.
    from bootseer.base.documents import to_line

    os.write(report, to_line(message).encode("ascii") + b"\n")


def _read(line: bytes) -> _Report:
    from bootseer.base.documents import from_line

    return from_line(line, _Report)


class CheckpointMounts:
    """Mounts checkpoint folders for the job that this process is going to be.

    `aside`: they are mounted in the run directory, to be bound into a container's root later.
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
        self._aside = settings.run_dir / "checkpoints" if aside else None
        self._owner = os.getpid()
        # Process ids come again, perhaps while a mount of an earlier one lingers.
        self._name = f"{self._owner}-{time.time_ns()}"
        self._pid = 0
        self._reports = -1
        self._received = b""
        self._has_said = False

    def _directory(self, number: int) -> Path:
        if self._aside is None:
            return Path(self._paths[number].directory)
        return self._aside / f"{self._name}-{number}"

    # ---- the process that mounts --------------------------------------------------------------

    def start(self, timeline: Timeline) -> None:
        """Begin to mount; returns at once."""
        if not self._paths:
            return
        self._reports, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._become_mounter()
                self._mount_all(timeline, report)
            finally:
                os._exit(0)
        os.close(report)

    def _become_mounter(self) -> None:
        """Be nothing that the terminal, or a reader of the job's output, could take for the job."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        for number in STOPS:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))

    def _mount_all(self, timeline: Timeline, report: int) -> None:
        try:
            self._sweep()
            for number, path in enumerate(self._paths):
                with timeline.span("checkpoint") as span:
                    done = self._mount(number, path)
                    span.set("bootseer.how", done.how)
                _send(report, done)
        except BaseException as error:
            if not isinstance(error, BootseerError | SystemExit):
                _log.debug("cannot mount a checkpoint folder", exc_info=True)
            _send(report, _Report(failure=failure_of(error, "mounting")))

    def _sweep(self) -> None:
        """Remove mount points of starts that have ended; a mounted one is busy and stays."""
        from bootseer.fuse.striped.mounted.mount import take_off_dead_mounts

        for old in self._aside.iterdir() if self._aside and self._aside.is_dir() else ():
            take_off_dead_mounts(self._settings.run_dir, old)
            with contextlib.suppress(OSError):
                # A young one may be another start's that is about to mount there.
                if not os.path.ismount(old) and time.time() - old.stat().st_mtime > _ABANDONED_S:
                    old.rmdir()

    def _mount(self, number: int, path: CheckpointPath) -> _Report:
        from bootseer.fuse.striped.mounted.mount import (
            mount_checkpoints,
            mount_spec,
            take_off_dead_mounts,
            take_over,
            unchecked_spec,
        )

        is_shared = self._aside is not None and os.geteuid() == 0
        choices = {
            # The command in a container may be of another user than this process. Nobody else gets
            # into the folder that these mounts are in.
            "allow_other": is_shared,
            "everyone_writes": is_shared,
            "lifetime_pid": self._owner,
            "read_newest": True,
        }
        directory = self._lingering(path, choices) or self._directory(number)
        # Before the folder is made: a dead mount answers nobody, mkdir included.
        found = take_over(unchecked_spec(self._settings, path.url, directory, **choices))
        if found == LIVE:
            return _Report(number, directory=str(directory), how=found)
        take_off_dead_mounts(self._settings.run_dir, directory)
        try:
            make_directory(directory)
        except OSError as error:
            raise from_oserror(error, f"make the mount point {directory}") from error
        deadline_s = time.monotonic() + _BUSY_S
        while True:
            try:
                spec = mount_spec(self._settings, path.url, directory, **choices)
                made = mount_checkpoints(spec, forks=True).root_was_made
                return _Report(number, made, str(directory), found or "mounted")
            except BusyError as error:
                if time.monotonic() >= deadline_s:
                    raise BusyError(
                        f"{error}. A job that runs several processes on one node mounts once: let "
                        "`bootseer run` start the launcher (torchrun), not each process"
                    ) from error
                time.sleep(_POLL_S)

    def _lingering(self, path: CheckpointPath, choices: dict[str, Any]) -> Path | None:
        """Where it is mounted aside since a job that has ended, as it would be now."""
        from bootseer.fuse.striped.mounted.mount import unchecked_spec
        from bootseer.served.cover_users import lingering
        from bootseer.served.folders import CHECKPOINT

        for _, state in lingering(self._settings.run_dir, CHECKPOINT) if self._aside else ():
            directory = Path(state.directory)
            spec = unchecked_spec(self._settings, path.url, directory, **choices)
            if spec.fingerprint == state.fingerprint:
                return directory
        return None

    # ---- the process that waits for it --------------------------------------------------------

    def check(self) -> None:
        """Raises what a mount has failed with by now; does not wait."""
        self._receive(0.0)
        self._raise_child_error()

    def finish(self) -> list[tuple[Path, str]]:
        """Wait for the mounts: (where it is mounted, where the job wants it).

        The limit counts from this call: what the start did meanwhile may have taken hours.

        Raises: what a mount failed with; DeadlineError.
        """
        # Each mount has deadlines of its own, within which it succeeds or fails.
        limit_s = (_BUSY_S + 2 * self._settings.deadline_s) * len(self._paths)
        self._drain(limit_s)
        self._raise_child_error()
        if self._reports >= 0:
            raise DeadlineError(
                f"the checkpoint folders were not mounted within {limit_s:g} s; "
                "a larger --deadline gives them more"
            )
        if len(self._mounted()) < len(self._paths):
            raise UnavailableError("the process that mounts checkpoint folders was killed")
        self._say_made()
        found = [Path(one.directory) for one in self._received_reports()]
        return list(zip(found, (path.directory for path in self._paths), strict=True))

    def _say_made(self) -> None:
        if self._has_said:
            return
        self._has_said = True
        for one in self._received_reports():
            if one.made and one.mounted is not None:
                self._say(made_sentence(self._paths[one.mounted].url))

    def _receive(self, timeout_s: float) -> bool:
        """Return whether something came: a piece of a report, or the end of them."""
        if self._reports < 0 or not wait_readable([self._reports], timeout_s):
            return False
        piece = os.read(self._reports, _REPORT_BYTES_MAX)
        self._received += piece
        if not piece:
            os.close(self._reports)
            self._reports = -1
            reap(self._pid, _END_S)
        return True

    def _received_reports(self) -> list[_Report]:
        # What follows the last newline is a line still on its way.
        return [_read(line) for line in self._received.split(b"\n")[:-1]]

    def _mounted(self) -> list[int]:
        reports = self._received_reports()
        return [one.mounted for one in reports if one.mounted is not None]

    def _raise_child_error(self) -> None:
        for one in self._received_reports():
            if one.failure is not None:
                error = error_of(one.failure)
                raise type(error)(f"cannot mount a checkpoint folder: {error}")

    def abandon(self) -> None:
        """Unmount what was mounted: the start has failed. Never raises."""
        if self._pid == 0:
            return
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._reports >= 0:
                with contextlib.suppress(OSError):
                    os.kill(self._pid, ending)
                self._drain(_END_S)
        for one in self._received_reports():
            if one.mounted is None or one.how == LIVE:
                continue  # what lingers is there for the next start
            directory = Path(one.directory)
            try:
                self._unmount(directory)
            except (BootseerError, OSError) as error:
                _log.debug("cannot unmount %s: %s", directory, error)
        for number in range(len(self._paths) if self._aside is not None else 0):
            with contextlib.suppress(OSError):
                self._directory(number).rmdir()

    def _drain(self, timeout_s: float) -> None:
        """Receive reports until the last one, or for so long; what is there is read in any case."""
        deadline_s = time.monotonic() + timeout_s
        while self._reports >= 0:
            left_s = deadline_s - time.monotonic()
            if not self._receive(max(left_s, 0.0)) and left_s <= 0:
                return

    def _unmount(self, directory: Path) -> None:
        from bootseer.fuse.striped.mounted.mount import unmount_checkpoints

        unmount_checkpoints(self._settings.run_dir, directory, timeout_s=_END_S)
