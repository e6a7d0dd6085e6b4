"""The users of an overlay over a served tree (`covers`), and so how long it stays.

Alone owns the folder `users` in a mount's own (`folders`): a file per process for which the
cover is kept, or one for all times. A cover without any such file is not finished. The server takes
the cover off when the last of them has ended. Any thread, and every process of the node.
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
    living_ids,
    living_processes,
    note_process,
    notes,
    own_line,
    write_note,
)
from bootseer.linux.removal import remove_tree
from bootseer.served.covers import Cover, cover_at, covers, uncover
from bootseer.served.folders import (
    LINK,
    MountState,
    attendants,
    is_alive,
    live_mounts,
    mounts_dir,
    read_state,
    take_lock,
)

_log = logging.getLogger(__name__)

_KEEP = "keep"
_USERS = "users"
LOCK_S = 30.0
"""The lock is held for moments, though a stuck unmounting may be one of them."""
# The kernel tells of changed mounts and ended processes; this is for what it may not tell.
_LOOK_MS = 60_000


def sweep_covers(run_dir: Path) -> int:
    """Take off covers whose server died: they answer nothing any more. Returns how many. Never
    raises."""
    count = 0
    found: list[Cover] = []
    with contextlib.suppress(OSError):
        found = covers()
    for cover in reversed(found):
        state_dir = mounts_dir(run_dir) / cover.id
        # What another run folder knows is not for us to judge.
        if not state_dir.is_dir() or is_alive(state_dir) or serves_itself(state_dir):
            continue
        try:
            _log.warning("taking off %s, whose server died", cover.path)
            uncover(cover)
            count += 1
        except BootseerError as error:
            _log.warning("cannot unmount %s, whose server died: %s", cover.path, error)
    return count


def serves_itself(state_dir: Path) -> bool:
    """Whether an overlay is used that shows files of the node's disk: these do not need the process
    that was to clean up."""
    state = read_state(state_dir)
    return state is not None and state.purpose == LINK and next_user(state_dir) is not None


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """While users come and go. Raises: TimeoutError, OSError."""
    fd = take_lock(state_dir, LOCK_S, name="users.lock")
    try:
        yield
    finally:
        os.close(fd)


def add_user(state_dir: Path, pid: int | None) -> None:
    """Keep the cover as long as process `pid` lives; None: until it is unmounted.

    The first user finishes the cover. Raises: BootseerError.
    """
    try:
        with _alone(state_dir):
            _write_user(state_dir, pid)
    except OSError as error:
        raise from_oserror(error, f"note who uses the mount {state_dir.name}") from error


def join(state_dir: Path, cover: Cover | None, pid: int | None) -> bool:
    """`add_user` of a finished cover, or of what has none (None) and lingers. False where it
    is not finished, or has been taken off."""
    try:
        with _alone(state_dir):
            if not has_users(state_dir) or not is_alive(state_dir):
                return False
            if cover is not None and cover not in covers():
                return False
            _write_user(state_dir, pid)
    except (OSError, BootseerError):
        return False
    return True


def _write_user(state_dir: Path, pid: int | None) -> None:
    if pid is None:
        write_note(state_dir / _USERS, _KEEP)
    else:
        note_process(state_dir / _USERS, pid)


def has_users(state_dir: Path) -> bool:
    """Whether the cover is, or was, finished."""
    return bool(notes(state_dir / _USERS))


def is_kept(state_dir: Path) -> bool:
    """Whether the cover stays, whichever process ends."""
    return _KEEP in notes(state_dir / _USERS)


def other_users(state_dir: Path) -> set[int]:
    """Processes that use the cover, but for this one and those that it descends from."""
    return living_ids(state_dir / _USERS) - own_line()


def is_others_only(state_dir: Path) -> bool:
    """Whether processes use the cover, and neither this one nor any that it descends from."""
    users = living_ids(state_dir / _USERS)
    return bool(users) and not users & own_line()


def next_user(state_dir: Path) -> ProcessId | None:
    """A process that uses the cover and lives."""
    return next(living_processes(state_dir / _USERS), None)


# ---- what lingers -----------------------------------------------------------------------------


def linger(run_dir: Path, pid: int) -> None:
    """Keep what this process uses as long as process `pid` lives, too. Raises: BootseerError."""
    ours = ProcessId.of(os.getpid())
    for state_dir, state in live_mounts(run_dir):
        if state.user == ours or ours in living_processes(state_dir / _USERS):
            add_user(state_dir, ours.pid)
            add_user(state_dir, pid)


def only_lingers(state_dir: Path) -> bool:
    """Whether no job uses what is served, but only processes for which it lingers."""
    users = living_ids(state_dir / _USERS)
    run_dir = state_dir.parent.parent
    return bool(users) and users <= {state.pid for _, state in attendants(run_dir)}


def lingering(run_dir: Path, purpose: str, job: str = "") -> Iterator[tuple[Path, MountState]]:
    """The folder and state of each thing of this purpose that `only_lingers`; after `job`, if that
    is named."""
    for state_dir, state in live_mounts(run_dir):
        if state.purpose == purpose and only_lingers(state_dir):
            users = living_ids(state_dir / _USERS)
            if not job or any(
                one.pid in users and one.reference == job for _, one in attendants(run_dir)
            ):
                yield state_dir, state


def last_user(state_dir: Path) -> ProcessId | None:
    """A process that a checkpoint folder, or a container's tree, is still served for; None: it has
    none, and gets none."""
    with contextlib.suppress(OSError, BootseerError), _alone(state_dir):
        user = next_user(state_dir)
        if user is None and has_users(state_dir):
            remove_tree(state_dir / _USERS)
        return user
    return None


# ---- the end ----------------------------------------------------------------------------------


def leave(state_dir: Path) -> ProcessId | None:
    """Called when a user has ended: a process to wait for before it is called again, or None. Then
    the cover, if there was one, is off, unless it `is_kept` or lies below one that stays."""
    try:
        while True:
            with _alone(state_dir):
                if is_kept(state_dir):
                    return None
                user = next_user(state_dir)
                if user is not None:
                    return user
                above = _take_off(state_dir)
            if above is None:
                return None
            # A later set-up of the same job has covered it once more.
            if not take_off_unused(state_dir.parent, above):
                return next_user(state_dir.parent / above.id)
    except (OSError, BootseerError) as error:
        _log.warning("cannot take off the mount %s: %s", state_dir.name, error)
    return None


def _take_off(state_dir: Path) -> Cover | None:
    """Take off the cover, and unused ones that it lay on; or return the cover on top of it.

    Raises: BusyError where something else is mounted on top of it; BootseerError."""
    for cover in reversed(covers()):
        if cover.id == state_dir.name:
            above = None if cover.is_topmost else cover_at(cover.path)
            if above is not None:
                return above
            uncover(cover)
            take_off_all_unused(state_dir.parent, cover.path)
    return None


def take_off_all_unused(mounts: Path, path: Path) -> None:
    """Take off the covers of `path`, from the topmost on, down to the first that is used. `mounts`:
    the folder of the node's mounts. Raises: BootseerError, OSError."""
    while (cover := cover_at(path)) is not None and take_off_unused(mounts, cover):
        pass


def take_off_unused(mounts: Path, cover: Cover) -> bool:
    """Take off a cover whose users have ended; False: it has one, is kept, or is not finished.

    Raises: BootseerError, OSError.
    """
    state_dir = mounts / cover.id
    # What another run folder knows is not for us to judge.
    if not state_dir.is_dir():
        return False
    with _alone(state_dir):
        if not has_users(state_dir) or is_kept(state_dir) or next_user(state_dir) is not None:
            return False
        uncover(cover)
    return True


def stay_while_covered(directory: Path, user: int) -> None:
    """The life of a process that serves nothing: it returns when the overlay of the mount with this
    folder is off, or when there is none and no process that would make one; it takes the overlay
    off after its last user. `user`: a descriptor of the process that makes it, which is closed."""
    poll = select.poll()
    was_covered = False
    try:
        with Path("/proc/self/mountinfo").open("rb") as table:
            # proc_pid_mountinfo(5): it is marked as having an error when mounts change.
            poll.register(table, select.POLLPRI | select.POLLERR)
            poll.register(user, select.POLLIN)
            while True:
                # Asked first: a folder with users has been covered before.
                was_covered = was_covered or has_users(directory)
                if was_covered and not _is_covered(directory.name):
                    return
                # With POLLIN, or with POLLHUP as well once its parent has reaped it.
                if all(fd != user for fd, _ in poll.poll(_LOOK_MS)):
                    continue
                poll.unregister(user)
                os.close(user)
                user = _next_user(directory)
                if user >= 0:
                    poll.register(user, select.POLLIN)
                elif not is_kept(directory) and not _is_covered(directory.name):
                    return
    finally:
        if user >= 0:
            os.close(user)


def _is_covered(identity: str) -> bool:
    return any(cover.id == identity for cover in covers())


def _next_user(directory: Path) -> int:
    """A descriptor of another process that uses the overlay; -1: none does, see `leave`."""
    while (process := leave(directory)) is not None:
        with contextlib.suppress(ProcessLookupError):
            return process.open()
    return -1
