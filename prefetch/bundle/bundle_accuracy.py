"""How well a bundle met what a start read, and whether that start should be recorded. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from msgspec import Struct

from bootseer.blob.parts import FileParts
from bootseer.blob.tree import Extent, Tree
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import MERGED_TRACE_COUNT
from bootseer.prefetch.bundle.sector_marks import SECTOR_BYTES, sectors_of

_Span: TypeAlias = tuple[int, int]
"""Half-open."""

RECALL_ENOUGH = 0.95
"""A start that missed less than this share of its bytes teaches nothing worth a new bundle."""
PRECISION_ENOUGH = 0.5
"""A bundle of which less than this share is used takes longer to come than what it is for."""


class BundleAccuracy(Struct, frozen=True):
    """How well a bundle met what a start read. Uncompressed bytes, in whole sectors of 512."""

    bundle_bytes: int
    asked_bytes: int
    """Bytes that the kernel asked for."""
    used_bytes: int
    """Bytes that are in the bundle and were asked for."""

    @property
    def precision(self) -> float | None:
        """Share of the bundle that was used; the rest was wasted."""
        return self.used_bytes / self.bundle_bytes if self.bundle_bytes else None

    @property
    def recall(self) -> float | None:
        """Share of what was asked for that the bundle had; the rest was missed."""
        return self.used_bytes / self.asked_bytes if self.asked_bytes else None


def accuracy_of(
    bundle: Bundle | None,
    stream_lengths: Sequence[int],
    accesses: Iterable[tuple[int, int, int, int]],
    extents_of: Callable[[int], Sequence[Extent]],
) -> BundleAccuracy:
    """Compare a bundle with a log of accesses (inode, offset, length, time). Pure."""
    # One number for each sector of all streams, one stream behind the other.
    starts = list(accumulate((-(-length // SECTOR_BYTES) for length in stream_lengths), initial=0))
    asked: list[_Span] = []
    parts = FileParts(extents_of)
    for inode, offset, length, _ in accesses:
        for part in parts.within(inode, offset, offset + length):
            first, end = sectors_of(part.blob_offset, part.length)
            asked.append((starts[part.blob] + first, starts[part.blob] + end))
    held: list[_Span] = []
    for frame in bundle.frames if bundle else ():
        for piece in frame.extents:
            first, end = sectors_of(piece.offset, piece.length)
            held.append((starts[piece.blob] + first, starts[piece.blob] + end))
    asked, held = _union(asked), _union(held)
    held_count, asked_count = _count(held), _count(asked)
    used_count = held_count + asked_count - _count(_union(asked + held))
    return BundleAccuracy(
        SECTOR_BYTES * held_count, SECTOR_BYTES * asked_count, SECTOR_BYTES * used_count
    )


def scattered_inodes(tree: Tree, paths: Iterable[bytes]) -> frozenset[int]:
    """The files at `paths`, of which each start reads other bytes: what is read of them says
    nothing about a bundle."""
    return frozenset(number for path in paths if (number := tree.resolve(path)) is not None)


def _union(spans: list[_Span]) -> list[_Span]:
    """The numbers as ascending spans that do not touch each other."""
    spans.sort()
    found: list[_Span] = []
    start = end = 0
    for first, stop in spans:
        if first > end:
            found.append((start, end))
            start, end = first, stop
        elif stop > end:
            end = stop
    found.append((start, end))
    return found


def _count(spans: Sequence[_Span]) -> int:
    """How many numbers are in a union."""
    return sum([end - first for first, end in spans])


def is_worthwhile(accuracy: BundleAccuracy, trace_count: int, ended: str) -> bool:
    """Whether a start that a bundle of `trace_count` traces met like this should be recorded, and a
    bundle be made anew. Pure.

    Yes where it missed much. Also where it wasted much, as long as further traces can show what is
    not needed, and unless the start ended before it was ready: it may have failed half-way.
    """
    if (accuracy.recall or 0.0) < RECALL_ENOUGH:
        return True
    settled = trace_count >= MERGED_TRACE_COUNT or ended == "unmount"
    return not settled and (accuracy.precision or 0.0) < PRECISION_ENOUGH
