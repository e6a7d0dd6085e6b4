"""Packing and indexing of a layer's tar, including its references to lower layers.

`pack.tar_packing` treats a tar as an archive that stands alone. In a layer, a directory without an
entry of its own keeps the attributes that it has in lower layers, and a hard link may point to a
file of a lower layer. As with container engines, and unlike with tar, the entry of a hard link
within the layer sets the attributes of the file.
"""

import stat
from collections.abc import Callable
from typing import BinaryIO

from msgspec.structs import replace

from bootseer.blob.pack.frame_writer import FRAME_BYTES, FrameWriter, TarWriter, local_blob
from bootseer.blob.pack.tar_packing import (
    IMPLIED_DIRECTORY,
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
"""Compression level: a layer is packed once, but by a node that may be short of CPUs
(docs/format/blob.md)."""
_LINK_COST_BYTES = 500


class _UnpackedLayer(Unpacked):
    """Result of unpacking a layer's members on top of unknown lower layers."""

    def __init__(self) -> None:
        super().__init__()
        self._lower_links: dict[bytes, bytes] = {}
        """Path -> target of hard links to files of lower layers."""
        self._lower_links_in: dict[bytes, set[bytes]] = {}
        """Folder -> paths of such links in it."""

    def add(self, member: TarMember, extents: tuple[Extent, ...], digest: bytes | None) -> None:
        if member.is_hard_link:
            target = self._target(member.link)
            if target not in self._names:
                path = self._locate(member.path)
                if not path:
                    raise CorruptError("the tar archive replaces its root by something else")
                target = self._lower_links.get(target, target)
                self._remove(path)
                self._charge(2 * len(path) + len(target) + _LINK_COST_BYTES)
                self._lower_links[path] = target
                self._lower_links_in.setdefault(path.rpartition(b"/")[0], set()).add(path)
                return
        super().add(member, extents, digest)
        if member.is_hard_link:
            self._set_attributes(self._names[target], member)

    def _set_attributes(self, number: int, member: TarMember) -> None:
        # Containerd and Docker set the attributes of a link's entry on the file that it links to.
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
        """Return the path that a hard link points to.

        Unlike `_locate` this adds no directories: the layer must not get one only because a link
        points to a file of a lower layer.
        """
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
        if self._lower_links.pop(path, None) is not None:
            self._lower_links_in[path.rpartition(b"/")[0]].discard(path)
        for folder in gone:
            for link in self._lower_links_in.pop(folder, ()):
                del self._lower_links[link]
        return gone

    @property
    def implied(self) -> frozenset[bytes]:
        """Return the paths of directories without a member of their own."""
        return frozenset(
            path
            for path, number in self._names.items()
            if self._inodes[number] is IMPLIED_DIRECTORY
        )

    @property
    def links(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return (path, target) of the hard links to lower layers that no later member replaced."""
        return tuple(link for link in self._lower_links.items() if link[0] not in self._names)


def index_layer(stream: ReadableStream, stream_digest: Callable[[], str]) -> LayerTree:
    """Return the tree of a layer's uncompressed tar, without digests of files.

    Reads `stream`, which the caller stores, to its end, and then calls `stream_digest`. Raises: as
    `pack_layer`.
    """
    reader = TarReader(stream)
    layer = _UnpackedLayer()
    for member in reader:
        layer.add(member, extents_of(member, reader.position), None)
        reader.skip_padded(member.stored_bytes)
    while reader.take_up_to(FRAME_BYTES):
        pass
    tree = layer.tree(local_blob(stream_digest(), reader.position))
    return LayerTree(tree, layer.implied, layer.links)


class _NullWriter:
    """`TarWriter` that writes nothing, for a stream that is stored already."""

    frame_bytes = FRAME_BYTES
    position = 0

    def reserve(self, length: int) -> None:
        pass

    def cut(self) -> None:
        pass

    def write(self, *pieces: bytes | memoryview) -> None:
        self.position += sum(map(len, pieces))


def read_layer(stream: ReadableStream, blob: Blob) -> LayerTree:
    """Return the tree of a layer's uncompressed tar, which `blob` stores, with digests of files.

    Reads `stream` to its end. Raises: as `pack_layer`.
    """
    return _read(stream, _NullWriter(), lambda: blob)


def _read(stream: ReadableStream, writer: TarWriter, finish: Callable[[], Blob]) -> LayerTree:
    reader = TarReader(stream)
    layer = _UnpackedLayer()
    for member in reader:
        layer.add(member, *copy_member(reader, writer, member))
    copy_end(reader, writer)
    return LayerTree(layer.tree(finish()), layer.implied, layer.links)


def pack_layer(stream: ReadableStream, sink: BinaryIO, *, diff_id: str | None = None) -> LayerTree:
    """Write the blob of a layer's uncompressed tar to `sink`; read `stream` to its end.

    `diff_id`: the digest of `stream`, which the caller verifies; without one it is computed.
    Raises: CorruptError, UnsupportedError, as `pack.tar_packing.pack_tar`; OSError of the sink.
    """
    with FrameWriter(
        sink,
        level=LEVEL,
        frame_bytes=FRAME_BYTES,
        threads=None,
        stream_digest=diff_id,
    ) as writer:
        return _read(stream, writer, writer.finish)
