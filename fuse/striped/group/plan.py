"""Which rank of a group reads which bytes of a checkpoint, and to whom it hands them on.

Pure (no I/O) and deterministic: the same needs give the same plan. Knows nothing of torch. Bytes
that one rank alone needs are its own affair; what several need is cut into pieces, each read by one
of them, and handed on in rounds in which no rank reads more than one piece.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct


class Extent(NamedTuple):
    """Bytes `[start, start + length)` of a file: one stored item, needed whole."""

    path: str
    start: int
    length: int


class Piece(NamedTuple):
    """Bytes of one file that one rank reads in one go. Small: plans of many travel."""

    file: int
    """Which of the plan's `files`."""
    start: int
    length: int
    owner: int
    """The rank that reads it; it needs the bytes itself."""
    audience: int
    """Which of the plan's `audiences` needs it."""


class GroupPlan(Struct, frozen=True):
    """What one rank has to do. `rounds`, `files` and `audiences` are the same for all ranks."""

    files: tuple[str, ...]
    audiences: tuple[tuple[int, ...], ...]
    """Sets of ranks that need the same bytes, each ascending."""
    rounds: tuple[tuple[Piece, ...], ...]
    """Pieces that several ranks need; in a round each owner has one."""
    private: tuple[Piece, ...]
    """Pieces that this rank alone needs."""

    def own(self, rank: int) -> Iterator[Piece]:
        """What `rank` reads, in the order in which it is wanted."""
        for pieces in self.rounds:
            yield from (piece for piece in pieces if piece.owner == rank)
        yield from self.private


def plan_group(
    needs: Sequence[Collection[Extent]], *, piece_bytes: int, pieces_per_round: int
) -> list[GroupPlan]:
    """One plan per rank for what each rank needs, such that every byte is read by one rank only.

    Pieces end at multiples of `piece_bytes` in their file, so that two ranks seldom share a block
    of verification. Within an audience they are in the order of the files, so that at most one item
    of each is incomplete at any time, and their bytes are balanced to within a piece.
    """
    audience_of: dict[Extent, list[int]] = defaultdict(list)
    for rank, extents in enumerate(needs):
        for extent in set(extents):
            if extent.length:
                audience_of[extent].append(rank)
    shared: dict[tuple[int, ...], list[Extent]] = defaultdict(list)
    for extent, ranks in audience_of.items():
        shared[tuple(ranks)].append(extent)
    audiences = tuple(sorted(shared))
    files = tuple(sorted({extent.path for extent in audience_of}))
    number_of = {path: number for number, path in enumerate(files)}
    private: list[tuple[Piece, ...]] = [()] * len(needs)
    queues: deque[tuple[int, deque[Piece]]] = deque()
    for number, audience in enumerate(audiences):
        pieces = deque(
            Piece(number_of[extent.path], extent.start, extent.length, audience[0], number)
            for extent in _cut(shared[audience], piece_bytes)
        )
        if len(audience) == 1:
            private[audience[0]] = tuple(pieces)
        else:
            queues.append((number, pieces))
    rounds = tuple(_rounds(queues, audiences, len(needs), pieces_per_round))
    return [GroupPlan(files, audiences, rounds, own) for own in private]


def _cut(extents: list[Extent], piece_bytes: int) -> Iterator[Extent]:
    """The union of the extents, in order, cut at every multiple of `piece_bytes`."""
    path, start, end = "", 0, 0
    for extent in [*sorted(extents), None]:
        if extent is not None and extent.path == path and extent.start <= end:
            end = max(end, extent.start + extent.length)
            continue
        while start < end:
            stop = min(end, (start // piece_bytes + 1) * piece_bytes)
            yield Extent(path, start, stop - start)
            start = stop
        if extent is not None:
            path, start, end = extent.path, extent.start, extent.start + extent.length


def _rounds(
    queues: deque[tuple[int, deque[Piece]]],
    audiences: tuple[tuple[int, ...], ...],
    rank_count: int,
    pieces_per_round: int,
) -> Iterator[tuple[Piece, ...]]:
    """Yields the pieces in rounds: audiences without a common rank share a round."""
    load_bytes = [0] * rank_count
    while queues:
        chosen: list[Piece] = []
        busy: set[int] = set()
        for number, pieces in queues:
            free = sorted(
                (rank for rank in audiences[number] if rank not in busy),
                key=lambda rank: (load_bytes[rank], rank),
            )
            for owner in free[: pieces_per_round - len(chosen)]:
                if not pieces:
                    break
                piece = pieces.popleft()._replace(owner=owner)
                chosen.append(piece)
                busy.add(owner)
                load_bytes[owner] += piece.length
        yield tuple(chosen)
        queues.rotate(-1)
        queues = deque(queue for queue in queues if queue[1])
