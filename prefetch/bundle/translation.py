"""A bundle of one image, translated for another that was built anew from much the same files.

Pure (no I/O). Alone decides what of a bundle still serves. What both images store in the same
stream (`Blob.stream_digest`) stays where it is. Elsewhere a bundle's bytes belong to files of the
old image: the same content in the new one, at its path or else anywhere, is where they go. Only
whole sectors of contents are moved; tar headers of a changed stream are nobody's.
"""

import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

from msgspec.structs import replace

from bootseer.blob.tree import Blob, Tree
from bootseer.prefetch.bundle.format import Bundle, BundleExtent, BundleFrame
from bootseer.prefetch.bundle.sector_marks import SECTOR_BYTES, SectorMarks, sectors_of
from bootseer.prefetch.index.stream_contents import StreamContents

EXTENT_COUNT_MAX = 100_000
"""So much of a bundle is translated; the rest is left out. A second's work in a process that has
a start to serve, and far more than a start needs; what comes first was wanted first."""

STEP_COUNT_MAX = 2**22
"""So many pairs of an old content and a new extent are looked at, some forty for each extent of a
bundle: a tree may claim that millions of files share their bytes."""

_SHARE = 8
"""A frame is used if at least this fraction (1 / 8) of its content has a place. Otherwise faults
bring the little that does: each moves a frame of its blob, 128 KiB, a fourth of ours."""

_Piece: TypeAlias = tuple[BundleExtent, int]
"""Bytes of a new stream, and their position in the frame's content."""


def translate(bundle: Bundle, old: Tree, new: Tree, new_index_digest: str) -> Bundle:
    """What of `bundle`, which belongs to `old`, serves `new`: its frames in their order, with
    extents of `new`'s streams. Frames that bring too little are left out, maybe all.

    No sector comes twice. Raises: CorruptError for a tree whose contents make no sense.
    """
    places = _Places(old, new)
    frames: list[BundleFrame] = []
    extent_count = 0
    for frame in bundle.frames:
        extent_count += len(frame.extents)
        if extent_count > EXTENT_COUNT_MAX:
            break
        pieces: list[_Piece] = []
        for extent, position in zip(frame.extents, frame.positions, strict=True):
            places.add_pieces(extent, position, pieces)
        if sum(extent.length for extent, _ in pieces) * _SHARE >= frame.stream_length:
            extents, positions = zip(*pieces, strict=True)
            frames.append(replace(frame, extents=extents, positions=positions))
    return Bundle(new_index_digest, bundle.header_bytes, tuple(frames))


def shared_streams(old: Sequence[Blob], new: Sequence[Blob]) -> dict[int, int]:
    """Numbers of old blobs whose streams new blobs have, too -> those blobs' numbers. Pure."""
    numbers = {(blob.stream_digest, blob.stream_length): n for n, blob in enumerate(new)}
    found = {}
    for number, blob in enumerate(old):
        other = numbers.get((blob.stream_digest, blob.stream_length))
        if other is not None:
            found[number] = other
    return found


class _Places:
    """Maps bytes of the old image's streams to places in the new image's streams."""

    def __init__(self, old: Tree, new: Tree) -> None:
        self._old = old
        self._new = new
        self._shared = shared_streams(old.blobs, new.blobs)
        self._taken = [SectorMarks() for _ in new.blobs]
        self._steps_left = STEP_COUNT_MAX
        # Tar has none: sectors of the new streams in whose middle other contents begin.
        self._crowded = {
            (blob, offset // SECTOR_BYTES)
            for blob, offset in zip(
                new.columns.extent_blob, new.columns.extent_blob_offset, strict=True
            )
            if offset % SECTOR_BYTES
        }
        self._contents = StreamContents(old)
        self._targets: dict[int, list[tuple[int, int, int, int]]] = {}

    def add_pieces(self, extent: BundleExtent, position: int, pieces: list[_Piece]) -> None:
        """Add the parts of an extent that the new image has; `position` is that of the extent."""
        number = self._shared.get(extent.blob)
        if number is None:
            self._add_contents(extent, position, pieces)
        elif self._take(number, extent.offset, extent.length):
            pieces.append((BundleExtent(number, extent.offset, extent.length), position))

    def _take(self, blob: int, offset: int, length: int) -> bool:
        """Mark sectors as brought; False if some are already."""
        first, end = sectors_of(offset, length)
        taken = self._taken[blob]
        if taken.gaps(first, end) != [(first, end)]:
            return False
        taken.take(first, end)
        return True

    def _add_contents(self, extent: BundleExtent, position: int, pieces: list[_Piece]) -> None:
        columns = self._old.columns
        starts, numbers = self._contents.layout(extent.blob)
        offset, extent_end = extent.offset, extent.offset + extent.length
        i = max(bisect_right(starts, offset) - 1, 0)
        while i < len(starts) and starts[i] < extent_end and self._steps_left > 0:
            self._steps_left -= 1
            number = numbers[i]
            start = starts[i]
            end = start + columns.extent_length[number]
            # Behind the end of a file tar fills its last sector with zeros, and no more.
            room_end = min(
                starts[i + 1] if i + 1 < len(starts) else extent_end,
                end + -end % SECTOR_BYTES,
                extent_end,
            )
            i += 1
            first, last = max(start, offset), min(end, extent_end)
            if first >= last:
                continue
            inode = self._contents.inode_of(number)
            one = columns.extent_start[inode + 1] - columns.extent_start[inode] == 1
            targets = self._target(inode)
            shift = columns.extent_file_offset[number] - start
            self._steps_left -= len(targets)
            for file_offset, blob, blob_offset, length in targets:
                low = max(first + shift, file_offset)
                high = min(last + shift, file_offset + length)
                # Whole sectors of the new stream only; the last one may end with it.
                to = blob_offset - file_offset
                low += -(low + to) % SECTOR_BYTES
                gap = -(high + to) % SECTOR_BYTES
                gap = min(gap, self._new.blobs[blob].stream_length - high - to)
                if gap:
                    at_end = one and high == end + shift == file_offset + length
                    alone = (
                        len(targets) == 1
                        and (blob, (high + to) // SECTOR_BYTES) not in self._crowded
                    )
                    if at_end and alone and high - shift + gap <= room_end:
                        high += gap
                    else:
                        high -= (high + to) % SECTOR_BYTES
                if low < high and self._take(blob, low + to, high - low):
                    place = position + low - shift - offset
                    pieces.append((BundleExtent(blob, low + to, high - low), place))

    def _target(self, inode: int) -> list[tuple[int, int, int, int]]:
        """The extents, in the new image, of a file with the content of an old one."""
        found = self._targets.get(inode)
        if found is None:
            number = self._find(inode)
            found = [] if number is None else self._new.extents(number)
            self._targets[inode] = found
        return found

    def _find(self, inode: int) -> int | None:
        """The new inode with an old one's content: by content alone where only one has it, which
        is quick and finds what was moved; of several the one at the same path, if any."""
        old = self._old.columns
        number = old.digest[inode]
        if not number or not stat.S_ISREG(old.mode[inode]):
            return None
        digest = old.digests[32 * (number - 1) : 32 * number]
        found = self._by_digest.get(digest)
        if found is None or digest not in self._several:
            return found
        same = self._new.resolve(self._old.path(inode))
        return same if same is not None and _digest(self._new, same) == digest else found

    @cached_property
    def _by_digest(self) -> dict[bytes, int]:
        """Digest of a content -> the first inode that has it."""
        digests, numbers = _digests(self._new), self._new.columns.digest
        inodes = range(self._new.inode_count - 1, -1, -1)
        return {digests[numbers[i]]: i for i in inodes if numbers[i]}

    @cached_property
    def _several(self) -> set[bytes]:
        """Digests of contents that several inodes have."""
        digests, counts = _digests(self._new), Counter(self._new.columns.digest)
        return {digests[number] for number, count in counts.items() if number and count > 1}


def _digests(tree: Tree) -> list[bytes]:
    heap = tree.columns.digests
    return [b"", *(heap[i : i + 32] for i in range(0, len(heap), 32))]


def _digest(tree: Tree, inode: int) -> bytes:
    number = tree.columns.digest[inode]
    return tree.columns.digests[32 * (number - 1) : 32 * number] if number else b""
