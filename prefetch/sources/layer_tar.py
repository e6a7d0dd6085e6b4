"""Packs or indexes a layer's tar, and notes what it leaves to the layers below.

`pack.tar_packing` treats a tar as an archive that stands alone. A layer does not: a directory that
it merely implies keeps the attributes it has below, and a hard link may point to a file below. And
as with container engines, unlike with tar, a hard link within it brings attributes of its own.
"""

import stat
from collections.abc import Callable
from typing import BinaryIO

from msgspec.structs import replace

from bootseer.blob.pack.frame_writer import FRAME_BYTES, FrameWriter
from bootseer.blob.pack.plain_writer import local_blob
from bootseer.blob.pack.tar_packing import (
    IMPLIED_DIRECTORY,
    TarWriter,
    Unpacked,
    copy_end,
    copy_member,
    extents_of,
)
from bootseer.blob.tar.reader import ReadableStream, TarMember, TarReader
from bootseer.blob.tree import Blob, Extent
from bootseer.errors import CorruptError
from bootseer.prefetch.index.merge import LayerTree

LEVEL = 1
"""A layer is packed once, but by a node that may be short of CPUs: see docs/format/blob.md."""
_LINK_COST_BYTES = 500


class _Layer(Unpacked):
    """What the members so far would have made on disk, on top of unknown lower layers."""

    def __init__(self) -> None:
        super().__init__()
        self._below: dict[bytes, bytes] = {}
        self._below_in: dict[bytes, set[bytes]] = {}
        """The links by the folders they lie in."""

    def add(self, member: TarMember, extents: tuple[Extent, ...], digest: bytes | None) -> None:
        if member.is_hard_link:
            target = self._target(member.link)
            if target not in self._names:
                path = self._locate(member.path)
                if not path:
                    raise CorruptError("the tar archive replaces its root by something else")
                target = self._below.get(target, target)
                self._remove(path)
                self._charge(2 * len(path) + len(target) + _LINK_COST_BYTES)
                self._below[path] = target
                self._below_in.setdefault(path.rpartition(b"/")[0], set()).add(path)
                return
        super().add(member, extents, digest)
        if member.is_hard_link:
            self._set_attributes(self._names[target], member)

    def _set_attributes(self, number: int, member: TarMember) -> None:
        """Containerd and Docker set what a link's entry says on the file that it links to."""
        inode = self._inodes[number]
        kind = stat.S_IFMT(inode.mode)
        self._inodes[number] = replace(
            inode,
            mode=kind | stat.S_IMODE(member.mode),
            uid=member.uid,
            gid=member.gid,
            mtime_ns=member.mtime_ns,
            xattrs=tuple(sorted((dict(inode.xattrs) | dict(member.xattrs)).items())),
        )

    def _target(self, link: bytes) -> bytes:
        """Where a hard link points. Unlike `_locate` this makes no directories, which would
        appear in this layer only because something below was linked to."""
        parts = [part for part in link.split(b"/") if part not in (b"", b".")]
        for count in range(1, len(parts)):
            number = self._names.get(b"/".join(parts[:count]))
            if number is None:
                break
            if not self._is_directory(number):
                return self._locate(link)
        return b"/".join(parts)

    def _remove(self, path: bytes) -> list[bytes]:
        gone = super()._remove(path)
        if self._below.pop(path, None) is not None:
            self._below_in[path.rpartition(b"/")[0]].discard(path)
        for folder in gone:
            for link in self._below_in.pop(folder, ()):
                del self._below[link]
        return gone

    @property
    def implied(self) -> frozenset[bytes]:
        """Paths of directories without a member of their own."""
        return frozenset(
            path
            for path, number in self._names.items()
            if self._inodes[number] is IMPLIED_DIRECTORY
        )

    @property
    def links(self) -> tuple[tuple[bytes, bytes], ...]:
        """Hard links to what lies below, unless a later member replaced them."""
        return tuple(link for link in self._below.items() if link[0] not in self._names)


def index_layer(stream: ReadableStream, stream_digest: Callable[[], str]) -> LayerTree:
    """The tree of a layer's uncompressed tar, whose stream the caller keeps; reads to its end, and
    then asks for its digest. No file has a digest in the tree: contents are only passed over.

    Raises: as `pack_layer`.
    """
    reader = TarReader(stream)
    layer = _Layer()
    for member in reader:
        layer.add(member, extents_of(member, reader.position), None)
        reader.skip_padded(member.stored_bytes)
    while reader.take_up_to(FRAME_BYTES):
        pass
    tree = layer.tree(local_blob(stream_digest(), reader.position))
    return LayerTree(tree, layer.implied, layer.links)


class _Passed:
    """Takes the place of a blob's writer where the stream is stored already."""

    frame_bytes = FRAME_BYTES
    position = 0

    def reserve(self, length: int) -> None:
        """Nothing is cut."""

    def cut(self) -> None:
        """Nothing is cut."""

    def write(self, *pieces: bytes | memoryview) -> None:
        """Count."""
        self.position += sum(map(len, pieces))


def read_layer(stream: ReadableStream, blob: Blob) -> LayerTree:
    """Return the tree of a layer's uncompressed tar, with the files' digests; reads to its end.
    `blob` is where that stream is stored.

    Raises: as `pack_layer`.
    """
    return _read(stream, _Passed(), lambda: blob)


def _read(stream: ReadableStream, writer: TarWriter, finish: Callable[[], Blob]) -> LayerTree:
    reader = TarReader(stream)
    layer = _Layer()
    for member in reader:
        layer.add(member, *copy_member(reader, writer, member))
    copy_end(reader, writer)
    return LayerTree(layer.tree(finish()), layer.implied, layer.links)


def pack_layer(
    stream: ReadableStream,
    sink: BinaryIO,
    on_progress: Callable[[int], None] | None = None,
    *,
    diff_id: str | None = None,
) -> LayerTree:
    """Write the blob of a layer's uncompressed tar to `sink`; reads `stream` to its end, of which
    the caller verifies that it has the digest `diff_id`, if given.

    Raises: CorruptError, UnsupportedError, as `pack.tar_packing.pack_tar`; OSError of the sink.
    """
    with FrameWriter(
        sink,
        level=LEVEL,
        frame_bytes=FRAME_BYTES,
        threads=None,
        on_progress=on_progress,
        stream_digest=diff_id,
    ) as writer:
        return _read(stream, writer, writer.finish)
