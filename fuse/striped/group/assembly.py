"""Puts stored items together from the pieces of files that arrive in any order.

Owns the bytes of items that are not whole yet. For one thread. Knows nothing of torch.
"""

import io
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bootseer.errors import CorruptError
from bootseer.fuse.striped.group.plan import Extent


class _Item:
    """A tensor that is not whole yet."""

    __slots__ = ("buffer", "data", "missing_bytes")

    def __init__(self, buffer: bytearray, length: int) -> None:
        self.buffer = buffer
        self.data = memoryview(buffer)[:length]
        self.missing_bytes = length


class Assembly:
    """Items from the pieces they come in, each told to `on_complete` once it is whole."""

    def __init__(
        self, extents: list[Extent], on_complete: Callable[[Extent, memoryview], None]
    ) -> None:
        self._on_complete = on_complete
        self._by_file: dict[str, list[Extent]] = defaultdict(list)
        for extent in sorted(extents):
            self._by_file[extent.path].append(extent)
        self._open: dict[Extent, _Item] = {}
        self._spare: bytearray | None = None
        self._missing_count = len(extents)

    def add(self, path: str, start: int, view: memoryview) -> None:
        """Bytes of a file, from `start`; each byte of an item comes once."""
        extents = self._by_file.get(path, [])
        end = start + len(view)
        index = max(0, bisect_right(extents, start, key=lambda extent: extent.start) - 1)
        while index < len(extents) and extents[index].start < end:
            extent = extents[index]
            index += 1
            first, last = max(extent.start, start), min(extent.start + extent.length, end)
            if first >= last:
                continue
            part = view[first - start : last - start]
            if len(part) == extent.length:
                self._complete(extent, part)
                continue
            item = self._open.get(extent)
            if item is None:
                item = self._open[extent] = _Item(self._buffer(extent.length), extent.length)
            item.data[first - extent.start : last - extent.start] = part
            item.missing_bytes -= len(part)
            if not item.missing_bytes:
                del self._open[extent]
                self._complete(extent, item.data)
                self._spare = item.buffer

    def finish(self) -> None:
        """Raises CorruptError where items never became whole: the metadata lets them overlap."""
        if self._missing_count:
            raise CorruptError(f"the metadata names {self._missing_count} items that overlap")

    def _buffer(self, length: int) -> bytearray:
        # New memory costs more than filling it: the last one is used again where it is enough.
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) >= length else bytearray(length)

    def _complete(self, extent: Extent, data: memoryview) -> None:
        self._missing_count -= 1
        self._on_complete(extent, data)


class BytesFile(io.RawIOBase):
    """Bytes as a file that torch.load reads without a copy in between."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._data[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)
