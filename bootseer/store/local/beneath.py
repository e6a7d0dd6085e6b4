"""Directory file descriptors beneath a root, reached without following a symbolic link.

Owns the walk (openat with O_NOFOLLOW, one component at a time, so that neither ".." nor a link
planted by another user of a shared folder leads outside) and rename-without-overwrite. Functions
raise plain OSError and return descriptors that the caller closes. Thread-safe.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from functools import cache
from typing import Any

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1


def open_directory(root: str, names: Sequence[str]) -> int:
    """An O_PATH descriptor of the directory `names` beneath `root`; `root` itself may be a link."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def make_directory(root: str, names: Sequence[str]) -> int:
    """As `open_directory`, after making what is missing, each durable in its parent.

    New directories take the root's permission bits; a root made here is private (0700).
    """
    with contextlib.suppress(FileExistsError):
        os.makedirs(os.path.dirname(root) or "/", exist_ok=True)
        os.mkdir(root, 0o700)
        sync_directory(os.path.dirname(root))
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mode = directory_mode(fd)
    for name in names:
        try:
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                below = _make_one(fd, name, mode)
        finally:
            os.close(fd)
        fd = below
    return fd


def _make_one(parent: int, name: str, mode: int) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:  # another process made it at the same moment
        return os.open(name, _DIRECTORY, dir_fd=parent)
    if mode != 0o700:
        # mkdir(2) applies the umask, which would take a shared store's group bits away.
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    sync_fd(parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def directory_mode(fd: int) -> int:
    """What directories beneath a root `fd` get: its own bits, but never write for others."""
    return stat.S_IMODE(os.fstat(fd).st_mode) & 0o2775 | 0o700


def file_mode(root: str) -> int:
    """What files beneath `root` get: its own read and write bits, but never write for others."""
    return stat.S_IMODE(os.stat(root).st_mode) & 0o664 | 0o600


def sync_fd(directory: int) -> None:
    """Make the names in an O_PATH directory descriptor durable."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync directories
            raise
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """`sync_fd` by path."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


@cache
def _renameat2() -> Any:
    import ctypes  # here: importing it costs more than the rest of the package

    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # musl before 1.2.6 has no wrapper
        return None

    def call(source_fd: int, source: str, target_fd: int, target: str) -> int:
        result = function(
            source_fd,
            os.fsencode(source),
            target_fd,
            os.fsencode(target),
            ctypes.c_uint(_RENAME_NOREPLACE),
        )
        return ctypes.get_errno() if result else 0

    return call


def rename_exclusive(source_fd: int, source: str, target_fd: int, target: str) -> None:
    """rename(2) that fails with FileExistsError where `target` exists, in one atomic step.

    Where the file system has no RENAME_NOREPLACE (NFS: EINVAL), a *file* is moved by link and
    unlink, which keeps the promise; a directory then ends in OSError EINVAL.
    """
    call = _renameat2()
    code = call(source_fd, source, target_fd, target) if call else errno.ENOSYS
    if code in (errno.EINVAL, errno.ENOSYS):
        info = os.stat(source, dir_fd=source_fd, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            os.link(
                source,
                target,
                src_dir_fd=source_fd,
                dst_dir_fd=target_fd,
                follow_symlinks=False,
            )
            os.unlink(source, dir_fd=source_fd)
            return
        code = errno.EINVAL
    if code:
        raise OSError(code, os.strerror(code), source, None, target)
