"""Packing of a tar stream into a blob: the stream is cut into frames, and parsed for its tree.

The stream is copied byte for byte, so that the blob of a container layer keeps the layer's DiffID.
The tree is the result of unpacking the archive in order: a later member replaces an earlier one, a
path leads through symbolic links inside the root, missing parent directories are created.
"""

import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from bootseer.base.content_digest import ContentHasher, content_digest
from bootseer.base.display import quoted
from bootseer.blob.build import build_tree
from bootseer.blob.pack.frame_writer import FRAME_BYTES, FrameWriter, TarWriter
from bootseer.blob.pack.members import hash_zeros, plain_size
from bootseer.blob.tar.header import BLOCK
from bootseer.blob.tar.reader import ReadableStream, TarMember, TarReader
from bootseer.blob.tree import ZEROS_HASHED_MAX, Blob, Extent, Inode, Tree
from bootseer.errors import CorruptError, InvalidInputError

IMPLIED_DIRECTORY = Inode(stat.S_IFDIR | 0o755)
"""Inode of a directory that the archive does not mention; compare with `is`."""
_SYMLINKS_MAX = 40
"""Largest number of symbolic links in one path, as in Linux."""
_STEPS_MAX = 4096
"""Largest number of directories in one path, including those of followed links."""
MEMORY_BYTES_MAX = 4 * 2**30
"""Largest memory of the names and attributes of one archive: about four million files, or fewer
with long names or many attributes. A hostile archive of a few megabytes could exceed it."""
_IMPLIED_BYTES_MAX = 2**27
"""Largest part of it for directories that the archive does not mention: about 150,000 of them. A
hostile name of 4 KiB can imply two thousand, which take a thousand times its size."""
_EMPTY_DIGEST = content_digest(b"")
_NAME_COST_BYTES = 800
_EXTENT_COST_BYTES = 160
_XATTR_COST_BYTES = 200


def pack_tar(
    stream: ReadableStream,
    sink: BinaryIO,
    *,
    level: int = 3,
    frame_bytes: int = FRAME_BYTES,
    threads: int | None = None,
    must_end: bool = False,
) -> Tree:
    """Write the blob of an uncompressed tar archive to `sink` (buffered), and return its tree.

    A leading "/" or "./" of names is removed; whiteouts (".wh.x") are plain files here. `stream` is
    read to its end. With `must_end`, an archive without a zero block after its last member is
    refused as cut off; use it for an archive without a known digest.

    Raises: CorruptError for a malformed archive, for example a wrong checksum, a name with "..", or
    a hard link to a name that does not precede it; UnsupportedError for a multi-volume archive. The
    content of `sink` is then unusable.
    """
    with FrameWriter(sink, level=level, frame_bytes=frame_bytes, threads=threads) as writer:
        reader = TarReader(stream)
        unpacked = Unpacked()
        for member in reader:
            extents, digest = copy_member(reader, writer, member)
            unpacked.add(member, extents, digest)
        if must_end and not reader.rest:
            raise CorruptError(
                f"the tar archive is cut off at byte {reader.position}: no zero block ends it"
            )
        copy_end(reader, writer)
        return unpacked.tree(writer.finish())


def copy_member(
    reader: TarReader, writer: TarWriter, member: TarMember
) -> tuple[tuple[Extent, ...], bytes | None]:
    """Copy one member with its content from the reader to the writer.

    Return the extents of the content in the blob's stream, and its digest.
    """
    stored = member.stored_bytes
    padded = stored + -stored % BLOCK
    is_small = member.segments is None and stored < writer.frame_bytes
    writer.reserve(len(member.raw) + (padded if is_small else 0))
    extents = extents_of(member, writer.position + len(member.raw))
    if is_small:
        content = memoryview(reader.view_padded(stored))
        writer.write(member.raw, content)
        return extents, content_digest(content[:stored]) if stored else _EMPTY_DIGEST
    writer.write(member.raw)
    writer.cut()
    segments = member.segments if member.segments is not None else [(0, stored)]
    pieces = _copied_pieces(reader, writer, stored, segments)
    return extents, _digest(pieces, segments, member.size_bytes)


def extents_of(member: TarMember, start: int) -> tuple[Extent, ...]:
    """Return the extents of a member whose content begins at the offset `start` of a stream."""
    extents = []
    segments = [(0, member.stored_bytes)] if member.segments is None else member.segments
    for offset, length in segments:
        if length:
            extents.append(Extent(offset, 0, start, length))
            start += length
    return tuple(extents)


def copy_end(reader: TarReader, writer: TarWriter) -> None:
    """Copy the rest of the stream after the last member."""
    rest = reader.rest + reader.take_up_to(writer.frame_bytes - len(reader.rest))
    while rest:
        writer.write(rest)
        rest = reader.take_up_to(writer.frame_bytes)


def _copied_pieces(
    reader: TarReader, writer: TarWriter, stored: int, segments: Iterable[tuple[int, int]]
) -> Iterator[bytes | memoryview]:
    left = stored
    for _, length in segments:
        # Pieces end at segments, as in `members`, so that a directory's tar stream gives the same
        # blob as the directory.
        while length:
            piece = reader.view(min(writer.frame_bytes, length))
            left -= len(piece)
            length -= len(piece)
            yield piece
            writer.write(piece if left else bytes(piece) + reader.take_padding(stored))


def _digest(
    pieces: Iterable[bytes | memoryview], segments: Iterable[tuple[int, int]], size_bytes: int
) -> bytes | None:
    """Consume `pieces`, and return the digest of the content with holes as zeros.

    Return None if the holes are larger than `ZEROS_HASHED_MAX`.
    """
    segments = [segment for segment in segments if segment[1]]
    holes = size_bytes - sum(length for _, length in segments)
    if holes > ZEROS_HASHED_MAX:
        for _ in pieces:
            pass
        return None
    hasher = ContentHasher()
    following = iter(segments)
    position = left = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            if not left:
                offset, left = next(following)
                hash_zeros(hasher, offset - position)
                position = offset
            part = view[:left]
            hasher.update(part)
            position += len(part)
            left -= len(part)
            view = view[len(part) :]
    hash_zeros(hasher, size_bytes - position)
    return hasher.digest()


class Unpacked:
    """File tree that unpacking the members so far would have created.

    `prefetch` has a subclass for layers, which are unpacked over other layers. It may override
    `add` and `_remove`, and use `_locate`, `_charge`, `_names` (path -> inode number), `_inodes`.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, int] = {b"": 0}
        self._inodes: list[Inode] = [IMPLIED_DIRECTORY]
        self._inside: dict[bytes, set[bytes]] | None = None
        """Paths in each directory. Made when a directory is first replaced, which is rare."""
        self._memory_bytes = 0
        self._implied_bytes = 0

    def add(self, member: TarMember, extents: tuple[Extent, ...], digest: bytes | None) -> None:
        if member.is_label:
            return
        path = self._locate(member.path)
        known = self._names.get(path)
        if member.is_hard_link:
            target = self._names.get(self._locate(member.link))
            if target is None or stat.S_ISDIR(self._inodes[target].mode) or not path:
                raise CorruptError(
                    f"the tar archive links {quoted(member.path)} to {quoted(member.link)}, "
                    "which is no file that precedes it"
                )
            if known != target:
                self._remove(path)
                self._set(path, target)
            return
        inode = _inode(member, extents, digest)
        cost = len(extents) * _EXTENT_COST_BYTES + len(inode.link_target)
        if inode.xattrs:
            cost += sum(len(n) + len(v) + _XATTR_COST_BYTES for n, v in inode.xattrs)
        self._charge(cost)
        if known is not None and self._is_directory(known) and stat.S_ISDIR(inode.mode):
            self._inodes[known] = inode
            return
        if not path:
            raise CorruptError("the tar archive replaces its root by something else")
        self._remove(path)
        self._set(path, len(self._inodes))
        self._inodes.append(inode)

    def tree(self, blob: Blob) -> Tree:
        """Return the tree of all members; inodes are numbered in the order of `Tree.walk`."""
        numbers: dict[int, int] = {}
        # Sorted by components: NUL sorts before every byte that a name can contain.
        paths = sorted(self._names, key=lambda path: path.replace(b"/", b"\0"))
        for path in paths:
            numbers.setdefault(self._names[path], len(numbers))
        names = ((path, numbers[self._names[path]]) for path in paths)
        try:
            return build_tree(names, [self._inodes[number] for number in numbers], [blob])
        except InvalidInputError as error:
            raise CorruptError(f"the tar archive is malformed: {error}") from error

    def _is_directory(self, number: int | None) -> bool:
        return number is not None and stat.S_ISDIR(self._inodes[number].mode)

    def _set(self, path: bytes, number: int) -> None:
        self._charge(len(path) + _NAME_COST_BYTES)
        self._names[path] = number
        if self._inside is not None:
            self._inside.setdefault(path.rpartition(b"/")[0], set()).add(path)

    def _charge(self, memory_bytes: int) -> None:
        self._memory_bytes += memory_bytes
        if self._memory_bytes > MEMORY_BYTES_MAX:
            raise CorruptError(
                "the tar archive's names and attributes would take more than "
                f"{MEMORY_BYTES_MAX >> 30} GiB of memory; split it into several layers"
            )

    def _remove(self, path: bytes) -> list[bytes]:
        """Remove `path` and all paths below it; return the removed directories."""
        number = self._names.pop(path, None)
        if self._inside is not None:
            self._inside.get(path.rpartition(b"/")[0], set()).discard(path)
        if not self._is_directory(number):
            return []
        if self._inside is None:
            self._inside = {}
            for name in self._names:
                if name:
                    self._inside.setdefault(name.rpartition(b"/")[0], set()).add(name)
        gone = [path]
        for folder in gone:
            for name in self._inside.pop(folder, ()):
                if self._is_directory(self._names.pop(name)):
                    gone.append(name)
        return gone

    def _locate(self, path: bytes) -> bytes:
        """Return the path that a member's path leads to, after creating its parent directory."""
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise CorruptError(f'the tar archive holds {quoted(path)}: ".." is not allowed')
        if not parts:
            return b""
        parent = b"/".join(parts[:-1])
        if not self._is_directory(self._names.get(parent)):
            parent = self._make_parent(parts[:-1])
        return parent + b"/" + parts[-1] if parent else parts[-1]

    def _make_parent(self, parts: list[bytes]) -> bytes:
        """Return the path of a directory, following symbolic links and creating missing parents."""
        current: list[bytes] = []
        left = parts[::-1]
        followed = steps = 0
        while left:
            part = left.pop()
            steps += 1
            if followed > _SYMLINKS_MAX or steps > _STEPS_MAX:
                path = b"/".join(parts)
                raise CorruptError(f"the tar archive's {quoted(path)} leads through too many links")
            if part == b"..":
                current = current[:-1]
                continue
            path = b"/".join([*current, part])
            number = self._names.get(path)
            if number is None:
                self._set(path, len(self._inodes))
                self._inodes.append(IMPLIED_DIRECTORY)
                self._implied_bytes += len(path) + _NAME_COST_BYTES
                if self._implied_bytes > _IMPLIED_BYTES_MAX:
                    raise CorruptError(
                        "the tar archive's names lie in too many directories that are not in it"
                    )
            elif stat.S_ISLNK(self._inodes[number].mode):
                target = self._inodes[number].link_target
                followed += 1
                if target.startswith(b"/"):
                    current = []
                left += [p for p in target.split(b"/")[::-1] if p not in (b"", b".")]
                continue
            elif not self._is_directory(number):
                raise CorruptError(f"the tar archive puts something into {quoted(path)}, a file")
            current.append(part)
        return b"/".join(current)


def _inode(member: TarMember, extents: tuple[Extent, ...], digest: bytes | None) -> Inode:
    mode = member.mode
    is_file = stat.S_ISREG(mode)
    target = member.link if stat.S_ISLNK(mode) else b""
    return Inode(
        mode,
        member.uid,
        member.gid,
        member.mtime_ns,
        member.size_bytes if is_file else plain_size(mode, target),
        member.rdev,
        target,
        member.xattrs,
        extents if is_file else (),
        digest if is_file else None,
    )
