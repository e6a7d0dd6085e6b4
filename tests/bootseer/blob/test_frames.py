"""Frames: the ones that cover a range, and the checks before and after decompression."""

import io
import os
import struct
from array import array
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.blob.frames import FrameTable, decode_frame, frames_for
from bootseer.blob.pack import frame_writer
from bootseer.blob.pack.frame_writer import FrameWriter
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import CorruptError, InvalidInputError, UnsupportedError
from tests.bootseer.blob.trees import packed


def frame_of(data: bytes, stream_length: int) -> Frame:
    return Frame(7, len(data), 0, stream_length, content_digest(data))


@given(
    st.lists(st.integers(1, 50), max_size=10),
    st.integers(0, 600),
    st.integers(-3, 600),
    st.booleans(),
)
def test_frames_for_agrees_with_looking_at_every_byte(
    lengths: list[int], offset: int, length: int, columnar: bool
) -> None:
    count = len(lengths)
    table = FrameTable(array("I", [1] * count), array("I", lengths), bytes(32 * count))
    digest = "sha256:" + "0" * 64
    blob = Blob(digest, count, table if columnar else list(table), digest, sum(lengths))
    expected = [
        number
        for number, frame in enumerate(table)
        if any(
            frame.stream_offset <= byte < frame.stream_offset + frame.stream_length
            for byte in range(offset, offset + length)
        )
    ]
    assert list(frames_for(blob, offset, length)) == expected


def test_a_frame_table_is_a_sequence_of_frames() -> None:
    table = FrameTable(array("I", [5, 6]), array("I", [10, 20]), b"a" * 32 + b"b" * 32)
    frames = [Frame(0, 5, 0, 10, b"a" * 32), Frame(5, 6, 10, 20, b"b" * 32)]
    assert list(table) == frames
    assert table == frames
    assert table[-1] == frames[1]
    assert table[0:1] == frames[0:1]
    with pytest.raises(IndexError):
        table[2]
    with pytest.raises(CorruptError):
        FrameTable(array("I", [5]), array("I", [10, 20]), bytes(64))


@pytest.mark.parametrize(
    ("length", "stream_length"), [(0, 10), (5, 0), (5, 2**26 + 1), (2**27 + 1, 10)]
)
def test_empty_and_huge_frames_are_refused(length: int, stream_length: int) -> None:
    """A decompression allocates the size that the table says."""
    with pytest.raises(CorruptError, match="empty or too large"):
        FrameTable(array("I", [length]), array("I", [stream_length]), bytes(32))


def test_decode_frame_checks_before_and_after() -> None:
    data = zstandard.compress(b"x" * 1000)
    assert decode_frame(frame_of(data, 1000), data) == b"x" * 1000
    assert decode_frame(frame_of(data, 1000), memoryview(data)) == b"x" * 1000
    for frame, bad in (
        (frame_of(data, 1000), data[:-1]),
        (frame_of(data, 1000), data[:-1] + b"\0"),
        (frame_of(data, 999), data),
        (frame_of(data, 2**25), data),
        (frame_of(data + data, 1000), data + data),
        (frame_of(b"no zstd", 1000), b"no zstd"),
        (frame_of(data[:-1], 1000), data[:-1]),
    ):
        with pytest.raises(CorruptError):
            decode_frame(frame, bad)


def test_small_members_share_a_frame_and_large_ones_start_their_own() -> None:
    sink = io.BytesIO()
    with FrameWriter(sink, level=3, frame_bytes=4096, threads=2) as writer:
        for size in (1000, 2000, 2000, 3000, 3000):
            writer.reserve(size)
            writer.write(bytes(size))
        writer.cut()
        writer.cut()
        blob = writer.finish()
    assert [frame.stream_length for frame in blob.frames] == [3000, 2000, 3000, 3000]
    assert blob.size_bytes == len(sink.getvalue())
    assert sink.getvalue().endswith(b"\xb1\xea\x92\x8f")


def test_the_seek_table_says_what_the_index_says(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(300_000))
    (tmp_path / "text").write_bytes(b"text " * 30_000)
    tree, blob = packed(tmp_path)
    count, descriptor, magic = struct.unpack("<IBI", blob[-9:])
    assert (descriptor, magic) == (0, 0x8F92EAB1)
    table = blob[-9 - 8 * count - 8 :]
    assert struct.unpack("<II", table[:8]) == (0x184D2A5E, 8 * count + 9)
    entries = list(struct.iter_unpack("<II", table[8:-9]))
    frames = tree.blobs[0].frames
    assert entries == [(frame.length, frame.stream_length) for frame in frames]
    last = frames[-1]
    assert last.offset + last.length + len(table) == len(blob)


def test_the_seek_table_has_room_for_so_many_frames_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_writer, "SEEK_TABLE_FRAMES_MAX", 3)
    with FrameWriter(io.BytesIO(), level=1, frame_bytes=4096, threads=1) as writer:
        for _ in range(4):
            writer.write(bytes(4096))
        with pytest.raises(UnsupportedError, match="at most 3 frames"):
            writer.finish()


@pytest.mark.parametrize(
    ("level", "frame_bytes", "threads"),
    [(0, 2**17, 1), (23, 2**17, 1), (3, 1, 1), (3, 2**30, 1), (3, 2**17, 0)],
)
def test_options_out_of_range_are_refused(level: int, frame_bytes: int, threads: int) -> None:
    with pytest.raises(InvalidInputError):
        FrameWriter(io.BytesIO(), level=level, frame_bytes=frame_bytes, threads=threads)
