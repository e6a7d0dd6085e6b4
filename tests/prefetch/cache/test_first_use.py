"""Bits that a disk flips in the node's cache are found when a process first uses their sectors.

The read that finds them reads more than was asked for: whole records of the log of checksums. What
comes out of it is compared here with what was written.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.blob.tree import Blob, Frame
from bootseer.prefetch.cache.node_cache import SECTOR_BYTES, NodeCache

DIGEST = "sha256:" + "cd" * 32
LENGTH = 1200 * SECTOR_BYTES + 100
STREAM = bytes(i * 7 % 251 for i in range(LENGTH))
RECORD = 256 * 1024

ranges = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda pair: (pair[0], min(pair[1], LENGTH - pair[0]))
)


def flip(cache_dir: Path, position: int, digest: str = DIGEST) -> None:
    with (cache_dir / "streams-3" / digest.replace(":", "-") / "data").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]) if byte else b"")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(ranges, min_size=1, max_size=6),
    flips=st.lists(st.integers(0, LENGTH - 1), max_size=3),
    later=st.lists(ranges, max_size=2),
    asked=st.lists(ranges, min_size=1, max_size=6),
)
def test_no_wrong_byte_is_read_whatever_the_disk_flips(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[int, int]],
    flips: list[int],
    later: list[tuple[int, int]],
    asked: list[tuple[int, int]],
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    with ExitStack() as stack:
        writer, reader = [
            stack.enter_context(closing(NodeCache(directory).open_stream(DIGEST, LENGTH)))
            for _ in range(2)
        ]
        for offset, length in writes:
            assert writer.write(offset, STREAM[offset : offset + length])
        for position in flips:
            flip(directory, position)
        for number, (offset, length) in enumerate(asked):
            was_here = reader.holds(offset, length)
            found = reader.get(offset, length)
            if found is not None:
                assert bytes(found) == STREAM[offset : offset + length]
            else:
                assert not reader.holds(offset, length), "what is damaged is absent for all"
            if not flips:
                assert (found is not None) == was_here
            if number < len(later):
                start, count = later[number]
                assert writer.write(start, STREAM[start : start + count])


@pytest.mark.parametrize("position", [0, 5000, RECORD - 1])
def test_a_bit_beside_what_was_asked_for_is_found_with_it(tmp_path: Path, position: int) -> None:
    cache = NodeCache(tmp_path)
    cache.open_stream(DIGEST, LENGTH).write(0, STREAM)
    with closing(cache.open_stream(DIGEST, LENGTH)) as stream:
        flip(tmp_path, position)
        # All of one record, with sectors of the next one, which is whole.
        assert stream.get(RECORD - 8192, 10_000) is None
        assert list(stream.missing(0, LENGTH)) == [(0, RECORD)]
        found = stream.get(RECORD + 10, 5000)
        assert found is not None
        assert bytes(found) == STREAM[RECORD + 10 : RECORD + 5010]


def test_a_damaged_claim_is_no_part_of_what_is_read(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    half = 600 * SECTOR_BYTES
    blob = Blob(DIGEST, 100, (Frame(0, 100, 0, LENGTH, bytes(32)),), DIGEST, LENGTH)

    def opened() -> Any:
        (stream,) = cache.open_image([blob], mark=cache.claims_mark("an image"))
        return closing(stream)

    with opened() as stream:
        assert stream.prove(0, STREAM[:half])
        assert stream.claim(half, STREAM[half:])
        found = stream.get(half - 3000, 9000)
        assert found is not None
        assert bytes(found) == STREAM[half - 3000 : half + 6000]
    (claimed,) = tmp_path.glob("streams-3/claimed-*")
    flip(tmp_path, half + 4000, claimed.name)
    with opened() as stream:
        assert stream.get(half - 3000, 9000) is None
        found = stream.get(half - 3000, 3000)
        assert found is not None
        assert bytes(found) == STREAM[half - 3000 : half]
