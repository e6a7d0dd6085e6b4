"""Layout of a striped file: its segments, its parts, and the codec of the layout file.

A striped file is a sequence of *segments*. A save makes one segment; an append, or writing after
fsync, adds another. A segment's bytes are cut into stripe units, which are distributed round robin
over the segment's parts; each part is a file in `<directory>/.bootseer-parts/<generation>/`.

docs/format/stripe.md describes the layout file. Layout files are untrusted: every count and length
is checked before memory is allocated for it. Pure, deterministic; any thread.
"""

import re
import struct

import xxhash
from msgspec import Struct

from bootseer.errors import CorruptError, InvalidInputError, UnknownFormatError

PARTS_FOLDER = ".bootseer-parts"
MAGIC = b"\x93BSTRIPE"
VERSION = 1

DEFAULT_STRIPE_UNIT_BYTES = 4 * 2**20
DEFAULT_STRIPE_COUNT = 8
DEFAULT_BLOCK_BYTES = 256 * 2**10
"""Unit of verification, and so the least that a random read fetches. With 8 bytes of checksum for
each block and 32 bytes of digest for each stripe unit, a 1 GiB file has a 40 KiB layout."""

MIN_BLOCK_BYTES = 4 * 2**10
MAX_STRIPE_UNIT_BYTES = 2**30
MAX_PART_COUNT = 128
MAX_SEGMENT_COUNT = 16 * 2**10
MAX_BLOCK_COUNT = 4 * 2**20
MAX_LAYOUT_BYTES = 64 * 2**20

HEADER_BYTES = 128
CHECKSUM_XXH3_64 = 1

# Every layout file is padded to `4096 * k + 1729` bytes. A reader that has a directory listing
# (names and sizes) so knows, without opening it, that nearly every small file is *not* a layout.
_PAD_MODULUS = 4096
_PAD_RESIDUE = 1729

# magic, version, header length, generation, logical size, body length, body checksum,
# segment count, checksum kind, zeros; then the header's own checksum.
_HEADER = struct.Struct("<8sII16sQQQII56x")
# generation, size, stripe unit, block, part count
_SEGMENT = struct.Struct("<16sQQII")
# size, name padded with NULs
_PART = struct.Struct("<Q16s")
_U64 = struct.Struct("<Q")
_CHECKSUM_BYTES = _U64.size
_DIGEST_BYTES = 32

_GENERATION = re.compile(r"[0-9a-f]{32}")
_PART_NAME = re.compile(r"[0-9a-z][0-9a-z.]{0,15}")

assert _HEADER.size + _U64.size == HEADER_BYTES


class PartFile(Struct, frozen=True):
    """Physical file of a segment."""

    name: str
    size_bytes: int


class Segment(Struct, frozen=True):
    """Consecutive bytes of a logical file that were written by one save or append."""

    generation: str
    """32 hex digits: the name of the folder that holds the parts."""
    size_bytes: int
    stripe_unit_bytes: int
    block_bytes: int
    """Unit of verification; divides the stripe unit."""
    parts: tuple[PartFile, ...]
    checksums: bytes
    """xxh3-64 of each block, little-endian, in logical order."""
    digests: bytes
    """BLAKE3 digest of each stripe unit, in logical order."""

    @property
    def block_count(self) -> int:
        """Return the number of blocks; the last one may be short."""
        return -(-self.size_bytes // self.block_bytes)

    @property
    def unit_count(self) -> int:
        """Return the number of stripe units; the last one may be short."""
        return -(-self.size_bytes // self.stripe_unit_bytes)

    def checksum(self, block: int) -> int:
        """Return the xxh3-64 of block number `block`."""
        return int(_U64.unpack_from(self.checksums, block * _CHECKSUM_BYTES)[0])

    def digest(self, unit: int) -> bytes:
        """Return the BLAKE3 digest of stripe unit number `unit`."""
        return self.digests[unit * _DIGEST_BYTES : (unit + 1) * _DIGEST_BYTES]


class Layout(Struct, frozen=True):
    """Layout of a single generation of a striped file."""

    generation: str
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Return the logical file's length."""
        return sum(segment.size_bytes for segment in self.segments)


class Header(Struct, frozen=True):
    """The first `HEADER_BYTES` of a layout file: enough for stat(2)."""

    generation: str
    size_bytes: int
    body_bytes: int
    body_checksum: int
    segment_count: int


def block_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of one block."""
    return xxhash.xxh3_64_intdigest(data)


def pack_checksums(values: list[int]) -> bytes:
    """Encode checksums for `Segment.checksums`."""
    return struct.pack(f"<{len(values)}Q", *values)


def part_size(segment_bytes: int, unit_bytes: int, part_count: int, part: int) -> int:
    """Return the number of a segment's bytes that part number `part` holds."""
    rounds, rest = divmod(segment_bytes, unit_bytes * part_count)
    return rounds * unit_bytes + min(max(rest - part * unit_bytes, 0), unit_bytes)


def may_be_layout(size_bytes: int) -> bool:
    """Return whether a file of this size can be a layout file; False for most ordinary files."""
    return size_bytes <= MAX_LAYOUT_BYTES and size_bytes % _PAD_MODULUS == _PAD_RESIDUE


def check_geometry(stripe_unit_bytes: int, stripe_count: int, block_bytes: int) -> None:
    """Check the numbers of a layout. Raises: InvalidInputError with the allowed values."""
    if not MIN_BLOCK_BYTES <= block_bytes <= stripe_unit_bytes <= MAX_STRIPE_UNIT_BYTES:
        raise InvalidInputError(
            f"a stripe unit of {stripe_unit_bytes} bytes cannot be used; "
            f"choose {max(block_bytes, MIN_BLOCK_BYTES)} to {MAX_STRIPE_UNIT_BYTES} bytes"
        )
    if stripe_unit_bytes % block_bytes:
        raise InvalidInputError(
            f"a stripe unit of {stripe_unit_bytes} bytes is not a multiple of {block_bytes} bytes"
        )
    if not 1 <= stripe_count <= MAX_PART_COUNT:
        raise InvalidInputError(
            f"a stripe count of {stripe_count} cannot be used; choose 1 to {MAX_PART_COUNT}"
        )


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout file. Deterministic. Raises: InvalidInputError."""
    if not 1 <= len(layout.segments) <= MAX_SEGMENT_COUNT:
        raise InvalidInputError(
            f"a striped file has 1 to {MAX_SEGMENT_COUNT} segments, not {len(layout.segments)}"
        )
    if len({segment.generation for segment in layout.segments}) != len(layout.segments):
        raise InvalidInputError("two segments of a layout have the same generation")
    body = bytearray()
    for segment in layout.segments:
        _check_segment(segment, InvalidInputError, "this layout")
        body += _SEGMENT.pack(
            bytes.fromhex(segment.generation),
            segment.size_bytes,
            segment.stripe_unit_bytes,
            segment.block_bytes,
            len(segment.parts),
        )
        for part in segment.parts:
            body += _PART.pack(part.size_bytes, part.name.encode("ascii"))
    for segment in layout.segments:
        body += segment.checksums + segment.digests
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        bytes.fromhex(layout.generation),
        layout.size_bytes,
        len(body),
        xxhash.xxh3_64_intdigest(body),
        len(layout.segments),
        CHECKSUM_XXH3_64,
    )
    data = header + _U64.pack(xxhash.xxh3_64_intdigest(header)) + body
    data += bytes((_PAD_RESIDUE - len(data)) % _PAD_MODULUS)
    if len(data) > MAX_LAYOUT_BYTES:
        raise InvalidInputError(f"the layout would have {len(data)} bytes, over {MAX_LAYOUT_BYTES}")
    return data


def decode_header(data: bytes, what: str) -> Header | None:
    """Decode the header at the start of `data`; return None if `data` is not a layout file.

    `what` names the file in messages. Raises: CorruptError, UnknownFormatError.
    """
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    # The version comes first: a later version may lay out everything behind it differently.
    _, version, header_bytes, *_ = _HEADER.unpack_from(data)
    if version != VERSION:
        raise UnknownFormatError(
            f"{what} is a striped file of format version {version}; this release reads {VERSION}: "
            "upgrade bootseer"
        )
    (checksum,) = _U64.unpack_from(data, _HEADER.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: _HEADER.size]) or header_bytes != HEADER_BYTES:
        raise CorruptError(f"the layout header of {what} is damaged")
    (_, _, _, generation, size, body_bytes, body_checksum, segments, kind) = _HEADER.unpack_from(
        data
    )
    if kind != CHECKSUM_XXH3_64:
        raise UnknownFormatError(f"{what} uses checksum kind {kind}; this release reads 1")
    if not 1 <= segments <= MAX_SEGMENT_COUNT or body_bytes > MAX_LAYOUT_BYTES - HEADER_BYTES:
        raise CorruptError(f"the layout header of {what} has impossible lengths")
    return Header(generation.hex(), size, body_bytes, body_checksum, segments)


def decode_layout(data: bytes, what: str) -> Layout:
    """Decode a whole layout file, and check all of it.

    Raises: CorruptError, UnknownFormatError.
    """
    header = decode_header(data, what)
    if header is None:
        raise CorruptError(f"{what} is not a layout file")
    body = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    if len(body) != header.body_bytes or not may_be_layout(len(data)):
        raise CorruptError(f"the layout of {what} is cut short")
    if xxhash.xxh3_64_intdigest(body) != header.body_checksum:
        raise CorruptError(f"the layout of {what} is damaged: its checksum does not match")
    try:
        segments = _decode_segments(body, header.segment_count, what)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptError(f"the layout of {what} ends too early or names no part") from error
    layout = Layout(header.generation, segments)
    if layout.size_bytes != header.size_bytes:
        raise CorruptError(f"the layout of {what} contradicts its own size")
    if len({segment.generation for segment in segments}) != len(segments):
        raise CorruptError(f"the layout of {what} names one generation twice")
    return layout


def _decode_segments(body: memoryview, count: int, what: str) -> tuple[Segment, ...]:
    heads: list[tuple[str, int, int, int, tuple[PartFile, ...]]] = []
    position = 0
    for _ in range(count):
        generation, size, unit, block, part_count = _SEGMENT.unpack_from(body, position)
        position += _SEGMENT.size
        if not 1 <= part_count <= MAX_PART_COUNT or min(block, unit) < MIN_BLOCK_BYTES:
            raise CorruptError(f"the layout of {what} has a segment with impossible counts")
        parts = []
        for _ in range(part_count):
            part_bytes, name = _PART.unpack_from(body, position)
            position += _PART.size
            parts.append(PartFile(name.rstrip(b"\0").decode("ascii"), part_bytes))
        heads.append((generation.hex(), size, unit, block, tuple(parts)))
    segments = []
    for generation, size, unit, block, parts_of in heads:
        middle = position + -(-size // block) * _CHECKSUM_BYTES
        end = middle + -(-size // unit) * _DIGEST_BYTES
        checksums, digests = bytes(body[position:middle]), bytes(body[middle:end])
        position = end
        segment = Segment(generation, size, unit, block, parts_of, checksums, digests)
        _check_segment(segment, CorruptError, what)
        segments.append(segment)
    if position != len(body):
        raise CorruptError(f"the layout of {what} has {len(body) - position} bytes too many")
    return tuple(segments)


def _check_segment(
    segment: Segment, error: type[CorruptError] | type[InvalidInputError], what: str
) -> None:
    try:
        check_geometry(segment.stripe_unit_bytes, len(segment.parts), segment.block_bytes)
    except InvalidInputError as cause:
        raise error(f"{what}: {cause}") from cause
    if not _GENERATION.fullmatch(segment.generation) or segment.size_bytes < 1:
        raise error(f"{what}: a segment has no generation or no bytes")
    if segment.block_count > MAX_BLOCK_COUNT:
        raise error(f"{what}: a segment has more than {MAX_BLOCK_COUNT} checksum blocks")
    if len(segment.checksums) != segment.block_count * _CHECKSUM_BYTES:
        raise error(f"{what}: a segment has the wrong number of checksums")
    if len(segment.digests) != segment.unit_count * _DIGEST_BYTES:
        raise error(f"{what}: a segment has the wrong number of digests")
    names = {part.name for part in segment.parts}
    if len(names) != len(segment.parts) or not all(map(_PART_NAME.fullmatch, names)):
        raise error(f"{what}: a part's name is unusable or used twice")
    for index, part in enumerate(segment.parts):
        expected = part_size(
            segment.size_bytes, segment.stripe_unit_bytes, len(segment.parts), index
        )
        if part.size_bytes != expected or expected == 0:
            raise error(
                f"{what}: part {part.name} should have {expected} bytes, not {part.size_bytes}"
            )
