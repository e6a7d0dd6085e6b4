"""Construction of a `Tree` from names, inodes and blobs in memory, for packers and mergers.

Fills the columns of the tree, and refuses trees that no file system could hold. Pure.
"""

import stat
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.blob.columns import SECTIONS, Columns, check_names
from bootseer.blob.frames import FrameTable
from bootseer.blob.index import encode_digest
from bootseer.blob.tree import Blob, Inode, Tree
from bootseer.blob.xattr_codec import Xattrs, encode_xattrs
from bootseer.errors import CorruptError, InvalidInputError

_T = TypeVar("_T")


def build_tree(
    names: Iterable[tuple[bytes, int]], inodes: Sequence[Inode], blobs: Sequence[Blob]
) -> Tree:
    """Return the tree of (path, inode number) pairs in any order; `inodes[0]` is the root.

    The pair (b"", 0) is optional. Every directory on a path must have a pair itself, and every
    inode except the root a name. Raises: InvalidInputError for a tree that no file system could
    hold.
    """
    by_path = {}
    for path, number in names:
        if path in by_path:
            raise InvalidInputError(f"the path {quoted(path)} is given twice")
        if not 0 <= number < len(inodes):
            raise InvalidInputError(f"{quoted(path)} names inode {number} of {len(inodes)}")
        by_path[path] = number
    if by_path.pop(b"", 0) != 0:
        raise InvalidInputError("the root directory must be inode 0")
    entries = []
    for path, number in by_path.items():
        directory, slash, name = path.rpartition(b"/")
        parent = by_path.get(directory) if slash else 0
        if parent is None or not stat.S_ISDIR(inodes[parent].mode):
            raise InvalidInputError(
                f"{quoted(path)} lies in {quoted(directory)}, which is not a directory here"
            )
        entries.append((parent, name, number))
    entries.sort()
    # The paths take more memory than the tree will.
    by_path.clear()
    extents = [extent for inode in inodes for extent in inode.extents]
    try:
        return make_tree(
            ColumnValues(
                numbers={
                    "name_parent": (parent for parent, _, _ in entries),
                    "name_inode": (number for _, _, number in entries),
                    "mode": (inode.mode for inode in inodes),
                    "uid": (inode.uid for inode in inodes),
                    "gid": (inode.gid for inode in inodes),
                    "mtime_ns": (inode.mtime_ns for inode in inodes),
                    "size_bytes": (inode.size_bytes for inode in inodes),
                    "rdev": (inode.rdev for inode in inodes),
                    "extent_count": (len(inode.extents) for inode in inodes),
                    "extent_file_offset": (extent.file_offset for extent in extents),
                    "extent_blob": (extent.blob for extent in extents),
                    "extent_blob_offset": (extent.blob_offset for extent in extents),
                    "extent_length": (extent.length for extent in extents),
                },
                names=[name for _, name, _ in entries],
                links=(inode.link_target for inode in inodes),
                xattrs=(inode.xattrs for inode in inodes),
                digests=(inode.digest or b"" for inode in inodes),
            ),
            len(inodes),
            blobs,
        )
    except CorruptError as error:
        raise InvalidInputError(f"not a valid tree: {error}") from error


class ColumnValues(Struct, frozen=True):
    """Values of a tree's columns. Each iterable is consumed once."""

    numbers: Mapping[str, Iterable[int]]
    """Numbers by section, except the sections of blobs and of the fields below."""
    names: Sequence[bytes]
    """Sorted by (parent, name)."""
    links: Iterable[bytes]
    """Target of each inode; b"" if the inode is not a symbolic link."""
    xattrs: Iterable[Xattrs]
    """Extended attributes of each inode."""
    digests: Iterable[bytes]
    """Digest of each inode's content; b"" if it has none."""


def make_tree(values: ColumnValues, inode_count: int, blobs: Sequence[Blob]) -> Tree:
    """Return the tree of these values, after checking all of them. Raises: CorruptError."""
    links: dict[bytes, int] = {}
    xattrs: dict[Xattrs, int] = {}
    digests: dict[bytes, int] = {}
    tables = [_frame_table(blob) for blob in blobs]
    # Columns are built one at a time: as Python numbers they take several times the tree's memory.
    numbers: dict[str, Iterable[int]] = {
        **values.numbers,
        "blob_size_bytes": (blob.size_bytes for blob in blobs),
        "blob_frame_count": map(len, tables),
        "blob_stream_length": (blob.stream_length for blob in blobs),
        "frame_length": (length for table in tables for length in table.lengths),
        "frame_stream_length": (length for table in tables for length in table.stream_lengths),
        "link": _numbered(links, values.links),
        "xattr": _numbered(xattrs, values.xattrs),
        "digest": _numbered(digests, values.digests),
    }
    sections: dict[str, bytes] = {}
    for section, column_values in numbers.items():
        try:
            column = array(SECTIONS[section][1], column_values)
        except (OverflowError, TypeError) as error:
            raise CorruptError(f"a value of {section} is out of range") from error
        if sys.byteorder == "big":
            column.byteswap()
        sections[section] = column.tobytes()
    # Building the columns has filled `links`, `xattrs` and `digests`.
    sections |= {
        "blob_digests": b"".join(encode_digest(blob.digest) for blob in blobs),
        "blob_stream_digests": b"".join(encode_digest(blob.stream_digest) for blob in blobs),
        "frame_digests": b"".join(bytes(table.digests) for table in tables),
        "names": _heap(values.names),
        "links": _heap(links),
        "xattrs": encode_xattrs(list(xattrs)),
        "digests": b"".join(digests),
    }
    columns = Columns(inode_count, len(values.names), sections.__getitem__)
    check_names(columns)
    tree = Tree(columns, tuple(blobs))
    tree.validate()
    return tree


def _heap(strings: Collection[bytes]) -> bytes:
    return b"\0".join((*strings, b"")) if strings else b""


def _numbered(known: dict[_T, int], values: Iterable[_T]) -> Iterator[int]:
    """Yield for each value 1 + its position among the distinct values so far; 0 if it is empty."""
    return (known.setdefault(value, len(known) + 1) if value else 0 for value in values)


def _frame_table(blob: Blob) -> FrameTable:
    """Return the frames of a blob as a table. Raises: CorruptError if they have gaps."""
    table = blob.frames
    if not isinstance(table, FrameTable):
        try:
            table = FrameTable(
                array("I", (frame.length for frame in blob.frames)),
                array("I", (frame.stream_length for frame in blob.frames)),
                b"".join(frame.digest for frame in blob.frames),
            )
        except OverflowError as error:
            raise CorruptError(f"a frame of {blob.digest} has an impossible length") from error
        if table != blob.frames:
            raise CorruptError(f"the frames of {blob.digest} do not follow one another")
    if table.offsets[-1] > blob.size_bytes:
        raise CorruptError(f"the frames of {blob.digest} reach beyond its end")
    if table and table.stream_offsets[-1] != blob.stream_length:
        raise CorruptError(f"the frames of {blob.digest} do not make up its stream")
    return table
