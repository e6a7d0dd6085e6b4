"""Which contents of files lie where in a tree's streams. Pure; belongs to one thread."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator

from bootseer.blob.tree import Tree


class StreamLayout:
    """The way back from a stream's bytes to files. A stream is sorted when it is first asked for:
    some 20 ms for 50,000 files."""

    def __init__(self, tree: Tree) -> None:
        self._columns = tree.columns
        self._layouts: dict[int, tuple[list[int], array[int]]] = {}

    def of(self, blob: int) -> tuple[list[int], "array[int]"]:
        """Contents in the stream of blob number `blob`, by offset: where each begins, and the
        number of its extent."""
        found = self._layouts.get(blob)
        if found is None:
            offsets = self._columns.extent_blob_offset
            numbers = array("I", (n for n, b in enumerate(self._columns.extent_blob) if b == blob))
            numbers = array("I", sorted(numbers, key=offsets.__getitem__))
            found = self._layouts[blob] = [offsets[n] for n in numbers], numbers
        return found

    def files(self, blob: int, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(inode, offset, length) of all contents within these bytes of a stream."""
        columns = self._columns
        starts, numbers = self.of(blob)
        stop = offset + length
        i = max(bisect_right(starts, offset) - 1, 0)
        while i < len(starts) and starts[i] < stop:
            number = numbers[i]
            first = max(starts[i], offset)
            end = min(starts[i] + columns.extent_length[number], stop)
            if first < end:
                inode = bisect_right(columns.extent_start, number) - 1
                yield inode, columns.extent_file_offset[number] + first - starts[i], end - first
            i += 1
