"""The tree: names, attributes, and where each file's bytes lie in which blob.

The model that every layer shares: `blob.pack` makes one, `prefetch` merges several into an
image's tree and serves it, `snapshots` compares and restores it. Its codec is
`bootseer.blob.index`. Frozen; safe to read from any thread.

A `Tree` is a list of *inodes* (what stat shows, and the content) and a list of *names* that point
to them, so hard links are two names of one inode.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of a file at `file_offset`, found in blob number `blob` of the tree's blob
    table at `blob_offset` of its *uncompressed* tar stream. Gaps between extents are holes."""

    file_offset: int
    blob: int
    blob_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Inode:
    """Attributes and content. `mode` holds file type and permission bits, as in stat(2)."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    rdev: int = 0
    link_target: bytes = b""
    """For symbolic links."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Sorted by name; names with their namespace (b"security.capability")."""
    extents: tuple[Extent, ...] = ()
    """Sorted by file_offset, disjoint; for regular files."""
    digest: bytes | None = None
    """SHA-256 (32 raw bytes) of a regular file's content."""


@dataclass(frozen=True, slots=True)
class Name:
    """One directory entry: `name` in directory `parent` (an inode number) is inode `inode`."""

    parent: int
    name: bytes
    inode: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One independent zstd frame of a blob: a *chunk*, the unit of fetching and verifying."""

    offset: int
    """Of its compressed bytes in the blob."""
    length: int
    """Compressed."""
    stream_offset: int
    """Of its content in the uncompressed tar stream."""
    stream_length: int
    digest: bytes
    """SHA-256 (32 raw bytes) of the frame as stored (compressed), so that it is verified before any
    decompressor sees it."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored seekable tar.zst: digest over its compressed bytes, and its frames in order."""

    digest: str
    """`sha256:<hex>`."""
    size_bytes: int
    frames: Sequence[Frame]

    @property
    def stream_length(self) -> int:
        """Length of the uncompressed tar stream in bytes."""
        last = self.frames[-1] if self.frames else None
        return last.stream_offset + last.stream_length if last else 0
