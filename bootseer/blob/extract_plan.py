"""Plans an extraction: which names are made when, and which files are written together. Pure.

Files are grouped in the order of the stream, so that each frame is read and decoded once, and
cut where a frame begins, so that groups can be written by several threads.
"""

import stat
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bootseer.blob.frames import FrameTable
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import InvalidInputError, PermissionDeniedError

GROUP_BYTES = 2 * 1024 * 1024
"""Content of one group: a second thread gets work soon, and few frames are decoded twice."""
GROUP_FILES = 256
PART_BYTES = 16 * 1024 * 1024
"""A larger file is written in parts of about this size, by several threads."""
_PLAIN_CUT_BYTES = 128 * 1024

Place = tuple[int, int, int, int]
"""(file offset, blob, offset in its stream, length)"""


class Node(NamedTuple):
    """One name to make: `name` in the directory with inode number `parent`."""

    number: int
    parent: int
    name: bytes


class Link(NamedTuple):
    """A further name of something that is made before."""

    parent: int
    name: bytes
    first: Node


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a large file."""

    node: Node
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Make `directories`, then `groups` and `large` with their `parts`, then `others`, `links`."""

    directories: list[Node]
    """Parents first, the root left out."""
    groups: list[list[tuple[Node, list[Place]]]]
    large: list[Node]
    parts: list[Part]
    others: list[Node]
    """Symbolic links, fifos, sockets, devices."""
    links: list[Link]
    content_bytes: int
    """To be written; holes do not count."""


def plan_extraction(
    tree: Tree, *, max_files: int, max_bytes: int, allow_devices: bool = False
) -> Plan:
    """Raises: InvalidInputError beyond a limit; PermissionDeniedError for a device node that is
    not allowed; CorruptError for contents that make no sense."""
    columns = tree.columns
    if tree.name_count > max_files:
        raise InvalidInputError(f"{tree.name_count} names are more than the {max_files} allowed")
    content_bytes = sum(columns.extent_length)
    if content_bytes > max_bytes:
        raise InvalidInputError(f"{content_bytes} bytes are more than the {max_bytes} allowed")
    first_names: dict[int, Node] = {}
    directories: list[Node] = []
    files: list[tuple[Node, list[Place]]] = []
    empty: list[tuple[Node, list[Place]]] = []
    others: list[Node] = []
    links: list[Link] = []
    for parent, name, number in zip(
        columns.name_parent, columns.names, columns.name_inode, strict=True
    ):
        first = first_names.get(number)
        if first is not None:
            links.append(Link(parent, name, first))
            continue
        node = first_names[number] = Node(number, parent, name)
        kind = stat.S_IFMT(columns.mode[number])
        if kind == stat.S_IFREG:
            places = tree.extents(number)
            if places:
                files.append((node, places))
            else:
                empty.append((node, places))
        elif kind == stat.S_IFDIR:
            directories.append(node)
        else:
            if kind in (stat.S_IFCHR, stat.S_IFBLK) and not allow_devices:
                raise PermissionDeniedError(
                    f"{tree.path(number)!r} is a device node, which is not allowed here"
                )
            others.append(node)
    files.sort(key=lambda item: item[1][0][1:3])
    large = [item for item in files if content_length(item[1]) > PART_BYTES]
    groups = _groups(tree, [item for item in files if content_length(item[1]) <= PART_BYTES])
    groups += [empty[i : i + GROUP_FILES] for i in range(0, len(empty), GROUP_FILES)]
    return Plan(
        _parents_first(directories),
        groups,
        [node for node, _ in large],
        [part for node, places in large for part in _parts(tree, node, places)],
        others,
        links,
        content_bytes,
    )


def content_length(places: list[Place]) -> int:
    """Bytes in all places together."""
    return places[0][3] if len(places) == 1 else sum(place[3] for place in places)


def _parents_first(directories: list[Node]) -> list[Node]:
    below: dict[int, list[Node]] = {}
    for node in directories:
        below.setdefault(node.parent, []).append(node)
    ordered = []
    stack = below.get(0, [])[::-1]
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack.extend(reversed(below.get(node.number, ())))
    return ordered


def _groups(
    tree: Tree, files: list[tuple[Node, list[Place]]]
) -> list[list[tuple[Node, list[Place]]]]:
    groups: list[list[tuple[Node, list[Place]]]] = []
    group: list[tuple[Node, list[Place]]] = []
    group_bytes = 0
    last = (-1, -1)
    for item in files:
        _, blob, offset, _ = item[1][0]
        if group_bytes >= GROUP_BYTES or len(group) >= GROUP_FILES:
            frame = (blob, _frame_number(tree.blobs[blob], offset))
            if frame != last:
                groups.append(group)
                group, group_bytes = [], 0
        group.append(item)
        group_bytes += content_length(item[1])
        if group_bytes >= GROUP_BYTES or len(group) >= GROUP_FILES:
            _, blob, offset, length = item[1][-1]
            last = (blob, _frame_number(tree.blobs[blob], offset + length - 1))
    if group:
        groups.append(group)
    return groups


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


def _parts(tree: Tree, node: Node, places: list[Place]) -> Iterator[Part]:
    """The file's places, cut at frames into parts of about PART_BYTES."""
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
                yield Part(node, tuple(part))
                part, part_bytes = [], 0
    if part:
        yield Part(node, tuple(part))
