"""Records: round trip, merging, and refusal of hostile or foreign ones."""

import itertools
import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.warm.record import (
    FileRange,
    WarmFile,
    WarmRecord,
    bounded,
    decode,
    encode,
    identity_of,
    key_of,
    merge_records,
    normalized,
    subtract,
)

_IDENTITY = "path:/lustre/env"
_MIB = 2**20


def _record(*files: WarmFile, count: int = 1) -> WarmRecord:
    return WarmRecord(_IDENTITY, "train", "inotify", count, 7, files)


def _file(path: bytes, *ranges: tuple[int, int], size: int = 10_000, mtime: int = 5) -> WarmFile:
    return WarmFile(path, size, mtime, tuple(FileRange(*numbers) for numbers in ranges))


def _pages(ranges: tuple[FileRange, ...]) -> set[int]:
    return {byte for found in ranges for byte in range(found.offset, found.end)}


_RANGES = st.lists(st.builds(FileRange, st.integers(0, 60), st.integers(1, 9)), max_size=8)


def test_a_record_comes_back_as_it_was() -> None:
    record = _record(
        _file(b"a/b.py", (0, 4096), (8192, 1000)), _file(b"\xff\xfe", mtime=-3), _file(b"c")
    )
    assert decode(encode(record), _IDENTITY, "train") == record
    assert encode(record) == encode(record)


@given(_RANGES, _RANGES)
def test_ranges_are_sets_of_bytes(left: list[FileRange], right: list[FileRange]) -> None:
    first, second = normalized(left), normalized(right)
    assert _pages(first) == _pages(tuple(left))
    assert all(a.end < b.offset for a, b in itertools.pairwise(first))
    assert _pages(subtract(first, second)) == _pages(first) - _pages(second)


def test_what_two_recordings_touched_is_united() -> None:
    old = _record(_file(b"same", (0, 10)), _file(b"changed", (0, 10)), _file(b"only old", (1, 2)))
    new = _record(
        _file(b"only new", (3, 4)), _file(b"changed", (5, 1), mtime=6), _file(b"same", (10, 5))
    )
    merged = merge_records(old, new)
    assert merged.recording_count == 2
    assert {file.path: file.ranges for file in merged.files} == {
        b"only new": (FileRange(3, 4),),
        b"changed": (FileRange(5, 1),),
        b"same": (FileRange(0, 15),),
        b"only old": (FileRange(1, 2),),
    }
    assert [file.path for file in merged.files][:2] == [b"only new", b"changed"]


def test_a_file_in_absurdly_many_pieces_becomes_one() -> None:
    file = _file(b"sparse", *((2 * n, 1) for n in range(70_000)), size=200_000)
    (kept,) = bounded([file])
    assert kept.ranges == (FileRange(0, 139_999),)


def test_identities_do_not_collide() -> None:
    assert key_of(identity_of("/a", None), "w") != key_of(identity_of("/a", "/a"), "w")
    assert key_of(identity_of("/\udcff", None), "w").count("/") == 2


def _hostile(*lines: object, **header: object) -> bytes:
    top = {**json.loads(zstandard.decompress(encode(_record())).decode()), **header}
    top.setdefault("file_count", 0)
    if "file_count" not in header:
        top["file_count"] = len(lines)
    text = "\n".join(json.dumps(line) for line in (top, *lines)) + "\n"
    return zstandard.ZstdCompressor(write_checksum=True).compress(text.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not zstd at all",
        encode(_record(_file(b"a", (0, 1))))[:-1],
        _hostile(["../etc/passwd", 10, 1, [0, 1]]),
        _hostile(["/etc/passwd", 10, 1, [0, 1]]),
        _hostile(["a/../../b", 10, 1, [0, 1]]),
        _hostile(["a\0b", 10, 1, [0, 1]]),
        _hostile(["a//b", 10, 1, [0, 1]]),
        _hostile(["", 10, 1, []]),
        _hostile(["x" * 5000, 10, 1, []]),
        _hostile(["a", 10, 1, [0]]),
        _hostile(["a", 10, 1, [0, 11]]),
        _hostile(["a", 10, 1, [0, 0]]),
        _hostile(["a", 10, 1, [0, 5, 3, 2]]),
        _hostile(["a", 10, 1, [-1, 5]]),
        _hostile(["a", -10, 1, []]),
        _hostile(["a", 10, 1.5, []]),
        _hostile(["a", 10, 1, [True, 1]]),
        _hostile(["a", 10, 1, [2**64, 1]]),
        _hostile(["a", 10, 1]),
        _hostile({"path": "a"}),
        _hostile(7),
        _hostile([None, 10, 1, []]),
        _hostile(file_count=1),
        _hostile(file_count=2**40),
        _hostile(recording_count="many"),
        _hostile(method=None),
        _hostile(identity="path:/other"),
        _hostile(workload="other"),
        zstandard.ZstdCompressor().compress(b"[" * 100_000),
        zstandard.ZstdCompressor().compress(b"\0" * 2**28),
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises((CorruptError, UnknownFormatError)):
        decode(data, _IDENTITY, "train")


def test_a_line_of_more_than_8_mib_is_refused() -> None:
    # Fewer ranges than a record may have, with numbers that make it no bomb.
    starts = (at * 2**43 + at * at * 12345 % 2**42 for at in range(2**19))
    ranges = [number for start in starts for number in (start, start % 997 + 1)]
    with pytest.raises(CorruptError, match="line"):
        decode(_hostile(["a", 2**63 - 1, 1, ranges]), _IDENTITY, "train")


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(UnknownFormatError, match="version 2"):
        decode(_hostile(version=2), _IDENTITY, "train")
