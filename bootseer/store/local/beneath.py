"""Directory operations below a root that never follow a symbolic link.

Paths are opened by openat with O_NOFOLLOW, one component at a time, so that neither ".." nor a link
that another user of a shared folder has planted leads outside. Also: fsync of directories, and
rename without overwriting. Functions raise plain OSError and return descriptors that the caller
closes. Thread-safe, except that a `FilesBeneath` belongs to one thread.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from functools import cache
from typing import Any

from bootseer.base.closing import Closing

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe or device in the place of a file must not wait.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_RENAME_NOREPLACE = 1


def open_directory(root: str, names: Sequence[str]) -> int:
    """Return an O_PATH descriptor of the directory `names` below `root`; `root` may be a link."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def make_directory(root: str, names: Sequence[str]) -> int:
    """Open a directory as `open_directory` does, creating the missing ones durably.

    New directories get the permission bits of the root; a root that is created is private (0700).
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
        # mkdir(2) applies the umask, which would remove the group bits of a shared store.
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    sync_fd(parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def directory_mode(fd: int) -> int:
    """Return the mode of directories below a root: its bits without write for others."""
    return stat.S_IMODE(os.fstat(fd).st_mode) & 0o2775 | 0o700


def file_mode(root: str) -> int:
    """Return the mode of files below `root`: its read and write bits without write for others."""
    return stat.S_IMODE(os.stat(root).st_mode) & 0o664 | 0o600


def sync_fd(directory: int) -> None:
    """Make the names in an O_PATH directory descriptor durable."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync directories
            raise
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """Make the names in the directory at `path` durable."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


@cache
def _renameat2() -> Any:
    import ctypes  # here, since importing ctypes takes longer than the rest of the package

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


def publish_temporary(source_fd: int, source: str, target_fd: int, target: str) -> None:
    """Move a temporary file to a free name, or raise FileExistsError if `target` exists.

    For a moment the file has both names. Without ctypes, whose import takes longer than the rest of
    the package, and which most starts need for nothing else.
    """
    try:
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # not every file system has links
        rename_exclusive(source_fd, source, target_fd, target)
    else:
        os.unlink(source, dir_fd=source_fd)


def rename_exclusive(source_fd: int, source: str, target_fd: int, target: str) -> None:
    """Rename a file or directory atomically, or raise FileExistsError if `target` exists.

    On a file system without RENAME_NOREPLACE (NFS: EINVAL) a file is moved by link and unlink,
    which is exclusive too; a directory raises OSError EINVAL.
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


class FilesBeneath(Closing):
    """Regular files below `root`, by untrusted paths: no link, device or pipe is opened.

    The last folder is kept open, since successive paths often share it.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = b""
        self._fd = -1

    def stat(self, path: bytes) -> os.stat_result:
        """Return the status of a file, without following a link. Raises: OSError."""
        return os.stat(self._name(path), dir_fd=self._fd, follow_symlinks=False)

    def open(self, path: bytes) -> int:
        """Open a regular file for reading, and return its descriptor. Raises: OSError."""
        name = self._name(path)
        # Checked before the file is opened, because opening a device may have effects.
        if not stat.S_ISREG(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
            raise FileNotFoundError(f"{os.fsdecode(path)} is no regular file")
        fd = os.open(name, _FILE, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(f"{os.fsdecode(path)} is no regular file")
        return fd

    def _name(self, path: bytes) -> bytes:
        folder, _, name = path.rpartition(b"/")
        if self._fd < 0 or folder != self._folder:
            self.close()
            parts = [os.fsdecode(part) for part in folder.split(b"/")] if folder else []
            self._fd = open_directory(self._root, parts)
            self._folder = folder
        return name

    def close(self) -> None:
        """Close the folder. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
