"""Planning of reads: chunks of stored objects, joined to fetches in order. Pure.

A `ChunkFetcher` carries out the fetches.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.base.content_digest import content_digest


class Priority(IntEnum):
    """Priority of a read; the lowest number runs first."""

    DEMAND = 0
    """A reader is waiting for the bytes."""
    PREFETCH = 1
    """A hot set predicts that a reader will need the bytes."""
    FILL = 2
    """The bytes are filled in the background."""


class Chunk(Struct, frozen=True):
    """Range of a stored object: the unit of fetching, verifying and sharing."""

    key: str
    """The object's key in the store."""
    offset: int
    length: int
    digest: bytes | None = None
    """BLAKE3 digest (32 raw bytes) of exactly these bytes; None: not verified here."""

    @property
    def end(self) -> int:
        return self.offset + self.length


class Fetch(Struct, frozen=True):
    """Ranged read that covers `chunks`: of one key, by ascending offset, with tolerated gaps."""

    key: str
    offset: int
    length: int
    chunks: tuple[Chunk, ...]
    priority: Priority


def covering(chunks: Sequence[Chunk], priority: Priority) -> Fetch:
    """Return a fetch that reads all of `chunks` (not empty, one key, ascending offset)."""
    first = chunks[0]
    end = max(chunk.end for chunk in chunks)
    return Fetch(first.key, first.offset, end - first.offset, tuple(chunks), priority)


def plan(
    wanted: Iterable[Chunk],
    is_cached: Callable[[Chunk], bool],
    *,
    priority: Priority = Priority.PREFETCH,
    max_gap_bytes: int = 64 * 1024,
    max_fetch_bytes: int = 4 * 1024 * 1024,
) -> list[Fetch]:
    """Return the fetches for all chunks that are wanted and not cached.

    Neighbouring chunks of one object join into one fetch while the gap between them is at most
    `max_gap_bytes` and the fetch stays within `max_fetch_bytes`. Fetches are in the order of their
    first wanted chunk. A chunk wanted twice is planned once; a chunk larger than `max_fetch_bytes`
    gets a fetch of its own.
    """
    rank: dict[Chunk, int] = {}
    by_key: dict[str, list[Chunk]] = {}
    for chunk in dict.fromkeys(wanted):
        if not is_cached(chunk):
            rank[chunk] = len(rank)
            by_key.setdefault(chunk.key, []).append(chunk)

    ranked: list[tuple[int, Fetch]] = []
    for chunks in by_key.values():
        chunks.sort(key=lambda chunk: (chunk.offset, chunk.length, chunk.digest or b""))
        for group in _groups(chunks, max_gap_bytes, max_fetch_bytes):
            first_wanted = min(rank[chunk] for chunk in group)
            ranked.append((first_wanted, covering(group, priority)))
    ranked.sort(key=lambda pair: pair[0])
    return [fetch for _, fetch in ranked]


def _groups(
    chunks: Sequence[Chunk], max_gap_bytes: int, max_fetch_bytes: int
) -> Iterable[list[Chunk]]:
    """Yield runs of `chunks` (one key, sorted by offset) that are worth one read each."""
    group: list[Chunk] = []
    end = 0
    for chunk in chunks:
        joins = (
            group
            and chunk.offset - end <= max_gap_bytes
            and max(end, chunk.end) - group[0].offset <= max_fetch_bytes
        )
        if not joins:
            if group:
                yield group
            group, end = [], chunk.end
        group.append(chunk)
        end = max(end, chunk.end)
    if group:
        yield group


def remaining(fetch: Fetch, is_wanted: Callable[[Chunk], bool]) -> list[Fetch]:
    """Return the rest of `fetch` when only some of its chunks are still wanted.

    The fetch is cut at chunks that are no longer wanted, so that nothing unwanted is read except
    gaps that were tolerated before.
    """
    runs: list[list[Chunk]] = [[]]
    for chunk in fetch.chunks:
        if is_wanted(chunk):
            runs[-1].append(chunk)
        elif runs[-1]:
            runs.append([])
    if len(runs[0]) == len(fetch.chunks):
        return [fetch]
    return [covering(run, fetch.priority) for run in runs if run]


# ---- objects that are read as a whole ------------------------------------------------------------

# Indexes and headers of bundles. Whoever names such an object, by a digest of all its bytes, may
# also list the digests of its chunks: then nodes can verify the bytes that they pass on before they
# have all of them.

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


def even_chunks(key: str, size_bytes: int, digests: Sequence[str]) -> tuple[Chunk, ...]:
    """Return the chunks of the object `key`; empty if `digests` are not as many."""
    starts = range(0, size_bytes, CHUNK_BYTES)
    if len(starts) != len(digests):
        return ()
    return tuple(
        Chunk(key, start, min(CHUNK_BYTES, size_bytes - start), bytes.fromhex(digest))
        for start, digest in zip(starts, digests, strict=True)
    )
