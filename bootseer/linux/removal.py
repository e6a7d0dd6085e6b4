"""Removing a directory that a stranger has filled: a container, an image, a user's set-up.

Everything is done relative to open directories and no link is followed, so depth, and paths longer
than PATH_MAX, make no difference; memory and descriptors are bounded. What is mounted below is left
alone. Directories that even their owner may not enter, and files that are marked as immutable, are
removed like others as far as this user may do that. Stateless; any thread.
"""

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

# Two descriptors each. What lies deeper is moved up before it is emptied.
_LEVELS_MAX = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# ioctl_iflags(2), of Linux with 64 bits; FS_IMMUTABLE_FL and FS_APPEND_FL.
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_UNCHANGEABLE = 0x10 | 0x20


def remove_tree(
    path: str | bytes | Path,
    *,
    dir_fd: int | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> None:
    """Remove a directory with all that is in it; nothing where there is none. `on_entry` is called
    for each name that is come to.

    Raises: OSError of the first thing that could not be removed, after all that could be has been.
    """
    name = os.fsencode(path)
    failure = None
    try:
        empty_directory(name, dir_fd=dir_fd, on_entry=on_entry)
    except FileNotFoundError:
        return
    except OSError as error:
        failure = error
    try:
        _unlocked(lambda: os.rmdir(name, dir_fd=dir_fd), dir_fd, name)
    except OSError as error:
        # Why something is still in it says more than that there is.
        raise failure or error from None


def empty_directory(
    path: str | bytes | Path,
    *,
    dir_fd: int | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> None:
    """Remove all that is in a directory, which stays. Raises: OSError, as `remove_tree`."""
    name = os.fsencode(path)
    top = _unlocked(lambda: os.open(name, _DIRECTORY, dir_fd=dir_fd), dir_fd, name)
    try:
        failure = _empty(top, on_entry)
    finally:
        os.close(top)
    if failure is not None:
        raise failure


class _Level:
    """An open directory that is being emptied."""

    def __init__(self, name: bytes, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.has_shrunk = False
        """Whether something has been removed since it was listed from its beginning."""
        self.entries = os.scandir(fd)

    def list_again(self) -> None:
        self.has_shrunk = False
        self.entries = os.scandir(self.fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


def _empty(top: int, on_entry: Callable[[], None]) -> OSError | None:
    """Remove all that is in the open directory `top`. What could not be removed first, and why."""
    failure: OSError | None = None
    levels = [_Level(b"", top)]
    try:
        while True:
            level = levels[-1]
            on_entry()
            try:
                entry = next(level.entries, None)
                if entry is not None:
                    inner = _remove_entry(levels, os.fsencode(entry.name), entry)
                    if inner is not None:
                        levels.append(inner)
                elif level.has_shrunk and len(levels) == 1:
                    # What was moved up, or was not listed because names went meanwhile.
                    level.list_again()
                elif len(levels) == 1:
                    return failure
                elif not _remove_emptied(levels):
                    level.list_again()
            except OSError as error:
                failure = failure or error
    finally:
        for level in levels[1:]:
            level.close()


def _remove_entry(levels: list[_Level], name: bytes, entry: "os.DirEntry[str]") -> _Level | None:
    """Remove it; or where it is a directory that has to be emptied first, that, opened.

    Raises: OSError.
    """
    level = levels[-1]
    fd = level.fd
    if not entry.is_dir(follow_symlinks=False):
        _unlocked(lambda: os.unlink(name, dir_fd=fd), fd, name)
    else:
        try:
            # Of what is mounted there rmdir(2) says EBUSY before it looks whether it is empty.
            _unlocked(lambda: os.rmdir(name, dir_fd=fd), fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if len(levels) < _LEVELS_MAX:
                inner = _unlocked(lambda: os.open(name, _DIRECTORY, dir_fd=fd), fd, name)
                return _Level(name, inner)
            moved = b".moved-%b" % os.urandom(8).hex().encode()
            top = levels[0].fd
            _unlocked(lambda: os.rename(name, moved, src_dir_fd=fd, dst_dir_fd=top), fd, name)
            levels[0].has_shrunk = True
    level.has_shrunk = True
    return None


def _remove_emptied(levels: list[_Level]) -> bool:
    """Remove the innermost directory, which has been gone through; False where it is to be gone
    through again, since names have been removed and others are left. Raises: OSError."""
    level, above = levels[-1], levels[-2]
    try:
        _unlocked(lambda: os.rmdir(level.name, dir_fd=above.fd), above.fd, level.name)
        above.has_shrunk = True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and level.has_shrunk:
            return False
        levels.pop().close()
        raise
    levels.pop().close()
    return True


def _unlocked(work: Callable[[], _T], dir_fd: int | None, name: bytes) -> _T:
    """What `work` on a name returns; where it is refused it is called again after what forbids it
    has been taken off. Raises: OSError."""
    try:
        return work()
    except PermissionError:
        if dir_fd is not None:
            _unlock(dir_fd)
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                _unlock(fd)
            finally:
                os.close(fd)
        return work()


def _unlock(fd: int) -> None:
    """Let the owner change a file or directory, as far as this process may arrange that."""
    mode = os.fstat(fd).st_mode
    # Not a device or a pipe, which must not be opened; a descriptor of O_PATH takes no ioctl.
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return
    path = f"/proc/self/fd/{fd}"
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # An int, although the numbers of these calls say that it is a long.
            flags = int.from_bytes(fcntl.ioctl(opened, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
            kept = (flags & ~_UNCHANGEABLE).to_bytes(4, sys.byteorder)
            fcntl.ioctl(opened, _SET_FLAGS, kept + bytes(4))
        finally:
            os.close(opened)
