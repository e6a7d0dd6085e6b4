"""Lookup of the extents of a range of a file. Pure; one thread at a time.

The lookup is by bisection, since a hostile file may have millions of extents and be read by
millions of small ranges.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from bootseer.blob.tree import Extent


class FileParts:
    """Extents of files by range; keeps the extents of each file after its first lookup."""

    def __init__(self, extents_of: Callable[[int], Sequence[Extent]]) -> None:
        """Set the function that returns the extents of an inode, sorted and disjoint."""
        self._extents_of = extents_of
        self._known: dict[int, tuple[Sequence[Extent], list[int]]] = {}

    def within(self, inode: int, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents of the range `[start, end)` of a file, cut to the range."""
        found = self._known.get(inode)
        if found is None:
            extents = self._extents_of(inode)
            found = self._known[inode] = extents, [extent.file_offset for extent in extents]
        extents, starts = found
        for number in range(max(bisect_right(starts, start) - 1, 0), len(extents)):
            extent = extents[number]
            if extent.file_offset >= end:
                return
            first = max(start, extent.file_offset)
            last = min(end, extent.file_offset + extent.length)
            if first < last:
                shift = extent.blob_offset - extent.file_offset
                yield Extent(first, extent.blob, first + shift, last - first)
