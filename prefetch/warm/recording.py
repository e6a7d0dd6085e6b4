"""Recording of the file ranges that a command reads below a directory while it starts.

Names come from fanotify if that is permitted, else from inotify, else from the page cache. Ranges
are those in the page cache at the end. A watch and a `WarmRecording` belong to one thread each.
"""

import contextlib
import ctypes
import errno
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

from bootseer.errors import BootseerError, UnsupportedError
from bootseer.linux.processes import wait_readable
from bootseer.prefetch.warm.plan import GAP_BYTES
from bootseer.prefetch.warm.record import (
    FILE_COUNT_MAX,
    FileRange,
    WarmFile,
    WarmRecord,
    bounded,
    subtract,
)
from bootseer.prefetch.warm.residency import cached_ranges
from bootseer.store.local.beneath import FilesBeneath

_log = logging.getLogger(__name__)

METHODS = ("auto", "fanotify", "inotify", "residency")
ARM_S = 15.0
"""The longest preparation of a recording, for which the command waits once."""


# ---- watches of opened files ---------------------------------------------------------------------

# A watch reports opened files below a directory, in order, by fanotify(7) or inotify(7). fanotify
# needs CAP_SYS_ADMIN and no preparation, but reports only opens through the mount that it marks.
# inotify needs no privilege and reports every open, also through bind mounts in other namespaces,
# but needs a watch for each directory.


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


# ---- recording -----------------------------------------------------------------------------------


class WarmRecording:
    """Recording that begins with its construction and ends with `finish`."""

    def __init__(self, root: str, method: str = "auto") -> None:
        """Prepare a recording. Raises: UnsupportedError if `method` cannot be used; OSError."""
        self._root = root
        self._opened: dict[bytes, None] = {}
        self._watch: OpenWatch | None = None
        self._before: dict[bytes, tuple[FileRange, ...]] = {}
        if method != "residency":
            self._watch = _open_watch(root, method)
        if self._watch is None:
            self._before = {path: ranges for path, _, ranges in _scan(root) if ranges}

    @property
    def method(self) -> str:
        """Return the method in use."""
        return self._watch.method if self._watch else "residency"

    def run(self, until: Sequence[int], window_s: float) -> None:
        """Record until a descriptor of `until` is readable, at most `window_s` seconds."""
        deadline_s = time.monotonic() + window_s
        watched = [self._watch.fileno()] if self._watch else []
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            readable = wait_readable([*watched, *until], remaining_s)
            self._note_opened()
            if any(fd in readable for fd in until):
                return

    def _note_opened(self) -> None:
        if self._watch is not None:
            for path in self._watch.opened():
                if len(self._opened) < FILE_COUNT_MAX:
                    self._opened.setdefault(path)

    def finish(self, identity: str, workload: str) -> WarmRecord:
        """End the recording, and return its record."""
        method = self.method
        if self._watch is not None:
            self._note_opened()
            if self._watch.is_lossy:
                _log.warning("the kernel dropped events: the record lacks files")
            self.close()
            files = bounded(_files(self._root, self._opened))
        else:
            files = bounded(_difference(self._root, self._before))
        return WarmRecord(identity, workload, method, 1, time.time_ns(), files)

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._watch is not None:
            self._watch.close()


def _open_watch(root: str, method: str) -> OpenWatch | None:
    """Return a watch by `method`, for "auto" by the best one, or None if no watch is possible."""
    if method in ("auto", "fanotify"):
        try:
            return FanotifyWatch(root)
        except UnsupportedError as error:
            if method == "fanotify":
                raise
            _log.info("%s; inotify is used", error)
    try:
        return InotifyWatch(root, ARM_S)
    except UnsupportedError as error:
        if method == "inotify":
            raise
        _log.info("%s; only the page cache is compared", error)
        return None


def _files(root: str, paths: Sequence[bytes] | dict[bytes, None]) -> Iterator[WarmFile]:
    """Yield the opened files, each with its ranges in the page cache now.

    Ranges that were cached before count as well: the file is used, and a new node will not have
    them. If the kernel does not tell which pages are cached (another user's file), the whole file
    counts.
    """
    with FilesBeneath(root) as beneath:
        for path in paths:
            with contextlib.suppress(OSError, BootseerError):
                fd = beneath.open(path)
                try:
                    status, ranges = os.fstat(fd), cached_ranges(fd)
                finally:
                    os.close(fd)
                yield _warm_file(path, status, ranges)


def _warm_file(
    path: bytes, status: os.stat_result, ranges: tuple[FileRange, ...] | None
) -> WarmFile:
    size_bytes = status.st_size
    if ranges is None or size_bytes <= GAP_BYTES:
        ranges = (FileRange(0, size_bytes),) if size_bytes else ()
    return WarmFile(path, size_bytes, status.st_mtime_ns, ranges)


def _difference(root: str, before: dict[bytes, tuple[FileRange, ...]]) -> Iterator[WarmFile]:
    """Yield the files with ranges that came into the page cache since, in order of directories."""
    for path, status, ranges in _scan(root):
        fresh = subtract(ranges, before.get(path, ()))
        if fresh:
            yield WarmFile(path, status.st_size, status.st_mtime_ns, fresh)


def _scan(root: str) -> Iterator[tuple[bytes, os.stat_result, tuple[FileRange, ...]]]:
    """Yield every regular file below `root` with its cached ranges, if the kernel tells any."""
    with FilesBeneath(root) as beneath:
        for folder in directories(root):
            try:
                with os.scandir(os.path.join(os.fsencode(root), folder)) as entries:
                    names = sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
            except OSError:
                continue
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    fd = beneath.open(path)
                    try:
                        status, ranges = os.fstat(fd), cached_ranges(fd)
                    finally:
                        os.close(fd)
                    if ranges and stat.S_ISREG(status.st_mode):
                        yield path, status, ranges
