"""Packs a layer's tar, and notes what it leaves to the layers below.

`blob.tar_pack` treats a tar as an archive that stands alone. A layer does not: a directory that it
merely implies keeps the attributes it has below, and a hard link may point to a file below.
"""

from collections.abc import Callable
from typing import BinaryIO

from bootseer.blob.frame_writer import FRAME_BYTES, FrameWriter
from bootseer.blob.tar_pack import _IMPLIED_DIRECTORY, _copy, _Unpacked
from bootseer.blob.tar_reader import Member, TarReader
from bootseer.blob.tree import Extent
from bootseer.prefetch.merge import LayerTree

LEVEL = 3


class _Layer(_Unpacked):
    """What the members so far would have made on disk, on top of unknown lower layers."""

    def __init__(self) -> None:
        super().__init__()
        self._below: dict[bytes, bytes] = {}

    def add(self, member: Member, extents: tuple[Extent, ...], digest: bytes | None) -> None:
        if member.is_hard_link:
            target = self._locate(member.link)
            if target not in self._names:
                path = self._locate(member.path)
                target = self._below.get(target, target)
                self._remove(path)
                self._below[path] = target
                return
        super().add(member, extents, digest)

    def _remove(self, path: bytes) -> None:
        super()._remove(path)
        prefix = path + b"/"
        for link in [p for p in self._below if p == path or p.startswith(prefix)]:
            del self._below[link]

    @property
    def implied(self) -> frozenset[bytes]:
        """Paths of directories without a member of their own."""
        return frozenset(
            path
            for path, number in self._names.items()
            if self._inodes[number] is _IMPLIED_DIRECTORY
        )

    @property
    def links(self) -> tuple[tuple[bytes, bytes], ...]:
        """Hard links to what lies below, unless a later member replaced them."""
        return tuple(link for link in self._below.items() if link[0] not in self._names)


def pack_layer(
    stream: BinaryIO, sink: BinaryIO, on_progress: Callable[[int], None] | None = None
) -> LayerTree:
    """Write the blob of a layer's uncompressed tar to `sink`; reads `stream` to its end.

    Raises: CorruptError, UnsupportedError, as `blob.pack_tar`; OSError of the sink.
    """
    with FrameWriter(
        sink, level=LEVEL, frame_bytes=FRAME_BYTES, threads=None, on_progress=on_progress
    ) as writer:
        reader = TarReader(stream)
        layer = _Layer()
        for member in reader:
            layer.add(member, *_copy(reader, writer, member))
        rest = reader.rest
        while rest:
            writer.write(rest)
            rest = reader.take_up_to(FRAME_BYTES)
        return LayerTree(layer.tree(writer.finish()), layer.implied, layer.links)
