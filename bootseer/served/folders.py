"""What is served on this node: one folder for each under `run_dir/mounts`, while its server lives.

Alone owns that folder's layout: `state.json` (who, what, where), `control` (the server's socket),
and `lock`, held for as long as a process of the server lives. A folder whose lock is free belongs
to a server that died; `ending` removes it. Edge module; any thread.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.errors import from_oserror
from bootseer.linux.locks import lock_within
from bootseer.linux.private_files import (
    private_directory,
    read_private_file,
    write_private_file,
)
from bootseer.linux.processes import ProcessId
from bootseer.linux.removal import remove_tree

CHECKPOINT = "checkpoint"
"""The purpose of a mounted checkpoint folder."""
RUN = "run"
"""The purpose of a tree that containers have their roots over."""
PUBLISH = "publish"
"""The purpose of a process that publishes what a start leaves behind."""
ATTENDING = "attendant"
"""The purpose of the process beside a start, for which what the job has used may stay after it."""
LINK = "link"
"""The purpose of an overlay over an extracted tree, or over what a job's own view shows."""
VOLUME = "volume"
"""The purpose of a tree that volumes of pods show."""

_STATE = "state.json"
# A look at a lock holds it for as long as one system call.
_LOOK_MAX_S = 2.0


class MountState(Struct, frozen=True):
    """What one server serves, as `state.json` has it."""

    id: str
    reference: str
    """What is served, for people: an image, an environment, a storage's public URL."""
    index_digest: str
    workload: str
    directory: str
    """Where it is mounted."""
    pid: int
    """The process id of the server; of the supervisor, where there is one."""
    started_ns: int
    purpose: str
    """The kind of thing that is served: "mount" (an image), "environment", "containerd" (an image
    for it), and those above."""
    scratch: str = ""
    """A folder of the run's own, removed with it."""
    pid_started: str = ""
    """When that process started (`processes.start_time`): with its id it names it for sure."""
    mount_namespace: str = ""
    """The mount namespace in which that process has mounted (`namespaces.mount_namespace`)."""
    worker_pid: int = 0
    """The process that answers for a checkpoint folder. `pid` holds the mount, and replaces it."""
    worker_started: str = ""
    user: ProcessId | None = None
    """The process that it is served for, and goes with."""
    root_was_made: bool = False
    """The checkpoint folder was not there: a misspelt URL gives an empty mount."""
    fingerprint: str = ""
    """Of all that decides how it is served: what lingers is for a start that asks for the same."""
    until_ns: int = 0
    """When what lingers goes; 0: its job still runs."""
    owner: tuple[int, int] | None = None
    """The user and group as whose everything is shown."""
    device_minor: int = 0
    """The number of the mount's FUSE connection; 0: none, or not known yet."""
    unwritten: tuple[str, ...] = ()
    """Files that were being written when the mount ended; nothing of them is kept."""

    @property
    def process(self) -> ProcessId:
        """The server's process."""
        return ProcessId(self.pid, self.pid_started)

    @property
    def processes(self) -> tuple[ProcessId, ProcessId]:
        """The server's process, and its worker."""
        return self.process, ProcessId(self.worker_pid, self.worker_started)


_STATE_FORM: DocumentFormat[MountState] = DocumentFormat(type=MountState, size_max=1 << 20)


def new_identity() -> str:
    """A new identity for a mount that is about to be made."""
    return os.urandom(8).hex()


def mounts_dir(run_dir: Path) -> Path:
    """Where the servers' folders are."""
    return run_dir / "mounts"


def starts_dir(run_dir: Path) -> Path:
    """Where the folders of the node's starts are, each with its attendant's lock and state."""
    return run_dir / "starts"


def log_path(run_dir: Path, identity: str) -> Path:
    """The log of a server and of what it starts."""
    return run_dir / "logs" / f"{identity}.log"


def new_mount_dir(run_dir: Path, identity: str | None = None) -> Path:
    """A new folder for a server; its name is the mount's identity, by default a new one.

    Raises: BootseerError.
    """
    return private_directory(mounts_dir(run_dir) / (identity or new_identity()))


# ---- the lock ---------------------------------------------------------------------------------


def take_lock(
    directory: Path, timeout_s: float = 0.0, *, create: bool = True, name: str = "lock"
) -> int:
    """A lock of a folder, as a descriptor that holds it until closed in every process.

    Raises: TimeoutError when another process has it; OSError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    fd = os.open(directory / name, flags, 0o600)
    try:
        lock_within(fd, timeout_s)
    except OSError:
        os.close(fd)
        raise
    return fd


def lock_new(directory: Path) -> int:
    """The lock of a folder that no other server may hold, as `take_lock`; a process that looks
    whether one does (`is_alive`) holds it for a moment. Raises: OSError."""
    return take_lock(directory, _LOOK_MAX_S)


def is_alive(directory: Path) -> bool:
    """Whether a process holds the folder's lock: its server lives."""
    try:
        # Without making one: its holder may be removing the folder this moment.
        os.close(take_lock(directory, create=False))
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def wait_released(directory: Path, timeout_s: float) -> bool:
    """Wait until the folder's holder is gone; False when it is not in time."""
    deadline_s = time.monotonic() + timeout_s
    while directory.exists() and is_alive(directory):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


# ---- the state --------------------------------------------------------------------------------


def write_state(directory: Path, state: MountState) -> None:
    """Write the state of a server in one step. Raises: BootseerError."""
    try:
        write_private_file(directory / _STATE, _STATE_FORM.encode(state))
    except OSError as error:
        raise from_oserror(error, f"write the state of the mount to {directory}") from error


def read_state(directory: Path) -> MountState | None:
    """None where there is none, none that can be read, or another user's: not to be acted upon."""
    return read_private_file(directory / _STATE, _STATE_FORM)


def live_mounts(run_dir: Path) -> Iterator[tuple[Path, MountState]]:
    """Each folder whose server lives, the oldest first."""
    yield from _known(mounts_dir(run_dir), alive=True)


def attendants(run_dir: Path) -> Iterator[tuple[Path, MountState]]:
    """The folder and state of each start whose attendant lives, the oldest first."""
    yield from _known(starts_dir(run_dir), alive=True)


def dead_mounts(run_dir: Path) -> Iterator[tuple[Path, MountState]]:
    """Each folder whose server died and that no other one has swept yet, the oldest first."""
    yield from _known(mounts_dir(run_dir), alive=False)


def _known(parent: Path, *, alive: bool) -> list[tuple[Path, MountState]]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for directory in parent.iterdir():
            state = read_state(directory)
            if state is not None and is_alive(directory) is alive:
                found.append((directory, state))
    return sorted(found, key=lambda pair: pair[1].started_ns)


# ---- the end ----------------------------------------------------------------------------------


def remove_mount_dir(directory: Path) -> None:
    """Remove a server's folder, as the holder of its lock. Never raises.

    The lock goes last: a process that waits for the end (`wait_released`) then finds no half of a
    folder.
    """
    with contextlib.suppress(OSError):
        empty_mount_dir(directory)
        (directory / "lock").unlink(missing_ok=True)
        directory.rmdir()


def empty_mount_dir(directory: Path, *kept: str) -> None:
    """Remove what is in a server's folder but the lock and `kept`. Raises: OSError."""
    for path in directory.iterdir():
        if path.name not in ("lock", *kept):
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink()
