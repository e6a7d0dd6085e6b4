"""Chunks of one length for stored objects that are read as a whole: indexes, headers of bundles.

Whoever names such an object, by a digest of all its bytes, may also list the digests of its chunks:
then nodes can verify the bytes that they pass on before they have all of them. Pure.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from bootseer.base.content_digest import content_digest
from bootseer.transfer.ranges import Chunk

CHUNK_BYTES = 256 << 10
"""Length of all chunks but the last one: small, so that nodes soon have something to pass on."""
_COUNT_MAX = 1 << 14

ChunkDigests = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")], ...], Meta(max_length=_COUNT_MAX)
]
"""BLAKE3 digests of an object's chunks, in order; empty if they are unknown."""


def digests_of(data: bytes) -> ChunkDigests:
    """Return the digests of the chunks of `data`; empty for too many chunks."""
    starts = range(0, len(data), CHUNK_BYTES)
    if len(starts) > _COUNT_MAX:
        return ()
    view = memoryview(data)
    return tuple(content_digest(view[start : start + CHUNK_BYTES]).hex() for start in starts)


def chunks_of(key: str, size_bytes: int, digests: Sequence[str]) -> tuple[Chunk, ...]:
    """Return the chunks of the object `key`; empty if `digests` are not as many."""
    starts = range(0, size_bytes, CHUNK_BYTES)
    if len(starts) != len(digests):
        return ()
    return tuple(
        Chunk(key, start, min(CHUNK_BYTES, size_bytes - start), bytes.fromhex(digest))
        for start, digest in zip(starts, digests, strict=True)
    )
