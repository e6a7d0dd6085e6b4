"""Map from bytes of a tree's streams to the files that they belong to. Pure."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from bootseer.blob.tree import Tree

PAGE_BYTES = 4096

_STEP_COUNT_MAX = 2**22
"""Extents that `pages` looks at in all, some forty for each extent of a bundle. A hostile tree may
claim that millions of files share their bytes; beyond this count `pages` yields nothing."""


class Pages(Struct, frozen=True):
    """Whole pages of a file, or pages up to the file's end, and the place of their bytes."""

    inode: int
    file_offset: int
    blob: int
    blob_offset: int
    length: int


class StreamContents:
    """Index of a tree's extents by their place in the streams. One thread at a time."""

    def __init__(self, tree: Tree) -> None:
        self._columns = tree.columns
        self._steps_left = _STEP_COUNT_MAX
        self._layouts: dict[int, tuple[list[int], array[int]]] = {}

    def layout(self, blob: int) -> "tuple[list[int], array[int]]":
        """Return the extents of a stream by offset: the offset of each, and its number."""
        found = self._layouts.get(blob)
        if found is None:
            offsets = self._columns.extent_blob_offset
            numbers = array("I", (n for n, b in enumerate(self._columns.extent_blob) if b == blob))
            numbers = array("I", sorted(numbers, key=offsets.__getitem__))
            found = self._layouts[blob] = [offsets[n] for n in numbers], numbers
        return found

    def inode_of(self, number: int) -> int:
        """Return the inode that the extent with this number belongs to."""
        return bisect_right(self._columns.extent_start, number) - 1

    def inodes(self, blob: int, offset: int, length: int) -> Iterator[int]:
        """Yield the inodes with bytes in `[offset, offset + length)` of a stream, maybe twice."""
        starts, numbers = self.layout(blob)
        i = max(bisect_right(starts, offset) - 1, 0)
        while i < len(starts) and starts[i] < offset + length:
            yield self.inode_of(numbers[i])
            i += 1

    def pages(self, blob: int, offset: int, length: int) -> Iterator[Pages]:
        """Yield the whole pages of files in `[offset, offset + length)` of a stream."""
        columns = self._columns
        starts, numbers = self.layout(blob)
        end = offset + length
        i = max(bisect_right(starts, offset) - 1, 0)
        while i < len(starts) and starts[i] < end and self._steps_left > 0:
            self._steps_left -= 1
            start, number = starts[i], numbers[i]
            i += 1
            inode = self.inode_of(number)
            shift = columns.extent_file_offset[number] - start
            first = max(start, offset) + shift
            last = min(start + columns.extent_length[number], end) + shift
            first += -first % PAGE_BYTES
            if last < columns.size_bytes[inode]:
                last -= last % PAGE_BYTES
            if first < last:
                yield Pages(inode, first, blob, first - shift, last - first)
