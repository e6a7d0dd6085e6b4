"""Writer of the members of a blob's tar stream, which collects the tree at the same time.

Decides how members are cut into frames. Not thread-safe: one caller.
"""

import stat
from collections.abc import Callable, Sequence

from bootseer.base.content_digest import ContentHasher, content_digest
from bootseer.blob.build import build_tree
from bootseer.blob.pack.frame_writer import StreamWriter
from bootseer.blob.tar.header import END, member_header, padding
from bootseer.blob.tree import ZEROS_HASHED_MAX, Blob, Extent, Inode, Tree

HEADS = b".bootseer-heads"
"""Path of the member with the first bytes of files whose other bytes are in other blobs."""

_ZEROS = bytes(1024 * 1024)

Read = Callable[[int, int], bytes]
"""Function `read(offset, length)` that returns exactly `length` bytes of the file being packed."""


class Members:
    """Members of a blob, to be added in the order of `Tree.walk`, directories first."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._names: list[tuple[bytes, int]] = []
        self._inodes: list[Inode] = []
        self._elsewhere: set[int] = set()
        # (inode number, its first bytes)
        self._heads: list[tuple[int, bytes]] = []

    def add_plain(self, path: bytes, inode: Inode) -> int:
        """Add a member without content, and return its inode number."""
        self._put(member_header(path, inode))
        return self._added(path, inode)

    def add_hard_link(self, path: bytes, number: int, target: bytes) -> None:
        """Add another name of the inode `number`, whose earlier path is `target`."""
        if number not in self._elsewhere:
            self._put(member_header(path, self._inodes[number], hard_link_to=target))
        self._names.append((path, number))

    def add_small(self, path: bytes, inode: Inode, content: bytes) -> int:
        """Add a regular file by its whole content, which is not split between frames."""
        header = member_header(path, inode)
        member = b"".join((header, content, padding(len(content))))
        self._writer.reserve(len(member))
        offset = self._writer.position + len(header)
        self._writer.write(member)
        extents = (Extent(0, 0, offset, len(content)),) if content else ()
        digest = content_digest(content)
        return self._added(path, _with_content(inode, extents, digest))

    def add_large(
        self,
        path: bytes,
        inode: Inode,
        read: Read,
        segments: Sequence[tuple[int, int]] | None = None,
    ) -> int:
        """Add a regular file that is read piece by piece; its content begins a new frame.

        With `segments`, only those parts are read, and the rest are holes.
        """
        size = inode.size_bytes
        if segments is None:
            header = member_header(path, inode)
            segments = [(0, size)]
        else:
            # For a file that ends in a hole, GNU tar needs an empty segment at the end.
            ends_in_hole = not segments or sum(segments[-1]) < size
            listed = [*segments, (size, 0)] if ends_in_hole else segments
            header = member_header(path, inode, segments=listed)
        self._put(header)
        self._writer.cut()
        stored = sum(length for _, length in segments)
        hasher = ContentHasher() if size - stored <= ZEROS_HASHED_MAX else None
        extents = []
        hashed = 0
        left = stored
        for start, length in segments:
            if not length:
                continue
            extents.append(Extent(start, 0, self._writer.position, length))
            if hasher:
                hash_zeros(hasher, start - hashed)
            for offset in range(start, start + length, self._writer.frame_bytes):
                piece = read(offset, min(self._writer.frame_bytes, start + length - offset))
                if hasher:
                    hasher.update(piece)
                left -= len(piece)
                self._writer.write(piece if left else piece + padding(stored))
            hashed = start + length
        if hasher:
            hash_zeros(hasher, size - hashed)
        digest = hasher.digest() if hasher else None
        return self._added(path, _with_content(inode, tuple(extents), digest))

    def add_elsewhere(
        self, path: bytes, inode: Inode, extents: tuple[Extent, ...], digest: bytes, head: bytes
    ) -> int:
        """Add a regular file to the tree whose content is in other blobs, without a member.

        `head` has the first bytes if they are not in other blobs.
        """
        number = self._added(path, _with_content(inode, extents, digest))
        self._elsewhere.add(number)
        if head:
            self._heads.append((number, head))
        return number

    def finish(self, others: Sequence[Blob] = ()) -> Tree:
        """Write the end of the archive, and return the tree.

        The tree has the new blob and then `others`, the blobs in the extents of `add_elsewhere`.
        """
        if self._heads:
            self._add_heads()
        self._writer.write(END)
        return build_tree(self._names, self._inodes, [self._writer.finish(), *others])

    def _add_heads(self) -> None:
        """Write all heads as one member, which is not in the tree and takes few frames."""
        content = b"".join(head for _, head in self._heads)
        self._put(member_header(HEADS, Inode(stat.S_IFREG | 0o600, size_bytes=len(content))))
        self._writer.cut()
        position = self._writer.position
        padded = content + padding(len(content))
        for offset in range(0, len(padded), self._writer.frame_bytes):
            self._writer.write(padded[offset : offset + self._writer.frame_bytes])
        for number, head in self._heads:
            inode = self._inodes[number]
            extents = (Extent(0, 0, position, len(head)), *inode.extents)
            self._inodes[number] = _with_content(inode, extents, inode.digest)
            position += len(head)

    def _put(self, header: bytes) -> None:
        self._writer.reserve(len(header))
        self._writer.write(header)

    def _added(self, path: bytes, inode: Inode) -> int:
        self._inodes.append(inode)
        number = len(self._inodes) - 1
        self._names.append((path, number))
        return number


def _with_content(inode: Inode, extents: tuple[Extent, ...], digest: bytes | None) -> Inode:
    # `msgspec.structs.replace` takes three times as long, which matters for 100,000 files.
    return Inode(
        inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.size_bytes, inode.rdev,
        inode.link_target, inode.xattrs, extents, digest,
    )  # fmt: skip


def hash_zeros(hasher: ContentHasher, count: int) -> None:
    """Add `count` zero bytes to a hash."""
    while count > 0:
        hasher.update(_ZEROS[:count] if count < len(_ZEROS) else _ZEROS)
        count -= len(_ZEROS)


def plain_size(mode: int, link_target: bytes) -> int:
    """Return st_size of an inode without content: the length of a symbolic link's target, or 0."""
    return len(link_target) if stat.S_ISLNK(mode) else 0
