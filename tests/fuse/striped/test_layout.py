"""Layout codec and address arithmetic against a byte-by-byte oracle."""

import functools
import hashlib
import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError, InvalidInputError, UnknownFormatError
from bootseer.fuse.striped import layout as codec
from bootseer.fuse.striped.layout import (
    HEADER_BYTES,
    MIN_BLOCK_BYTES,
    Layout,
    PartFile,
    Segment,
    block_checksum,
    decode_header,
    decode_layout,
    encode_layout,
    may_be_layout,
    pack_checksums,
    part_size,
)
from bootseer.fuse.striped.view import ByteRange, FileView, pieces

BLOCK = MIN_BLOCK_BYTES


def deal(data: bytes, unit: int, count: int) -> list[bytearray]:
    """Return the parts by the oracle: byte i is in the part of its unit's number modulo the
    count."""
    parts = [bytearray() for _ in range(count)]
    for index, byte in enumerate(data):
        parts[index // unit % count].append(byte)
    return parts


def segment_of(data: bytes, unit: int, count: int, generation: str = "a" * 32) -> Segment:
    used = min(count, -(-len(data) // unit))
    parts = deal(data, unit, used)
    sums = [block_checksum(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return Segment(
        generation,
        len(data),
        unit,
        BLOCK,
        tuple(PartFile(f"{i:02x}", len(part)) for i, part in enumerate(parts)),
        pack_checksums(sums),
        b"".join(content_digest(data[at : at + unit]) for at in range(0, len(data), unit)),
    )


def small_segment(size: int, units: int, count: int, seed: int = 0) -> tuple[bytes, Segment]:
    data = random.Random(seed).randbytes(size)
    return data, segment_of(data, units * BLOCK, count, f"{seed:032x}")


@given(
    size=st.integers(1, 9 * BLOCK),
    units=st.integers(1, 3),
    count=st.integers(1, 5),
    offset=st.integers(0, 9 * BLOCK),
    length=st.integers(0, 9 * BLOCK),
)
@settings(max_examples=60)
def test_pieces_agree_with_dealing_byte_by_byte(
    size: int, units: int, count: int, offset: int, length: int
) -> None:
    data, segment = small_segment(size, units, count)
    parts = deal(data, units * BLOCK, len(segment.parts))
    found = b""
    for piece in pieces(segment, offset, length):
        stored = parts[piece.part][piece.part_offset : piece.part_offset + piece.length]
        assert len(stored) == piece.length
        found += stored
    assert found == data[offset : offset + length]


@given(size=st.integers(0, 10**6), unit=st.integers(1, 10**4), count=st.integers(1, 9))
def test_part_sizes_add_up(size: int, unit: int, count: int) -> None:
    sizes = [part_size(size, unit, count, part) for part in range(count)]
    assert sum(sizes) == size
    assert sizes == sorted(sizes, reverse=True) or max(sizes) - min(sizes) <= unit


segments = st.builds(
    lambda size, units, count, seed: small_segment(size, units, count, seed),
    st.integers(1, 9 * BLOCK),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 2**64),
)

distinct = st.lists(segments, min_size=1, max_size=4, unique_by=lambda made: made[1].generation)


@given(distinct)
@settings(max_examples=40)
def test_a_view_finds_and_verifies_every_byte(made: list[tuple[bytes, Segment]]) -> None:
    layout = Layout("f" * 32, tuple(segment for _, segment in made))
    whole = b"".join(data for data, _ in made)
    stored = {
        f"d/.bootseer-parts/{segment.generation}/{part.name}": bytes(content)
        for data, segment in made
        for part, content in zip(
            segment.parts, deal(data, segment.stripe_unit_bytes, len(segment.parts)), strict=True
        )
    }
    view = FileView("d/file", "x", layout.size_bytes, 0, layout)
    for cut in (view.unit_at, view.block_at):
        rebuilt = bytearray()
        while len(rebuilt) < len(whole):
            span = cut(len(rebuilt))
            assert span.start == len(rebuilt) < span.end
            path, offset = view.source(span)
            data = stored[path][offset : offset + span.length]
            view.verify(span, memoryview(data))
            if cut == view.unit_at:
                assert view.digest(span) == content_digest(data)
            flipped = bytearray(data)
            flipped[-1] ^= 1
            with pytest.raises(CorruptError):
                view.verify(span, memoryview(flipped))
            rebuilt += data
        assert rebuilt == whole


def test_an_ordinary_file_is_cut_into_the_same_units() -> None:
    view = FileView("plain", "x", 9 * 2**20)
    assert view.unit_at(5 * 2**20) == ByteRange(4 * 2**20, 8 * 2**20)
    assert view.unit_at(9 * 2**20 - 1) == ByteRange(8 * 2**20, 9 * 2**20)
    assert view.source(ByteRange(4 * 2**20, 8 * 2**20)) == ("plain", 4 * 2**20)


@given(distinct)
@settings(max_examples=40)
def test_encoding_round_trips(made: list[tuple[bytes, Segment]]) -> None:
    layout = Layout("0" * 31 + "1", tuple(segment for _, segment in made))
    data = encode_layout(layout)
    assert data == encode_layout(layout)
    assert may_be_layout(len(data))
    assert decode_layout(data, "f") == layout
    header = decode_header(data[:HEADER_BYTES], "f")
    assert header is not None
    assert (header.size_bytes, header.generation) == (layout.size_bytes, layout.generation)


@functools.cache
def encoded() -> bytes:
    return encode_layout(Layout("1" * 32, (small_segment(5 * BLOCK + 7, 2, 2)[1],)))


@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(max_examples=120)
def test_any_flipped_bit_is_refused_or_changes_nothing(position: int, bit: int) -> None:
    data = bytearray(encoded())
    data[position % len(data)] ^= 1 << bit
    try:
        result = decode_layout(bytes(data), "f")
    except (CorruptError, UnknownFormatError):
        return
    # Only the padding has no checksum.
    assert result == decode_layout(encoded(), "f")


@given(st.integers(0, len(encoded()) - 1))
def test_a_truncated_layout_is_refused(length: int) -> None:
    with pytest.raises(CorruptError):
        decode_layout(encoded()[:length], "f")


def reseal(data: bytearray) -> bytes:
    """Return `data` with both checksums made right, as an attacker would write it."""
    (body_bytes,) = struct.unpack_from("<Q", data, 40)
    body = data[HEADER_BYTES : HEADER_BYTES + body_bytes]
    struct.pack_into("<Q", data, 48, xxhash.xxh3_64_intdigest(body))
    struct.pack_into("<Q", data, 120, xxhash.xxh3_64_intdigest(data[:120]))
    return bytes(data)


@given(position=st.integers(16, 400), value=st.binary(min_size=1, max_size=8))
@settings(max_examples=150)
def test_a_hostile_layout_with_right_checksums_is_bounded(position: int, value: bytes) -> None:
    data = bytearray(encoded())
    data[position : position + len(value)] = value
    try:
        layout = decode_layout(reseal(data), "f")
    except (CorruptError, UnknownFormatError):
        return
    assert len(layout.segments) <= codec.MAX_SEGMENT_COUNT
    for segment in layout.segments:
        assert "/" not in "".join(part.name for part in segment.parts)
        assert len(segment.checksums) + len(segment.digests) < len(data)


def test_an_unknown_version_is_named() -> None:
    data = bytearray(encoded())
    struct.pack_into("<I", data, 8, 2)
    with pytest.raises(UnknownFormatError, match="version 2"):
        decode_layout(bytes(data), "f")


def test_a_part_name_cannot_leave_its_folder() -> None:
    data = bytearray(encoded())
    at = data.index(b"00" + bytes(14))
    data[at : at + 16] = b"../../etc/passwd"
    with pytest.raises(CorruptError, match="name"):
        decode_layout(reseal(data), "f")


def test_what_is_no_layout_is_recognised() -> None:
    assert decode_header(b"PK\x03\x04" * 100, "f") is None
    assert decode_header(b"", "f") is None
    assert not may_be_layout(4096)


@pytest.mark.parametrize(
    ("unit", "count"),
    [(0, 8), (BLOCK - 1, 8), (BLOCK + 1, 8), (2**31, 8), (BLOCK, 0), (BLOCK, 999)],
)
def test_unusable_geometry_is_refused(unit: int, count: int) -> None:
    with pytest.raises(InvalidInputError):
        codec.check_geometry(unit, count, BLOCK)


def test_version_1_stays_as_it_is() -> None:
    """A layout's bytes must decode, and encode to the same bytes, for ever."""
    data = encoded()
    assert len(data) == 1729
    assert hashlib.sha256(data).hexdigest() == (
        "c46b9ce29b104cf12df9eaa4373f42b0b97ed93df5ad9ea0cf234cd177825bc9"
    )
