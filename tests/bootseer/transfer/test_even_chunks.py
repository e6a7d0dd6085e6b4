"""Chunks of objects that are read as a whole."""

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.transfer.ranges import CHUNK_BYTES, digests_of, even_chunks


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1])
def test_chunks_cover_the_object_and_have_its_digests(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    chunks = even_chunks("indexes/sha256/1", size, digests_of(data))
    assert b"".join(data[chunk.offset : chunk.end] for chunk in chunks) == data
    assert all(content_digest(data[chunk.offset : chunk.end]) == chunk.digest for chunk in chunks)


def test_digests_of_another_size_are_of_no_use() -> None:
    digests = digests_of(bytes(CHUNK_BYTES + 1))
    assert even_chunks("a", CHUNK_BYTES, digests) == ()
    assert even_chunks("a", CHUNK_BYTES + 1, ()) == ()
