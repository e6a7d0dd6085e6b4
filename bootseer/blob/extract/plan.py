"""Plan of an extraction: the order of names, and the groups of files written together. Pure.

Files are grouped in the order of the stream, so that each frame is read and decoded once. Groups
begin at the start of a frame, so that different workers can write them. `worker_columns` makes the
columns that the workers get.
"""

import stat
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.blob.extract.sections import SETTINGS, Section, pick
from bootseer.blob.frames import FrameTable
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import InvalidInputError, PermissionDeniedError

MAX_FILES = 5_000_000
"""Largest number of names of a tree."""
MAX_BYTES = 1024**4
"""Largest content of a tree."""
GROUP_BYTES = 2 * 1024 * 1024
"""Content of a group: small enough to share out work soon, large beside a frame decoded twice."""
GROUP_FILES = 256
PART_BYTES = 16 * 1024 * 1024
"""Size from which a file is written in parts of about this size, by several workers."""
_PLAIN_CUT_BYTES = 128 * 1024

Place = tuple[int, int, int, int]
"""(file offset, blob, offset in its stream, length)"""


class ExtractionPlan(Struct, frozen=True):
    """Plan of an extraction.

    The steps are: make `directories` and `large`, run the tasks, make `others` and `links`. A task
    is a group of whole files or a part of a large file. Names are given by their index in the
    tree's columns.
    """

    directories: list[int]
    """Directories, parents first, without the root."""
    large: list[int]
    others: list[int]
    """Symbolic links, fifos, sockets, devices."""
    devices: list[int]
    """First names of the device nodes that are skipped."""
    links: list[tuple[int, int]]
    """Hard links as (further name, first name of the same inode)."""
    with_xattrs: list[int]
    """Regular files with extended attributes."""
    files: "array[int]"
    """Regular files except the large ones, in the order in which they are written."""
    group_start: "array[int]"
    """Range of each group: group n has the files `group_start[n]` up to `group_start[n + 1]`."""
    parts: list[tuple[int, list[Place]]]
    """Parts of large files: the index of the name, and the places of the part's bytes."""
    task_bytes: "array[int]"
    """Content bytes of each task, without holes."""

    @property
    def task_count(self) -> int:
        """Number of tasks. Groups are numbered first, then parts."""
        return len(self.group_start) - 1 + len(self.parts)

    def tasks(self) -> list[int]:
        """Return the tasks in the order in which to start them.

        The longest tasks come first, so that no worker is left alone with a long one at the end.
        """
        groups = len(self.group_start) - 1
        return [*range(groups, groups + len(self.parts)), *range(groups)]

    def strands(self, count: int) -> list[list[int]]:
        """Return the tasks divided among `count` workers.

        Each worker gets consecutive tasks, and so directories and large files of its own, on whose
        kernel locks other workers do not wait.
        """
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
        """Return the files that a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            return (self.parts[task - groups][0],)
        return self.files[self.group_start[task] : self.group_start[task + 1]]

    def places(self, tree: Tree, task: int) -> Iterable[Place]:
        """Return the places of the bytes that a task writes."""
        groups = len(self.group_start) - 1
        if task >= groups:
            return self.parts[task - groups][1]
        c = tree.columns
        starts = c.extent_start
        inodes = pick(c.name_inode, self.names(task))
        extents = [k for number in inodes for k in range(starts[number], starts[number + 1])]
        columns = (c.extent_file_offset, c.extent_blob, c.extent_blob_offset, c.extent_length)
        return zip(*(pick(column, extents) for column in columns), strict=True)


def plan_extraction(
    tree: Tree, *, allow_devices: bool = False, skip_devices: bool = False
) -> ExtractionPlan:
    """Return the plan of an extraction.

    Raises: InvalidInputError beyond a limit; PermissionDeniedError for a device node that is
    neither allowed nor skipped; CorruptError for invalid contents.
    """
    c = tree.columns
    if tree.name_count > MAX_FILES:
        raise InvalidInputError(f"{tree.name_count} names are more than the {MAX_FILES} allowed")
    content_bytes = sum(c.extent_length)
    if content_bytes > MAX_BYTES:
        raise InvalidInputError(f"{content_bytes} bytes are more than the {MAX_BYTES} allowed")
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
    # Every inode except the root has a name, so without hard links the numbers are equal.
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
            # Most files have one extent. Others, and invalid ones, take the slower, checked way.
            if (
                end - start > 1
                or not 0 < length <= sizes[number] - file_offsets[start]
                or blob >= len(stream_lengths)
                or offset + length > stream_lengths[blob]
            ):
                places = tree.extents(number)
                # A file is grouped with the neighbours of its largest extent, so that each frame is
                # needed by one group.
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
    return ExtractionPlan(
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
    """Return the bounds of the groups in `files` (blob, offset, name, length), and their sizes."""
    starts, group_bytes = array("I", [0]), array("Q")
    # Bytes of all files before each file.
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
    """Return whether the file `following` begins in the frame in which the file `one` ends."""
    blob, offset, _, length = one
    if following[0] != blob:
        return False
    last = _frame_number(tree.blobs[blob], offset + length - 1)
    return _frame_number(tree.blobs[blob], following[1]) == last


def _frame_number(blob: Blob, offset: int) -> int:
    frames = blob.frames
    if not frames:
        # An uncompressed stream may be cut anywhere.
        return offset // _PLAIN_CUT_BYTES
    if isinstance(frames, FrameTable):
        return bisect_right(frames.stream_offsets, offset) - 1
    return bisect_right(frames, offset, key=lambda frame: frame.stream_offset) - 1


def _cut_near(blob: Blob, start: int, wanted: int) -> int:
    """Return the offset of the start of a frame beyond `start` and close to `wanted`."""
    if not blob.frames:
        return wanted
    frame = blob.frames[_frame_number(blob, wanted)]
    return (
        frame.stream_offset
        if frame.stream_offset > start
        else frame.stream_offset + frame.stream_length
    )


def _parts(tree: Tree, places: list[Place]) -> Iterator[list[Place]]:
    """Yield a file's places, cut at frames into parts of about PART_BYTES."""
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


# ---- columns for the workers ---------------------------------------------------------------------


def worker_columns(
    tree: Tree, plan: ExtractionPlan, settings: Mapping[str, int], recorded: bytes
) -> dict[str, Section]:
    """Return the columns that a worker needs, as listed in `sections.SECTIONS`.

    If owners are not restored, `mode` lacks the set-ID bits of other users' files: they would give
    our rights to a program that was meant to have the other user's.
    """
    c = tree.columns
    name_of = array("I", bytes(4 * tree.inode_count))
    for i in plan.directories:
        name_of[c.name_inode[i]] = i
    bases, firsts = array("Q", [0]), array("I", [0])
    offsets, stream_offsets = array("Q"), array("Q")
    digests = []
    for blob in tree.blobs:
        frames = blob.frames
        if isinstance(frames, FrameTable):
            ends, stream_ends = frames.offsets, frames.stream_offsets
            digests.append(frames.digests)
        else:
            ends = array("Q", [0, *(frame.offset + frame.length for frame in frames)])
            stream_ends = array(
                "Q", [0, *(frame.stream_offset + frame.stream_length for frame in frames)]
            )
            digests.append(b"".join(frame.digest for frame in frames))
        base = bases[-1]
        offsets.extend(array("Q", [base + end for end in ends]))
        stream_offsets.extend(stream_ends)
        bases.append(base + (blob.size_bytes if frames else blob.stream_length))
        firsts.append(firsts[-1] + len(frames))
    part_start, places = array("I", [0]), array("Q")
    for _, part in plan.parts:
        places.extend(chain.from_iterable(part))
        part_start.append(part_start[-1] + len(part))
    return {
        "settings": array("q", [settings[name] for name in SETTINGS]),
        "names": b"".join(name + b"\0" for name in c.names),
        "name_parent": c.name_parent,
        "name_inode": c.name_inode,
        "directory_name": name_of,
        "mode": _modes(tree, settings),
        "uid": c.uid,
        "gid": c.gid,
        "mtime_ns": c.mtime_ns,
        "size_bytes": c.size_bytes,
        "extent_start": c.extent_start,
        "extent_file_offset": c.extent_file_offset,
        "extent_blob": c.extent_blob,
        "extent_blob_offset": c.extent_blob_offset,
        "extent_length": c.extent_length,
        "blob_base": bases,
        "blob_frame": firsts,
        "frame_offset": offsets,
        "frame_stream_offset": stream_offsets,
        "frame_digests": b"".join(digests),
        "files": plan.files,
        "group_start": plan.group_start,
        "part_name": array("I", [i for i, _ in plan.parts]),
        "part_start": part_start,
        "places": places,
        "recorded": recorded,
    }


def _modes(tree: Tree, settings: Mapping[str, int]) -> "array[int]":
    c = tree.columns
    if settings["owners"] or not any(mode & 0o6000 for mode in set(c.mode)):
        return c.mode
    modes = array("I", c.mode)
    for number, mode in enumerate(modes):
        if c.uid[number] != settings["uid"]:
            mode &= ~stat.S_ISUID
        if c.gid[number] != settings["gid"]:
            mode &= ~stat.S_ISGID
        modes[number] = mode
    return modes
