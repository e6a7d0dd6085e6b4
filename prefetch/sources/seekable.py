"""Search for the seek points of a gzip layer, and verification of them on the whole layer.

The layer is copied from its source, its digest compared, and decompressed once by `indexed_gzip`
(zlib's zran), which records where deflate blocks begin. Then every span is decompressed as a reader
of the image will decompress it, and all spans together must have the layer's `diff_id`: a mistake
of the library or of this module is never published. docs/format/seekpoints.md has the format.
"""

import hashlib
import io
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard
from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.content_digest import content_digest
from bootseer.blob import seek_points
from bootseer.blob.frames import FRAME_STREAM_BYTES_MAX, FrameTable
from bootseer.blob.keys import POINTS
from bootseer.blob.seek_points import UNIT_BYTES, SeekPoint, SeekPoints
from bootseer.blob.tar.inflate import PIECE_BYTES, ExpansionLimits
from bootseer.blob.tree import Blob
from bootseer.errors import CorruptError, UnsupportedError
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.sources.layer_tar import read_layer
from bootseer.prefetch.sources.stream import ExpectedLayer, ReadAhead

SPAN_BYTES = 2**20
"""Least output between two seek points; docs/decisions/0038-seek-points.md measures others."""
_GZIP = b"\x1f\x8b\x08"
_STEP_BYTES = 2**24
"""Output between two checks of the layer's expansion."""
_LEVEL = 3
"""Compression level: higher ones make the windows 5 % smaller and take ten times as long."""

# The export of indexed_gzip: header, table, windows (zran.c, zran_export_index).
_EXPORT = struct.Struct("<5sBBQQIII")
_EXPORTED = struct.Struct("<QQBB")
_EXPORT_MAGIC = b"GZIDX"
_EXPORT_VERSION = 1


class _DeflateBlock(Struct, frozen=True):
    offset: int
    """Offset of the first whole byte in the gzip file."""
    stream_offset: int
    unused_bits: int
    window: bytes


def write_seek_points(
    stored: BinaryIO,
    expected: ExpectedLayer,
    sink: BinaryIO,
    limits: ExpansionLimits,
    on_progress: Callable[[int], None],
    span_bytes: int = SPAN_BYTES,
) -> LayerTree:
    """Write the seek points of the layer `stored` to `sink`; close `stored`.

    `sink` is an empty file that can be read as well. `on_progress` gets counts of stored bytes, and
    may raise to end the work.

    Returns: The layer's tree, whose only blob is the layer as its seek points divide it.
    Raises: UnsupportedError if the layer is not gzip or seek points cannot be found; CorruptError,
    NotFoundError, UnavailableError.
    """
    digest = expected.stored_digest or ""
    if not digest.startswith("sha256:"):
        raise UnsupportedError(f"the {expected.name} is not named by SHA-256")
    _copy(stored, expected, sink, on_progress)
    blocks = _find_blocks(sink, expected, limits, span_bytes, on_progress)
    frames, points = _divide(sink, blocks, span_bytes)
    found = SeekPoints(digest, expected.size_bytes, points)
    data = seek_points.encode(found)
    blob = Blob(
        f"{POINTS}{hashlib.sha256(data).hexdigest()}",
        expected.size_bytes,
        frames,
        expected.diff_id,
        blocks[-1].stream_offset,
    )
    with ReadAhead(_verified_stream(sink, found, blob, on_progress), "layer-reader") as stream:
        layer = read_layer(stream, blob)
        stream.finish()
    sink.seek(0)
    sink.truncate()
    sink.write(data)
    return layer


def _copy(
    stored: BinaryIO, expected: ExpectedLayer, sink: BinaryIO, on_progress: Callable[[int], None]
) -> None:
    """Copy the gzip file. Raises: CorruptError unless size and digest are as expected."""
    hasher, size_bytes = hashlib.sha256(), 0
    with stored:
        while piece := stored.read(PIECE_BYTES):
            if not size_bytes and not piece.startswith(_GZIP):
                raise UnsupportedError(f"the {expected.name} is not compressed with gzip")
            size_bytes += len(piece)
            if size_bytes > expected.size_bytes:
                break
            hasher.update(piece)
            sink.write(piece)
            on_progress(len(piece))
    sink.flush()
    if (
        size_bytes != expected.size_bytes
        or f"sha256:{hasher.hexdigest()}" != expected.stored_digest
    ):
        raise CorruptError(f"the {expected.name} came with another content than its digest says")


def _find_blocks(
    file: BinaryIO,
    expected: ExpectedLayer,
    limits: ExpansionLimits,
    span_bytes: int,
    on_progress: Callable[[int], None],
) -> list[_DeflateBlock]:
    """Return blocks at least `span_bytes` of output apart, from the first one of the file.

    The last item stands for the end of the file. Raises: CorruptError, UnsupportedError.
    """
    try:
        from indexed_gzip import IndexedGzipFile, ZranError
    except ImportError as error:
        raise UnsupportedError(
            "seek points are found with indexed_gzip: pip install 'bootseer[seekpoints]'"
        ) from error
    total_bytes = 0
    try:
        with (
            # The library wants a file that is opened for reading only, and `file` has no name.
            Path(f"/proc/self/fd/{file.fileno()}").open("rb") as source,
            IndexedGzipFile(
                fileobj=source, spacing=span_bytes, window_size=seek_points.WINDOW_BYTES
            ) as reader,
        ):
            # Seeking records points on the way; reading would decompress everything once more.
            while True:
                wanted_bytes = total_bytes + _STEP_BYTES
                reader.seek(wanted_bytes)
                total_bytes = reader.tell()
                limits.check(expected.size_bytes, total_bytes, expected.name)
                on_progress(0)
                if total_bytes < wanted_bytes:
                    break
            exported = io.BytesIO()
            reader.export_index(fileobj=exported)
            blocks = [_with_window(block, reader) for block in _parse_export(exported.getvalue())]
    except (ZranError, EOFError, OSError) as error:
        raise CorruptError(f"the {expected.name} cannot be decompressed: {error}") from error
    return [*blocks, _DeflateBlock(expected.size_bytes, total_bytes, 0, b"")]


def _with_window(block: _DeflateBlock, reader: BinaryIO) -> _DeflateBlock:
    """Return the block with a window that reaches back to the cut before it.

    The library exports no window for the first block of a gzip member.
    """
    skipped = block.stream_offset % UNIT_BYTES
    if block.window or not skipped:
        return block
    reader.seek(block.stream_offset - skipped)
    return replace(block, window=reader.read(skipped))


def _parse_export(export: bytes) -> list[_DeflateBlock]:
    magic, version, _, _, _, _, window_bytes, count = _EXPORT.unpack_from(export)
    if magic != _EXPORT_MAGIC or version != _EXPORT_VERSION:
        raise UnsupportedError(
            f"this release does not know version {version} of indexed_gzip's index"
        )
    start = _EXPORT.size + count * _EXPORTED.size
    blocks = []
    for offset, stream_offset, unused_bits, has_window in _EXPORTED.iter_unpack(
        export[_EXPORT.size : start]
    ):
        end = start + (window_bytes if has_window else 0)
        blocks.append(_DeflateBlock(offset, stream_offset, unused_bits, export[start:end]))
        start = end
    return blocks


def _divide(
    file: BinaryIO, blocks: list[_DeflateBlock], span_bytes: int
) -> tuple[FrameTable, list[SeekPoint]]:
    """Divide the file into frames of at least `span_bytes` of output, each with its seek point.

    Shorter gzip members, as eStargz has them, are joined. The last item of `blocks` stands for the
    end of the file.
    """
    size_bytes, stream_length = blocks[-1].offset, blocks[-1].stream_offset
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    # The first span includes the gzip header in front of the first block.
    offsets, cuts = array("Q", [0]), array("Q", [0])
    points = [SeekPoint(True, 0, 0, 0, b"")]
    for block in blocks[:-1]:
        skipped = block.stream_offset % UNIT_BYTES
        cut = block.stream_offset - skipped
        if cuts[-1] + span_bytes - UNIT_BYTES <= cut < stream_length:
            byte = os.pread(file.fileno(), 1, block.offset - 1)[0] if block.unused_bits else 0
            window = compressor.compress(block.window) if block.window else b""
            offsets.append(block.offset)
            cuts.append(cut)
            points.append(SeekPoint(False, block.unused_bits, byte, skipped, window))
    lengths = array("I", (end - start for start, end in _pairs(offsets, size_bytes)))
    stream_lengths = array("I", (end - start for start, end in _pairs(cuts, stream_length)))
    if max(stream_lengths, default=0) > FRAME_STREAM_BYTES_MAX:
        raise UnsupportedError("a deflate block is too large for a frame")
    digests = b"".join(
        content_digest(os.pread(file.fileno(), length, offset))
        for offset, length in zip(offsets, lengths, strict=True)
    )
    return FrameTable(lengths, stream_lengths, digests), points


def _pairs(starts: "array[int]", end: int) -> Iterator[tuple[int, int]]:
    return zip(starts, [*starts[1:], end], strict=True)


def _verified_stream(
    file: BinaryIO, points: SeekPoints, blob: Blob, on_progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the layer's stream, decompressed span by span. Raises: CorruptError at its end."""
    hasher = hashlib.new(blob.stream_digest.partition(":")[0])
    for number, frame in enumerate(blob.frames):
        data = os.pread(file.fileno(), frame.length, frame.offset)
        content = points.decode_frame(number, frame, data)
        hasher.update(content)
        on_progress(0)
        yield content
    if hasher.hexdigest() != blob.stream_digest.partition(":")[2]:
        raise CorruptError(
            f"the layer {points.layer_digest} contains another stream than the image's "
            f"configuration says, {blob.stream_digest}"
        )
