"""Bits that the disk flips in the node's cache are found at a process's first use of a piece.

That read covers whole pieces. Its result is compared here with the bytes that were written.
"""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.prefetch.cache.node_cache import NodeCache

DIGEST = "sha256:" + "cd" * 32
STARTS = (0, 100_000, 262_144, 262_656, 400_000, 614_500)
LENGTH = STARTS[-1]
STREAM = bytes(i * 7 % 251 for i in range(LENGTH))
PIECES = range(len(STARTS) - 1)

ranges = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda pair: (pair[0], min(pair[1], LENGTH - pair[0]))
)
pieces = st.sampled_from(PIECES)


def piece(number: int) -> bytes:
    return STREAM[STARTS[number] : STARTS[number + 1]]


def flip(cache_dir: Path, position: int) -> None:
    with (cache_dir / "streams" / DIGEST.replace(":", "-") / "data").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]) if byte else b"")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(pieces, min_size=1, max_size=6),
    flips=st.lists(st.integers(0, LENGTH - 1), max_size=3),
    later=st.lists(pieces, max_size=2),
    asked=st.lists(ranges, min_size=1, max_size=6),
)
def test_no_wrong_byte_is_read_whatever_the_disk_flips(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[int],
    flips: list[int],
    later: list[int],
    asked: list[tuple[int, int]],
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    with ExitStack() as stack:
        writer, reader = [
            stack.enter_context(closing(NodeCache(directory).open_pieces(DIGEST, STARTS)))
            for _ in range(2)
        ]
        for number in writes:
            assert writer.put(number, piece(number))
        for position in flips:
            flip(directory, position)
        for turn, (offset, length) in enumerate(asked):
            was_here = reader.holds_bytes(offset, length)
            found = reader.get(offset, length)
            if found is not None:
                assert bytes(found) == STREAM[offset : offset + length]
            else:
                assert not writer.holds_bytes(offset, length), "what is damaged is absent for all"
            if not flips:
                assert (found is not None) == was_here
            if turn < len(later):
                assert writer.put(later[turn], piece(later[turn]))


@pytest.mark.parametrize("position", [100_000, 150_000, 262_143])
def test_a_bit_beside_what_was_asked_for_is_found_with_it(tmp_path: Path, position: int) -> None:
    cache = NodeCache(tmp_path)
    writer = cache.open_pieces(DIGEST, STARTS)
    for number in PIECES:
        assert writer.put(number, piece(number))
    with closing(writer), closing(cache.open_pieces(DIGEST, STARTS)) as stream:
        flip(tmp_path, position)
        # All of one piece, with bytes of the next one, which is whole.
        assert stream.get(262_000, 400) is None
        assert stream.missing(0, LENGTH) == [1]
        assert stream.get(262_150, 400) == STREAM[262_150:262_550]
