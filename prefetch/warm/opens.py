"""Watches that report opened files below a directory, in order, by fanotify(7) or inotify(7).

fanotify needs CAP_SYS_ADMIN and no preparation, but reports only opens through the mount that it
marks. inotify needs no privilege and reports every open, also through bind mounts in other
namespaces, but needs a watch for each directory. A watch belongs to one thread.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

from bootseer.errors import UnsupportedError

# linux/fanotify.h
_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x10
_FAN_MARK_ADD, _FAN_MARK_MOUNT = 0x1, 0x10
_FAN_OPEN = 0x20
_FAN_Q_OVERFLOW = 0x4000
_FAN_EVENT = struct.Struct("=IBBHQii")  # event_len vers reserved metadata_len mask fd pid
_FAN_NOFD = -1
_AT_FDCWD = -100
# linux/inotify.h
_IN_OPEN, _IN_Q_OVERFLOW, _IN_ISDIR = 0x20, 0x4000, 0x40000000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x01000000, 0x02000000
_IN_EVENT = struct.Struct("=iIII")  # wd mask cookie len
# Size of one read(2): each event of fanotify holds a descriptor until it is handled.
_READ_BYTES = 64 * _FAN_EVENT.size
_INOTIFY_READ_BYTES = 1 << 16
# Reads per call of `opened`, so that the caller can do other work.
_ROUNDS = 64

DIRECTORY_COUNT_MAX = 2**17
"""Directories that inotify may watch: each watch pins about 1 kB of kernel memory."""


class OpenWatch(Protocol):
    """Watch of a directory, which reports opened files from its construction on."""

    method: str
    is_lossy: bool
    """Whether the kernel dropped events because its queue was full."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""

    def opened(self) -> Iterator[bytes]:
        """Yield the paths, relative to the directory, of files opened since the last call.

        Never waits.
        """

    def close(self) -> None:
        """End the watch. Idempotent."""


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise UnsupportedError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")
    return result


class FanotifyWatch:
    """Watch of the opens through the mount that holds `root`. Raises: UnsupportedError."""

    method = "fanotify"

    def __init__(self, root: str) -> None:
        self.is_lossy = False
        self._prefix = os.fsencode(root).rstrip(b"/") + b"/"
        # O_NONBLOCK: each event carries a descriptor that the kernel opens for us, even of a pipe.
        self._fd = _check(
            _libc().fanotify_init(
                _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_UNLIMITED_QUEUE,
                os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_LARGEFILE,
            ),
            "start fanotify",
        )
        try:
            _check(
                _libc().fanotify_mark(
                    self._fd,
                    _FAN_MARK_ADD | _FAN_MARK_MOUNT,
                    ctypes.c_uint64(_FAN_OPEN),
                    _AT_FDCWD,
                    os.fsencode(root),
                ),
                f"watch {root} with fanotify",
            )
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._fd

    def opened(self) -> Iterator[bytes]:
        for _ in range(_ROUNDS):
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The file of an event can no longer be opened; the next read goes on behind it.
                continue
            offset = 0
            while offset + _FAN_EVENT.size <= len(data):
                length, _, _, _, mask, fd, pid = _FAN_EVENT.unpack_from(data, offset)
                offset += length
                self.is_lossy |= bool(mask & _FAN_Q_OVERFLOW)
                if fd == _FAN_NOFD:
                    continue
                try:
                    path = self._path(fd) if pid != os.getpid() else None
                finally:
                    os.close(fd)
                if path is not None:
                    yield path

    def _path(self, fd: int) -> bytes | None:
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            path = os.readlink(b"/proc/self/fd/%d" % fd)
        except OSError:
            return None
        return path[len(self._prefix) :] if path.startswith(self._prefix) else None

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class InotifyWatch:
    """Watch of the opens in all directories that are below `root` now.

    Raises: UnsupportedError if there are more directories than the user's limit of watches allows,
    or than can be watched within `timeout_s`.
    """

    method = "inotify"

    def __init__(self, root: str, timeout_s: float) -> None:
        self.is_lossy = False
        self._folders: dict[int, bytes] = {}
        self._fd = _check(_libc().inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "start inotify")
        try:
            self._watch_all(root, time.monotonic() + timeout_s)
        except OSError:
            self.close()
            raise

    def _watch_all(self, root: str, deadline_s: float) -> None:
        for folder in directories(root):
            if len(self._folders) == DIRECTORY_COUNT_MAX or time.monotonic() > deadline_s:
                raise UnsupportedError(
                    f"{root} has more directories than can be watched: {len(self._folders)} were"
                )
            number = _libc().inotify_add_watch(
                self._fd,
                os.path.join(os.fsencode(root), folder),
                _IN_OPEN | _IN_ONLYDIR | (_IN_DONT_FOLLOW if folder else 0),
            )
            if number < 0 and not folder:
                _check(number, f"watch {root} with inotify")
            if number < 0 and ctypes.get_errno() == errno.ENOSPC:
                raise UnsupportedError(
                    f"{root} has more directories than fs.inotify.max_user_watches allows"
                )
            # Any other failure: the directory was removed, or its files cannot be opened either.
            if number >= 0:
                self._folders[number] = folder + b"/" if folder else b""

    def fileno(self) -> int:
        return self._fd

    def opened(self) -> Iterator[bytes]:
        for _ in range(_ROUNDS):
            try:
                data = os.read(self._fd, _INOTIFY_READ_BYTES)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                number, mask, _, length = _IN_EVENT.unpack_from(data, offset)
                start = offset + _IN_EVENT.size
                offset = start + length
                self.is_lossy |= bool(mask & _IN_Q_OVERFLOW)
                name = data[start:offset].rstrip(b"\0")
                if mask & _IN_OPEN and not mask & _IN_ISDIR and name and number in self._folders:
                    yield self._folders[number] + name

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def directories(root: str) -> Iterator[bytes]:
    """Yield the path of every directory below `root`, relative to it, beginning with b"".

    Directories of other file systems and those that cannot be listed are left out; symbolic links
    are not followed.
    """
    top = os.fsencode(root)
    device = os.stat(top).st_dev
    todo = [b""]
    while todo:
        folder = todo.pop()
        yield folder
        with contextlib.suppress(OSError), os.scandir(os.path.join(top, folder)) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_dev == device:
                    todo.append(os.path.join(folder, entry.name))
