"""Planning of a group's reads: which rank reads which bytes, who gets them, and their assembly.

A rank reads bytes that it alone needs. Bytes that several ranks need are cut into pieces; one of
these ranks reads a piece and sends it to the others, in rounds in which no rank reads more than one
piece. Pure (no I/O), deterministic, and without torch: the same needs give the same plan.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from bootseer.errors import CorruptError


class NeededRange(NamedTuple):
    """Bytes `[start, start + length)` of a file that hold one stored item."""

    path: str
    start: int
    length: int


class PlannedRead(NamedTuple):
    """Bytes of one file that a single rank reads. Small, because plans are sent between ranks."""

    file: int
    """Index into the plan's `files`."""
    start: int
    length: int
    owner: int
    """Rank that reads the piece, and needs it itself."""
    audience: int
    """Index into the plan's `audiences`: the ranks that need the piece."""


class GroupPlan(Struct, frozen=True):
    """Work of one rank. `rounds`, `files` and `audiences` are the same for all ranks."""

    files: tuple[str, ...]
    audiences: tuple[tuple[int, ...], ...]
    """Sets of ranks that need the same bytes, each ascending."""
    rounds: tuple[tuple[PlannedRead, ...], ...]
    """Pieces that several ranks need; in a round each owner has one."""
    private: tuple[PlannedRead, ...]
    """Pieces that this rank alone needs."""

    def own(self, rank: int) -> Iterator[PlannedRead]:
        """Yield the pieces that `rank` reads, in order."""
        for pieces in self.rounds:
            yield from (piece for piece in pieces if piece.owner == rank)
        yield from self.private


def plan_group(
    needs: Sequence[Collection[NeededRange]], *, piece_bytes: int, pieces_per_round: int
) -> list[GroupPlan]:
    """Return a plan for each rank, such that every byte is read by one rank only.

    Pieces end at multiples of `piece_bytes` in their file, so that two ranks seldom share a block
    of verification. The pieces of an audience are in the order of the files, so that at most one
    item of each audience is incomplete at any time. The ranks' bytes differ by a piece at most.
    """
    audience_of: dict[NeededRange, list[int]] = defaultdict(list)
    for rank, extents in enumerate(needs):
        for extent in set(extents):
            if extent.length:
                audience_of[extent].append(rank)
    shared: dict[tuple[int, ...], list[NeededRange]] = defaultdict(list)
    for extent, ranks in audience_of.items():
        shared[tuple(ranks)].append(extent)
    audiences = tuple(sorted(shared))
    files = tuple(sorted({extent.path for extent in audience_of}))
    number_of = {path: number for number, path in enumerate(files)}
    private: list[tuple[PlannedRead, ...]] = [()] * len(needs)
    queues: deque[tuple[int, deque[PlannedRead]]] = deque()
    for number, audience in enumerate(audiences):
        pieces = deque(
            PlannedRead(number_of[extent.path], extent.start, extent.length, audience[0], number)
            for extent in _cut(shared[audience], piece_bytes)
        )
        if len(audience) == 1:
            private[audience[0]] = tuple(pieces)
        else:
            queues.append((number, pieces))
    rounds = tuple(_rounds(queues, audiences, len(needs), pieces_per_round))
    return [GroupPlan(files, audiences, rounds, own) for own in private]


def _cut(extents: list[NeededRange], piece_bytes: int) -> Iterator[NeededRange]:
    """Yield the union of the extents, in order, cut at every multiple of `piece_bytes`."""
    path, start, end = "", 0, 0
    for extent in [*sorted(extents), None]:
        if extent is not None and extent.path == path and extent.start <= end:
            end = max(end, extent.start + extent.length)
            continue
        while start < end:
            stop = min(end, (start // piece_bytes + 1) * piece_bytes)
            yield NeededRange(path, start, stop - start)
            start = stop
        if extent is not None:
            path, start, end = extent.path, extent.start, extent.start + extent.length


def _rounds(
    queues: deque[tuple[int, deque[PlannedRead]]],
    audiences: tuple[tuple[int, ...], ...],
    rank_count: int,
    pieces_per_round: int,
) -> Iterator[tuple[PlannedRead, ...]]:
    """Yield the pieces in rounds. Audiences without a common rank share a round."""
    load_bytes = [0] * rank_count
    while queues:
        chosen: list[PlannedRead] = []
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


class _Item:
    """Tensor with bytes that are not received yet."""

    __slots__ = ("buffer", "data", "missing_bytes")

    def __init__(self, buffer: bytearray, length: int) -> None:
        self.buffer = buffer
        self.data = memoryview(buffer)[:length]
        self.missing_bytes = length


class Assembly:
    """Assembly of items from pieces in any order. `on_complete` gets each complete item."""

    def __init__(
        self, extents: list[NeededRange], on_complete: Callable[[NeededRange, memoryview], None]
    ) -> None:
        self._on_complete = on_complete
        self._by_file: dict[str, list[NeededRange]] = defaultdict(list)
        for extent in sorted(extents):
            self._by_file[extent.path].append(extent)
        self._open: dict[NeededRange, _Item] = {}
        self._spare: bytearray | None = None
        self._missing_count = len(extents)

    def add(self, path: str, start: int, view: memoryview) -> None:
        """Add bytes of a file from `start` on. Each byte of an item comes once."""
        extents = self._by_file.get(path, [])
        end = start + len(view)
        index = max(0, bisect_right(extents, start, key=lambda extent: extent.start) - 1)
        while index < len(extents) and extents[index].start < end:
            extent = extents[index]
            index += 1
            first, last = max(extent.start, start), min(extent.start + extent.length, end)
            if first >= last:
                continue
            part = view[first - start : last - start]
            if len(part) == extent.length:
                self._complete(extent, part)
                continue
            item = self._open.get(extent)
            if item is None:
                item = self._open[extent] = _Item(self._buffer(extent.length), extent.length)
            item.data[first - extent.start : last - extent.start] = part
            item.missing_bytes -= len(part)
            if not item.missing_bytes:
                del self._open[extent]
                self._complete(extent, item.data)
                self._spare = item.buffer

    def finish(self) -> None:
        """Raise CorruptError if an item is incomplete, because items in the metadata overlap."""
        if self._missing_count:
            raise CorruptError(f"the metadata names {self._missing_count} items that overlap")

    def _buffer(self, length: int) -> bytearray:
        # New memory costs more than filling it, so the last buffer is used again if large enough.
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) >= length else bytearray(length)

    def _complete(self, extent: NeededRange, data: memoryview) -> None:
        self._missing_count -= 1
        self._on_complete(extent, data)
