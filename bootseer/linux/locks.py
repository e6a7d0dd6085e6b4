"""File locks (flock(2)), which end when the last copy of the descriptor is closed.

Descriptors are copied by fork; a killed holder's lock ends with it. Stateless; any thread.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from bootseer.linux.private_files import make_private_directory, private_opener

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# flock(2) has no time-out. Most locks are held for milliseconds, some for a pull.
_POLL_S = 0.005
_POLL_S_MAX = 0.05
_REMOVED_MAX = 100


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock an open file without waiting. Return whether it is locked now. Raises: OSError."""
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock, in all copies of the descriptor. Raises: OSError."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_log(path: Path) -> int:
    """Open a log for appending, with a shared lock, which `has_writer` finds.

    Raises: OSError.
    """
    fd = private_opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with contextlib.suppress(OSError):
        try_lock(fd, is_shared=True)
    return fd


def has_writer(path: Path) -> bool:
    """Return whether a living process has the log open for writing. Raises: OSError."""
    fd = private_opener(str(path), os.O_RDONLY)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def lock_within(fd: int, timeout_s: float, *, is_shared: bool = False) -> None:
    """Lock an open file, after `timeout_s` at most. Raises: TimeoutError, OSError."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = _POLL_S
    while not try_lock(fd, is_shared=is_shared):
        if time.monotonic() >= deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked")
        time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, _POLL_S_MAX)


def lock_file(
    path: Path, timeout_s: float, *, is_shared: bool = False, folder: int | None = None
) -> int:
    """Return a descriptor that holds the lock file `path`, which is made if missing.

    `path` is relative to the open folder `folder`, if given. The holder may remove the file: a
    process that waited for the lock then makes a new one. Raises: TimeoutError, OSError.
    """
    removed_count = 0
    while True:
        try:
            if folder is None:
                # In each round, since a holder may have removed the folder, too.
                make_private_directory(path.parent)
            fd = os.open(path, _FLAGS, 0o600, dir_fd=folder)
        except (FileNotFoundError, FileExistsError):
            # A holder removed the folder between the two calls: `mkdir` saw it, `open` did not.
            removed_count += 1
            if folder is not None or removed_count > _REMOVED_MAX:
                raise
            continue
        try:
            lock_within(fd, timeout_s, is_shared=is_shared)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def remove_unused_lock(path: Path) -> bool:
    """Remove a lock file without a holder. Return whether it was removed. Never raises.

    A process that has opened the file but not yet locked it notices the removal; see `lock_file`.
    """
    try:
        fd = os.open(path, _FLAGS & ~os.O_CREAT)
    except OSError:
        return False
    try:
        if not try_lock(fd):
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
