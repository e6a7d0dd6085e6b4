"""Making a tree from names, inodes and blobs in memory, as packers and mergers have them.

Alone owns how a tree is spread over its columns, and refuses what no file system could hold. Pure
(no I/O).
"""

import stat
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar

from bootseer.blob.columns import SECTIONS, Columns, check_names
from bootseer.blob.digest_codec import encode_digest
from bootseer.blob.tree import Blob, Inode, Tree
from bootseer.blob.xattr_codec import Xattrs, encode_xattrs
from bootseer.errors import CorruptError, InvalidInputError

_T = TypeVar("_T")


def build_tree(
    names: Iterable[tuple[bytes, int]], inodes: Sequence[Inode], blobs: Sequence[Blob]
) -> Tree:
    """A tree from (path, inode number) pairs, in any order; `inodes[0]` is the root directory.

    The pair (b"", 0) may be given or left out. Every directory on a path must be named itself and
    every inode but the root must have a name. Raises: InvalidInputError for anything that a file
    system could not hold.
    """
    by_path = {}
    for path, number in names:
        if path in by_path:
            raise InvalidInputError(f"the path {path!r} is given twice")
        if not 0 <= number < len(inodes):
            raise InvalidInputError(f"{path!r} names inode {number} of {len(inodes)}")
        by_path[path] = number
    if by_path.pop(b"", 0) != 0:
        raise InvalidInputError("the root directory must be inode 0")
    entries = []
    for path, number in by_path.items():
        directory, slash, name = path.rpartition(b"/")
        parent = by_path.get(directory) if slash else 0
        if parent is None or not stat.S_ISDIR(inodes[parent].mode):
            raise InvalidInputError(
                f"{path!r} lies in {directory!r}, which is not a directory here"
            )
        entries.append((parent, name, number))
    entries.sort()
    # The paths take more than the tree will.
    by_path.clear()
    try:
        tree = Tree(_columns_from(entries, inodes, blobs), tuple(blobs))
        tree.validate()
    except CorruptError as error:
        raise InvalidInputError(f"not a valid tree: {error}") from error
    return tree


def _columns_from(
    entries: Sequence[tuple[int, bytes, int]], inodes: Sequence[Inode], blobs: Sequence[Blob]
) -> Columns:
    """The columns of (parent, name, inode number) entries, sorted. Raises: CorruptError."""
    links: dict[bytes, int] = {}
    xattrs: dict[Xattrs, int] = {}
    digests: dict[bytes, int] = {}
    extents = [extent for inode in inodes for extent in inode.extents]
    frames = [frame for blob in blobs for frame in blob.frames]
    # One column at a time: as lists of numbers they would take several times what the tree does.
    numbers: dict[str, Iterable[int]] = {
        "blob_size_bytes": (blob.size_bytes for blob in blobs),
        "blob_frame_count": (len(blob.frames) for blob in blobs),
        "blob_stream_length": (blob.stream_length for blob in blobs),
        "frame_length": (frame.length for frame in frames),
        "frame_stream_length": (frame.stream_length for frame in frames),
        "name_parent": (parent for parent, _, _ in entries),
        "name_inode": (number for _, _, number in entries),
        "mode": (inode.mode for inode in inodes),
        "uid": (inode.uid for inode in inodes),
        "gid": (inode.gid for inode in inodes),
        "mtime_ns": (inode.mtime_ns for inode in inodes),
        "size_bytes": (inode.size_bytes for inode in inodes),
        "rdev": (inode.rdev for inode in inodes),
        "link": (_number(links, inode.link_target) for inode in inodes),
        "xattr": (_number(xattrs, inode.xattrs) for inode in inodes),
        "extent_count": (len(inode.extents) for inode in inodes),
        "extent_file_offset": (extent.file_offset for extent in extents),
        "extent_blob": (extent.blob for extent in extents),
        "extent_blob_offset": (extent.blob_offset for extent in extents),
        "extent_length": (extent.length for extent in extents),
        "digest": (_number(digests, inode.digest or b"") for inode in inodes),
    }
    sections: dict[str, bytes] = {}
    for section, values in numbers.items():
        try:
            column = array(SECTIONS[section][1], values)
        except (OverflowError, TypeError) as error:
            raise CorruptError(f"a value of {section} is out of range") from error
        if sys.byteorder == "big":
            column.byteswap()
        sections[section] = column.tobytes()
    # `links`, `xattrs` and `digests` were filled on the way.
    sections |= {
        "blob_digests": b"".join(encode_digest(blob.digest) for blob in blobs),
        "blob_stream_digests": b"".join(encode_digest(blob.stream_digest) for blob in blobs),
        "frame_digests": b"".join(frame.digest for frame in frames),
        "names": b"".join(name + b"\0" for _, name, _ in entries),
        "links": b"".join(target + b"\0" for target in links),
        "xattrs": encode_xattrs(list(xattrs)),
        "digests": b"".join(digests),
    }
    columns = Columns(len(inodes), len(entries), sections.__getitem__)
    _check_frames(blobs)
    check_names(columns)
    return columns


def _number(known: dict[_T, int], value: _T) -> int:
    """1 + the position of `value` among the distinct values so far; 0 for an empty one."""
    return known.setdefault(value, len(known) + 1) if value else 0


def _check_frames(blobs: Sequence[Blob]) -> None:
    """Raises CorruptError unless each blob's frames follow one another without gaps."""
    for blob in blobs:
        offset = stream_offset = 0
        for frame in blob.frames:
            if frame.offset != offset or frame.stream_offset != stream_offset:
                raise CorruptError(f"the frames of {blob.digest} do not follow one another")
            if len(frame.digest) != 32 or frame.length < 1 or frame.stream_length < 1:
                raise CorruptError(f"a frame of {blob.digest} is empty or has no digest")
            offset += frame.length
            stream_offset += frame.stream_length
        if offset > blob.size_bytes:
            raise CorruptError(f"the frames of {blob.digest} reach beyond its end")
        if blob.frames and stream_offset != blob.stream_length:
            raise CorruptError(f"the frames of {blob.digest} do not make up its stream")
