"""Logical files of a storage, as they are stored now.

A stored name is a striped file, an ordinary file, a directory, or hidden. Layouts that were read
lately are cached. Thread-safe; no call waits for a change of names.
"""

import errno
import os
import threading
from collections import OrderedDict

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.fuse.striped.layout import (
    PARTS_FOLDER,
    Header,
    Layout,
    decode_header,
    decode_layout,
    may_be_layout,
)
from bootseer.fuse.striped.view import FileView, plain_version
from bootseer.store.backend import Backend, FileInfo

_RUN_PREFIX = ".bootseer-run-"
# One read of this much is the whole layout of a file of up to about 1.6 GiB.
_PROBE_BYTES = 64 * 2**10
_CACHED_LAYOUTS = 4096


class FileStatus(Struct, frozen=True):
    """Kind, size and identity of a name in the tree."""

    path: str
    is_dir: bool
    size_bytes: int
    modified_ns: int
    identity: str
    """Differs between two generations of a file; "" for a directory."""


def status_of(view: FileView) -> FileStatus:
    """Return the status of a file whose current generation is `view`."""
    return FileStatus(view.path, False, view.size_bytes, view.modified_ns, view.identity)


class _Examined(Struct, frozen=True):
    info: FileInfo
    header: Header | None
    layout: Layout | None


def os_error(code: int, path: str = "") -> OSError:
    """Return the OSError with the errno `code`."""
    return OSError(code, os.strerror(code), path)


def plain_identity(info: FileInfo) -> str:
    """Return the identity of an ordinary file."""
    return f"{info.path}\0{plain_version(info)}"


def plain_view(path: str, info: FileInfo) -> FileView:
    """Return the view of an ordinary file, which lies at `path` now."""
    return FileView(
        path,
        plain_identity(info),
        info.size_bytes,
        info.modified_ns,
        block_bytes=info.block_bytes,
    )


class StoredNames:
    """Logical files as they are in the storage now, by path."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._examined: OrderedDict[str, _Examined] = OrderedDict()
        self._lock = threading.Lock()

    def status(self, path: str) -> FileStatus:
        """Return the status of `path`. Raises: NotFoundError, CorruptError, UnknownFormatError."""
        return self.status_of(self._backend.stat(path))

    def status_of(self, info: FileInfo) -> FileStatus:
        """Return the status of the stored file `info`; read the file only if it can be a layout."""
        if info.is_dir:
            return FileStatus(info.path, True, 0, info.modified_ns, "")
        known = self._examine(info)
        info, header = known.info, known.header
        if info.is_dir:
            return self.status_of(info)
        if header is None:
            return FileStatus(
                info.path, False, info.size_bytes, info.modified_ns, plain_identity(info)
            )
        return FileStatus(info.path, False, header.size_bytes, info.modified_ns, header.generation)

    def shown(self, info: FileInfo) -> FileStatus:
        """Return the status of the stored file `info`.

        A damaged file is shown as an ordinary file, so that it can be listed and removed.
        """
        try:
            return self.status_of(info)
        except (CorruptError, UnknownFormatError):
            return status_of(plain_view(info.path, info))

    def view(self, path: str) -> FileView:
        """Return the current generation of the file at `path`, ready to be read."""
        info = self._backend.stat(path)
        if info.is_dir:
            raise os_error(errno.EISDIR, path)
        return self.view_of(info)

    def entries(self, path: str) -> list[FileInfo]:
        """Return the stored files and directories in a directory, without the hidden ones."""
        return [
            info for info in self._backend.list(path) if not is_hidden(info.path.rpartition("/")[2])
        ]

    def view_of(self, info: FileInfo) -> FileView:
        """Return the view of the stored file `info`, ready to be read."""
        known = self._examine(info, whole=True)
        info, layout = known.info, known.layout
        if info.is_dir:
            raise os_error(errno.EISDIR, info.path)
        if known.header is None:
            return plain_view(info.path, info)
        assert layout is not None
        return FileView(info.path, layout.generation, layout.size_bytes, info.modified_ns, layout)

    def is_striped(self, info: FileInfo) -> bool:
        """Return whether the stored file `info` is a layout."""
        return self._examine(info).header is not None

    def _examine(self, info: FileInfo, *, whole: bool = False) -> _Examined:
        """Return header and layout of the stored file `info`; None for both of an ordinary file.

        If the file was replaced since it was listed, the result describes the new file.
        """
        if not may_be_layout(info.size_bytes):
            return _Examined(info, None, None)
        with self._lock:
            known = self._examined.get(info.path)
            enough = known is not None and (
                known.header is None or known.layout is not None or not whole
            )
            if known is not None and known.info == info and enough:
                self._examined.move_to_end(info.path)
                return known
        known = self._probe(info, whole=whole)
        is_large = info.size_bytes > _PROBE_BYTES
        with self._lock:
            self._examined[info.path] = replace(known, layout=None) if is_large else known
            while len(self._examined) > _CACHED_LAYOUTS:
                self._examined.popitem(last=False)
        return known

    def _probe(self, info: FileInfo, *, whole: bool) -> _Examined:
        for attempt in range(3):
            length = info.size_bytes if whole else min(info.size_bytes, _PROBE_BYTES)
            data = self._backend.read(info.path, 0, length)
            header = layout = problem = None
            try:
                header = decode_header(data, info.path)
                if header is not None and len(data) == info.size_bytes:
                    layout = decode_layout(data, info.path)
            except CorruptError as error:
                problem = error
            if problem is None and len(data) == length:
                return _Examined(info, header, layout)
            # The file may have been replaced since `info` was read: compare with a new `info`.
            # The result of the last attempt counts.
            again = self._backend.stat(info.path)
            if attempt == 2 or again == info:
                if problem is not None:
                    raise problem
                return _Examined(info, header, layout)
            info = again
            if info.is_dir or not may_be_layout(info.size_bytes):
                return _Examined(info, None, None)
        raise AssertionError("unreachable")

    def forget(self, path: str) -> None:
        """Drop the layouts of a name that has changed, and of all names below it."""
        with self._lock:
            for name in [n for n in self._examined if n == path or n.startswith(path + "/")]:
                del self._examined[name]


def run_name(directory: str, generation: str) -> str:
    """Return the path of a file that will be joined to another one of `directory`."""
    name = f"{_RUN_PREFIX}{generation}"
    return f"{directory}/{name}" if directory else name


def is_hidden(name: str) -> bool:
    """Return whether mounts hide a name."""
    return name == PARTS_FOLDER or name.startswith(_RUN_PREFIX)
