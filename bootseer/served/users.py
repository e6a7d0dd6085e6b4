"""Reference counting for services: the processes that use each of them.

The folder of a service (`service`) has a subfolder `users` with one empty file per process, whose
name tells attendants from jobs, or a file `keep` for a mount that stays until it is unmounted. A
mount without any of these files is not set up yet. The server unmounts the overlay when its
last user has ended. Only this module writes to the subfolder. Any thread, and every process of the
node.
"""

import contextlib
import logging
import os
import select
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import BootseerError, from_oserror
from bootseer.linux.processes import (
    ProcessId,
    living_pids,
    living_processes,
    note_names,
    note_process,
    own_ancestry,
    write_note,
)
from bootseer.linux.removal import remove_tree
from bootseer.served.overlays import Overlay, overlay_at, overlays, unmount_overlay
from bootseer.served.service import (
    ATTENDING,
    LINK,
    PRELOAD,
    USERS,
    has_mount,
    is_alive,
    read_state,
    services,
    services_dir,
    take_lock,
)

_log = logging.getLogger(__name__)

_KEEP = "keep"
LOCK_S = 30.0
"""Longest wait for the lock, which is held for moments, or for the time of a stuck unmount."""
# Interval of checks in addition to the kernel's events for changed mounts and ended processes.
_CHECK_MS = 60_000


def sweep_overlays(run_dir: Path) -> int:
    """Unmount overlays whose server died. Return their number. Never raises."""
    count = 0
    found: list[Overlay] = []
    with contextlib.suppress(OSError):
        found = overlays()
    for overlay in reversed(found):
        state_dir = services_dir(run_dir) / overlay.id
        # An overlay of another run folder is not ours to judge.
        if not state_dir.is_dir() or is_alive(state_dir) or works_without_server(state_dir):
            continue
        try:
            _log.warning("unmounting %s, whose server died", overlay.path)
            unmount_overlay(overlay)
            count += 1
        except BootseerError as error:
            _log.warning("cannot unmount %s, whose server died: %s", overlay.path, error)
    return count


def works_without_server(state_dir: Path) -> bool:
    """Return whether a dead server's overlay is in use and shows files of the node's disk."""
    state = read_state(state_dir)
    return state is not None and state.purpose == LINK and next_user(state_dir) is not None


@contextlib.contextmanager
def _users_locked(state_dir: Path) -> Iterator[None]:
    """Hold the exclusive lock on the mount's user list. Raises: TimeoutError, OSError."""
    fd = take_lock(state_dir, LOCK_S, name="users.lock")
    try:
        yield
    finally:
        os.close(fd)


def add_user(state_dir: Path, pid: int | None, role: str = "") -> None:
    """Keep the mount as long as process `pid` lives; None: until it is unmounted.

    The mount is set up as soon as it has a user. `role`: ATTENDING for an attendant; a mount whose
    only users are attendants lingers. Raises: BootseerError.
    """
    try:
        with _users_locked(state_dir):
            _write_user(state_dir, pid, role)
    except OSError as error:
        raise from_oserror(error, f"record a user of the mount {state_dir.name}") from error


def join(state_dir: Path, overlay: Overlay | None, pid: int | None) -> bool:
    """Add a user to a mount that is set up. Return False if it is not, or has ended.

    `overlay`, if given, must still be mounted.
    """
    try:
        with _users_locked(state_dir):
            if not has_users(state_dir) or not is_alive(state_dir):
                return False
            if overlay is not None and overlay not in overlays():
                return False
            _write_user(state_dir, pid)
    except (OSError, BootseerError):
        return False
    return True


def _write_user(state_dir: Path, pid: int | None, role: str = "") -> None:
    if pid is None:
        write_note(state_dir / USERS, _KEEP)
    else:
        note_process(state_dir / USERS, pid, role)


def has_users(state_dir: Path) -> bool:
    """Return whether the mount has, or had, users, and so was set up."""
    return bool(note_names(state_dir / USERS))


def is_kept(state_dir: Path) -> bool:
    """Return whether the mount stays until it is unmounted, whichever process ends."""
    return _KEEP in note_names(state_dir / USERS)


def other_users(state_dir: Path) -> set[int]:
    """Return the living users except this process and its ancestors."""
    return living_pids(state_dir / USERS) - own_ancestry()


def is_others_only(state_dir: Path) -> bool:
    """Return whether the mount has living users, but not this process or an ancestor."""
    users = living_pids(state_dir / USERS)
    return bool(users) and not users & own_ancestry()


def next_user(state_dir: Path) -> ProcessId | None:
    """Return a living user; None if there is none."""
    return next(living_processes(state_dir / USERS), None)


# ---- lingering --------------------------------------------------------------------------------


def share_services(run_dir: Path, pid: int) -> None:
    """Make the attendant `pid` a user of each mount and preloader that this process uses.

    Raises: BootseerError.
    """
    ours = ProcessId.of(os.getpid())
    for service in services(run_dir, lambda state: has_mount(state) or state.purpose == PRELOAD):
        uses = service.state.user == ours or ours in living_processes(service.folder / USERS)
        if uses and service.is_alive:
            add_user(service.folder, ours.pid)
            add_user(service.folder, pid, ATTENDING)


def last_user(state_dir: Path) -> ProcessId | None:
    """Return a living user of a mount without an overlay.

    If there is none, no process can `join` the mount any more, and None is returned.
    """
    with contextlib.suppress(OSError, BootseerError), _users_locked(state_dir):
        user = next_user(state_dir)
        if user is None and has_users(state_dir):
            remove_tree(state_dir / USERS)
        return user
    return None


# ---- the end ----------------------------------------------------------------------------------


def unmount_if_unused(state_dir: Path) -> ProcessId | None:
    """Unmount the overlay if its last user has ended. Return a process to wait for, or None.

    Call it when a user has ended, and again when the returned process has. None means that the
    overlay is unmounted, `is_kept`, or lies below an overlay that stays.
    """
    try:
        while True:
            with _users_locked(state_dir):
                if is_kept(state_dir):
                    return None
                user = next_user(state_dir)
                if user is not None:
                    return user
                above = _unmount(state_dir)
            if above is None:
                return None
            # A later set-up of the same job has mounted another overlay on top.
            if not unmount_unused(state_dir.parent, above):
                return next_user(state_dir.parent / above.id)
    except (OSError, BootseerError) as error:
        _log.warning("cannot unmount the overlay of mount %s: %s", state_dir.name, error)
    return None


def _unmount(state_dir: Path) -> Overlay | None:
    """Unmount the overlay and unused ones below, or return the one on top of it."""
    for overlay in reversed(overlays()):
        if overlay.id == state_dir.name:
            above = None if overlay.is_topmost else overlay_at(overlay.path)
            if above is not None:
                return above
            unmount_overlay(overlay)
            unmount_all_unused(state_dir.parent, overlay.path)
    return None


def unmount_all_unused(mounts: Path, path: Path) -> None:
    """Unmount the overlays on `path`, from the topmost down to the first that is used.

    `mounts` is the folder of the node's mounts. Raises: BootseerError, OSError.
    """
    while (overlay := overlay_at(path)) is not None and unmount_unused(mounts, overlay):
        pass


def unmount_unused(mounts: Path, overlay: Overlay) -> bool:
    """Unmount an overlay that was set up and has no user. Return whether it was unmounted.

    Raises: BootseerError, OSError.
    """
    state_dir = mounts / overlay.id
    # An overlay of another run folder is not ours to judge.
    if not state_dir.is_dir():
        return False
    with _users_locked(state_dir):
        if not has_users(state_dir) or is_kept(state_dir) or next_user(state_dir) is not None:
            return False
        unmount_overlay(overlay)
    return True


def wait_until_unmounted(directory: Path, user: int) -> None:
    """Wait until the mount's overlay is unmounted; unmount it after its last user.

    For a process that serves nothing and only cleans up. Also returns if there is no overlay and
    the process that is to mount it has ended. `user` is a pidfd of that process, which is closed.
    """
    poll = select.poll()
    was_mounted = False
    try:
        with Path("/proc/self/mountinfo").open("rb") as table:
            # proc_pid_mountinfo(5): poll reports an error condition when mounts change.
            poll.register(table, select.POLLPRI | select.POLLERR)
            poll.register(user, select.POLLIN)
            while True:
                # Before the mount table is read: a mount with users has had its overlay.
                was_mounted = was_mounted or has_users(directory)
                if was_mounted and not _is_mounted(directory.name):
                    return
                # A pidfd reports POLLIN, and POLLHUP too once the parent has reaped the process.
                if all(fd != user for fd, _ in poll.poll(_CHECK_MS)):
                    continue
                poll.unregister(user)
                os.close(user)
                user = _next_user(directory)
                if user >= 0:
                    poll.register(user, select.POLLIN)
                elif not is_kept(directory) and not _is_mounted(directory.name):
                    return
    finally:
        if user >= 0:
            os.close(user)


def _is_mounted(identity: str) -> bool:
    return any(overlay.id == identity for overlay in overlays())


def _next_user(directory: Path) -> int:
    while (process := unmount_if_unused(directory)) is not None:
        with contextlib.suppress(ProcessLookupError):
            return process.open()
    return -1
