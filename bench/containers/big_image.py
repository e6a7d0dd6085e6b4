"""Images to index: the torch image with another compression, and synthetic ones of any size."""

import gzip
import random
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from testbed.images.layout import LayerWriter, OciLayout, StoredLayer

_PIECE_BYTES = 2**20
_ZSTD_LEVEL = 3  # the default of zstd, and of BuildKit
_RANDOM_BYTES = 2**17
_VARIANT_COUNT = 16


def as_zstd(source: OciLayout, layers: list[StoredLayer], folder: Path) -> OciLayout:
    """Write a layout in `folder` with the same layers as zstd, tagged `v1`."""
    target = OciLayout(folder)
    target.create()
    copies = [target.add_layer(_zstd(source.blob(layer.digest)), "zstd") for layer in layers]
    target.write_index({"v1": copies})
    return target


def _zstd(blob: Path) -> Callable[[LayerWriter], None]:
    def fill(writer: LayerWriter) -> None:
        compressor = zstandard.ZstdCompressor(_ZSTD_LEVEL).compressobj()
        with gzip.open(blob, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                writer.put(piece, compressor.compress(piece))
        writer.put(b"", compressor.flush())

    return fill


def synthetic(folder: Path, size_bytes: int) -> OciLayout:
    """Write a layout in `folder` with one gzip layer of `size_bytes`, tagged `v1`.

    The layer has files of 1 MiB. An eighth of each file is random. There are few different files,
    each compressed once as a gzip member, so that making the image takes little longer than hashing
    it.
    """
    target = OciLayout(folder)
    target.create()

    def fill(writer: LayerWriter) -> None:
        contents = list(_contents())
        for number in range(size_bytes // _PIECE_BYTES):
            info = tarfile.TarInfo(f"data/{number // 1000:04d}/{number:08d}")
            info.size = _PIECE_BYTES
            header = info.tobuf(tarfile.USTAR_FORMAT)
            writer.put(header, gzip.compress(header, 1, mtime=0))
            writer.put(*contents[number % len(contents)])
        end = bytes(2 * tarfile.BLOCKSIZE)
        writer.put(end, gzip.compress(end, mtime=0))

    target.write_index({"v1": [target.add_layer(fill)]})
    return target


def _contents() -> Iterator[tuple[bytes, bytes]]:
    generator = random.Random(0)
    for variant in range(_VARIANT_COUNT):
        regular = b"".join(b"%d %d\n" % (variant, number) for number in range(_PIECE_BYTES // 4))
        data = generator.randbytes(_RANDOM_BYTES) + regular[: _PIECE_BYTES - _RANDOM_BYTES]
        compressor = zlib.compressobj(6, wbits=31)
        yield data, compressor.compress(data) + compressor.flush()
