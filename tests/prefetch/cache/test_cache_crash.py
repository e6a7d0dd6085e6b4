"""Simulated crash of the machine: another boot id, and lost or torn pages of any file.

No wrong byte may be served, and intact content must be found again.
"""

import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache

DIGEST = "sha256:" + "ef" * 32
PAGE = 4096
LENGTH = 200 * PAGE + 300
STREAM = random.Random(11).randbytes(LENGTH)
STARTS = (*range(0, LENGTH, 10 * PAGE), LENGTH)
PIECES = range(len(STARTS) - 1)
FOLDER = Path("streams") / DIGEST.replace(":", "-")
HEADER = 64


def crash(tmp_path: Path) -> Path:
    """Simulate a crash of the machine after all writes; return the stream's folder."""
    folder = tmp_path / FOLDER
    damage(folder / "sums", 12, struct.pack("<I16s", 0, b"another boot id!"))
    return folder


def damage(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def opened(tmp_path: Path) -> CachedStream:
    return NodeCache(tmp_path).open_pieces(DIGEST, STARTS)


def piece(number: int) -> bytes:
    return STREAM[STARTS[number] : STARTS[number + 1]]


def check(stream: CachedStream, expected: Iterable[int] | None = None) -> None:
    """Assert that no wrong byte is served, and that only the pieces `expected` are here."""
    found: set[int] = set()
    for start in range(0, LENGTH, PAGE):
        count = min(PAGE, LENGTH - start)
        data = stream.get(start, count)
        if data is not None:
            assert bytes(data) == STREAM[start : start + count]
            found.update(range(*stream.pieces(start, count)))
    if expected is not None:
        assert found == set(expected)


def written(tmp_path: Path, numbers: Iterable[int] = PIECES) -> None:
    stream = opened(tmp_path)
    for number in numbers:
        assert stream.put(number, piece(number))
    stream.close()


def test_only_what_is_intact_is_believed(tmp_path: Path) -> None:
    written(tmp_path, (0, 1, 4, 5, len(PIECES) - 1))
    folder = crash(tmp_path)
    damage(folder / "data", 3 * PAGE, bytes(PAGE))
    stream = opened(tmp_path)
    assert not stream.is_known_to_hold(1, 2)
    check(stream, (1, 4, 5, len(PIECES) - 1))
    # The lost pieces are fetched, and the stream is complete.
    assert stream.missing(0, 11 * PAGE) == [0]
    for number in stream.missing(0, LENGTH):
        assert stream.put(number, piece(number))
    assert stream.read(0, LENGTH) == STREAM
    stream.close()
    crash(tmp_path)
    again = NodeCache(tmp_path).open_whole(DIGEST)
    assert again is not None
    check(again, PIECES)
    again.close()


def test_verifying_in_the_background_ends(tmp_path: Path) -> None:
    written(tmp_path)
    folder = crash(tmp_path)
    damage(folder / "data", 0, b"torn")
    stream = opened(tmp_path)
    other = opened(tmp_path)
    assert not other.is_known_to_hold(3, 4)
    assert stream.check_all(lambda: False) == 0
    assert not stream.is_known_to_hold(3, 4)
    assert stream.is_doubtful
    assert stream.check_all() == 10 * PAGE
    assert stream.present_bytes() == LENGTH - 10 * PAGE
    assert other.is_known_to_hold(3, 4)
    assert not other.is_doubtful
    for one in (stream, other):
        check(one, PIECES[1:])
        one.close()


def test_a_clean_close_ends_no_doubt(tmp_path: Path) -> None:
    written(tmp_path)
    folder = crash(tmp_path)
    damage(folder / "data", 100 * PAGE, bytes(PAGE))
    opened(tmp_path).close()
    stream = opened(tmp_path)
    assert stream.is_doubtful
    assert not stream.holds_bytes(100 * PAGE, PAGE)
    check(stream, set(PIECES) - {10})
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
    ids=["no sums", "empty sums", "zeroed sums", "empty data", "no data"],
)
def test_lost_files_are_an_empty_cache(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    written(tmp_path)
    lose(crash(tmp_path))
    stream = opened(tmp_path)
    check(stream, ())
    stream.close()


def test_a_checksum_that_was_lost_loses_its_piece_alone(tmp_path: Path) -> None:
    written(tmp_path)
    folder = crash(tmp_path)
    damage(folder / "sums", HEADER + 8 * 7, bytes(8))
    stream = opened(tmp_path)
    check(stream, set(PIECES) - {7})
    stream.put(7, piece(7))
    stream.close()
    crash(tmp_path)
    stream = opened(tmp_path)
    check(stream, PIECES)
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


SUMS_BYTES = HEADER + 8 * (2 * len(PIECES) + 1)
pages = st.integers(0, LENGTH // PAGE)
numbers = st.sampled_from(PIECES)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(numbers, max_size=len(PIECES)),
    lost=st.lists(pages, max_size=6),
    torn=st.lists(st.tuples(st.integers(0, LENGTH - 8), st.binary(min_size=1, max_size=8))),
    sums_end=st.integers(0, 2 * SUMS_BYTES),
    sums_torn=st.lists(
        st.tuples(st.integers(0, SUMS_BYTES - 8), st.binary(min_size=1, max_size=8))
    ),
    after=st.lists(numbers, max_size=4),
)
def test_no_crash_serves_a_wrong_byte(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[int],
    lost: list[int],
    torn: list[tuple[int, bytes]],
    sums_end: int,
    sums_torn: list[tuple[int, bytes]],
    after: list[int],
) -> None:
    tmp_path = tmp_path_factory.mktemp("cache")
    written(tmp_path, before)
    folder = crash(tmp_path)
    for page in lost:
        damage(folder / "data", page * PAGE, bytes(min(PAGE, LENGTH - page * PAGE)))
    for position, data in torn:
        damage(folder / "data", position, data)
    for position, data in sums_torn:
        damage(folder / "sums", position, data)
    if sums_end < SUMS_BYTES:
        with (folder / "sums").open("r+b") as file:
            file.truncate(sums_end)
    stream = opened(tmp_path)
    for number in after:
        assert stream.put(number, piece(number))
    check(stream)
    stream.close()
