"""Read-only, stateless FUSE server of the files of one directory.

The benchmark of the FUSE server measures it; tests kill and restart it under supervision. Node ids
come from the sorted listing and handles are always 0, so that they mean the same in every process.
Thread-safe.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from bootseer.fuse.kernel.operations import (
    ROOT_NODE,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    NodeEntry,
    Opened,
    Operations,
)

_TTL_S = 3600.0
_FIRST_COOKIE = 3
_DIRECTORY_MODE = 0o040755


class OpenMode(StrEnum):
    """Ways of opening files."""

    CACHED = "cached"
    DIRECT_IO = "direct_io"
    PASSTHROUGH = "passthrough"


class FlatDirectory(Operations):
    """Serves the regular files directly in `root`; the list is made once, at the start.

    With `mapped`, reads are answered with views of the mapped files, which saves a copy. The files
    must then not shrink, and the server must not be supervised (see
    `bootseer.served.supervision.supervisor`).
    """

    def __init__(self, root: Path, mode: OpenMode, *, mapped: bool = False) -> None:
        self._mode = mode
        paths = sorted(path for path in root.iterdir() if path.is_file())
        self._names = [os.fsencode(path.name) for path in paths]
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._local = threading.local()
        self._views = [_view(fd) for fd in self._fds] if mapped else []

    def destroyed(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def _attributes(self, node: int) -> Attributes:
        if node == ROOT_NODE:
            return Attributes(node, _DIRECTORY_MODE, 0, link_count=2)
        status = os.fstat(self._fds[node - 2])
        return Attributes(
            node,
            status.st_mode,
            status.st_size,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
        )

    def _entry(self, number: int) -> NodeEntry:
        return NodeEntry(self._attributes(number + 2), _TTL_S, _TTL_S)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        number = self._numbers.get(name)
        if parent != ROOT_NODE or number is None:
            return NodeEntry(None, _TTL_S)
        return self._entry(number)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        return self._attributes(node), _TTL_S

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._mode is OpenMode.PASSTHROUGH:
            return Opened(keep_cache=True, no_flush=True, passthrough_fd=self._fds[node - 2])
        direct_io = self._mode is OpenMode.DIRECT_IO
        return Opened(direct_io=direct_io, keep_cache=not direct_io, no_flush=True)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        if self._views:
            return self._views[node - 2][offset : offset + length]
        # One buffer for each server thread: a reply is written before the thread reads the next
        # request.
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = self._local.buffer = memoryview(bytearray(length))
        count = os.preadv(self._fds[node - 2], [buffer[:length]], offset)
        return buffer[:count]

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        start = max(0, offset - _FIRST_COOKIE + 1)
        return [
            DirectoryEntry(name, number + 2, 0o100000, number + _FIRST_COOKIE, self._entry(number))
            for number, name in enumerate(self._names[start : start + 64], start)
        ]


def _view(fd: int) -> memoryview:
    # An empty file cannot be mapped.
    if os.fstat(fd).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
