"""Mount and unmount a checkpoint tree from any process.

Starts and ends the server process, unmounts mounts whose server was killed, and makes mount points
immutable. Functions may be called from any thread.
"""

import array
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.redact import public_url
from bootseer.base.urls import absolute_url
from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.fuse.kernel.unmount import detach, is_disconnected, unmount
from bootseer.fuse.striped.mounted.options import FANOUT, SUBTYPE, CheckpointPlan, MountSpec
from bootseer.linux.mount_table import absolute, find_mount
from bootseer.linux.namespaces import mount_namespace
from bootseer.served.ending import discard_server, end_process, kill_silent
from bootseer.served.processes import CHECKPOINTS, start
from bootseer.served.service import (
    ServicePhase,
    find_checkpoints,
    log_path,
    new_service_dir,
    read_state,
    remove_service_dir,
    take_lock,
    write_state,
)
from bootseer.served.users import join
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

_START_S = 10.0
# Time in which a server ends after a request, unless a file is being written again.
_RESTART_S = 3.0
_LOOK_S = 0.1
_RELEASED_S = 5.0

# FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of <linux/fs.h>: _IOR('f', 1, long), _IOW('f', 2, long), with
# the size of a long in bits 16 to 29. The argument is an int, although the macros say long.
_LONG_BYTES = array.array("l").itemsize
_GET_FLAGS = 2 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 1
_SET_FLAGS = 1 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 2
_IMMUTABLE = 0x10  # FS_IMMUTABLE_FL, what `chattr +i` sets
_NO_ATTRIBUTES = frozenset({errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class MountedCheckpoints(Struct, frozen=True):
    """Mount served by a process of its own. Leaving a `with` block unmounts."""

    url: str
    directory: Path
    run_dir: Path
    state_dir: Path

    @property
    def log(self) -> Path:
        """Return the path of the server's log."""
        return log_path(self.run_dir, self.state_dir.name)

    @property
    def pid(self) -> int:
        """Return the id of the supervisor, which replaces `worker_pid` when that dies."""
        state = read_state(self.state_dir)
        return state.pid if state is not None else 0

    @property
    def worker_pid(self) -> int:
        """Return the id of the worker, which answers the kernel."""
        state = read_state(self.state_dir)
        return state.worker_pid if state is not None else 0

    @property
    def root_was_made(self) -> bool:
        """Return whether the remote folder was missing before."""
        state = read_state(self.state_dir)
        return state is not None and state.root_was_made

    def close(self, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Unmount; returns the files whose last bytes were lost (see `unmount_checkpoints`)."""
        return unmount_checkpoints(self.run_dir, self.directory, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NotFoundError):
            self.close()


def mount_spec(settings: Settings, url: str, directory: Path, **choices: Any) -> MountSpec:
    """Return `describe_mount` of a directory on which nothing is mounted.

    A mount on `directory` whose server was killed is unmounted. Raises: InvalidInputError,
    NotFoundError, BusyError.
    """
    spec = describe_mount(settings, url, directory, **choices)
    path = Path(spec.directory)
    unmount_dead_mounts(settings.run_dir, path)
    if find_mount(path) is not None:
        raise BusyError(f"{path} is a mounted FUSE file system already; unmount it first")
    return spec


def describe_mount(settings: Settings, url: str, directory: Path, **choices: Any) -> MountSpec:
    """Return the description of a mount of the tree at `url` on `directory`.

    `choices`: further fields of `MountSpec`; None stands for the default or the setting.

    Raises: InvalidInputError; UnsupportedError for a storage that is never mounted.
    """
    if url.lower().startswith("arrow_hdfs://"):
        raise UnsupportedError(
            f"{public_url(url)} cannot be mounted: libhdfs can replace no file in one step; mount "
            "hdfs://, or copy with `bootseer checkpoint cp`"
        )
    path = absolute(directory)
    chosen = {name: value for name, value in choices.items() if value is not None}
    spec = MountSpec(
        url=absolute_url(url),
        directory=str(path),
        run_dir=str(settings.run_dir),
        memory_bytes=chosen.pop("memory_bytes", settings.memory_bytes),
        deadline_s=chosen.pop("deadline_s", settings.deadline_s),
        metrics_dir=chosen.pop("metrics_dir", settings.metrics_dir),
        **chosen,
    )
    spec.stripe_settings  # noqa: B018  (checks the numbers)
    return spec


def note_fanout(state_dir: Path, address: bytes) -> None:
    """Tell the server of a mount the address of its start's fan-out; b"": the start has none."""
    path = state_dir / FANOUT
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        if address:
            path.write_bytes(address)


def take_over(spec: MountSpec, fanout: bytes = b"") -> str:
    """Give the job of `spec` the mount that lingers on its directory since the last start.

    `fanout`: address of the fan-out of the job's start.

    Returns: "live" if the job has that mount now; "changed" if a mount with other options, or one
    that does not answer, was unmounted; "" if this process sees none (a job of Slurm may have a
    /tmp of its own).
    Raises: BootseerError.
    """
    # An earlier step of the job may have mounted there since.
    unmount_dead_mounts(Path(spec.run_dir), Path(spec.directory))
    if find_mount(Path(spec.directory)) is None:
        return ""
    known = find_checkpoints(Path(spec.run_dir), Path(spec.directory))
    if known is None or known.phase is not ServicePhase.LINGERING:
        return ""
    if known.state.fingerprint == spec.fingerprint:
        try:
            note_fanout(known.folder, fanout)
            # "warm" reads ahead a checkpoint that is newer than the one read ahead before.
            known.ask("warm" if spec.read_newest else "status")
            if join(known.folder, None, spec.user.pid if spec.user else None):
                return "live"
        except (UnavailableError, DeadlineError):
            kill_silent(known.folder, known.state)
            return "changed"
    unmount_checkpoints(Path(spec.run_dir), Path(spec.directory))
    return "changed"


def mount_checkpoints(
    spec: MountSpec,
    variables: Mapping[str, str | None] = MappingProxyType({}),
    *,
    forks: bool = False,
    fanout: bytes = b"",
) -> MountedCheckpoints:
    """Mount a tree, served by a background process. The mount works when this returns.

    `variables` are added to the environment of the process, or removed if None. `forks`: the
    process may be a fork of this one, which must be a program of Bootseer without `variables`.
    `fanout`: address of the fan-out of a start that mounts it.
    Raises: BootseerError; nothing is mounted then.
    """
    run_dir = Path(spec.run_dir)
    state_dir = new_service_dir(run_dir)
    note_fanout(state_dir, fanout)
    try:
        with start(
            CHECKPOINTS, run_dir, identity=state_dir.name, copy=forks, variables=variables
        ) as process:
            process.tell(CheckpointPlan(spec, state_dir))
            process.wait(spec.deadline_s + _START_S)
    except BaseException:
        discard_server(state_dir)
        raise
    return MountedCheckpoints(spec.url, Path(spec.directory), run_dir, state_dir)


def restart_checkpoints(
    run_dir: Path, directory: Path, *, timeout_s: float, force: bool = False
) -> int:
    """Replace the process that serves a mount by a new one with the installed code; return its id.

    Open files stay open. Wait until no file is being written; with `force`, let the writers fail
    with EIO. Raises: NotFoundError, UnsupportedError, DeadlineError; BusyError with the files that
    are being written.
    """
    path = absolute(directory)
    before = _ask(run_dir, path, "status")["worker_pid"]
    deadline = time.monotonic() + timeout_s
    while True:
        unfinished = _ask(run_dir, path, "restart-now" if force else "restart")["unfinished"]
        if not unfinished:
            after = _await_another(run_dir, path, before)
            if after:
                return after
        if time.monotonic() >= deadline:
            if not unfinished:
                raise DeadlineError(f"the server of {path} does not end; see its log")
            raise BusyError(
                f"cannot restart the server of {path}: {', '.join(unfinished)} is being written; "
                "wait, or use --force, which fails its writer"
            )
        time.sleep(_LOOK_S)


def _ask(run_dir: Path, path: Path, command: str) -> dict[str, Any]:
    known = find_checkpoints(run_dir, path)
    if known is None or not known.is_alive:
        raise NotFoundError(f"no checkpoint folder of this user is mounted on {path}")
    return known.ask(command)


def _await_another(run_dir: Path, path: Path, before: int) -> int:
    """Return the id of the process that replaces `before`; 0 if `before` stays."""
    deadline = time.monotonic() + _RESTART_S
    while time.monotonic() < deadline:
        try:
            now = int(_ask(run_dir, path, "status")["worker_pid"])
        except (UnavailableError, NotFoundError):
            # The old process has ended, and the new one does not answer yet.
            deadline = max(deadline, time.monotonic() + _RESTART_S)
            now = before
        if now != before:
            return now
        time.sleep(_LOOK_S)
    return 0


def unmount_checkpoints(
    run_dir: Path, directory: Path, *, timeout_s: float = 10.0
) -> tuple[str, ...]:
    """Unmount a checkpoint tree, even if its server hangs or is dead.

    Wait `timeout_s` until open files are closed, then abort the mount and end its server.

    Returns: The files that were still being written: their last bytes are lost, and their writers
    get an error.
    Raises: NotFoundError if nothing is mounted there; InvalidInputError if another kind of file
    system is.
    """
    path = absolute(directory)
    known = find_checkpoints(run_dir, path)
    mounted = find_mount(path)
    if mounted is None and (known is None or not known.is_alive):
        raise NotFoundError(f"cannot unmount {path}: no checkpoint folder is mounted there")
    if mounted is not None and mounted.subtype != SUBTYPE:
        raise InvalidInputError(
            f"cannot unmount {path}: fuse.{mounted.subtype} is mounted there, no checkpoint folder"
        )
    if mounted is not None:
        # The server sees its connection end, and ends.
        unmount(path, timeout_s=timeout_s)
    if known is None:
        return ()
    if known.is_alive:
        for process in known.state.processes:
            end_process(process)
    ended = read_state(known.folder)
    lost = ended.unwritten if ended is not None else ()
    try:
        # A killed process may hold the folder's lock for a moment after it has ended.
        lock = take_lock(known.folder, _RELEASED_S, create=False)
    except TimeoutError:
        if ended is not None and lost:
            # The caller says what was lost; without that, the next server removes the folder.
            with contextlib.suppress(BootseerError):
                write_state(known.folder, replace(ended, unwritten=()))
    except OSError:
        pass  # The server has removed its folder.
    else:
        remove_service_dir(known.folder)
        os.close(lock)
    return lost


# ---- mount points ----------------------------------------------------------------------------


def unmount_dead_mounts(run_dir: Path, directory: Path) -> None:
    """Unmount the checkpoint mounts on `directory` whose server has died.

    A mount that answers stays. Raises: BootseerError.
    """
    # A running server of this namespace is not checked, because a stat would wait for it if it
    # hangs. A server of another namespace may have mounted another folder of this name.
    known = find_checkpoints(run_dir, directory)
    is_ours = known is not None and known.state.mount_namespace in ("", mount_namespace())
    if known is not None and known.is_alive and is_ours:
        return
    while (mounted := find_mount(directory)) is not None and mounted.subtype == SUBTYPE:
        try:
            directory.stat()
            return
        except OSError as error:
            if not is_disconnected(error):
                return
        _log.info("unmounting %s, whose server has died", directory)
        detach(directory, lazy=True)


def make_mount_point(run_dir: Path, directory: Path) -> None:
    """Make `directory` and its missing parents. Raises: BootseerError."""
    unmount_dead_mounts(run_dir, absolute(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the mount point {directory}") from error


def make_immutable(directory: Path) -> None:
    """Set the immutable attribute of a mount point: without the mount, no user can make files.

    The folder must not be mounted on; `chattr -i` undoes it. Raises: InvalidInputError if the
    folder is not empty; UnsupportedError if its file system has no such attribute;
    PermissionDeniedError.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = array.array("i", [0])
            fcntl.ioctl(folder, _GET_FLAGS, flags)
            if flags[0] & _IMMUTABLE:
                return
            if os.listdir(folder):
                raise InvalidInputError(
                    f"cannot make {directory} immutable: there are files in it that were written "
                    "while nothing was mounted; move them away"
                )
            flags[0] |= _IMMUTABLE
            fcntl.ioctl(folder, _SET_FLAGS, flags)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            raise UnsupportedError(
                f"cannot make {directory} immutable: its file system does not know chattr +i"
            ) from error
        raise from_oserror(error, f"make {directory} immutable") from error
