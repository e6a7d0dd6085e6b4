"""Accuracy of a bundle: comparison of its bytes with the bytes that a start read. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from msgspec import Struct

from bootseer.blob.tree import Extent, FileParts, Tree
from bootseer.prefetch.bundle.format import SECTOR_BYTES, Bundle, sectors_of
from bootseer.prefetch.bundle.hot_store import MERGED_TRACE_COUNT

_Span: TypeAlias = tuple[int, int]
"""Half-open range of sectors."""

RECALL_ENOUGH = 0.95
"""Recall from which on a new bundle would not be worth its cost."""
PRECISION_ENOUGH = 0.5
"""Precision below which unused bytes delay the used ones too much."""


class BundleAccuracy(Struct, frozen=True):
    """Sizes of a bundle, of the bytes that a start read, and of what both have in common.

    Uncompressed bytes, in whole sectors of 512.
    """

    bundle_bytes: int
    asked_bytes: int
    """Bytes that the kernel read."""
    used_bytes: int
    """Bytes of the bundle that the kernel read."""

    @property
    def precision(self) -> float | None:
        """Share of the bundle that was read."""
        return self.used_bytes / self.bundle_bytes if self.bundle_bytes else None

    @property
    def recall(self) -> float | None:
        """Share of the read bytes that the bundle had."""
        return self.used_bytes / self.asked_bytes if self.asked_bytes else None


def accuracy_of(
    bundle: Bundle | None,
    stream_lengths: Sequence[int],
    accesses: Iterable[tuple[int, int, int, int]],
    extents_of: Callable[[int], Sequence[Extent]],
) -> BundleAccuracy:
    """Compare a bundle with a log of accesses (inode, offset, length, time). Pure."""
    # Sectors are numbered through all streams: those of the second follow those of the first.
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
    """Return the inodes of scattered files, whose bytes differ from start to start.

    Reads of these files do not count for the accuracy of a bundle. `paths` that do not exist are
    left out.
    """
    return frozenset(number for path in paths if (number := tree.resolve(path)) is not None)


def _union(spans: list[_Span]) -> list[_Span]:
    """Return the spans' union as ascending spans that do not touch each other."""
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
    return sum([end - first for first, end in spans])


def is_worthwhile(accuracy: BundleAccuracy, trace_count: int, ended: str) -> bool:
    """Return whether the trace of a start should be published and a new bundle be made. Pure.

    True if the bundle missed many of the start's bytes. Also true if many of its bytes were not
    read, unless its `trace_count` is the highest possible, or the start `ended` by "unmount": it
    may have failed half-way.
    """
    if (accuracy.recall or 0.0) < RECALL_ENOUGH:
        return True
    settled = trace_count >= MERGED_TRACE_COUNT or ended == "unmount"
    return not settled and (accuracy.precision or 0.0) < PRECISION_ENOUGH
