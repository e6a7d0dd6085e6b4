"""File objects of a striped tree for fsspec.

A written file becomes visible at `close`, whole. It does not become visible if an exception left
the `with` block, if it was not closed, or in a forked child. Like other file objects, not
thread-safe.
"""

import contextlib
import io
import logging
import os
import sys
from types import TracebackType
from typing import Any, Self

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from bootseer.errors import AlreadyExistsError, NotFoundError, UnavailableError
from bootseer.fuse.striped.names.stored import FileStatus, status_of
from bootseer.fuse.striped.reading.unit_read import OpenFile
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.copy import read_opened

_log = logging.getLogger(__name__)

# Smaller reads are served from one cached block: pickle reads a few bytes at a time.
_SMALL_BYTES = 256 * 2**10
_LINE_BYTES = 8192
# Depth to which the call stack is searched for the __exit__ of a `with` block.
_EXIT_DEPTH = 6


class StripedFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """File that is open in the mode `rb`, `wb`, `xb` (new) or `ab`."""

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        mode: str,
        *,
        block_size: int | None = None,
        autocommit: bool = True,
        identity: str | None = None,
    ) -> None:
        """Open a file of the `CheckpointFileSystem` `fs`.

        `identity`: the generation that the file must still have; for a file that was pickled.
        """
        self._closed = True
        self._pid = os.getpid()
        self._key = fs.key(path)
        self._block = b""
        self._block_start = 0
        self._is_done = False
        storage: StripedStorage = fs.storage
        self._storage = storage
        size, start = None, 0
        if mode == "rb":
            self._view = storage.tree.stored.view(self._key)
            if identity not in (None, self._view.identity):
                raise UnavailableError(f"{path} was replaced elsewhere meanwhile; open it again")
            self._opened = storage.reader.open(self._view)
            self._details = entry(fs.shown_name(path), status_of(self._view))
            size = self._view.size_bytes
        else:
            if mode == "xb" and fs.exists(path):
                raise AlreadyExistsError(f"{path} exists already")
            self._error_outside = sys.exception()
            base = None
            if mode == "ab":
                with contextlib.suppress(NotFoundError):
                    base = storage.tree.stored.view(self._key)
            self._writer = storage.writer(self._key, base)
            start = self._writer.size_bytes
        # Last, because it marks the file as open.
        super().__init__(
            fs, path, mode, block_size or "default", autocommit, cache_type="none", size=size
        )
        self.loc = start

    # ---- reading --------------------------------------------------------------------------

    def read(self, length: int | None = -1) -> bytes:
        """Read at most `length` bytes, or the rest of the file without a length."""
        self._check_readable()
        left = max(0, self.size - self.loc)
        count = left if length is None or length < 0 else min(int(length), left)
        data = self._fetch_range(self.loc, self.loc + count)
        self.loc += count
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`. Return the count, which is short only at the end of the file."""
        self._check_readable()
        target = memoryview(buffer).cast("B")
        count: int = min(len(target), max(0, self.size - self.loc))
        if count < _SMALL_BYTES:
            target[:count] = self._fetch_range(self.loc, self.loc + count)
        else:
            opened = self._open_here()
            read_opened(self._storage, opened, self.loc, target[:count])
        self.loc += count
        return count

    def readline(self, size: int | None = -1) -> bytes:
        """Read the rest of a line with its end, but at most `size` bytes."""
        limit = self.size if size is None or size < 0 else size
        line = bytearray()
        while len(line) < limit:
            piece = self.read(min(_LINE_BYTES, limit - len(line)))
            end = piece.find(b"\n") + 1
            if end:
                self.loc -= len(piece) - end
            line += piece[: end or None]
            if end or not piece:
                break
        return bytes(line)

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return bytes `[start, end)` of the file; many bytes come from all parts at once."""
        count = end - start
        if count <= 0:
            return b""
        if count >= _SMALL_BYTES:
            # Fills a `bytes` object in place, because a copy could take most of the memory.
            whole = io.BytesIO(bytes(count))
            opened = self._open_here()
            with whole.getbuffer() as buffer:
                read_opened(self._storage, opened, start, buffer)
            return whole.getvalue()
        at = start - self._block_start
        if at < 0 or at + count > len(self._block):
            first, last = self._view.block_at(start), self._view.block_at(end - 1)
            opened = self._open_here()
            length = last.end - first.start
            self._block = self._storage.reader.read_bytes(opened, first.start, length)
            self._block_start = first.start
            at = start - first.start
        return self._block[at : at + count]

    def _open_here(self) -> OpenFile:
        if self._pid != os.getpid():
            # Forked: this process has a storage of its own.
            self._storage = self.fs.storage
            self._opened = self._storage.reader.open(self._view)
            self._pid = os.getpid()
        return self._opened

    def _check_readable(self) -> None:
        if self.mode != "rb":
            raise ValueError("File not in read mode")
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    # ---- writing --------------------------------------------------------------------------

    def write(self, data: Any) -> int:
        """Add `data` at the end. Raises the storage's error, of this write or an earlier one."""
        if self.mode == "rb":
            raise ValueError("File not in write mode")
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        view = memoryview(data)
        if view.nbytes:
            self._writer.append(view.cast("B"))
            self.loc += view.nbytes
        return view.nbytes

    def flush(self, force: bool = False) -> None:
        """Do nothing: written bytes are sent in the background, and become visible at `close`."""
        if self.closed:
            raise ValueError("Flush on closed file")

    def commit(self) -> None:
        """Make the file visible, whole. If this raises, the file does not become visible."""
        if self.mode == "rb" or self._is_done or self._pid != os.getpid():
            return
        self._is_done = True
        try:
            if self.mode == "xb" and self.fs.exists(self.path):
                raise AlreadyExistsError(f"{self.path} was made elsewhere meanwhile")
            self._writer.publish()
        finally:
            self._writer.close()

    def discard(self) -> None:
        """Drop the file: nothing of it becomes visible."""
        if self.mode == "rb" or self._is_done or self._pid != os.getpid():
            return
        self._is_done = True
        self._writer.close()

    def close(self) -> None:
        """Make the written file visible, unless this is the end of a failed `with` block."""
        if self._closed:
            return
        self._closed = True
        self._block = b""
        if self.mode == "rb":
            if self._pid == os.getpid():
                self._storage.reader.close(self._opened)
        elif self._is_unwinding():
            self.discard()
        elif self.autocommit:
            self.commit()

    def _is_unwinding(self) -> bool:
        """Return whether an exception leaves a `with` block that closes this file.

        `with fsspec.open(...)` closes its files without telling them about the exception.
        """
        error = sys.exception()
        if error is None or error is self._error_outside:
            return False
        frame = sys._getframe(1)
        for _ in range(_EXIT_DEPTH):
            if frame.f_back is None:
                return False
            frame = frame.f_back
            if frame.f_code.co_name == "__exit__":
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if self._closed:
            return
        if self.mode == "rb":
            self.close()
        elif self._pid == os.getpid() and not self._is_done:
            _log.warning("%s was never closed: nothing of it is kept", self.path)
            self.discard()
        self._closed = True

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode != "rb":
            raise RuntimeError("Pickling a writeable file is not supported")
        return _reopen, (self.fs, self.path, self._view.identity, self.loc)


class StripedText(io.TextIOWrapper):
    """Text file that is discarded after an exception in its `with` block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and isinstance(self.buffer, StripedFile):
            self.buffer.discard()
        super().__exit__(kind, error, trace)


def _reopen(fs: AbstractFileSystem, path: str, identity: str, loc: int) -> StripedFile:
    file = StripedFile(fs, path, "rb", identity=identity)
    file.seek(loc)
    return file


def entry(name: str, status: FileStatus) -> dict[str, Any]:
    """Return fsspec's info dictionary of a name."""
    return {
        "name": name,
        "size": status.size_bytes,
        "type": "directory" if status.is_dir else "file",
        "mtime": status.modified_ns / 1e9,
        "identity": status.identity,
    }
