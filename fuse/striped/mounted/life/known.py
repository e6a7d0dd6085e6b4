"""The checkpoint folders that are mounted with one `run_dir`, also by servers of earlier releases.

Those had no folders. Alone knows their files, `<run_dir>/checkpoint-mounts/<id>.json`, `.control`,
`.journal` and `.log`, where the id is derived from the mount point: they are read, and removed when
their server has ended. Whether it lives its processes tell. Any thread.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bootseer.linux.private_files import is_own
from bootseer.linux.processes import start_time
from bootseer.served.control import ask, ask_at
from bootseer.served.ending import CHECKPOINT
from bootseer.served.folders import MountState, is_alive, mounts_dir, read_state

_STATE_BYTES_MAX = 1 << 20


class KnownMount(Struct, frozen=True):
    """A checkpoint folder that is mounted, or was."""

    state: MountState
    folder: Path | None
    """Of its server; None: one of an earlier release."""
    files: Path
    """What its server's files begin with, for one of an earlier release."""
    is_running: bool

    @property
    def processes(self) -> tuple[tuple[int, str], ...]:
        """Each of the server's processes: its id, and when it started."""
        state = self.state
        return ((state.pid, state.pid_started), (state.worker_pid, state.worker_started))

    def ask(self, command: str) -> dict[str, Any]:
        """The server's answer. Raises: UnavailableError, DeadlineError."""
        if self.folder is not None:
            return ask(self.folder, command)
        return ask_at(self.files.with_suffix(".control"), command)


def known_mounts(run_dir: Path) -> list[KnownMount]:
    """All whose state can be read, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in mounts_dir(run_dir).iterdir():
            state = read_state(folder)
            if state is not None and state.purpose == CHECKPOINT:
                found.append(KnownMount(state, folder, folder, is_alive(folder)))
    return sorted([*earlier_mounts(run_dir), *found], key=lambda one: one.state.started_ns)


def find_known(run_dir: Path, directory: Path) -> KnownMount | None:
    """What is, or was last, mounted on `directory` (absolute); None where nothing was."""
    found = [one for one in known_mounts(run_dir) if one.state.directory == str(directory)]
    return max(found, key=lambda one: (one.is_running, one.state.started_ns), default=None)


# ---- servers of earlier releases --------------------------------------------------------------


class _EarlierState(Struct, frozen=True):
    url: str
    directory: str
    pid: int
    start_ticks: int
    started_s: float = 0.0
    worker_pid: int = 0
    worker_ticks: int = 0
    root_was_made: bool = False
    ended: bool = False


def earlier_files(run_dir: Path, directory: Path) -> Path:
    """What the files of a mount on `directory` (absolute) begin with."""
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return run_dir / "checkpoint-mounts" / name


def earlier_mounts(run_dir: Path) -> list[KnownMount]:
    """Those whose server lives, or was killed."""
    found = []
    for path in sorted((run_dir / "checkpoint-mounts").glob("*.json")):
        earlier = _read_earlier(path)
        if earlier is None or earlier.ended:
            continue
        state = MountState(
            id=path.stem,
            reference=earlier.url,
            index_digest="",
            workload="",
            directory=earlier.directory,
            pid=earlier.pid,
            started_ns=int(earlier.started_s * 1e9),
            purpose=CHECKPOINT,
            pid_started=str(earlier.start_ticks),
            worker_pid=earlier.worker_pid,
            worker_started=str(earlier.worker_ticks),
            root_was_made=earlier.root_was_made,
        )
        one = KnownMount(state, None, path.with_suffix(""), is_running=False)
        alive = any(pid and start_time(pid) == started for pid, started in one.processes)
        found.append(msgspec.structs.replace(one, is_running=alive))
    return found


def _read_earlier(path: Path) -> _EarlierState | None:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            if not is_own(os.fstat(file.fileno())):
                # It names processes to be ended.
                return None
            return msgspec.convert(json.loads(file.read(_STATE_BYTES_MAX)), _EarlierState)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None


def forget_earlier(one: KnownMount) -> tuple[str, ...]:
    """Remove the files of a server of an earlier release that has ended; the files that it said it
    has left unwritten. Raises nothing."""
    unwritten: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        unwritten = tuple(json.loads(one.files.with_suffix(".json").read_bytes())["unwritten"])
    for suffix in (".journal", ".control", ".json", ".log"):
        with contextlib.suppress(OSError):
            one.files.with_suffix(suffix).unlink(missing_ok=True)
    return unwritten
