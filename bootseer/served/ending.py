"""End of servers: on request, by force, and the removal of what dead servers left.

Only this module unmounts what servers have mounted, ends their processes, and cleans up after
killed ones (`sweep`, which every server calls when it begins). Folders of another user are ignored,
since they say what to unmount and remove. Edge module; any thread.
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
from bootseer.linux.locks import has_writer
from bootseer.linux.private_files import is_own, write_private_file
from bootseer.linux.processes import ProcessId, note_name, note_names, wait_readable
from bootseer.linux.removal import remove_tree
from bootseer.served.overlays import container_source, overlays, unmount_overlays
from bootseer.served.service import (
    CHECKPOINT,
    PRELOAD,
    START_PREFIX,
    ServiceState,
    dead_mounts,
    has_mount,
    is_alive,
    live_mounts,
    read_state,
    remove_service_dir,
    services_dir,
    take_lock,
    wait_released,
)
from bootseer.served.users import works_without_server

_log = logging.getLogger(__name__)

_SCRATCH = "scratch-path"
_RUNC_END_S = 20
_LOGS_KEPT = 20
_BEING_MADE_S = 60.0
_ENDED_KEPT_S = 3600.0
"""Time for which users can ask for the files that a checkpoint mount has lost."""
_FREED_S = 5.0
_FAILED_END_S = 3.0
_GIVEN_UP_END_S = 10.0
_END_GRACE_S = 15.0
"""Time for a server to clean up after its mount is gone: it deletes files that were replaced."""


# ---- servers that live --------------------------------------------------------------------------


def end_server(directory: Path, state: ServiceState, timeout_s: float) -> None:
    """Unmount the mount of a server, and wait for the server's end. Raises: BootseerError."""
    path = Path(state.directory)
    try:
        unmount(path, timeout_s=timeout_s)
    except InvalidInputError:
        pass  # Already unmounted: the server ends by itself.
    if not wait_released(directory, timeout_s):
        if mount_table.find_mount(path) is not None:
            raise DeadlineError(
                f"the server of {path} (process {state.pid}) did not end in {timeout_s:g} s"
            )
        # Writing a large cache to disk may take a while; no caller needs to wait for that.
        _log.info("the server of %s is still cleaning up", path)


def discard_server(directory: Path, wait_s: float = _FAILED_END_S) -> None:
    """End a server that could not begin, or is not needed, and remove its folder. Never raises.

    For `wait_s` the server may end by itself, which it does when the reader of its report has gone.
    """
    if not wait_released(directory, wait_s):
        state = read_state(directory)
        if state is not None:
            try:
                unmount(Path(state.directory), timeout_s=1.0)
            except BootseerError:
                # Nothing is mounted there, or the server does not end by an unmount.
                with contextlib.suppress(OSError):
                    state.process.kill(signal.SIGTERM)
        if not wait_released(directory, _GIVEN_UP_END_S):
            _log.warning("the server of the mount %s does not end", directory.name)
    if not sweep_one(directory) and not is_alive(directory):
        import shutil  # here, since it loads every compression module

        shutil.rmtree(directory, ignore_errors=True)


def kill_silent(directory: Path, state: ServiceState) -> None:
    """Kill a server that does not answer; the next `sweep` cleans up. Raises: OSError."""
    for process in state.processes:
        process.kill(signal.SIGKILL)
    wait_released(directory, _FAILED_END_S)


def end_process(server: ProcessId) -> None:
    """Wait for a server whose mount is gone; else SIGTERM, then SIGKILL. Raises: BootseerError."""
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
    """Remove what dead servers left: mounts, folders, old logs. Return the number of servers."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for directory in services_dir(run_dir).iterdir():
            try:
                count += sweep_one(directory)
            except Exception as error:
                # Go on: one failure must not prevent the clean-up of the others.
                _log.warning("cannot clean up the dead mount %s: %s", directory, error)
    _sweep_logs(run_dir)
    return count


def sweep_dead(run_dir: Path, target: Path) -> bool:
    """Remove what dead servers left that had mounted on `target`. Return whether there were any."""
    found = [folder for folder, state in dead_mounts(run_dir) if state.directory == str(target)]
    return sum(map(sweep_one, found)) > 0


def sweep_one(directory: Path) -> bool:
    """Remove the leftovers of a dead server and its folder. Return False if it must stay."""
    try:
        if directory.name.startswith(START_PREFIX) or not is_own(
            directory.stat(follow_symlinks=False)
        ):
            return False
    except OSError:
        return False
    # A folder without a state may be new: its server may not have locked it yet.
    state_path = directory / "state.json"
    if not state_path.exists() and _age_s(directory) < _BEING_MADE_S:
        return False
    try:
        lock = take_lock(directory, _FREED_S if _free_stuck(directory) else 0.0)
    except OSError:
        return False
    try:
        state = read_state(directory)
        if state is not None and has_mount(state):
            if _is_used_elsewhere(state) or works_without_server(directory):
                return False
            if state.purpose == CHECKPOINT and Path(state.directory).parent == directory:
                # The folder was mounted only to be bound into a container, whose mount stays.
                _unmount_left_over(Path(state.directory))
            # A checkpoint folder stays mounted while its job may use it: after an unmount the job
            # would write into the directory below the mount.
            if state.purpose == CHECKPOINT and _is_reportable(state, state_path):
                return False
            end_runc(directory)
            unmount_overlays(state.id)
            if any(overlay.id == state.id for overlay in overlays()):
                # Another overlay is on top: a later sweep can unmount it.
                return False
            if state.purpose != CHECKPOINT:
                _unmount_left_over(Path(state.directory))
            if state.scratch:
                remove_scratch(Path(state.scratch))
        elif state is not None and state.purpose == PRELOAD:
            # The job writes its record there, and starts its workers by the program `python`.
            if state.user is not None and state.user.lives():
                return False
        elif state is None and (scratch := _announced_scratch(directory)) is not None:
            remove_scratch(scratch)
        remove_service_dir(directory)
    finally:
        os.close(lock)
    _log.info("removed what the dead mount %s left", directory.name)
    return True


def _free_stuck(directory: Path) -> bool:
    """Abort the connection of a mount whose killed worker cannot end. Return whether it did.

    The worker cannot end while one of its threads stores a page in the kernel and the kernel asks
    the worker itself for that page. The thread keeps the connection open, and the folder locked,
    until the connection is aborted.
    """
    state = read_state(directory)
    if state is None or not state.device_minor:
        return False
    server, worker = state.processes
    if server.lives() or not worker.is_stuck():
        return False
    mount = mount_table.find_mount(Path(state.directory))
    if mount is None or mount.device_minor != state.device_minor:
        # If nobody uses the mount any more, another mount may have its number now.
        if not any(overlay.id == state.id for overlay in overlays()) and not is_in_use(
            state.scratch
        ):
            return False
        mount = None
    _log.warning("process %d, which was killed, cannot end: aborting its mount", worker.pid)
    return abort_connection(state.device_minor, mount.path if mount else None)


def _is_used_elsewhere(state: ServiceState) -> bool:
    """Return whether the mount is used in another mount namespace, such as a job's own view."""
    there = state.mount_namespace
    return there not in ("", namespaces.mount_namespace()) and namespaces.has_processes(there)


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _is_reportable(state: ServiceState, path: Path) -> bool:
    """Return whether users may still ask for the files that a checkpoint mount has lost."""
    if mount_table.find_mount(Path(state.directory)) is not None:
        return True
    return bool(state.unwritten) and _age_s(path) < _ENDED_KEPT_S


def remove_scratch(directory: Path) -> None:
    """Remove the files that a container has written, as far as possible. Never raises."""
    with contextlib.suppress(OSError):
        # A tmpfs, if the cache's file system cannot be an upper directory.
        namespaces.unmount(directory)
    try:
        remove_tree(directory)
    except OSError as error:
        _log.warning("cannot remove all of %s, which a container wrote: %s", directory, error)


# Each container of a tree has a scratch folder of its own, named by the process that began it. The
# container has ended when that process has, and no other process has its root mounted.


def announce_scratch(directory: Path, scratch: Path) -> None:
    """Note in a server's folder where a container's scratch folder will be made. Never raises.

    Its maker may be killed before the server has a state that names the folder.
    """
    with contextlib.suppress(OSError):
        write_private_file(directory / _SCRATCH, os.fsencode(scratch))


def _announced_scratch(directory: Path) -> Path | None:
    with contextlib.suppress(OSError):
        path = Path(os.fsdecode((directory / _SCRATCH).read_bytes()))
        return path if path.is_dir() else None
    return None


def make_own_scratch(scratch: Path) -> Path:
    """Make the scratch folder of this process's container. Raises: BootseerError.

    `scratch` itself is not made: if it is missing, the start has ended, and nobody would remove it.
    """
    own = scratch / note_name(os.getpid())
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the folder {own}") from error
    return own


def is_in_use(scratch: str) -> bool:
    """Return whether a container that has not ended writes below `scratch`."""
    return any(map(_has_container, _container_folders(scratch)))


def remove_ended_scratch(run_dir: Path) -> bool:
    """Remove the scratch folders of ended containers; return whether none is left. Never raises."""
    is_all = True
    for _, state in live_mounts(run_dir):
        for path in _container_folders(state.scratch):
            if _has_container(path):
                is_all = False
            else:
                remove_scratch(path)
    return is_all


def runc_folder(directory: Path) -> Path:
    """Return the folder of runc for this process's container, in the server's folder."""
    return directory / "runc" / note_name(os.getpid())


def runc_name(folder: Path) -> str:
    """Return the container's name for runc, by its `runc_folder`."""
    return f"bootseer-{folder.parent.parent.name}-{folder.name}"


def end_runc(directory: Path) -> None:
    """Kill containers whose runc was killed, and remove ended ones' folders. Never raises."""
    for name in note_names(directory / "runc"):
        pid = name.partition("-")[0]
        if not pid.isdigit() or note_name(int(pid)) == name:
            continue
        folder = directory / "runc" / name
        if (folder / "state" / runc_name(folder)).exists():
            _delete_container(folder)
        with contextlib.suppress(OSError):
            remove_tree(folder)


def _delete_container(folder: Path) -> None:
    import subprocess  # here, since most servers have no container of runc

    words = ["runc", "--root", str(folder / "state"), "delete", "--force", runc_name(folder)]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            words, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_RUNC_END_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("cannot end the container %s: %s", runc_name(folder), error)


def _container_folders(scratch: str) -> list[Path]:
    names = note_names(Path(scratch)) if scratch else []
    return [Path(scratch) / name for name in names if name.partition("-")[0].isdigit()]


def _has_container(path: Path) -> bool:
    pid = int(path.name.partition("-")[0])
    return note_name(pid) == path.name or namespaces.is_source_mounted(container_source(path))


def _unmount_left_over(path: Path) -> None:
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
                if not has_writer(path):
                    path.unlink()
