"""What a mount of a checkpoint tree is told, and what it leaves behind: two small JSON documents.

Owns their form and place: `<run_dir>/checkpoint-mounts/<id>.json` and `.log`, where the id is
derived from the mount point; `.control` is the socket of the server, `.journal` what its successor
needs. Immutable values; the state
file is replaced as a whole.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.base.structs import asdict
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    PermissionDeniedError,
    from_oserror,
)
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.linux.private_files import is_own, write_private_file

_MAX_STATE_BYTES = 1 << 20
_ENDED_KEPT = 20
_DEAD_S = 60.0
"""After its start: a mount that began and died since is looked after by the next one."""
_ENDED_KEPT_S = 3600.0
"""So long the end of any mount can be asked for, and its log read."""
SHUTDOWN_S = 10.0


class MountSpec(Struct, frozen=True, kw_only=True):
    """How to mount; travels from the command to the server process."""

    url: str
    directory: str
    run_dir: str
    memory_bytes: int
    deadline_s: float
    read_only: bool = False
    allow_other: bool = False
    """Let other users in, as far as modes and owner (this user) allow."""
    everyone_writes: bool = False
    """Whoever can reach the mount may do everything: for one that only a container can reach."""
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    stripe_count: int = DEFAULT_STRIPE_COUNT
    layout: LayoutKind = "striped"
    uid: int | None = None
    """Who owns everything that is shown; None: the user who mounts."""
    gid: int | None = None
    umask: int = 0o022
    """Permissions that nothing has; the kernel checks access by the rest."""
    lifetime_pid: int | None = None
    """The server unmounts and ends when this process has ended."""
    warm: bool = False
    """Read the newest checkpoint ahead as soon as the mount works."""
    shutdown_s: float = SHUTDOWN_S
    """How long open files may stay open when the server is told to end; then they are cut off."""

    @property
    def stripe_settings(self) -> StripeSettings:
        """Raises: InvalidInputError."""
        return StripeSettings(
            self.stripe_unit_bytes, self.stripe_count, self.deadline_s, self.layout
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of `to_json`. Raises: InvalidInputError."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"not a description of a mount: {error}") from error


class MountState(Struct, frozen=True):
    """A running mount, or how the last one on this directory ended."""

    url: str
    """Without credentials."""
    directory: str
    pid: int
    start_ticks: int
    """With the pid, names the process for sure."""
    started_s: float = 0.0
    """When it was mounted, since 1970."""
    worker_pid: int = 0
    """The process that answers; `pid` holds the mount, and replaces that one when it dies."""
    worker_ticks: int = 0
    root_was_made: bool = False
    """The remote folder was not there: a misspelt URL gives an empty mount."""
    ended: bool = False
    unwritten: tuple[str, ...] = ()
    """Files that were still being written when the mount ended; nothing of them is kept."""

    @classmethod
    def of_this_process(cls, spec: MountSpec) -> Self:
        """The state of a server that starts now."""
        ticks = start_ticks(os.getpid()) or 0
        return cls(public_url(spec.url), spec.directory, os.getpid(), ticks, time.time())

    @property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """Each of the server's processes: its id, and when it started."""
        return ((self.pid, self.start_ticks), (self.worker_pid, self.worker_ticks))

    @property
    def is_running(self) -> bool:
        """Whether a server process lives."""
        return not self.ended and any(is_alive(*process) for process in self.processes)


def start_ticks(pid: int) -> int | None:
    """When a process started, in the kernel's own count; None where there is none (any more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started then has not ended."""
    return pid > 0 and start_ticks(pid) == ticks


def state_path(run_dir: Path, directory: Path) -> Path:
    """Where the state of a mount on `directory` (absolute) lies; the log is beside it."""
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return run_dir / "checkpoint-mounts" / f"{name}.json"


def log_path(run_dir: Path, directory: Path) -> Path:
    """What the server of a mount logs."""
    return state_path(run_dir, directory).with_suffix(".log")


def control_path(run_dir: Path, directory: Path) -> Path:
    """Where the server of a mount is asked."""
    return state_path(run_dir, directory).with_suffix(".control")


def journal_path(run_dir: Path, directory: Path) -> Path:
    """What a server's successor goes on from."""
    return state_path(run_dir, directory).with_suffix(".journal")


def states(run_dir: Path) -> Iterator[MountState]:
    """The readable states of all mounts that this user ever made with this `run_dir`."""
    for path in sorted((run_dir / "checkpoint-mounts").glob("*.json")):
        with contextlib.suppress(BootseerError):
            state = _read(path)
            if state is not None:
                yield state


def forget_dead(run_dir: Path, directory: Path) -> None:
    """Remove what only a living server of a mount needs, if there is none. Raises nothing."""
    with contextlib.suppress(BootseerError, OSError):
        state = read_state(run_dir, directory)
        if state is None or not state.is_running:
            for path in (journal_path(run_dir, directory), control_path(run_dir, directory)):
                path.unlink(missing_ok=True)


def forget_ended(run_dir: Path) -> None:
    """Remove what mounts that ended have left, but for the latest ones; of those whose servers were
    killed what their successors would need. Raises nothing."""
    for one in states(run_dir):
        # A server that has just begun would write these files now.
        if not one.is_running and time.time() - one.started_s > _DEAD_S:
            forget_dead(run_dir, Path(one.directory))
    before_s = time.time() - _ENDED_KEPT_S
    with contextlib.suppress(OSError):
        paths = list((run_dir / "checkpoint-mounts").glob("*.json"))
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-_ENDED_KEPT]:
            with contextlib.suppress(BootseerError):
                state = _read(path)
                if state and not state.is_running and path.stat().st_mtime < before_s:
                    # The state last: without it nobody would look for the log.
                    path.with_suffix(".log").unlink(missing_ok=True)
                    path.unlink(missing_ok=True)


def write_state(run_dir: Path, state: MountState) -> None:
    """Replace the state. Raises: BootseerError."""
    path = state_path(run_dir, Path(state.directory))
    try:
        write_private_file(path, json.dumps(asdict(state)).encode("ascii"))
    except OSError as error:
        raise from_oserror(error, f"write the state of the mount to {path}") from error


def read_state(run_dir: Path, directory: Path) -> MountState | None:
    """The state of the mount on `directory`; None where there was none.

    Raises: CorruptError, PermissionDeniedError (another user's: it names a process to be ended).
    """
    return _read(state_path(run_dir, directory))


def _read(path: Path) -> MountState | None:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            if not is_own(os.fstat(file.fileno())):
                raise PermissionDeniedError(f"{path} belongs to another user; use --run-dir")
            fields = json.loads(file.read(_MAX_STATE_BYTES))
        fields["unwritten"] = tuple(map(str, fields["unwritten"]))
        return MountState(**fields)
    except FileNotFoundError:
        return None
    except PermissionDeniedError:
        raise
    except OSError as error:
        raise from_oserror(error, f"read the state of the mount {path}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptError(f"{path} is not the state of a mount: {error}") from error
