"""An object's list of chunks is refused if it is damaged or made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError, InvalidInputError
from bootseer.fanout.objects import CHUNK_BYTES_MAX, chunk_list, decode_list

chunks = st.lists(st.tuples(st.integers(1, CHUNK_BYTES_MAX), st.binary(min_size=32, max_size=32)),
                  min_size=1, max_size=50)  # fmt: skip


@given(chunks=chunks)
def test_a_list_comes_back_as_it_was(chunks: list[tuple[int, bytes]]) -> None:
    made = chunk_list(*zip(*chunks, strict=True))
    assert decode_list(made.encode(), made.name) == made
    assert made.offsets[-1] == sum(length for length, _ in chunks)


@given(chunks=chunks, at=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed(chunks: list[tuple[int, bytes]], at: int, bit: int) -> None:
    made = chunk_list(*zip(*chunks, strict=True))
    data = bytearray(made.encode())
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(CorruptError):
        decode_list(bytes(data), made.name)


@given(data=st.binary(max_size=200))
def test_bytes_that_have_their_own_name_are_no_list_yet(data: bytes) -> None:
    for some in (data, b"BSFANOUT" + data, b"BSFANOUT\x01\0\0\0" + data):
        with pytest.raises(CorruptError):
            decode_list(some, content_digest(some))


def test_no_object_is_empty_or_has_a_huge_chunk() -> None:
    for lengths in ([], [0], [CHUNK_BYTES_MAX + 1]):
        with pytest.raises(InvalidInputError):
            chunk_list(lengths, [bytes(32)] * len(lengths))
