"""Supply of the stored frames that the tasks of an extraction need.

If workers read the files of the blobs directly, the kernel is told to read ahead (`read_ahead`).
Otherwise `Supply` writes the frames into a memory file that the workers read. The file has the
layout of all blobs one after the other, so that a worker needs no more than the number of its task.
Memory of frames that no task needs any more is freed. `fetch` is called from one thread, `release`
from another.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias

from bootseer.blob.extract.plan import ExtractionPlan
from bootseer.blob.frames import frames_for
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError

_RUN_BYTES = 4 * 1024 * 1024
"""Largest single read."""
_CELL_BYTES = 128 * 1024
"""Piece of an uncompressed stream that is treated like a frame."""
_GAP_BYTES = 4096
"""Gap up to which two ranges are read as one: tar headers lie between the contents of two files.
Frames are larger than such a gap."""

ReadSome: TypeAlias = Callable[[int, int, int], "bytes | memoryview"]
"""Function `read(blob, offset, length)` that returns at least one and at most `length` stored bytes
of blob number `blob` of the tree, valid until the next call. For a blob without frames they are of
its stream."""
Unit = tuple[int, int]
"""(blob, index of a frame or of a cell)"""
Run = tuple[int, int, int]
"""(blob, first unit, end of the units)"""


def read_ahead(tree: Tree, plan: ExtractionPlan, files: Sequence[int], task: int) -> None:
    """Tell the kernel which ranges of the blobs' files a task will read. Raises: OSError."""
    for blob, start, end in _span(tree, plan, task) or _ranges(tree, plan, task):
        stored = tree.blobs[blob]
        if stored.frames:
            numbers = frames_for(stored, start, end - start)
            first, last = stored.frames[numbers[0]], stored.frames[numbers[-1]]
            start, end = first.offset, last.offset + last.length
        os.posix_fadvise(files[blob], start, end - start, os.POSIX_FADV_WILLNEED)


def pieces(
    tree: Tree, read: ReadSome, blob: int, offset: int, length: int
) -> Iterator[bytes | memoryview]:
    """Yield the stored bytes `[offset, offset + length)` of a blob in pieces.

    A piece is valid until the next one is requested. Raises: CorruptError if the blob is cut off;
    as `read`.
    """
    end = offset + length
    while offset < end:
        data = read(blob, offset, end - offset)
        if not 0 < len(data) <= end - offset:
            raise CorruptError(
                f"the blob {tree.blobs[blob].digest} gave {len(data)} of {end - offset} bytes at "
                f"offset {offset}"
            )
        yield data
        offset += len(data)


class Supply:
    """Memory file with the stored frames that queued and running tasks need."""

    def __init__(
        self, tree: Tree, plan: ExtractionPlan, read: ReadSome, columns: Mapping[str, Any], fd: int
    ) -> None:
        """Map the memory file `fd`; `columns` are those of the workers. Raises: OSError."""
        self._tree = tree
        self._plan = plan
        self._read = read
        self._bases: Sequence[int] = columns["blob_base"]
        self._frame_of: Sequence[int] = columns["blob_frame"]
        self._offsets: Sequence[int] = columns["frame_offset"]
        self._users: dict[Unit, int] = {}
        self._runs: dict[int, list[Run]] = {}
        self._lock = threading.Lock()
        self._fd = fd
        size_bytes = max(self._bases[-1], 1)
        os.ftruncate(fd, size_bytes)
        self._memory = mmap.mmap(fd, size_bytes)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()

    def fetch(self, task: int) -> None:
        """Write the frames that a task needs and the file lacks. Raises: as `read`."""
        missing = []
        users = self._users
        found = _ranges(self._tree, self._plan, task)
        runs = self._runs[task] = _joined(self._units(*range_) for range_ in found)
        with self._lock:
            for blob, first, end in runs:
                for unit in zip(repeat(blob), range(first, end)):
                    count = users.get(unit, 0)
                    users[unit] = count + 1
                    if not count:
                        missing.append((*unit, unit[1] + 1))
        for blob, first, end in _joined(missing):
            self._fill(blob, first, end)

    def release(self, task: int) -> None:
        """Free the memory of the frames that only this task, which is done, has needed."""
        unused = []
        users = self._users
        with self._lock:
            for blob, first, end in self._runs.pop(task):
                for unit in zip(repeat(blob), range(first, end)):
                    users[unit] -= 1
                    if not users[unit]:
                        del users[unit]
                        unused.append((*unit, unit[1] + 1))
        for blob, first, end in _joined(unused):
            # Whole pages only: the first and last page may contain parts of other frames.
            start = -(-self._place(blob, first) // mmap.PAGESIZE) * mmap.PAGESIZE
            length = self._place(blob, end) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                self._memory.madvise(mmap.MADV_REMOVE, start, length)

    def _units(self, blob: int, start: int, end: int) -> Run:
        if not self._tree.blobs[blob].frames:
            return blob, start // _CELL_BYTES, -(-end // _CELL_BYTES)
        numbers = frames_for(self._tree.blobs[blob], start, end - start)
        return blob, numbers.start, numbers.stop

    def _place(self, blob: int, number: int) -> int:
        """Return the offset of a unit in the file; for the number of units, the blob's end."""
        if self._tree.blobs[blob].frames:
            return self._offsets[self._frame_of[blob] + blob + number]
        return min(self._bases[blob] + number * _CELL_BYTES, self._bases[blob + 1])

    def _fill(self, blob: int, first: int, end: int) -> None:
        while first < end:
            start = position = self._place(blob, first)
            while first < end:
                behind = self._place(blob, first + 1)
                if position > start and behind > start + _RUN_BYTES:
                    break
                first, position = first + 1, behind
            offset = start - self._bases[blob]
            for data in pieces(self._tree, self._read, blob, offset, position - start):
                view = memoryview(data)
                while view:
                    count = os.pwrite(self._fd, view, start)
                    start, view = start + count, view[count:]


def _span(tree: Tree, plan: ExtractionPlan, task: int) -> list[Run]:
    """Return one range that covers all files of a task, from the first to the last.

    Faster than `_ranges`. Return no range if the files are in several blobs, or if less than half
    of the range belongs to them.
    """
    c = tree.columns
    names = plan.names(task)
    first = c.extent_start[c.name_inode[names[0]]]
    last = c.extent_start[c.name_inode[names[-1]] + 1] - 1
    if last < first or c.extent_blob[first] != c.extent_blob[last]:
        return []
    start = c.extent_blob_offset[first]
    end = c.extent_blob_offset[last] + c.extent_length[last]
    if not 0 < end - start <= 2 * plan.task_bytes[task]:
        return []
    return [(c.extent_blob[first], start, end)]


def _ranges(tree: Tree, plan: ExtractionPlan, task: int) -> Iterator[Run]:
    """Yield the ranges (blob, start, end) of the streams that a task needs, in its order."""
    blob = start = end = -1
    for _, place_blob, offset, length in plan.places(tree, task):
        if place_blob == blob and 0 <= offset - end < _GAP_BYTES:
            end = offset + length
            continue
        if blob >= 0:
            yield blob, start, end
        blob, start, end = place_blob, offset, offset + length
    if blob >= 0:
        yield blob, start, end


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Return the runs sorted, with overlapping and adjacent runs merged."""
    joined: list[Run] = []
    blob, first, end = -1, 0, 0
    for run in sorted(runs):
        if run[0] == blob and run[1] <= end:
            end = max(end, run[2])
            continue
        if blob >= 0:
            joined.append((blob, first, end))
        blob, first, end = run
    if blob >= 0:
        joined.append((blob, first, end))
    return joined
