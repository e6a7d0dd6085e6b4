"""Plans an extraction: which names are made when, and which files are written together. Pure.

Files are grouped in the order of the stream, so that each frame is read and decoded once, and
cut where a frame begins, so that groups can be written by several workers.
"""

import stat
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from msgspec import Struct

from bootseer.base.shown import quoted
from bootseer.blob.extract.sections import taken
from bootseer.blob.frames import FrameTable
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import InvalidInputError, PermissionDeniedError

GROUP_BYTES = 2 * 1024 * 1024
"""Content of one group: a second worker gets work soon, and few frames are decoded twice."""
GROUP_FILES = 256
PART_BYTES = 16 * 1024 * 1024
"""A larger file is written in parts of about this size, by several workers."""
_PLAIN_CUT_BYTES = 128 * 1024

Place = tuple[int, int, int, int]
"""(file offset, blob, offset in its stream, length)"""


class Plan(Struct, frozen=True):
    """Make `directories` and `large`, carry out the tasks, then make `others` and `links`.

    Names are meant by their index in the tree's columns.
    """

    directories: list[int]
    """Parents first, the root left out."""
    large: list[int]
    others: list[int]
    """Symbolic links, fifos, sockets, devices."""
    devices: list[int]
    """The device nodes that are skipped, by their first names."""
    links: list[tuple[int, int]]
    """(further name, first name of the same inode)"""
    with_xattrs: list[int]
    """Regular files that have some."""
    files: "array[int]"
    """Other regular files in the order in which they are written."""
    group_start: "array[int]"
    """Group n's files are those from `group_start[n]` to before `group_start[n + 1]`."""
    parts: list[tuple[int, list[Place]]]
    """Parts of large files: the number of the name, and places of its bytes."""
    task_bytes: "array[int]"
    """What each task writes; holes do not count."""
    content_bytes: int
    """All of that."""

    @property
    def task_count(self) -> int:
        """Groups, then parts."""
        return len(self.group_start) - 1 + len(self.parts)

    def tasks(self) -> list[int]:
        """The tasks, in the order in which they should be begun: the longest first, so that no
        worker is left with one at the end."""
        groups = len(self.group_start) - 1
        return [*range(groups, groups + len(self.parts)), *range(groups)]

    def strands(self, count: int) -> list[list[int]]:
        """The tasks, for workers that go on one beside the other: each has its own directories and
        large files, on whose locks the others do not wait."""
        groups = len(self.group_start) - 1
        strands: list[list[int]] = [[] for _ in range(count)]
        for first, end in ((groups, groups + len(self.parts)), (0, groups)):
            for number, strand in enumerate(strands):
                length = end - first
                strand += range(
                    first + length * number // count, first + length * (number + 1) // count
                )
        return strands

    def names(self, task: int) -> Sequence[int]:
        """Returns the numbers of the files that a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            return (self.parts[task - groups][0],)
        return self.files[self.group_start[task] : self.group_start[task + 1]]

    def places(self, tree: Tree, task: int) -> Iterable[Place]:
        """What a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            return self.parts[task - groups][1]
        c = tree.columns
        starts = c.extent_start
        inodes = taken(c.name_inode, self.names(task))
        extents = [k for number in inodes for k in range(starts[number], starts[number + 1])]
        columns = (c.extent_file_offset, c.extent_blob, c.extent_blob_offset, c.extent_length)
        return zip(*(taken(column, extents) for column in columns), strict=True)


def plan_extraction(
    tree: Tree,
    *,
    max_files: int,
    max_bytes: int,
    allow_devices: bool = False,
    skip_devices: bool = False,
) -> Plan:
    """Raises: InvalidInputError beyond a limit; PermissionDeniedError for a device node that is
    neither allowed nor to be skipped; CorruptError for contents that make no sense."""
    c = tree.columns
    if tree.name_count > max_files:
        raise InvalidInputError(f"{tree.name_count} names are more than the {max_files} allowed")
    content_bytes = sum(c.extent_length)
    if content_bytes > max_bytes:
        raise InvalidInputError(f"{content_bytes} bytes are more than the {max_bytes} allowed")
    directories: list[int] = []
    files: list[tuple[int, int, int, int]] = []
    empty: list[int] = []
    large: list[tuple[int, int, int, int]] = []
    others: list[int] = []
    links: list[tuple[int, int]] = []
    with_xattrs: list[int] = []
    devices: list[int] = []
    modes, starts, xattrs, sizes = c.mode, c.extent_start, c.xattr, c.size_bytes
    extents = (c.extent_file_offset, c.extent_blob, c.extent_blob_offset, c.extent_length)
    file_offsets, blobs, blob_offsets, lengths = extents
    stream_lengths = [blob.stream_length for blob in tree.blobs]
    first_names: dict[int, int] = {}
    # Every inode has a name, so without hard links there are as many of both.
    has_links = tree.name_count != tree.inode_count - 1
    for i, number in enumerate(c.name_inode):
        if has_links:
            first = first_names.setdefault(number, i)
            if first != i:
                links.append((i, first))
                continue
        mode = modes[number]
        if stat.S_ISREG(mode):
            if xattrs[number]:
                with_xattrs.append(i)
            start, end = starts[number], starts[number + 1]
            if start == end:
                empty.append(i)
                continue
            blob, offset, length = blobs[start], blob_offsets[start], lengths[start]
            # Of most files there is one extent, which makes sense.
            if (
                end - start > 1
                or not 0 < length <= sizes[number] - file_offsets[start]
                or blob >= len(stream_lengths)
                or offset + length > stream_lengths[blob]
            ):
                places = tree.extents(number)
                # With its neighbours where most of it lies: a frame should be wanted once.
                _, blob, offset, _ = max(places, key=lambda place: place[3])
                length = sum(place[3] for place in places)
            (large if length > PART_BYTES else files).append((blob, offset, i, length))
        elif stat.S_ISDIR(mode):
            directories.append(i)
        else:
            is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
            if is_device and skip_devices:
                devices.append(i)
                continue
            if is_device and not allow_devices:
                raise PermissionDeniedError(
                    f"{quoted(tree.path(number))} is a device node, which is not allowed here"
                )
            others.append(i)
    if devices:
        skipped = set(devices)
        links = [pair for pair in links if pair[1] not in skipped]
    files.sort()
    large.sort()
    group_start, task_bytes = _groups(tree, files)
    group_start.extend(
        len(files) + min(i + GROUP_FILES, len(empty)) for i in range(0, len(empty), GROUP_FILES)
    )
    large_files = [i for _, _, i, _ in large]
    parts = [(i, part) for i in large_files for part in _parts(tree, tree.extents(c.name_inode[i]))]
    task_bytes.extend([0] * (len(group_start) - 1 - len(task_bytes)))
    task_bytes.extend(sum(place[3] for place in part) for _, part in parts)
    return Plan(
        _parents_first(tree, directories),
        large_files,
        others,
        devices,
        links,
        with_xattrs,
        array("I", [*(i for _, _, i, _ in files), *empty]),
        group_start,
        parts,
        task_bytes,
        content_bytes,
    )


def _parents_first(tree: Tree, directories: list[int]) -> list[int]:
    c = tree.columns
    below: dict[int, list[int]] = {}
    for i in directories:
        below.setdefault(c.name_parent[i], []).append(i)
    ordered = []
    stack = below.get(0, [])[::-1]
    while stack:
        i = stack.pop()
        ordered.append(i)
        stack.extend(reversed(below.get(c.name_inode[i], ())))
    return ordered


def _groups(
    tree: Tree, files: list[tuple[int, int, int, int]]
) -> tuple["array[int]", "array[int]"]:
    """Where in `files` (blob, offset, name, length) each group begins, and where the last ends; and
    how many bytes each has."""
    starts, group_bytes = array("I", [0]), array("Q")
    # Of the files before each.
    totals = [0, *accumulate(length for _, _, _, length in files)]
    start = 0
    while start < len(files):
        end = min(start + GROUP_FILES, bisect_left(totals, totals[start] + GROUP_BYTES), len(files))
        while end < len(files) and _shares_frame(tree, files[end - 1], files[end]):
            end += 1
        starts.append(end)
        group_bytes.append(totals[end] - totals[start])
        start = end
    return starts, group_bytes


def _shares_frame(
    tree: Tree, one: tuple[int, int, int, int], following: tuple[int, int, int, int]
) -> bool:
    """Whether a file begins in the frame in which the one before it ends."""
    blob, offset, _, length = one
    if following[0] != blob:
        return False
    last = _frame_number(tree.blobs[blob], offset + length - 1)
    return _frame_number(tree.blobs[blob], following[1]) == last


def _frame_number(blob: Blob, offset: int) -> int:
    frames = blob.frames
    if not frames:
        # Read as it is, so that it may be cut anywhere.
        return offset // _PLAIN_CUT_BYTES
    if isinstance(frames, FrameTable):
        return bisect_right(frames.stream_offsets, offset) - 1
    return bisect_right(frames, offset, key=lambda frame: frame.stream_offset) - 1


def _cut_near(blob: Blob, start: int, wanted: int) -> int:
    """Returns the offset of a frame behind `start` and close to `wanted`."""
    if not blob.frames:
        return wanted
    frame = blob.frames[_frame_number(blob, wanted)]
    return (
        frame.stream_offset
        if frame.stream_offset > start
        else frame.stream_offset + frame.stream_length
    )


def _parts(tree: Tree, places: list[Place]) -> Iterator[list[Place]]:
    """A file's places, cut at frames into parts of about PART_BYTES."""
    part: list[Place] = []
    part_bytes = 0
    for offset, blob_number, blob_offset, length in places:
        blob = tree.blobs[blob_number]
        while length:
            wanted = blob_offset + PART_BYTES - part_bytes
            here = length
            if wanted < blob_offset + length:
                here = min(length, _cut_near(blob, blob_offset, wanted) - blob_offset)
            part.append((offset, blob_number, blob_offset, here))
            part_bytes += here
            offset, blob_offset, length = offset + here, blob_offset + here, length - here
            if length or part_bytes >= PART_BYTES:
                yield part
                part, part_bytes = [], 0
    if part:
        yield part
