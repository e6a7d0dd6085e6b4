"""The checkpoint folders that are mounted with one `run_dir`, also by servers of earlier releases.

Those had no folders. Alone knows their files, `<run_dir>/checkpoint-mounts/<id>.json`, `.control`,
`.journal` and `.log`, where the id is derived from the mount point: they are read, and removed when
their server has ended. Whether it lives its processes tell. Any thread.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.linux.private_files import read_private_file
from bootseer.linux.processes import start_time
from bootseer.served.folders import CHECKPOINT, MountState
from bootseer.served.status import Known, known_servers


def known_mounts(run_dir: Path) -> list[Known]:
    """All whose state can be read, the oldest first."""
    found = [one for one in known_servers(run_dir) if one.state.purpose == CHECKPOINT]
    return sorted([*earlier_mounts(run_dir), *found], key=lambda one: one.state.started_ns)


def find_known(run_dir: Path, directory: Path) -> Known | None:
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
    unwritten: tuple[str, ...] = ()


_EARLIER: Form[_EarlierState] = Form(type=_EarlierState, size_max=1 << 20)


def earlier_files(run_dir: Path, directory: Path) -> Path:
    """What the files of a mount on `directory` (absolute) begin with."""
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return run_dir / "checkpoint-mounts" / name


def earlier_mounts(run_dir: Path) -> list[Known]:
    """The mounts of earlier releases whose server lives, or was killed. They have no folder: its
    path is what their files' names begin with."""
    found = []
    for path in sorted((run_dir / "checkpoint-mounts").glob("*.json")):
        # It names processes to be ended: another user's is not read.
        earlier = read_private_file(path, _EARLIER)
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
        alive = any(pid and start_time(pid) == at for pid, at in state.processes)
        found.append(Known(state, path.with_suffix(""), alive, path.with_suffix(".control")))
    return found


def forget_earlier(one: Known) -> tuple[str, ...]:
    """Remove the files of a server of an earlier release that has ended; the files that it said it
    has left unwritten. Raises nothing."""
    earlier = read_private_file(one.folder.with_suffix(".json"), _EARLIER)
    for suffix in (".journal", ".control", ".json", ".log"):
        with contextlib.suppress(OSError):
            one.folder.with_suffix(suffix).unlink(missing_ok=True)
    return earlier.unwritten if earlier else ()
