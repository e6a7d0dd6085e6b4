"""Columns of a `Tree`: one array per attribute, loaded when first used.

Also checks that the names form a tree. `blob.build` fills columns from objects; `blob.index` stores
each column as one section. Immutable once loaded; two threads may load a column at the same time.
"""

import stat
import sys
from array import array
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate, compress, islice
from operator import ge
from typing import TypeVar

from bootseer.blob.xattr_codec import Xattrs, decode_xattrs
from bootseer.errors import CorruptError

# Section name -> (number, array typecode). Numbers are part of the format: never reuse one. The
# typecode "" stands for raw bytes.
SECTIONS: dict[str, tuple[int, str]] = {
    "blob_size_bytes": (1, "Q"),
    "blob_frame_count": (2, "I"),
    "blob_digests": (3, ""),
    "frame_length": (4, "I"),
    "frame_stream_length": (5, "I"),
    "frame_digests": (6, ""),
    "names": (7, ""),
    "name_parent": (8, "I"),
    "name_inode": (9, "I"),
    "mode": (10, "I"),
    "uid": (11, "I"),
    "gid": (12, "I"),
    "mtime_ns": (13, "q"),
    "size_bytes": (14, "Q"),
    "rdev": (15, "Q"),
    "link": (16, "I"),
    "links": (17, ""),
    "xattr": (18, "I"),
    "xattrs": (19, ""),
    "extent_count": (20, "I"),
    "extent_file_offset": (21, "Q"),
    "extent_blob": (22, "I"),
    "extent_blob_offset": (23, "Q"),
    "extent_length": (24, "Q"),
    "digest": (25, "I"),
    "digests": (26, ""),
    "blob_stream_length": (27, "Q"),
    "blob_stream_digests": (28, ""),
}

NAME_BYTES_MAX = 255
"""NAME_MAX of Linux."""
DEPTH_MAX = 4096
"""Deepest nesting of directories; with 255-byte names a path stays within 1 MiB."""
LINK_BYTES_MAX = 4095
"""PATH_MAX of Linux without the final NUL: no kernel makes or reads a longer symlink target."""
SIZE_BYTES_MAX = 2**63 - 1
"""Largest size of a file (off_t)."""

_TYPES = (
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFCHR,
    stat.S_IFBLK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
)
# Tables over the byte of a mode that contains the file type.
_KNOWN_TYPES = bytes(byte for byte in range(256) if stat.S_IFMT(byte << 8) in _TYPES)
_IS_DIRECTORY = bytes(stat.S_ISDIR(byte << 8) for byte in range(256))
_BAD_NAMES = frozenset((b"", b".", b".."))

Load = Callable[[str], bytes]
_T = TypeVar("_T")


class Columns:
    """Attributes of all inodes and names of a tree, as arrays."""

    def __init__(self, inode_count: int, name_count: int, load: Load) -> None:
        """Prepare the columns without loading them.

        `load(section)` returns the raw little-endian bytes of a section or raises CorruptError; it
        is called once per section.
        """
        self.inode_count = inode_count
        self.name_count = name_count
        self.load = load

    def ints(self, section: str, count: int | None) -> "array[int]":
        """Return the numbers of a section. Raises: CorruptError unless there are `count`."""
        raw = self.load(section)
        column = array(SECTIONS[section][1])
        if len(raw) % column.itemsize or count not in (None, len(raw) // column.itemsize):
            raise CorruptError(f"the column {section} holds {len(raw)} bytes, not {count} numbers")
        column.frombytes(raw)
        if sys.byteorder == "big":
            column.byteswap()
        return column

    @cached_property
    def mode(self) -> "array[int]":
        return self.ints("mode", self.inode_count)

    @cached_property
    def uid(self) -> "array[int]":
        return self.ints("uid", self.inode_count)

    @cached_property
    def gid(self) -> "array[int]":
        return self.ints("gid", self.inode_count)

    @cached_property
    def mtime_ns(self) -> "array[int]":
        return self.ints("mtime_ns", self.inode_count)

    @cached_property
    def size_bytes(self) -> "array[int]":
        column = self.ints("size_bytes", self.inode_count)
        if column and max(column) > SIZE_BYTES_MAX:
            raise CorruptError("a file is larger than any file system allows")
        return column

    @cached_property
    def rdev(self) -> "array[int]":
        return self.ints("rdev", self.inode_count)

    @cached_property
    def links(self) -> list[bytes]:
        """Targets of symbolic links, each once."""
        heap = self.load("links")
        if heap.count(b"\0") > self.inode_count:
            raise CorruptError("there are more targets of symbolic links than inodes")
        targets = _split(heap, "links")
        if any(not 0 < len(t) <= LINK_BYTES_MAX for t in targets):
            raise CorruptError("the target of a symbolic link is empty or too long")
        return targets

    @cached_property
    def link(self) -> "array[int]":
        """1 + index into `links`; 0: none."""
        return self._references("link", len(self.links))

    @cached_property
    def xattr_sets(self) -> list[Xattrs]:
        """Sets of extended attributes, each once."""
        return decode_xattrs(self.load("xattrs"), self.inode_count)

    @cached_property
    def xattr(self) -> "array[int]":
        """1 + index into `xattr_sets`; 0: none."""
        return self._references("xattr", len(self.xattr_sets))

    @cached_property
    def digests(self) -> bytes:
        """BLAKE3 digests of contents, 32 bytes each."""
        heap = self.load("digests")
        if len(heap) % 32:
            raise CorruptError("the table of file digests is cut off")
        return heap

    @cached_property
    def digest(self) -> "array[int]":
        """1 + index into `digests`; 0: none."""
        return self._references("digest", len(self.digests) // 32)

    def _references(self, section: str, count: int) -> "array[int]":
        column = self.ints(section, self.inode_count)
        if column and max(column) > count:
            raise CorruptError(f"the column {section} refers to something that is not there")
        return column

    @cached_property
    def extent_start(self) -> "array[int]":
        """Extent ranges: inode n has the extents `extent_start[n]` up to `extent_start[n + 1]`."""
        counts = self.ints("extent_count", self.inode_count)
        starts = array("Q", accumulate(counts, initial=0))
        if starts[-1] != len(self.extent_length):
            raise CorruptError("the inodes' extent counts do not add up to the extents")
        return starts

    @cached_property
    def extent_length(self) -> "array[int]":
        return self.ints("extent_length", None)

    @cached_property
    def extent_file_offset(self) -> "array[int]":
        return self.ints("extent_file_offset", len(self.extent_length))

    @cached_property
    def extent_blob(self) -> "array[int]":
        return self.ints("extent_blob", len(self.extent_length))

    @cached_property
    def extent_blob_offset(self) -> "array[int]":
        return self.ints("extent_blob_offset", len(self.extent_length))

    @cached_property
    def names(self) -> list[bytes]:
        """Sorted by (parent, name)."""
        heap = self.load("names")
        if b"/" in heap:
            raise CorruptError('a name contains "/"')
        # Checked before the split: each NUL of a hostile heap would become eight bytes.
        count = heap.count(b"\0")
        if count != self.name_count:
            raise CorruptError(f"{count} names where {self.name_count} were announced")
        return _split(heap, "names")

    @cached_property
    def name_parent(self) -> "array[int]":
        return self.ints("name_parent", self.name_count)

    @cached_property
    def name_inode(self) -> "array[int]":
        return self.ints("name_inode", self.name_count)

    def directories(self) -> frozenset[int]:
        """Return the numbers of the inodes that are directories."""
        return frozenset(compress(range(self.inode_count), directory_flags(self.mode)))

    def check_values(self) -> None:
        """Raise CorruptError unless each attribute of every inode can be decoded."""
        for column in ("uid", "gid", "mtime_ns", "size_bytes", "rdev", "link", "xattr", "digest"):
            getattr(self, column)


def _split(heap: bytes, section: str) -> list[bytes]:
    """Return the NUL-terminated strings of a heap."""
    if not heap:
        return []
    if heap[-1]:
        raise CorruptError(f"the section {section} does not end with a NUL")
    strings = heap.split(b"\0")
    strings.pop()
    return strings


def directory_flags(modes: "array[int]") -> bytes:
    """Return a byte per mode, 1 for a directory. Raises: CorruptError for an unknown type."""
    # `bytes.translate` is ten times as fast as a test of each number. The file type is in the
    # second of a mode's four bytes.
    raw = modes.tobytes()
    types, *above = (raw[i::4] for i in ((1, 2, 3) if sys.byteorder == "little" else (2, 1, 0)))
    if types.translate(None, _KNOWN_TYPES) or any(part.strip(b"\0") for part in above):
        raise CorruptError("an inode has an unknown file type")
    return types.translate(_IS_DIRECTORY)


def check_names(c: Columns) -> None:
    """Raise CorruptError unless the names form a tree that a Linux file system can hold."""
    flags = directory_flags(c.mode)
    if not flags.startswith(b"\1"):
        raise CorruptError("inode 0 is not a directory")
    # All loops over names run in C, and over lists, whose numbers are Python objects already: this
    # function takes most of the time of opening a tree.
    names, parents, numbers = c.names, c.name_parent.tolist(), c.name_inode.tolist()
    if not _BAD_NAMES.isdisjoint(names):
        raise CorruptError('a name is empty, "." or ".."')
    if names and max(map(len, names)) > NAME_BYTES_MAX:
        raise CorruptError(f"a name is longer than {NAME_BYTES_MAX} bytes")
    backwards = compress(range(len(names)), map(ge, names, islice(names, 1, None)))
    if parents != sorted(parents) or any(parents[i] == parents[i + 1] for i in backwards):
        raise CorruptError("the names are not sorted, or one occurs twice in a directory")
    named = set(numbers)
    if 0 in named:
        raise CorruptError("the root directory is named inside itself")
    if named and max(named) >= c.inode_count:
        raise CorruptError("a name refers to an inode that is not there")
    if len(named) != c.inode_count - 1:
        raise CorruptError("an inode has no name")
    _check_directories(flags, parents, numbers)


def _check_directories(flags: bytes, parents: list[int], numbers: list[int]) -> None:
    """Raise CorruptError unless each directory has one name, at most DEPTH_MAX below the root."""
    # `parents` is sorted, so the last one is the largest.
    if parents and (parents[-1] >= len(flags) or not all(map(flags.__getitem__, set(parents)))):
        raise CorruptError("a name lies in something that is not a directory")
    below: dict[int, list[int]] = {}
    count = 1
    is_named = list(map(flags.__getitem__, numbers))
    pairs = zip(compress(parents, is_named), compress(numbers, is_named), strict=True)
    for parent, number in pairs:
        below.setdefault(parent, []).append(number)
        count += 1
    if count != flags.count(1):
        raise CorruptError("a directory has two names")
    # Every directory has one name, so a directory that is not reached from the root is on a cycle.
    level, reached, depth = [0], 1, 0
    while level:
        if depth > DEPTH_MAX:
            raise CorruptError(f"directories are nested more than {DEPTH_MAX} deep")
        level = [child for number in level for child in below.get(number, ())]
        reached += len(level)
        depth += 1
    if reached != count:
        raise CorruptError("some directories contain one another")
