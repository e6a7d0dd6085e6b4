"""Which byte ranges to fetch, in which order. Pure (no I/O): the result is the plan an
`Executor` carries out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Lower runs first."""

    DEMAND = 0
    """Somebody is waiting."""
    PREFETCH = 1
    """A hot set says that somebody will."""
    FILL = 2
    """Background."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one stored object: the unit of fetching, verifying and sharing."""

    key: str
    """The object's key in the store."""
    offset: int
    length: int
    digest: bytes | None = None
    """SHA-256 (32 raw bytes) of exactly these bytes; None: not verified here."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One ranged read that covers `chunks` (same key, ascending offset, with tolerated gaps)."""

    key: str
    offset: int
    length: int
    chunks: tuple[Chunk, ...]
    priority: Priority


def plan(
    wanted: Iterable[Chunk],
    is_cached: Callable[[Chunk], bool],
    *,
    priority: Priority = Priority.PREFETCH,
    max_gap_bytes: int = 64 * 1024,
    max_fetch_bytes: int = 4 * 1024 * 1024,
) -> list[Fetch]:
    """Fetches for what is wanted and not cached. Pure (no I/O).

    Neighbouring chunks of one object join into one fetch while the gap between them is at most
    `max_gap_bytes` and the fetch stays within `max_fetch_bytes`. Wanted order is kept between
    fetches: a fetch stands where its first-wanted chunk stood. A chunk wanted twice is planned
    once; one chunk larger than `max_fetch_bytes` gets a fetch of its own.
    """
    raise RuntimeError("to be written")
