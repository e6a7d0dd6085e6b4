"""How a server's life ends: asked to, forced to, or found dead.

Alone unmounts what servers have mounted, ends their processes, and removes what killed ones left:
`sweep`, which every server that begins calls. What another user's folder says about where to
unmount and what to remove is not for us. Edge module; any thread.
"""

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, from_oserror
from bootseer.fuse.kernel.unmount import abort_connection, detach, unmount
from bootseer.linux import mount_table, namespaces
from bootseer.linux.locks import is_written
from bootseer.linux.private_files import is_own, write_private_file
from bootseer.linux.processes import ProcessId, name_of, notes, wait_readable
from bootseer.linux.removal import remove_tree
from bootseer.served.cover_users import serves_itself
from bootseer.served.covers import container_source, covers, uncover_all
from bootseer.served.folders import (
    CHECKPOINT,
    MountState,
    dead_mounts,
    is_alive,
    live_mounts,
    mounts_dir,
    read_state,
    remove_mount_dir,
    take_lock,
    wait_released,
)

_log = logging.getLogger(__name__)

_SCRATCH = "scratch-path"
_RUNC_END_S = 20
_LOGS_KEPT = 20
_BEING_MADE_S = 60.0
_ENDED_KEPT_S = 3600.0
"""So long what a mount has lost can be asked for."""
_FREED_S = 5.0
_FAILED_END_S = 3.0
_GIVEN_UP_END_S = 10.0
_END_GRACE_S = 15.0
"""What a server may take to clean up once its mount is gone: it deletes what was replaced."""


# ---- servers that live --------------------------------------------------------------------------


def end_server(directory: Path, state: MountState, timeout_s: float) -> None:
    """Unmount what a server serves and wait for its end. Raises: BootseerError."""
    path = Path(state.directory)
    try:
        unmount(path, timeout_s=timeout_s)
    except InvalidInputError:
        pass  # Detached, or unmounted by another process: the server ends by itself.
    if not wait_released(directory, timeout_s):
        if mount_table.find_mount(path) is not None:
            raise DeadlineError(
                f"the server of {path} (process {state.pid}) did not end in {timeout_s:g} s"
            )
        # It may take a while to make a large cache durable; no caller needs to wait for that.
        _log.info("the server of %s still tidies up", path)


def give_up(directory: Path, wait_s: float = _FAILED_END_S) -> None:
    """End a server that could not begin, or is not needed, and remove its folder. For `wait_s`
    it may end by itself: it does where it finds no process to report to. Never raises."""
    if not wait_released(directory, wait_s):
        state = read_state(directory)
        if state is not None:
            try:
                unmount(Path(state.directory), timeout_s=1.0)
            except BootseerError:
                # It has mounted nothing, or holds something else.
                with contextlib.suppress(OSError):
                    state.process.kill(signal.SIGTERM)
        if not wait_released(directory, _GIVEN_UP_END_S):
            _log.warning("the server of the mount %s does not end", directory.name)
    if not sweep_one(directory) and not is_alive(directory):
        import shutil  # here: it loads every kind of compression

        shutil.rmtree(directory, ignore_errors=True)


def end_silent(directory: Path, state: MountState) -> None:
    """Kill a server that does not answer: to be asked to end it would have to run. What it leaves
    is for a sweep. Raises: OSError."""
    for process in state.processes:
        process.kill(signal.SIGKILL)
    wait_released(directory, _FAILED_END_S)


def end_process(server: ProcessId) -> None:
    """Wait for a process of a server whose mount is gone; it cleans up for a while. Then SIGTERM,
    then SIGKILL. Raises: BootseerError."""
    try:
        process = server.open()
    except ProcessLookupError:
        return
    except OSError as error:
        raise from_oserror(error, f"reach the server process {server.pid}") from error
    try:
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
            if wait_readable([process], _END_GRACE_S):
                return
        raise DeadlineError(f"the server process {server.pid} does not end")
    finally:
        os.close(process)


# ---- servers that died --------------------------------------------------------------------------


def sweep(run_dir: Path) -> int:
    """Remove what dead servers left: mounts, folders, old logs. Returns how many servers."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for directory in mounts_dir(run_dir).iterdir():
            try:
                count += sweep_one(directory)
            except Exception as error:
                # One that cannot be cleaned must not keep the others, and the next start, waiting.
                _log.warning("cannot clean up the dead mount %s: %s", directory, error)
    _sweep_logs(run_dir)
    return count


def sweep_dead(run_dir: Path, target: Path) -> bool:
    """As `sweep`, of what was mounted on `target` by a server that died; False where none was."""
    found = [folder for folder, state in dead_mounts(run_dir) if state.directory == str(target)]
    return sum(map(sweep_one, found)) > 0


def sweep_one(directory: Path) -> bool:
    """Remove what is left of a dead server, and its folder; False where that must stay."""
    try:
        if not is_own(directory.stat(follow_symlinks=False)):
            return False
    except OSError:
        return False
    # Without the grace a folder that is being made this moment would go: between the creation of
    # its lock and the locking, too.
    state_path = directory / "state.json"
    if not state_path.exists() and _age_s(directory) < _BEING_MADE_S:
        return False
    try:
        lock = take_lock(directory, _FREED_S if _free_stuck(directory) else 0.0)
    except OSError:
        return False
    try:
        state = read_state(directory)
        if state is not None:
            if _is_elsewhere(state) or serves_itself(directory):
                return False
            # A checkpoint folder is not unmounted behind the back of its job, which would go on
            # writing into the folder below.
            if state.purpose == CHECKPOINT and _is_wanted(state, state_path):
                return False
            end_runc(directory)
            uncover_all(state.id)
            if any(cover.id == state.id for cover in covers()):
                # Below another one: only who finds this folder later can take it off.
                return False
            if state.purpose != CHECKPOINT:
                _unmount_left_over(Path(state.directory))
            if state.scratch:
                remove_scratch(Path(state.scratch))
        elif (scratch := _announced_scratch(directory)) is not None:
            remove_scratch(scratch)
        remove_mount_dir(directory)
    finally:
        os.close(lock)
    _log.info("removed what the dead mount %s left", directory.name)
    return True


def _free_stuck(directory: Path) -> bool:
    """Abort the connection of a mount whose processes were killed while one of them stored a page
    that it was to bring itself. Return whether that was so.

    Nobody else ends that wait: its thread holds the connection open, and the folder's lock.
    """
    state = read_state(directory)
    if state is None or not state.device_minor:
        return False
    server, worker = state.processes
    if server.lives() or not worker.is_stuck():
        return False
    mount = mount_table.find_mount(Path(state.directory))
    if mount is None or mount.device_minor != state.device_minor:
        # A number is given away again once nobody sees the mount any more.
        if not any(cover.id == state.id for cover in covers()) and not is_in_use(state.scratch):
            return False
        mount = None
    _log.warning("process %d, which was killed, cannot end: aborting its mount", worker.pid)
    return abort_connection(state.device_minor, mount.path if mount else None)


def _is_elsewhere(state: MountState) -> bool:
    """Whether what is left is mounted where this process cannot take it off: in another mount
    namespace, as a job's own view is one, that has processes. Its files are in use there."""
    there = state.mount_namespace
    return there not in ("", namespaces.mount_namespace()) and namespaces.has_processes(there)


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _is_wanted(state: MountState, path: Path) -> bool:
    """Whether a user may still ask what became of a checkpoint folder."""
    if mount_table.find_mount(Path(state.directory)) is not None:
        return True
    return bool(state.unwritten) and _age_s(path) < _ENDED_KEPT_S


def remove_scratch(directory: Path) -> None:
    """Remove what a container has written, as far as that can be done. Never raises."""
    with contextlib.suppress(OSError):
        # Of a cache that cannot take what is written: it went to memory.
        namespaces.unmount(directory)
    try:
        remove_tree(directory)
    except OSError as error:
        _log.warning("cannot remove all of %s, which a container wrote: %s", directory, error)


# What the containers of one tree write lies apart, in folders that are called by the processes that
# began them. One is over when that process has ended, and no other one has such a root.


def announce_scratch(directory: Path, scratch: Path) -> None:
    """Say in a server's folder, before there is a state, where the folder of what is written will
    be made: who makes it may be killed before the server knows of it. Never raises."""
    with contextlib.suppress(OSError):
        write_private_file(directory / _SCRATCH, os.fsencode(scratch))


def _announced_scratch(directory: Path) -> Path | None:
    with contextlib.suppress(OSError):
        path = Path(os.fsdecode((directory / _SCRATCH).read_bytes()))
        return path if path.is_dir() else None
    return None


def make_own_scratch(scratch: Path) -> Path:
    """Make the folder for what this process's container writes. Raises: BootseerError.

    Not `scratch` itself: where that is gone, so is the start, and nobody would remove it again.
    """
    own = scratch / name_of(os.getpid())
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the folder {own}") from error
    return own


def is_in_use(scratch: str) -> bool:
    """Whether a container that writes below `scratch` is not over."""
    return any(map(_is_in_use, _own_folders(scratch)))


def remove_ended_scratch(run_dir: Path) -> bool:
    """Remove what containers wrote that are over, but whose tree is kept. Returns whether nothing
    of such is left. Never raises."""
    is_all = True
    for _, state in live_mounts(run_dir):
        for path in _own_folders(state.scratch):
            if _is_in_use(path):
                is_all = False
            else:
                remove_scratch(path)
    return is_all


def runc_folder(directory: Path) -> Path:
    """Return the folder, in a server's own, for what runc needs of this process's container."""
    return directory / "runc" / name_of(os.getpid())


def runc_name(folder: Path) -> str:
    """Return the name by which runc knows the container of a `runc_folder`."""
    return f"bootseer-{folder.parent.parent.name}-{folder.name}"


def end_runc(directory: Path) -> None:
    """Kill what is left of containers whose runc was killed, and remove what runc had of them and
    of those that have ended. Never raises."""
    for name in notes(directory / "runc"):
        pid = name.partition("-")[0]
        if not pid.isdigit() or name_of(int(pid)) == name:
            continue
        folder = directory / "runc" / name
        if (folder / "state" / runc_name(folder)).exists():
            _delete_container(folder)
        with contextlib.suppress(OSError):
            remove_tree(folder)


def _delete_container(folder: Path) -> None:
    import subprocess  # here: most servers serve no container of runc

    words = ["runc", "--root", str(folder / "state"), "delete", "--force", runc_name(folder)]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            words, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_RUNC_END_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("cannot end the container %s: %s", runc_name(folder), error)


def _own_folders(scratch: str) -> list[Path]:
    names = notes(Path(scratch)) if scratch else []
    return [Path(scratch) / name for name in names if name.partition("-")[0].isdigit()]


def _is_in_use(path: Path) -> bool:
    pid = int(path.name.partition("-")[0])
    return name_of(pid) == path.name or namespaces.is_seen(container_source(path))


def _unmount_left_over(path: Path) -> None:
    """Unmount our dead file system there; a live one of another server stays."""
    mount = mount_table.find_mount(path)
    if mount is None or not mount.subtype.startswith("bootseer"):
        return
    try:
        detach(path, lazy=True)
    except BootseerError as error:
        _log.warning("cannot unmount %s, which a dead server left: %s", path, error)


def _sweep_logs(run_dir: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        logs = sorted((run_dir / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[:-_LOGS_KEPT]:
            with contextlib.suppress(OSError):
                if not is_written(path):
                    path.unlink()
