"""Format of bundles: planning, the codec, and hostile headers."""

import hashlib
import io
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError, UnknownFormatError
from bootseer.prefetch.bundle import format as bundle_format
from bootseer.prefetch.bundle.file import ExtentMap
from bootseer.prefetch.bundle.format import (
    SECTOR_BYTES,
    Bundle,
    decode_frame,
    decode_header,
    plan_frames,
    write_bundle,
)
from testbed.bounded import run_bounded

INDEX = "sha256:" + "12" * 32
LENGTHS = (40 * 512 + 77, 9 * 512)
STREAMS = [bytes((i * 31 + n) % 256 for i in range(length)) for n, length in enumerate(LENGTHS)]


def read(blob: int, offset: int, length: int) -> bytes:
    return STREAMS[blob][offset : offset + length]


@st.composite
def stream_range(draw: st.DrawFn) -> tuple[int, int, int]:
    blob = draw(st.integers(0, 1))
    offset = draw(st.integers(0, LENGTHS[blob] - 1))
    return blob, offset, draw(st.integers(1, LENGTHS[blob] - offset))


range_lists = st.lists(stream_range(), max_size=12)


def built(ranges: list[tuple[int, int, int]], frame_bytes: int = 2048) -> tuple[bytes, list[bytes]]:
    parts = [io.BytesIO() for _ in range(3)]
    header = write_bundle(INDEX, plan_frames(ranges, LENGTHS, frame_bytes), read, parts)
    return header, [part.getvalue() for part in parts]


def sectors(blob: int, offset: int, length: int) -> set[tuple[int, int]]:
    first, end = offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES)
    return {(blob, sector) for sector in range(first, end)}


@settings(max_examples=80)
@given(range_lists)
def test_round_trip_holds_exactly_what_was_wanted(ranges: list[tuple[int, int, int]]) -> None:
    header, parts = built(ranges)
    assert built(ranges) == (header, parts)
    bundle = decode_header(header, INDEX, LENGTHS)
    assert bundle.size_bytes == len(header) + sum(map(len, parts))
    found: set[tuple[int, int]] = set()
    for number, frame in enumerate(bundle.frames):
        assert 0 < frame.stream_length <= 2048
        assert frame.part == number % 3
        stored = parts[frame.part][frame.offset : frame.offset + frame.length]
        assert content_digest(stored) == frame.digest
        content = decode_frame(frame, stored)
        assert content == b"".join(read(*extent) for extent in frame.extents)
        for extent in frame.extents:
            piece = sectors(*extent)
            assert not piece & found
            found |= piece
    wanted: set[tuple[int, int]] = set()
    for item in ranges:
        wanted |= sectors(*item)
    assert found == wanted


@settings(max_examples=60)
@given(range_lists, stream_range())
def test_placement_against_a_model(
    ranges: list[tuple[int, int, int]], asked: tuple[int, int, int]
) -> None:
    bundle = decode_header(built(ranges)[0], INDEX, LENGTHS)
    blob, offset, length = asked
    assert ExtentMap(bundle.frames, 2).frames_for(blob, offset, length) == [
        number
        for number, frame in enumerate(bundle.frames)
        if any(
            e.blob == blob and e.offset < offset + length and offset < e.offset + e.length
            for e in frame.extents
        )
    ]


def test_order_of_use_is_kept() -> None:
    frames = plan_frames([(1, 1024, 512), (0, 0, 512), (1, 1536, 512)], LENGTHS, 512)
    assert [frame[0][:2] for frame in frames] == [(1, 1024), (0, 0), (1, 1536)]


@settings(max_examples=150)
@given(st.data())
def test_damaged_header_is_refused(data: st.DataObject) -> None:
    header = bytearray(built([(0, 0, 5000), (1, 512, 100)])[0])
    position = data.draw(st.integers(0, len(header) - 1))
    header[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BootseerError):
        decode_header(bytes(header), INDEX, LENGTHS)
    with pytest.raises(BootseerError):
        decode_header(bytes(header[:position]), INDEX, LENGTHS)


def forged(frames: list[tuple[int, int, int]], extents: list[tuple[int, int, int]]) -> bytes:
    """Return a header with a right checksum and wrong content."""
    raw = b"".join(struct.pack("<III32s", *frame, b"d" * 32) for frame in frames)
    raw += b"".join(struct.pack("<QII", *extent) for extent in extents)
    packed = zstandard.ZstdCompressor().compress(raw)
    head = struct.pack(
        "<8sII32sIIII",
        b"BSBUNDLE",
        1,
        1,
        bytes.fromhex(INDEX[7:]),
        len(packed),
        len(raw),
        len(frames),
        len(extents),
    )
    return head + packed + hashlib.sha256(head + packed).digest()


def test_the_forger_can_forge() -> None:
    bundle = decode_header(forged([(10, 512, 1)], [(512, 0, 512)]), INDEX, LENGTHS)
    assert isinstance(bundle, Bundle)


@pytest.mark.parametrize(
    ("frames", "extents"),
    [
        ([(10, 512, 1)], [(512, 2, 512)]),
        ([(10, 512, 1)], [(100, 0, 512)]),
        ([(10, 500, 1)], [(0, 0, 500)]),
        ([(10, 512, 1)], [(2**63, 0, 512)]),
        ([(10, 512, 1)], [(9 * 512, 1, 512)]),
        ([(10, 1024, 1)], [(0, 0, 512)]),
        ([(0, 512, 1)], [(0, 0, 512)]),
        ([(10, 0, 0)], []),
        ([(10, 512, 1)], [(0, 0, 512), (512, 0, 512)]),
        ([(10, 512, 2)], [(0, 0, 512)]),
        ([(2**32 - 1, 512, 1)], [(0, 0, 512)]),
    ],
)
def test_forged_tables_are_refused(
    frames: list[tuple[int, int, int]], extents: list[tuple[int, int, int]]
) -> None:
    with pytest.raises(CorruptError):
        decode_header(forged(frames, extents), INDEX, LENGTHS)


def test_another_image_and_another_version_are_refused() -> None:
    header = built([(0, 0, 512)])[0]
    with pytest.raises(CorruptError, match="another image"):
        decode_header(header, "sha256:" + "99" * 32, LENGTHS)
    newer = header[:8] + b"\2" + header[9:]
    with pytest.raises(UnknownFormatError, match="version 2"):
        decode_header(newer, INDEX, LENGTHS)
    with pytest.raises(UnknownFormatError):
        decode_header(b"", INDEX, LENGTHS)


@pytest.mark.parametrize("count", [0, 257])
def test_impossible_part_counts_are_refused(count: int) -> None:
    header = bytearray(built([(0, 0, 512)])[0])
    header[12:16] = struct.pack("<I", count)
    header[-32:] = hashlib.sha256(header[:-32]).digest()
    with pytest.raises(CorruptError, match="parts"):
        decode_header(bytes(header), INDEX, LENGTHS)


def test_a_frame_that_announces_another_length_is_refused() -> None:
    bundle = decode_header(built([(0, 0, 512)])[0], INDEX, LENGTHS)
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    with pytest.raises(CorruptError):
        decode_frame(bundle.frames[0], bomb)


@pytest.mark.parametrize(
    ("frame_count", "extent_count"), [(1_500_000, 1_500_000), (2**17, 2**17), (1, 2**22)]
)
def test_a_small_header_makes_few_objects(frame_count: int, extent_count: int) -> None:
    each = extent_count // frame_count
    header = forged([(10, 512 * each, each)] * frame_count, [(0, 0, 512)] * extent_count)
    assert len(header) < 30_000

    def read() -> None:
        decode_header(header, INDEX, LENGTHS)

    assert not run_bounded(read, (CorruptError,), memory_bytes=2**26)


def test_a_bundle_holds_no_more_than_the_image() -> None:
    with pytest.raises(CorruptError, match="more bytes"):
        decode_header(forged([(10, 512, 1)] * 100, [(0, 0, 512)] * 100), INDEX, LENGTHS)


def test_a_stream_that_says_it_has_a_terabyte_costs_nothing_to_plan() -> None:
    def planned() -> None:
        ranges = [(0, 2**39, 4096), (1, 0, 512), (0, 2**39 - 512, 8192)]
        frames = plan_frames(ranges, [2**40, 2**40])
        assert [extent.length for extent in frames[0]] == [4096, 512, 512, 3584]

    assert run_bounded(planned, memory_bytes=2**24)


def test_what_is_behind_the_last_extent_of_a_bundle_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundle_format, "EXTENT_COUNT_MAX", 2)
    frames = plan_frames([(0, 0, 512), (0, 4096, 512), (0, 8192, 512)], LENGTHS)
    assert [extent.offset for frame in frames for extent in frame] == [0, 4096]
