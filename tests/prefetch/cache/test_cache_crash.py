"""A crash of the machine, simulated: another boot id, and pages of any file lost or torn.

Whatever was lost, no wrong byte may be served, and what is intact must be found again.
"""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.prefetch.cache.node_cache import SECTOR_BYTES, NodeCache, StreamCache

DIGEST = "sha256:" + "ef" * 32
LENGTH = 200 * 4096 + 300
STREAM = random.Random(11).randbytes(LENGTH)
FOLDER = Path("streams-3") / DIGEST.replace(":", "-")
PAGE = 4096


def crash(tmp_path: Path) -> Path:
    """As if the machine had gone down with all written back; the stream's folder."""
    folder = tmp_path / FOLDER
    with (folder / "present").open("r+b") as file:
        file.seek(12)
        file.write(struct.pack("<I16s", 0, b"another boot id!"))
    return folder


def damage(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def check(stream: StreamCache, expected: set[int] | None = None) -> None:
    """No wrong byte is served; where it is known, just these sectors are here."""
    sectors = range(-(-LENGTH // SECTOR_BYTES))
    found = set()
    for sector in sectors:
        start = sector * SECTOR_BYTES
        count = min(SECTOR_BYTES, LENGTH - start)
        if stream.has(start, count):
            found.add(sector)
            assert stream.read(start, count) == STREAM[start : start + count]
    if expected is not None:
        assert found == expected


def written(tmp_path: Path, *ranges: tuple[int, int]) -> None:
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    for offset, length in ranges:
        assert stream.write(offset, STREAM[offset : offset + length])
    stream.close()


def test_only_what_is_intact_is_believed(tmp_path: Path) -> None:
    written(tmp_path, (0, 10 * PAGE), (10 * PAGE, PAGE), (20 * PAGE, LENGTH - 20 * PAGE))
    folder = crash(tmp_path)
    damage(folder / "data", 3 * PAGE, bytes(PAGE))
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    assert stream.present_bytes() == 0
    whole = set(range(-(-LENGTH // SECTOR_BYTES)))
    check(stream, whole - set(range(80)) - set(range(88, 160)))
    # What was lost is fetched, and all is here.
    assert list(stream.missing(0, 11 * PAGE)) == [(0, 10 * PAGE)]
    stream.write(0, STREAM[: 20 * PAGE])
    assert stream.read(0, LENGTH) == STREAM
    stream.close()
    crash(tmp_path)
    again = NodeCache(tmp_path).open_whole(DIGEST)
    assert again is not None
    check(again, whole)
    again.close()


def test_verifying_in_the_background_ends(tmp_path: Path) -> None:
    written(tmp_path, (0, LENGTH))
    folder = crash(tmp_path)
    damage(folder / "data", 0, b"torn")
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    other = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    assert not other.holds_now(300 * 1024, 1)
    stream.verify_all(lambda: False)
    assert stream.present_bytes() == 0
    stream.verify_all()
    assert stream.present_bytes() == LENGTH - 256 * 1024
    assert other.holds_now(300 * 1024, 1)
    assert (folder / "present").read_bytes()[40] == 0
    for one in (stream, other):
        check(one)
        one.close()


def test_a_clean_close_ends_no_suspicion(tmp_path: Path) -> None:
    written(tmp_path, (0, LENGTH))
    folder = crash(tmp_path)
    damage(folder / "data", 600 * 1024, bytes(PAGE))
    NodeCache(tmp_path).open_stream(DIGEST, LENGTH).close()
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    check(stream)
    assert not stream.has(600 * 1024, PAGE)
    assert stream.has(0, 256 * 1024)
    stream.close()


@pytest.mark.parametrize(
    "lose",
    [
        lambda folder: (folder / "sums").unlink(),
        lambda folder: (folder / "sums").write_bytes(b""),
        lambda folder: (folder / "sums").write_bytes(bytes(4096)),
        lambda folder: (folder / "data").write_bytes(b""),
        lambda folder: (folder / "data").unlink(),
    ],
    ids=["no log", "empty log", "zeroed log", "empty data", "no data"],
)
def test_lost_files_are_an_empty_cache(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    written(tmp_path, (0, LENGTH))
    lose(crash(tmp_path))
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    check(stream, set())
    stream.close()


def test_a_log_in_another_order_torn_at_its_end(tmp_path: Path) -> None:
    ranges = [(page * PAGE, PAGE) for page in range(200)]
    written(tmp_path, *ranges)
    folder = crash(tmp_path)
    log = (folder / "sums").read_bytes()
    records = [log[i : i + 32] for i in range(0, len(log), 32)]
    assert len(records) == 200
    lost = records.pop(77)
    random.Random(2).shuffle(records)
    (folder / "sums").write_bytes(b"".join(records) + lost[:20])
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    check(stream, set(range(1600)) - set(range(77 * 8, 78 * 8)))
    # Appending goes on at a record's place.
    stream.write(77 * PAGE, STREAM[77 * PAGE : 78 * PAGE])
    stream.close()
    crash(tmp_path)
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    check(stream, set(range(1600)))
    stream.close()


def test_a_whole_stream_survives_a_crash(tmp_path: Path) -> None:
    with NodeCache(tmp_path).new_stream() as new:
        new.append(STREAM)
        new.commit(DIGEST).close()
    crash(tmp_path)
    whole = NodeCache(tmp_path).open_whole(DIGEST)
    assert whole is not None
    whole.close()
    damage(crash(tmp_path) / "data", 5 * PAGE, bytes(PAGE))
    assert NodeCache(tmp_path).open_whole(DIGEST) is None


pages = st.integers(0, LENGTH // PAGE)
ranges = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 40 * PAGE)).map(
    lambda pair: (pair[0], min(pair[1], LENGTH - pair[0]))
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(ranges, max_size=8),
    lost=st.lists(pages, max_size=6),
    torn=st.lists(st.tuples(st.integers(0, LENGTH - 8), st.binary(min_size=1, max_size=8))),
    log_end=st.integers(0, 32 * 20),
    log_torn=st.lists(st.tuples(st.integers(0, 32 * 20), st.binary(min_size=1, max_size=8))),
    map_torn=st.lists(st.tuples(st.integers(0, 1600), st.binary(min_size=1, max_size=8))),
    after=st.lists(ranges, max_size=4),
)
def test_no_crash_serves_a_wrong_byte(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[int, int]],
    lost: list[int],
    torn: list[tuple[int, bytes]],
    log_end: int,
    log_torn: list[tuple[int, bytes]],
    map_torn: list[tuple[int, bytes]],
    after: list[tuple[int, int]],
) -> None:
    tmp_path = tmp_path_factory.mktemp("cache")
    written(tmp_path, *before)
    folder = tmp_path / FOLDER
    for position, data in map_torn:
        damage(folder / "present", position, data)
    crash(tmp_path)
    for page in lost:
        damage(folder / "data", page * PAGE, bytes(min(PAGE, LENGTH - page * PAGE)))
    for position, data in torn:
        damage(folder / "data", position, data)
    for position, data in log_torn:
        damage(folder / "sums", position, data)
    if log_end < (folder / "sums").stat().st_size:
        with (folder / "sums").open("r+b") as file:
            file.truncate(log_end)
    stream = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    for offset, length in after:
        if stream.has(offset, length):
            assert stream.read(offset, length) == STREAM[offset : offset + length]
        stream.write(offset, STREAM[offset : offset + length])
    check(stream)
    stream.close()
