"""Translation of a bundle for another image that has many of the same files, such as a rebuild.

Bytes of a stream that both images have (`Blob.stream_digest`) keep their place. All other bytes of
the bundle belong to files of the old image. They are moved to a file of the new image with the same
content, preferably the one at the same path. Only whole sectors of file contents are moved, no tar
headers. Pure.
"""

import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

from msgspec.structs import replace

from bootseer.blob.tree import Blob, Tree
from bootseer.prefetch.bundle.format import (
    SECTOR_BYTES,
    Bundle,
    BundleExtent,
    BundleFrame,
    SectorMarks,
    sectors_of,
)
from bootseer.prefetch.index.stream_contents import StreamContents

EXTENT_COUNT_MAX = 100_000
"""The most extents of a bundle that are translated, in the order of use; the rest is left out. It
takes about a second in a process that has a start to serve, and is far more than a start needs."""

STEP_COUNT_MAX = 2**22
"""The most pairs of an old content and a new extent that are examined, about forty for each extent
of a bundle: a tree may claim that millions of files share their bytes."""

_SHARE = 8
"""A frame is used if at least 1 / `_SHARE` of its content is found in the new image. For less than
that, faults are cheaper: each fetches 128 KiB of a blob, a fourth of a bundle's frame."""

_Piece: TypeAlias = tuple[BundleExtent, int]
"""Extent of a new stream, and its position in the frame's content."""


def translate(bundle: Bundle, old: Tree, new: Tree, new_index_digest: str) -> Bundle:
    """Return `bundle`, made for the tree `old`, with the extents of the streams of `new`.

    Frames with too little content of `new` are left out, maybe all. No sector is in the bundle
    twice. Raises: CorruptError for a tree with impossible contents.
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
    """Map each old blob to the new blob with the same stream, by their numbers. Pure."""
    numbers = {(blob.stream_digest, blob.stream_length): n for n, blob in enumerate(new)}
    found = {}
    for number, blob in enumerate(old):
        other = numbers.get((blob.stream_digest, blob.stream_length))
        if other is not None:
            found[number] = other
    return found


class _Places:
    """Map from bytes of the old image's streams to places in the new image's streams."""

    def __init__(self, old: Tree, new: Tree) -> None:
        self._old = old
        self._new = new
        self._shared = shared_streams(old.blobs, new.blobs)
        self._taken = [SectorMarks() for _ in new.blobs]
        self._steps_left = STEP_COUNT_MAX
        # Sectors of the new streams in whose middle a file begins. A tar stream has none.
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
        """Append the parts of an extent that the new image has; `position` is the extent's."""
        number = self._shared.get(extent.blob)
        if number is None:
            self._add_contents(extent, position, pieces)
        elif self._take(number, extent.offset, extent.length):
            pieces.append((BundleExtent(number, extent.offset, extent.length), position))

    def _take(self, blob: int, offset: int, length: int) -> bool:
        """Take sectors of a new stream. Return False if one of them is already taken."""
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
            # Tar fills the last sector of a file with zeros.
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
                # Whole sectors of the new stream; only its last sector may be partial.
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
        """Return the extents of the new file with the content of the old inode."""
        found = self._targets.get(inode)
        if found is None:
            number = self._find(inode)
            found = [] if number is None else self._new.extents(number)
            self._targets[inode] = found
        return found

    def _find(self, inode: int) -> int | None:
        """Return the new inode with the content of an old one; None if there is none.

        Of several such inodes, the one at the same path is returned, if any.
        """
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
        """Map from the digest of a content to the first new inode that has it."""
        digests, numbers = _digests(self._new), self._new.columns.digest
        inodes = range(self._new.inode_count - 1, -1, -1)
        return {digests[numbers[i]]: i for i in inodes if numbers[i]}

    @cached_property
    def _several(self) -> set[bytes]:
        """Digests of contents that several new inodes have."""
        digests, counts = _digests(self._new), Counter(self._new.columns.digest)
        return {digests[number] for number, count in counts.items() if number and count > 1}


def _digests(tree: Tree) -> list[bytes]:
    heap = tree.columns.digests
    return [b"", *(heap[i : i + 32] for i in range(0, len(heap), 32))]


def _digest(tree: Tree, inode: int) -> bytes:
    number = tree.columns.digest[inode]
    return tree.columns.digests[32 * (number - 1) : 32 * number] if number else b""
