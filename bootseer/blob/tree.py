"""Model of a file tree: names, attributes, and the places of each file's bytes in blobs.

`blob.pack` creates trees, `prefetch` merges the trees of layers and serves them, `snapshots`
compares and restores them. The codec is `bootseer.blob.index`. Frozen; safe to read from any
thread.

A `Tree` is a list of *inodes* (attributes and content) and a list of *names* that refer to them, so
hard links are two names of one inode. It is stored in columns (`blob.columns`), so that a tree of
100,000 names opens in milliseconds; `Inode` and `Name` objects are made on request.
"""

import stat
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress, islice
from operator import ne
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.blob.columns import Columns
from bootseer.errors import CorruptError

if TYPE_CHECKING:
    from array import array

# A directory with more names is searched by bisection in the columns. For a smaller one the first
# lookup makes a dict, with which later lookups take a tenth of a microsecond.
_DICT_NAMES_MAX = 8192

ZEROS_HASHED_MAX = 1024**3
"""Largest size of all holes of a file with a content digest. Hashing more zeros would take minutes
for nothing: the frames are verified, and the holes are in the tree."""


class Extent(Struct, frozen=True):
    """Range of a file and its place in a blob. Gaps between extents are holes."""

    file_offset: int
    blob: int
    """Index in `Tree.blobs`."""
    blob_offset: int
    """Offset in the blob's uncompressed tar stream."""
    length: int


class Inode(Struct, frozen=True):
    """Attributes and content of a file. `mode` has file type and permission bits, as in stat(2)."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    rdev: int = 0
    link_target: bytes = b""
    """Target of a symbolic link; empty for other inodes."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Extended attributes sorted by name; names include the namespace (b"security.capability")."""
    extents: tuple[Extent, ...] = ()
    """Extents of a regular file, sorted by file_offset, disjoint."""
    digest: bytes | None = None
    """BLAKE3 digest (32 raw bytes) of a regular file's content."""


class Name(Struct, frozen=True):
    """Directory entry: `name` in the directory `parent` (an inode number) is the inode `inode`."""

    parent: int
    name: bytes
    inode: int


class Frame(Struct, frozen=True):
    """Independent zstd frame of a blob, the *chunk* that is fetched and verified as a whole."""

    offset: int
    """Offset of the compressed frame in the blob."""
    length: int
    """Length of the compressed frame."""
    stream_offset: int
    """Offset of the frame's content in the uncompressed tar stream."""
    stream_length: int
    digest: bytes
    """BLAKE3 digest (32 raw bytes) of the compressed frame, verified before decompression."""


class Blob(Struct, frozen=True):
    """Tar stream, stored as a seekable tar.zst with its frames in order.

    A stream that only this node has, and that is stored nowhere, has no frames and a size of 0; the
    blob's digest is then that of the stream.
    """

    digest: str
    """Digest `blake3:<hex>` of the stored, compressed bytes; of older blobs `sha256:<hex>`."""
    size_bytes: int
    frames: Sequence[Frame]
    stream_digest: str
    """Digest of the uncompressed tar stream: the diff_id `sha256:<hex>` of a container layer, else
    `blake3:<hex>`."""
    stream_length: int
    """Length of the uncompressed tar stream in bytes."""


class Tree:
    """Names, inodes and blobs, made by `blob.build` or `blob.index.decode`.

    Immutable; safe from any thread. The names are validated: each directory except the root has
    exactly one name, there are no cycles, names are unique in their directory and contain neither
    "/" nor NUL. The contents (extents, links, xattrs, digests) of a decoded tree are checked when
    they are read: `inode` raises CorruptError for an invalid inode.
    """

    def __init__(self, columns: Columns, blobs: tuple[Blob, ...]) -> None:
        """Wrap `columns`, which `blob.columns.check_names` has checked."""
        self.columns = columns
        self.blobs = blobs
        self.inode_count: int = columns.inode_count
        self.name_count: int = columns.name_count
        self._directories: dict[int, dict[bytes, int]] = {}

    def inode(self, number: int) -> Inode:
        """Return an inode. Raises: CorruptError if its content is invalid; IndexError."""
        if not 0 <= number < self.inode_count:
            raise IndexError(f"no inode {number} in a tree of {self.inode_count}")
        c = self.columns
        mode = c.mode[number]
        xattrs = c.xattr[number]
        digest = c.digest[number]
        size = c.size_bytes[number]
        return Inode(
            mode,
            c.uid[number],
            c.gid[number],
            c.mtime_ns[number],
            size,
            c.rdev[number],
            self.link_target(number),
            c.xattr_sets[xattrs - 1] if xattrs else (),
            tuple(Extent(*extent) for extent in self.extents(number)),
            c.digests[32 * (digest - 1) : 32 * digest] if digest else None,
        )

    def extents(self, number: int) -> list[tuple[int, int, int, int]]:
        """Return an inode's extents as (file_offset, blob, blob_offset, length).

        Faster than `inode(number).extents` for thousands of files. Raises: CorruptError.
        """
        c = self.columns
        first, end = c.extent_start[number], c.extent_start[number + 1]
        if first == end:
            return []
        if not stat.S_ISREG(c.mode[number]):
            raise CorruptError(f"inode {number} is no regular file but has content")
        size = c.size_bytes[number]
        found = []
        position = 0
        for i in range(first, end):
            offset, length = c.extent_file_offset[i], c.extent_length[i]
            blob, blob_offset = c.extent_blob[i], c.extent_blob_offset[i]
            if offset < position or offset + length > size or not length:
                raise CorruptError(f"inode {number}: extents overlap or leave the file")
            if blob >= len(self.blobs) or blob_offset + length > self._stream_lengths[blob]:
                raise CorruptError(f"inode {number}: an extent lies outside its blob")
            position = offset + length
            found.append((offset, blob, blob_offset, length))
        return found

    @cached_property
    def _stream_lengths(self) -> tuple[int, ...]:
        return tuple(blob.stream_length for blob in self.blobs)

    def link_target(self, number: int) -> bytes:
        """Return the target of a symbolic link; b"" for other inodes. Raises: CorruptError."""
        link = self.columns.link[number]
        if bool(link) != stat.S_ISLNK(self.columns.mode[number]):
            raise CorruptError(f"inode {number}: symbolic links, and only they, have a target")
        return self.columns.links[link - 1] if link else b""

    def mode(self, number: int) -> int:
        """Return the mode of an inode."""
        return self.columns.mode[number]

    def span(self, directory: int) -> tuple[int, int]:
        """Return the half-open range of indexes of the names in a directory."""
        parents = self.columns.name_parent
        first = bisect_left(parents, directory)
        return first, bisect_right(parents, directory, first)

    def children(
        self, directory: int, skip: int = 0, count_max: int | None = None
    ) -> Sequence[Name]:
        """Return the names in a directory, sorted; empty if the inode is not a directory.

        For large directories: skip the first `skip` names, and return at most `count_max`.
        """
        first, end = self.span(directory)
        first += skip
        if count_max is not None:
            end = min(end, first + count_max)
        names = self.columns.names
        inodes = self.columns.name_inode
        return [Name(directory, names[i], inodes[i]) for i in range(first, end)]

    def lookup(self, directory: int, name: bytes) -> int | None:
        """Return the inode number of `name` in `directory`, or None."""
        known = self._directories.get(directory)
        if known is not None:
            return known.get(name)
        first, end = self.span(directory)
        names = self.columns.names
        if end - first > _DICT_NAMES_MAX:
            i = bisect_left(names, name, first, end)
            return self.columns.name_inode[i] if i < end and names[i] == name else None
        known = dict(zip(names[first:end], self.columns.name_inode[first:end], strict=True))
        self._directories[directory] = known
        return known.get(name)

    def resolve(self, path: bytes) -> int | None:
        """Return the inode number at `path` (b"usr/lib/x"; b"" is the root), or None.

        Symbolic links are not followed.
        """
        number = 0
        for part in path.split(b"/") if path else ():
            found = self.lookup(number, part)
            if found is None:
                return None
            number = found
        return number

    @cached_property
    def _first_name(self) -> "array[int]":
        """Index of the first name of each inode; 0 for the root, which has no name."""
        from array import array

        first = array("I", bytes(4 * self.inode_count))
        inodes = self.columns.name_inode
        for i in range(self.name_count - 1, -1, -1):
            first[inodes[i]] = i
        return first

    @cached_property
    def _link_counts(self) -> dict[int, int]:
        """Number of names of each inode that has several."""
        if self.name_count == self.inode_count - 1:
            # Each inode except the root has a name, so none has two.
            return {}
        counts = Counter(self.columns.name_inode)
        return {number: count for number, count in counts.items() if count > 1}

    def parent(self, directory: int) -> int:
        """Return the parent's inode number; the root is its own parent.

        For an inode that is not a directory, return the directory of its first name.
        """
        return self.columns.name_parent[self._first_name[directory]] if directory else 0

    def path(self, inode: int) -> bytes:
        """Return a path of the inode: the only one, unless the inode has hard links."""
        parts = []
        while inode:
            i = self._first_name[inode]
            parts.append(self.columns.names[i])
            inode = self.columns.name_parent[i]
        return b"/".join(reversed(parts))

    def link_count(self, inode: int) -> int:
        """Return st_nlink: the names of a file; 2 plus the subdirectories of a directory."""
        if not stat.S_ISDIR(self.mode(inode)):
            return self._link_counts.get(inode, 1)
        first, end = self.span(inode)
        modes = self.columns.mode
        return 2 + sum(stat.S_ISDIR(modes[i]) for i in self.columns.name_inode[first:end])

    def walk(self) -> Iterator[tuple[bytes, int]]:
        """Yield (path, inode number), the root first, parents before children, siblings sorted."""
        names = self.columns.names
        inodes = self.columns.name_inode
        modes = self.columns.mode
        yield b"", 0
        first, end = self.span(0)
        stack = [(b"", first, end)]
        while stack:
            prefix, i, end = stack.pop()
            while i < end:
                number = inodes[i]
                path = prefix + names[i]
                i += 1
                yield path, number
                if stat.S_ISDIR(modes[number]):
                    stack.append((prefix, i, end))
                    prefix = path + b"/"
                    i, end = self.span(number)

    def validate(self) -> None:
        """Decode and check everything, contents included. Raises: CorruptError."""
        c = self.columns
        c.check_values()
        links = frozenset(filter(stat.S_ISLNK, set(c.mode)))
        is_link = map(links.__contains__, c.mode)
        for number in compress(range(self.inode_count), map(ne, map(bool, c.link), is_link)):
            self.link_target(number)
        starts = c.extent_start
        for number in compress(range(self.inode_count), map(ne, starts, islice(starts, 1, None))):
            self.extents(number)


class FileParts:
    """Extents of files by range; keeps the extents of each file after its first lookup.

    The lookup is by bisection, since a hostile file may have millions of extents and be read by
    millions of small ranges. One thread at a time.
    """

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
