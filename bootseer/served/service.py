"""Services: whatever of Bootseer's is mounted or works on this node, each with one folder.

Only this module defines the layout of such a folder, which lies in `run_dir/services`: `state.json`
(a `ServiceState`), `control` (the service's socket), `users` (a note for each process that uses it;
`served.users`), and `lock`, which a process of the service holds as long as it lives. A folder
whose lock is free belongs to a dead service; `ending` removes it, unless it is a start's: its notes
are for the attendant, which removes it later. `hold_folder` is the life of a server in its folder.
Edge module; any thread.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import DocumentFormat
from bootseer.errors import from_oserror
from bootseer.linux.locks import lock_within
from bootseer.linux.private_files import (
    private_directory,
    read_private_file,
    write_private_file,
)
from bootseer.linux.processes import ProcessId, living_notes, living_pids
from bootseer.linux.removal import remove_tree

CHECKPOINT = "checkpoint"
"""Purpose of a mounted checkpoint folder."""
RUN = "run"
"""Purpose of a tree that is the lower directory of containers' roots."""
PUBLISH = "publish"
"""Purpose of a process that publishes the record of a start."""
ATTENDING = "attendant"
"""Purpose of a start's attendant, for which mounts may stay after the job."""
LINK = "link"
"""Purpose of an overlay over an extracted tree, or inside a job's own view."""
VOLUME = "volume"
"""Purpose of a tree that volumes of pods show."""
PRELOAD = "preload"
"""Purpose of a process from which a job's workers are forked."""
WARMING = "warming"
"""Purpose of a process that records or reads ahead a directory of another tool."""

USERS = "users"
"""Subfolder with the notes of the processes that use a service."""
_STATE = "state.json"
_WITHOUT_MOUNT = (ATTENDING, PUBLISH, PRELOAD, WARMING)
START_PREFIX = "start-"
"""Beginning of the name of a start's folder."""
# `is_alive` holds a lock for the time of one system call.
_PROBE_MAX_S = 2.0


class ServiceState(Struct, frozen=True):
    """Contents of `state.json`: the description of a service."""

    id: str
    reference: str
    """Name of what is served, for people: an image, an environment, a storage's public URL."""
    index_digest: str
    workload: str
    directory: str
    """Mount point; the directory that is warmed; "" for other services."""
    pid: int
    """Process id of the server; of the supervisor, if there is one."""
    started_ns: int
    purpose: str
    """"mount" (an image), "environment", "containerd" (an image), or a constant above."""
    scratch: str = ""
    """Folder that is removed with the mount."""
    pid_started: str = ""
    """Start time of the process `pid` (`processes.start_time`), which identifies it for sure."""
    mount_namespace: str = ""
    """Mount namespace in which the server has mounted (`namespaces.mount_namespace`)."""
    worker_pid: int = 0
    """Process that serves a checkpoint folder; the process `pid` replaces it."""
    worker_started: str = ""
    user: ProcessId | None = None
    """Process that the mount is for, and ends with."""
    root_was_made: bool = False
    """Whether the remote folder was created: a misspelt URL gives an empty mount."""
    fingerprint: str = ""
    """Digest of how it is served; a start takes over a lingering mount only if equal."""
    until_ns: int = 0
    """Time when a lingering mount ends; 0: its job still runs."""
    owner: tuple[int, int] | None = None
    """User and group that all files are shown to belong to."""
    device_minor: int = 0
    """Number of the mount's FUSE connection; 0: none, or not known yet."""
    unwritten: tuple[str, ...] = ()
    """Files that were being written when the mount ended, and are lost."""
    problem: str = ""
    """Problem that the service reports itself, for people."""

    @property
    def process(self) -> ProcessId:
        """The server's process."""
        return ProcessId(self.pid, self.pid_started)

    @property
    def processes(self) -> tuple[ProcessId, ProcessId]:
        """The server's process and its worker."""
        return self.process, ProcessId(self.worker_pid, self.worker_started)


_STATE_FORM: DocumentFormat[ServiceState] = DocumentFormat(type=ServiceState, size_max=1 << 20)


def new_identity() -> str:
    """Return a new random identity for a mount."""
    return os.urandom(8).hex()


def services_dir(run_dir: Path) -> Path:
    """Return the parent of the services' folders."""
    return run_dir / "services"


def start_folders(run_dir: Path) -> list[Path]:
    """Return the folders of starts, with the notes of their launchers."""
    return sorted(services_dir(run_dir).glob(f"{START_PREFIX}*"))


def log_path(run_dir: Path, identity: str) -> Path:
    """Return the path of the log of a server and its workers."""
    return run_dir / "logs" / f"{identity}.log"


def new_service_dir(run_dir: Path, identity: str | None = None) -> Path:
    """Make a folder for a server, named by the mount's identity. Raises: BootseerError."""
    return private_directory(services_dir(run_dir) / (identity or new_identity()))


# ---- the lock ---------------------------------------------------------------------------------


def take_lock(
    directory: Path, timeout_s: float = 0.0, *, create: bool = True, name: str = "lock"
) -> int:
    """Return a descriptor that holds a folder's lock. Raises: TimeoutError; OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    fd = os.open(directory / name, flags, 0o600)
    try:
        lock_within(fd, timeout_s)
    except OSError:
        os.close(fd)
        raise
    return fd


def lock_new(directory: Path) -> int:
    """Lock a folder without a server, after an `is_alive` that holds it. Raises: OSError."""
    return take_lock(directory, _PROBE_MAX_S)


def is_alive(directory: Path) -> bool:
    """Return whether a process holds the folder's lock, so that the folder's server lives."""
    try:
        # Do not create the lock file: the holder may be removing the folder at this moment.
        os.close(take_lock(directory, create=False))
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def wait_released(directory: Path, timeout_s: float) -> bool:
    """Wait until the folder's lock is free. Return False if it is not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while directory.exists() and is_alive(directory):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


# ---- the state --------------------------------------------------------------------------------


def write_state(directory: Path, state: ServiceState) -> None:
    """Replace the state of a server in one step. Raises: BootseerError."""
    try:
        write_private_file(directory / _STATE, _STATE_FORM.encode(state))
    except OSError as error:
        raise from_oserror(error, f"write the state of the service to {directory}") from error


def read_state(directory: Path) -> ServiceState | None:
    """Return the state of a server; None if it is missing, cannot be read, or is another user's."""
    return read_private_file(directory / _STATE, _STATE_FORM)


# ---- the services of a node -------------------------------------------------------------------


class ServicePhase(Enum):
    """Phase of a service, as its lock and its users say. It is stored nowhere."""

    SERVING = "serving"
    LINGERING = "lingering"
    """No job uses it, but the attendant of one that has ended, for the job's next start."""
    DEAD = "dead"
    """The processes have ended; `ending` removes their mounts and files."""


class Service(NamedTuple):
    """A service of this node, alive or dead."""

    folder: Path
    state: ServiceState

    @property
    def is_alive(self) -> bool:
        """Whether a process of the service lives now."""
        return is_alive(self.folder)

    @property
    def phase(self) -> ServicePhase:
        """Phase of the service now."""
        if not self.is_alive:
            return ServicePhase.DEAD
        return ServicePhase.LINGERING if is_lingering(self.folder) else ServicePhase.SERVING

    def users(self) -> set[int]:
        """Return the pids of the living processes that use the service."""
        users = living_pids(self.folder / USERS)
        if self.state.user is not None and self.state.user.lives():
            users.add(self.state.user.pid)
        return users

    def ask(self, command: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return the service's answer to a command. Raises: UnavailableError, DeadlineError."""
        # Imported here, since a start asks no service before it needs one.
        from bootseer.served.control import ask

        return ask(self.folder, command, timeout_s=timeout_s)


def services(
    run_dir: Path, matches: Callable[[ServiceState], bool] = lambda _: True
) -> list[Service]:
    """Return the services whose state matches, alive or dead, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in services_dir(run_dir).iterdir():
            state = read_state(folder)
            if state is not None and matches(state):
                found.append(Service(folder, state))
    return sorted(found, key=lambda one: one.state.started_ns)


def live_mounts(run_dir: Path) -> list[Service]:
    """Return the living services that have mounted something, the oldest first."""
    return [one for one in services(run_dir, has_mount) if one.is_alive]


def dead_mounts(run_dir: Path) -> list[Service]:
    """Return the dead services that had mounted something, the oldest first."""
    return [one for one in services(run_dir, has_mount) if not one.is_alive]


def attendants(run_dir: Path) -> list[Service]:
    """Return the starts whose attendant lives, the oldest first."""
    found = services(run_dir, lambda state: state.purpose == ATTENDING)
    return [one for one in found if one.is_alive]


def is_lingering(folder: Path) -> bool:
    """Return whether all living users of a service are attendants, so that no job uses it.

    An attendant that is ending counts, too: it has no state any more, but may live for seconds.
    """
    roles = {role for _, role in living_notes(folder / USERS)}
    return roles == {ATTENDING}


def lingering_services(run_dir: Path, purpose: str, job: str = "") -> Iterator[Service]:
    """Yield each lingering service with this purpose, and for `job` if given."""
    for service in services(run_dir, lambda state: state.purpose == purpose):
        if service.phase is ServicePhase.LINGERING:
            users = service.users()
            if not job or any(
                one.state.pid in users and one.state.reference == job for one in attendants(run_dir)
            ):
                yield service


def find_checkpoints(run_dir: Path, directory: Path) -> Service | None:
    """Return the service of the checkpoint folder last mounted on `directory` (absolute)."""
    found = services(
        run_dir,
        lambda state: state.purpose == CHECKPOINT and state.directory == str(directory),
    )
    return max(found, key=lambda one: (one.is_alive, one.state.started_ns), default=None)


def has_mount(state: ServiceState) -> bool:
    """Return whether the service has mounted something. Pure."""
    return state.purpose not in _WITHOUT_MOUNT


# ---- the end ----------------------------------------------------------------------------------


def remove_service_dir(directory: Path) -> None:
    """Remove a server's folder, as the holder of its lock. Never raises.

    The lock is removed last, so that `wait_released` returns when all is gone.
    """
    with contextlib.suppress(OSError):
        empty_service_dir(directory)
        (directory / "lock").unlink(missing_ok=True)
        directory.rmdir()


def empty_service_dir(directory: Path, *kept: str) -> None:
    """Remove the contents of a server's folder except the lock and `kept`. Raises: OSError."""
    for path in directory.iterdir():
        if path.name not in ("lock", *kept):
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink()


# ---- a server in its folder -------------------------------------------------------------------


class HeldFolder(Struct, frozen=True):
    """The state of a living server, and the lock of its folder."""

    state: ServiceState
    lock: int
    """Descriptor that holds the lock."""


@contextlib.contextmanager
def hold_folder(
    directory: Path, state: ServiceState, lock: int | None = None
) -> Iterator[HeldFolder]:
    """Hold the folder of a server, this process: lock it and write `state` to it.

    First, what dead servers left is removed. At the end, this server's overlays, its scratch
    folder and the folder are removed; the state stays if it says what was lost. `lock` is the
    descriptor of a server that this process replaces. Raises: BootseerError.
    """
    # Imported here, since a process that waits for its plan does not need them.
    from bootseer.linux.namespaces import mount_namespace
    from bootseer.served import ending
    from bootseer.served.overlays import unmount_overlays

    is_new = lock is None
    try:
        lock = lock_new(directory) if lock is None else lock
    except OSError as error:
        raise from_oserror(error, f"lock {directory}") from error
    try:
        if is_new:
            ending.sweep(directory.parent.parent)
            state = replace(
                state,
                pid=os.getpid(),
                pid_started=ProcessId.of(os.getpid()).started,
                mount_namespace=mount_namespace(),
            )
            write_state(directory, state)
        yield HeldFolder(state, lock)
    finally:
        unmount_overlays(state.id)
        if state.scratch:
            ending.remove_scratch(Path(state.scratch))
        last = read_state(directory)
        if last is not None and last.unwritten:
            with contextlib.suppress(OSError):
                empty_service_dir(directory, "state.json")
        else:
            # The folder last: as long as it exists, the mount has not ended completely.
            remove_service_dir(directory)
        os.close(lock)
