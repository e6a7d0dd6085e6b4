"""Locks of files (flock(2)): they hold until the last copy of the descriptor is closed, in whatever
process, and so end with a holder that is killed. Stateless; any thread.
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
    """Lock an open file for us alone, or with others that share it; False: another holder does not
    let us. Raises: OSError."""
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Let go of the lock in all copies of the descriptor. Raises: OSError."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_log(path: Path) -> int:
    """Open a log to append to; its lock is shared by all processes that have the descriptor, as
    their output, so that others see that it `is_written`. Raises: OSError."""
    fd = private_opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with contextlib.suppress(OSError):
        try_lock(fd, is_shared=True)
    return fd


def is_written(path: Path) -> bool:
    """Return whether a process that lives has a log for its output. Raises: OSError."""
    fd = private_opener(str(path), os.O_RDONLY)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def lock_within(fd: int, timeout_s: float, *, is_shared: bool = False) -> None:
    """As `try_lock`, again and again. Raises: TimeoutError, OSError."""
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
    """A descriptor that holds the lock file `path` (in the open `folder`), which is made if needed,
    as its folder is.

    The holder may remove the file: a process that waited for it then makes a new one.
    Raises: TimeoutError, OSError.
    """
    removed_count = 0
    while True:
        try:
            if folder is None:
                # The holder may have removed it, too.
                make_private_directory(path.parent)
            fd = os.open(path, _FLAGS, 0o600, dir_fd=folder)
        except (FileNotFoundError, FileExistsError):
            # A holder has just removed the folder that we have made or seen: `mkdir` says that it
            # exists, and then it does not.
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
    """Remove a lock file that nobody holds. Return whether it was removed. Never raises.

    Who has opened it and not locked it yet notices, as `lock_file` does.
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
