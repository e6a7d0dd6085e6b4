"""Seek points of a gzip layer: states from which decompression can begin in the middle.

A gzip stream has no index, but a decompressor can begin at the start of any deflate block, given
the bit at which the block begins and the 32 KiB of output before it (Mark Adler, examples/zran.c of
zlib; SOCI's zTOC and Nydus' zran work in the same way). A `SeekPoints` object has these states for
one layer, so that a node reads the unmodified layer from its registry by ranges, and no copy of the
layer is stored. docs/format/seekpoints.md has the format.

The bytes between two points are a *span*: one frame of a blob in a tree index, which has the digest
of the compressed bytes. The index names the object by its SHA-256, so windows and compressed bytes
are both verified before a decompressor sees them.

Python's zlib cannot begin inside a byte (`inflatePrime` has no binding). So a span is preceded by
empty deflate blocks that end at the same bit of a byte: `_LEADS`.

Pure and thread-safe; decompression releases the GIL.
"""

import struct
from collections.abc import Sequence

import zstandard
from msgspec import Struct

from bootseer.base.content_digest import content_digest
from bootseer.blob.tar.inflate import ERRORS, deflate_library
from bootseer.blob.tree import Frame
from bootseer.errors import CorruptError, UnknownFormatError

WINDOW_BYTES = 2**15
"""Largest distance of a deflate match (RFC 1951, 2)."""
UNIT_BYTES = 512
"""Block size of tar. Frames are cut at multiples of it, so that no tar block is in two frames. The
bytes from a cut to the next deflate block are at the end of that block's window."""
VERSION = 1
_MAGIC = b"BOOTSEEK"
_HEADER = struct.Struct("<8sHHIQ32s")
_POINT = struct.Struct("<IHBBBB")
_GZIP_WBITS = 31
_RAW_WBITS = -15
_TRAILER_BYTES = 8


_ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
"""Order of the code lengths' own code lengths (RFC 1951, 3.2.7)."""
_FIXED_BLOCK = ((0, 1), (1, 2), (0, 7))
"""Empty block with fixed codes: 10 bits."""
_DYNAMIC_BLOCK = (
    *((0, 1), (2, 2), (0, 5), (1, 5), (15, 4)),
    *((int(symbol in (1, 18)), 3) for symbol in _ORDER),
    # Literal 0 and the end (256) with 138 and 117 zeros between them, then two distances. All codes
    # have one bit, so that each set of codes is complete, as strict decoders require.
    *((0, 1), (1, 1), (138 - 11, 7), (1, 1), (117 - 11, 7), (0, 1), (0, 1), (0, 1)),
    (1, 1),
)
"""Empty block with dynamic codes: 95 bits, an odd number."""


def _leads() -> tuple[tuple[int, int], ...]:
    """Return empty blocks that end after 0, 1, ... 7 bits of a byte.

    Each is a pair: the bits as a number, lowest first, and their count.
    """
    found: dict[int, tuple[int, int]] = {}
    for first in ((), _DYNAMIC_BLOCK):
        for count in range(4):
            value = length = 0
            for bits, width in (*first, *_FIXED_BLOCK * count):
                value |= bits << length
                length += width
            found.setdefault(length % 8, (value, length))
    return tuple(found[used] for used in range(8))


_LEADS = _leads()


class SeekPoint(Struct, frozen=True):
    """State from which one span is decompressed."""

    is_member: bool
    """Whether the span begins with a gzip header instead of a deflate block."""
    unused_bits: int
    """Number of the highest bits of `byte` that belong to the span, 0 to 7."""
    byte: int
    """Byte before the span; 0 if none of its bits belongs to the span."""
    skipped_bytes: int
    """Number of bytes, below `UNIT_BYTES`, at the end of the window that begin the content."""
    window: bytes
    """Output before the block, at most `WINDOW_BYTES`, as a zstd frame; b"" if there is none."""


class SeekPoints(Struct, frozen=True):
    """Seek points of one gzip layer, one per frame of its blob in a tree index."""

    layer_digest: str
    """`sha256:<hex>` of the gzip file, as an image's manifest names the layer."""
    layer_bytes: int
    """Size of the gzip file."""
    points: Sequence[SeekPoint]

    def decode_frame(self, number: int, frame: Frame, data: bytes | memoryview) -> bytes:
        """Return the content of frame `number` from its stored bytes, after verifying their digest.

        Raises: CorruptError if `data` is not exactly the stored span, or does not decompress to the
        frame's length.
        """
        where = f"the span at offset {frame.offset} of the layer {self.layer_digest}"
        if len(data) != frame.length or content_digest(data) != frame.digest:
            raise CorruptError(f"{where} does not match its digest")
        if number >= len(self.points):
            raise CorruptError(f"{where} has no seek point")
        point = self.points[number]
        window = _window(point, where)
        skipped = window[len(window) - point.skipped_bytes :]
        if len(skipped) != point.skipped_bytes or len(skipped) > frame.stream_length:
            raise CorruptError(f"{where} has a window that is too short")
        try:
            pieces = _inflated(point, window, data, frame.stream_length - len(skipped))
        except ERRORS as error:
            raise CorruptError(f"{where} cannot be decompressed: {error}") from error
        content = b"".join((skipped, *pieces))
        if len(content) != frame.stream_length:
            raise CorruptError(f"{where} has a wrong length")
        return content


def _window(point: SeekPoint, where: str) -> bytes:
    if not point.window:
        return b""
    try:
        if not 0 < zstandard.frame_content_size(point.window) <= WINDOW_BYTES:
            raise CorruptError(f"{where} has a window that is too large")
        return zstandard.ZstdDecompressor().decompress(
            point.window, max_output_size=WINDOW_BYTES, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where} has a damaged window") from error


def _inflated(
    point: SeekPoint, window: bytes, data: bytes | memoryview, length: int
) -> list[bytes]:
    """Return at most `length` bytes of a span's output, in pieces.

    The checksums of gzip members are not verified, since the span's digest was. Raises: one of
    `ERRORS`.
    """
    if point.is_member:
        inflater = deflate_library.decompressobj(_GZIP_WBITS)
    else:
        inflater = deflate_library.decompressobj(_RAW_WBITS, zdict=window)
        if point.unused_bits:
            used = 8 - point.unused_bits
            value, count = _LEADS[used]
            value |= point.byte >> used << count
            data = value.to_bytes(-(-count // 8), "little") + data
    pieces = []
    is_raw = not point.is_member
    while length:
        piece = inflater.decompress(data, length)
        pieces.append(piece)
        length -= len(piece)
        if not inflater.eof:
            break
        # pigz and eStargz write several members; zeros may follow the last one.
        data = inflater.unused_data[_TRAILER_BYTES if is_raw else 0 :].lstrip(b"\0")
        if not data:
            break
        inflater, is_raw = deflate_library.decompressobj(_GZIP_WBITS), False
    return pieces


def encode(points: SeekPoints) -> bytes:
    """Return the encoded seek points. The same points give the same bytes."""
    raw = bytes.fromhex(points.layer_digest.partition(":")[2])
    header = _HEADER.pack(_MAGIC, VERSION, 0, len(points.points), points.layer_bytes, raw)
    table = b"".join(
        _POINT.pack(len(one.window), one.skipped_bytes, one.unused_bits, one.byte, one.is_member, 0)
        for one in points.points
    )
    return b"".join((header, table, *(one.window for one in points.points)))


HEAD_BYTES = _HEADER.size


def layer_digest_of(head: bytes) -> str:
    """Return the layer's digest from the first bytes of seek points, without verification.

    Return "" if `head` is not the start of seek points that this release reads.
    """
    if len(head) < HEAD_BYTES:
        return ""
    magic, version, *_, raw = _HEADER.unpack_from(head)
    return f"sha256:{raw.hex()}" if (magic, version) == (_MAGIC, VERSION) else ""


def decode(data: bytes) -> SeekPoints:
    """Return the seek points in an object whose digest the caller has verified.

    Raises: UnknownFormatError for another kind of file or a later version; CorruptError.
    """
    if data[:8] != _MAGIC:
        raise UnknownFormatError("no seek points: the magic number is missing")
    if len(data) < _HEADER.size:
        raise CorruptError("the seek points are cut off in their header")
    _, version, reserved, count, layer_bytes, raw = _HEADER.unpack_from(data)
    if version != VERSION:
        raise UnknownFormatError(
            f"these seek points have version {version}; this release reads version {VERSION}"
        )
    start = _HEADER.size + count * _POINT.size
    if reserved or not count or start > len(data):
        raise CorruptError("the table of the seek points is cut off")
    points = []
    for one in _POINT.iter_unpack(memoryview(data)[_HEADER.size : start]):
        window_bytes, skipped, unused_bits, byte, is_member, zero = one
        end = start + window_bytes
        if unused_bits > 7 or is_member > 1 or zero or skipped >= UNIT_BYTES or end > len(data):
            raise CorruptError("a seek point makes no sense")
        if byte and not unused_bits:
            raise CorruptError("a seek point has a byte before its span that it does not use")
        if is_member and (unused_bits or skipped or window_bytes):
            raise CorruptError("a seek point at the start of a member has a state")
        points.append(SeekPoint(bool(is_member), unused_bits, byte, skipped, data[start:end]))
        start = end
    if start != len(data):
        raise CorruptError("the seek points do not add up to the length of their file")
    return SeekPoints(f"sha256:{raw.hex()}", layer_bytes, points)
