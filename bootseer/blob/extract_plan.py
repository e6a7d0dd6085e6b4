"""Plans an extraction: which names are made when, and which files are written together. Pure.

Files are grouped in the order of the stream, so that each frame is read and decoded once, and
cut where a frame begins, so that groups can be written by several workers.
"""

import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from msgspec import Struct

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
    links: list[tuple[int, int]]
    """(further name, first name of the same inode)"""
    with_xattrs: list[int]
    """Regular files that have some."""
    files: "array[int]"
    """Other regular files in the order in which they are written."""
    group_start: "array[int]"
    """Group n's files are those from `group_start[n]` to before `group_start[n + 1]`."""
    parts: list[tuple[int, list[Place]]]
    """Of large files: name, and some of its bytes."""
    content_bytes: int
    """To be written; holes do not count."""

    @property
    def task_count(self) -> int:
        """Groups, then parts."""
        return len(self.group_start) - 1 + len(self.parts)

    def tasks(self) -> list[int]:
        """In the order in which they should be begun: the longest first, so that no worker is
        left with one at the end."""
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
        """Of the files that a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            return (self.parts[task - groups][0],)
        return self.files[self.group_start[task] : self.group_start[task + 1]]

    def places(self, tree: Tree, task: int) -> Iterator[Place]:
        """What a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            yield from self.parts[task - groups][1]
            return
        c = tree.columns
        for i in self.names(task):
            number = c.name_inode[i]
            for k in range(c.extent_start[number], c.extent_start[number + 1]):
                yield (
                    c.extent_file_offset[k],
                    c.extent_blob[k],
                    c.extent_blob_offset[k],
                    c.extent_length[k],
                )


def plan_extraction(
    tree: Tree, *, max_files: int, max_bytes: int, allow_devices: bool = False
) -> Plan:
    """Raises: InvalidInputError beyond a limit; PermissionDeniedError for a device node that is
    not allowed; CorruptError for contents that make no sense."""
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
    modes, starts, xattrs = c.mode, c.extent_start, c.xattr
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
            places = tree.extents(number)
            _, blob, offset, length = places[0]
            if len(places) > 1:
                # With its neighbours where most of it lies: a frame should be wanted once.
                _, blob, offset, _ = max(places, key=lambda place: place[3])
                length = sum(place[3] for place in places)
            (large if length > PART_BYTES else files).append((blob, offset, i, length))
        elif stat.S_ISDIR(mode):
            directories.append(i)
        else:
            if (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and not allow_devices:
                raise PermissionDeniedError(
                    f"{tree.path(number)!r} is a device node, which is not allowed here"
                )
            others.append(i)
    files.sort()
    large.sort()
    group_start = _groups(tree, files)
    group_start.extend(
        len(files) + min(i + GROUP_FILES, len(empty)) for i in range(0, len(empty), GROUP_FILES)
    )
    return Plan(
        _parents_first(tree, directories),
        [i for _, _, i, _ in large],
        others,
        links,
        with_xattrs,
        array("I", [*(i for _, _, i, _ in files), *empty]),
        group_start,
        [(i, part) for _, _, i, _ in large for part in _parts(tree, tree.extents(c.name_inode[i]))],
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


def _groups(tree: Tree, files: list[tuple[int, int, int, int]]) -> "array[int]":
    """Where in `files` (blob, offset, name, length) each group begins, and where the last ends."""
    starts = array("I", [0])
    group_bytes = group_files = 0
    last = (-1, -1)
    for position, (blob, offset, _, length) in enumerate(files):
        is_full = group_bytes >= GROUP_BYTES or group_files >= GROUP_FILES
        if is_full and (blob, _frame_number(tree.blobs[blob], offset)) != last:
            starts.append(position)
            group_bytes = group_files = 0
        group_bytes += length
        group_files += 1
        if group_bytes >= GROUP_BYTES or group_files >= GROUP_FILES:
            last = (blob, _frame_number(tree.blobs[blob], offset + length - 1))
    if files:
        starts.append(len(files))
    return starts


def _frame_number(blob: Blob, offset: int) -> int:
    frames = blob.frames
    if not frames:
        # Read as it is, so that it may be cut anywhere.
        return offset // _PLAIN_CUT_BYTES
    if isinstance(frames, FrameTable):
        return bisect_right(frames.stream_offsets, offset) - 1
    return bisect_right(frames, offset, key=lambda frame: frame.stream_offset) - 1


def _cut_near(blob: Blob, start: int, wanted: int) -> int:
    """Where a frame begins, behind `start` and near `wanted`."""
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
