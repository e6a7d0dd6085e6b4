"""The tree: names, attributes, and where each file's bytes lie in which blob.

The model that every layer shares: `blob.pack` makes one, `prefetch` merges several into an
image's tree and serves it, `snapshots` compares and restores it. Its codec is
`bootseer.blob.index.codec`. Frozen; safe to read from any thread.

A `Tree` is a list of *inodes* (what stat shows, and the content) and a list of *names* that point
to them, so hard links are two names of one inode. Inside, it is columns (`blob.columns`), so that
a tree of 100,000 names opens in milliseconds; `Inode` and `Name` objects are made when asked for.
"""

import stat
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress, islice
from operator import ne
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.blob.columns import Columns
from bootseer.errors import CorruptError

if TYPE_CHECKING:
    from array import array

# Above this many names a directory is searched by bisection in the columns; below, a dict of it is
# made at the first lookup and answers all later ones in a tenth of a microsecond.
_DICT_NAMES_MAX = 8192

ZEROS_HASHED_MAX = 1024**3
"""A sparse file with more bytes of holes than this has no content digest: hashing zeros for
minutes would buy nothing, since its frames are verified and its holes are in the tree."""


class Extent(Struct, frozen=True):
    """`length` bytes of a file at `file_offset`, found in blob number `blob` of the tree's blob
    table at `blob_offset` of its *uncompressed* tar stream. Gaps between extents are holes."""

    file_offset: int
    blob: int
    blob_offset: int
    length: int


class Inode(Struct, frozen=True):
    """Attributes and content. `mode` holds file type and permission bits, as in stat(2)."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    rdev: int = 0
    link_target: bytes = b""
    """The target of a symbolic link; empty for other inodes."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Sorted by name; names with their namespace (b"security.capability")."""
    extents: tuple[Extent, ...] = ()
    """Sorted by file_offset, disjoint; for regular files."""
    digest: bytes | None = None
    """BLAKE3 digest (32 raw bytes) of a regular file's content."""


class Name(Struct, frozen=True):
    """One directory entry: `name` in directory `parent` (an inode number) is inode `inode`."""

    parent: int
    name: bytes
    inode: int


class Frame(Struct, frozen=True):
    """One independent zstd frame of a blob: a *chunk*, the unit of fetching and verifying."""

    offset: int
    """The offset of the frame's compressed bytes in the blob."""
    length: int
    """Compressed."""
    stream_offset: int
    """The offset of the frame's content in the uncompressed tar stream."""
    stream_length: int
    digest: bytes
    """BLAKE3 digest (32 raw bytes) of the frame as stored (compressed), to be verified before any
    decompressor sees it."""


class Blob(Struct, frozen=True):
    """A tar stream, and the seekable tar.zst that stores it: its frames in order.

    A stream that is not stored anywhere, because only this node has it, has no frames and a size
    of 0; its digest is then the stream's.
    """

    digest: str
    """`blake3:<hex>` of the stored, compressed bytes; of older ones `sha256:<hex>`."""
    size_bytes: int
    frames: Sequence[Frame]
    stream_digest: str
    """The digest of the uncompressed tar stream: of a container layer its diff_id, `sha256:<hex>`,
    else `blake3:<hex>`."""
    stream_length: int
    """The length of the uncompressed tar stream in bytes."""


class Tree:
    """Names, inodes and blobs. Build one with `blob.build` or `index.codec.decode`.

    Immutable; safe from any thread. The names have been validated: each directory but the root has
    exactly one name, there are no cycles, names are unique in their directory and contain neither
    "/" nor NUL. Contents (extents, links, xattrs, digests) of a decoded tree are checked where
    they are read: `inode` raises CorruptError for an inode that makes no sense.
    """

    def __init__(self, columns: Columns, blobs: tuple[Blob, ...]) -> None:
        """`columns` have passed `blob.columns.check_names`."""
        self.columns = columns
        self.blobs = blobs
        self.inode_count: int = columns.inode_count
        self.name_count: int = columns.name_count
        self._directories: dict[int, dict[bytes, int]] = {}

    def inode(self, number: int) -> Inode:
        """Raises: CorruptError where its content makes no sense; IndexError."""
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
        """`inode(number).extents` as (file_offset, blob, blob_offset, length), for callers that
        go through thousands of files. Raises: CorruptError.
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
        """`inode(number).link_target`, without making the rest. Raises: CorruptError."""
        link = self.columns.link[number]
        if bool(link) != stat.S_ISLNK(self.columns.mode[number]):
            raise CorruptError(f"inode {number}: symbolic links, and only they, have a target")
        return self.columns.links[link - 1] if link else b""

    def mode(self, number: int) -> int:
        """`inode(number).mode`, without making the rest."""
        return self.columns.mode[number]

    def span(self, directory: int) -> tuple[int, int]:
        """Where the names in a directory are among all: from the first to before the second."""
        parents = self.columns.name_parent
        first = bisect_left(parents, directory)
        return first, bisect_right(parents, directory, first)

    def children(
        self, directory: int, skip: int = 0, count_max: int | None = None
    ) -> Sequence[Name]:
        """The names in a directory, sorted by name; empty for anything else. Of a large one a part
        may be asked for: at most `count_max` behind the first `skip`."""
        first, end = self.span(directory)
        first += skip
        if count_max is not None:
            end = min(end, first + count_max)
        names = self.columns.names
        inodes = self.columns.name_inode
        return [Name(directory, names[i], inodes[i]) for i in range(first, end)]

    def lookup(self, directory: int, name: bytes) -> int | None:
        """The inode number of `name` in `directory`."""
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
        """The inode number at `path` (b"usr/lib/x"; b"" is the root). Follows no symlinks."""
        number = 0
        for part in path.split(b"/") if path else ():
            found = self.lookup(number, part)
            if found is None:
                return None
            number = found
        return number

    @cached_property
    def _first_name(self) -> "array[int]":
        """Inode number -> index of its first name (the root: 0, which means nothing)."""
        from array import array

        first = array("I", bytes(4 * self.inode_count))
        inodes = self.columns.name_inode
        for i in range(self.name_count - 1, -1, -1):
            first[inodes[i]] = i
        return first

    @cached_property
    def _link_counts(self) -> dict[int, int]:
        """Returns the number of names of each inode that has several."""
        if self.name_count == self.inode_count - 1:
            # Each but the root has a name, so none has two.
            return {}
        counts = Counter(self.columns.name_inode)
        return {number: count for number, count in counts.items() if count > 1}

    def parent(self, directory: int) -> int:
        """The inode number of the directory that holds `directory`; the root is its own parent.

        For anything but a directory: the directory of its first name.
        """
        return self.columns.name_parent[self._first_name[directory]] if directory else 0

    def path(self, inode: int) -> bytes:
        """Returns one of the inode's paths: the only one, unless it has hard links."""
        parts = []
        while inode:
            i = self._first_name[inode]
            parts.append(self.columns.names[i])
            inode = self.columns.name_parent[i]
        return b"/".join(reversed(parts))

    def link_count(self, inode: int) -> int:
        """What stat shows as st_nlink: names of a file; 2 plus subdirectories of a directory."""
        if not stat.S_ISDIR(self.mode(inode)):
            return self._link_counts.get(inode, 1)
        first, end = self.span(inode)
        modes = self.columns.mode
        return 2 + sum(stat.S_ISDIR(modes[i]) for i in self.columns.name_inode[first:end])

    def walk(self) -> Iterator[tuple[bytes, int]]:
        """(path, inode number): parents before children, siblings sorted; the root first."""
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
