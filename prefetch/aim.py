"""How well a bundle met what a start read, and whether that start should be recorded. Pure."""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from bootseer.blob.tree import Extent
from bootseer.prefetch.bundle import Bundle
from bootseer.prefetch.cache import sectors_of
from bootseer.prefetch.hot_store import MERGED_TRACE_COUNT

RECALL_ENOUGH = 0.95
"""A start that missed less than this share of its bytes teaches nothing worth a new bundle."""
PRECISION_ENOUGH = 0.5
"""A bundle of which less than this share is used takes longer to come than what it is for."""


class Aim(Struct, frozen=True):
    """How well a bundle met what a start read. Uncompressed bytes, in whole sectors of 512."""

    bundle_bytes: int
    asked_bytes: int
    """What the kernel asked for."""
    used_bytes: int
    """In both."""

    @property
    def precision(self) -> float | None:
        """Share of the bundle that was used; the rest was wasted."""
        return self.used_bytes / self.bundle_bytes if self.bundle_bytes else None

    @property
    def recall(self) -> float | None:
        """Share of what was asked for that the bundle had; the rest was missed."""
        return self.used_bytes / self.asked_bytes if self.asked_bytes else None


def aim_of(
    bundle: Bundle | None,
    stream_lengths: Sequence[int],
    accesses: Iterable[tuple[int, int, int, int]],
    extents_of: Callable[[int], Sequence[Extent]],
) -> Aim:
    """Compare a bundle with a log of accesses (inode, offset, length, time). Pure."""
    wanted = [bytearray(-(-length // 512)) for length in stream_lengths]
    held = [bytearray(len(marks)) for marks in wanted]
    known: dict[int, Sequence[Extent]] = {}
    for inode, offset, length, _ in accesses:
        extents = known.get(inode)
        if extents is None:
            extents = known[inode] = extents_of(inode)
        for extent in extents:
            start = max(offset, extent.file_offset)
            stop = min(offset + length, extent.file_offset + extent.length)
            if start < stop:
                shift = extent.blob_offset - extent.file_offset
                first, end = sectors_of(start + shift, stop - start)
                wanted[extent.blob][first:end] = b"\1" * (end - first)
    for frame in bundle.frames if bundle else ():
        for piece in frame.extents:
            first, end = sectors_of(piece.offset, piece.length)
            held[piece.blob][first:end] = b"\2" * (end - first)
    used = 0
    for marks, others in zip(wanted, held, strict=True):
        # Both marks of a sector side by side in one long integer: 1 | 2 = 3.
        both = int.from_bytes(marks, "little") | int.from_bytes(others, "little")
        used += both.to_bytes(len(marks), "little").count(3)
    return Aim(
        512 * sum(marks.count(2) for marks in held),
        512 * sum(marks.count(1) for marks in wanted),
        512 * used,
    )


def is_worthwhile(aim: Aim, trace_count: int, ended: str) -> bool:
    """Whether a start that a bundle of `trace_count` traces met like this should be recorded, and a
    bundle be made anew. Pure.

    Yes where it missed much. Also where it wasted much, as long as further traces can show what is
    not needed, and unless the start ended before it was ready: it may have failed half-way.
    """
    if (aim.recall or 0.0) < RECALL_ENOUGH:
        return True
    settled = trace_count >= MERGED_TRACE_COUNT or ended == "unmount"
    return not settled and (aim.precision or 0.0) < PRECISION_ENOUGH
