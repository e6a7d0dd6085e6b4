"""Removal of a directory tree with hostile contents: a container, an image, a user's set-up.

Works relative to open directories and follows no link, so that neither depth nor paths longer than
PATH_MAX matter; memory and descriptors are bounded. Mounts below the tree stay. Directories that
their owner may not enter, and files marked immutable, are removed as far as this user may do that.
Stateless; any thread.
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

# A level needs two descriptors. Directories at a greater depth are moved to the top first.
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
    """Remove a directory with all its contents; do nothing if it does not exist.

    `on_entry` is called for each entry. Raises: OSError for the first entry that could not be
    removed, after everything else has been.
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
        _retry_unprotected(lambda: os.rmdir(name, dir_fd=dir_fd), dir_fd, name)
    except OSError as error:
        # The first failure inside says more than "directory not empty".
        raise failure or error from None


def empty_directory(
    path: str | bytes | Path,
    *,
    dir_fd: int | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> None:
    """Remove all contents of a directory, which stays. Raises: as `remove_tree`."""
    name = os.fsencode(path)
    top = _retry_unprotected(lambda: os.open(name, _DIRECTORY, dir_fd=dir_fd), dir_fd, name)
    try:
        failure = _empty(top, on_entry)
    finally:
        os.close(top)
    if failure is not None:
        raise failure


class _Level:
    def __init__(self, name: bytes, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.has_shrunk = False  # whether an entry was removed since the last listing began
        self.entries = os.scandir(fd)

    def list_again(self) -> None:
        self.has_shrunk = False
        self.entries = os.scandir(self.fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


def _empty(top: int, on_entry: Callable[[], None]) -> OSError | None:
    """Remove all contents of the open directory `top`. Return the first failure."""
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
                    # For directories moved here, and names that a listing skips when others go.
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
    """Remove one entry; return a directory with contents as a new level. Raises: OSError."""
    level = levels[-1]
    fd = level.fd
    if not entry.is_dir(follow_symlinks=False):
        _retry_unprotected(lambda: os.unlink(name, dir_fd=fd), fd, name)
    else:
        try:
            # On a mount point rmdir(2) fails with EBUSY before it checks for contents.
            _retry_unprotected(lambda: os.rmdir(name, dir_fd=fd), fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if len(levels) < _LEVELS_MAX:
                inner = _retry_unprotected(lambda: os.open(name, _DIRECTORY, dir_fd=fd), fd, name)
                return _Level(name, inner)
            moved = b".moved-%b" % os.urandom(8).hex().encode()
            top = levels[0].fd
            _retry_unprotected(
                lambda: os.rename(name, moved, src_dir_fd=fd, dst_dir_fd=top), fd, name
            )
            levels[0].has_shrunk = True
    level.has_shrunk = True
    return None


def _remove_emptied(levels: list[_Level]) -> bool:
    """Remove the innermost directory, whose listing has ended. Raises: OSError.

    Return False if it must be listed again, since some names are left and others were removed.
    """
    level, above = levels[-1], levels[-2]
    try:
        _retry_unprotected(lambda: os.rmdir(level.name, dir_fd=above.fd), above.fd, level.name)
        above.has_shrunk = True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and level.has_shrunk:
            return False
        levels.pop().close()
        raise
    levels.pop().close()
    return True


def _retry_unprotected(work: Callable[[], _T], dir_fd: int | None, name: bytes) -> _T:
    """Return `work()`; on PermissionError remove the protection of `name` and try again."""
    try:
        return work()
    except PermissionError:
        if dir_fd is not None:
            _remove_protection(dir_fd)
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                _remove_protection(fd)
            finally:
                os.close(fd)
        return work()


def _remove_protection(fd: int) -> None:
    mode = os.fstat(fd).st_mode
    # Devices and pipes must not be opened, and an O_PATH descriptor takes no ioctl.
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return
    path = f"/proc/self/fd/{fd}"
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The kernel uses an int, although the ioctl numbers are made for a long.
            flags = int.from_bytes(fcntl.ioctl(opened, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
            kept = (flags & ~_UNCHANGEABLE).to_bytes(4, sys.byteorder)
            fcntl.ioctl(opened, _SET_FLAGS, kept + bytes(4))
        finally:
            os.close(opened)
