"""The bytes that one bundle brought, on this node's disk: claimed, not proven.

An index vouches for frames, not for the pages that a bundle brings. So a bundle's content lies in a
stream of its own in the node cache, one piece for each frame of the bundle, and serves the one
image (index and store) for which it was fetched (docs/format/cache.md, "Proven and claimed").
All servers of the image share it. When a proven frame shows that one byte is wrong, the stream is
marked, and no process reads it any more.

Thread-safe, but `close`, which comes last.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from bootseer.errors import CorruptError
from bootseer.prefetch.bundle.format import Bundle, BundleExtent, BundleFrame
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache

_MEMORY_FRAMES = 64
"""32 MiB: more than all requests that are under way at once bring."""


def file_key(bundle: Bundle, owner: str) -> str:
    """Return the key of the file of `bundle`, for the image `owner` (`stream_keys.owner_of`).

    The frames' digests are in it: equal keys mean equal bytes, also of a bundle that another image
    has lent.
    """
    hasher = hashlib.sha256(owner.encode("ascii"))
    for frame in bundle.frames:
        hasher.update(frame.digest)
    return f"bundle:{hasher.hexdigest()}"


class BundleFile:
    """File of the content of one bundle, filled frame by frame."""

    def __init__(self, cache: NodeCache, bundle: Bundle, owner: str, blob_count: int) -> None:
        """Open the file, which is made if it is new. Raises: BootseerError."""
        self.bundle = bundle
        self.key = file_key(bundle, owner)
        self._cache = cache
        self._placement = Placement(bundle.frames, blob_count)
        self._content = cache.open_pieces(self.key, self._placement.starts)
        # Frames that were under way when the disk became full.
        self._memory: dict[int, bytes] = {}

    # ---- what is here ---------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Return whether a frame is here. Reads only after a crash of the machine."""
        is_kept = number in self._memory or self._content.holds(number, number + 1)
        return is_kept and not self.is_refuted

    def has_now(self, number: int) -> bool:
        """Return whether a frame is known to be here, without reading."""
        is_kept = number in self._memory or self._content.holds_now(number, number + 1)
        return is_kept and not self.is_refuted

    def is_here(self, number: int, streams: Sequence[CachedStream]) -> bool:
        """Return whether a frame, or all of its extents in the image's `streams`, are here."""
        return self.has(number) or not any(_not_held(self.bundle.frames[number], streams))

    def is_whole(self, streams: Sequence[CachedStream]) -> bool:
        """Return whether each frame is here in the sense of `is_here`."""
        return all(self.is_here(number, streams) for number in range(len(self.bundle.frames)))

    @property
    def is_full(self) -> bool:
        """Whether the disk refused the last write."""
        return self._content.is_full

    @property
    def is_refuted(self) -> bool:
        """Whether a process of this node has found wrong bytes in it."""
        return self._content.is_refuted

    def frames_for(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the numbers of the frames that hold any of these bytes of a stream, ascending."""
        return self._placement.frames_for(blob, offset, length)

    def unproven(self, streams: Sequence[CachedStream]) -> Iterator[BundleExtent]:
        """Return the extents that are here and that `streams`, the image's, do not hold yet."""
        for number, frame in enumerate(self.bundle.frames):
            if self.has(number):
                yield from _not_held(frame, streams)

    def is_proven(self, streams: Sequence[CachedStream]) -> bool:
        """Return whether `streams`, the image's, hold all that the bundle brings."""
        return not any(any(_not_held(frame, streams)) for frame in self.bundle.frames)

    # ---- reading and writing --------------------------------------------------------------

    def get(self, blob: int, offset: int, length: int) -> bytes | memoryview | None:
        """Return bytes of a stream; None unless all of them are here. Raises: OSError."""
        if self._content.is_refuted:
            return None
        place = self._placement.place_of(blob, offset, length)
        if place >= 0:
            return self._at(place, length)
        pieces: list[bytes | memoryview] = []
        position = offset
        for start, count, place, _ in self._placement.within(blob, offset, length):
            data = self._at(place, count) if start == position else None
            if data is None:
                return None
            pieces.append(data)
            position = start + count
        if position != offset + length:
            return None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def put(self, number: int, content: bytes) -> bool:
        """Keep the content of a frame. Return False if the disk takes no more; then the frame is
        kept in memory, and no other frame should be fetched."""
        if self._content.put(number, content):
            return True
        if len(self._memory) < _MEMORY_FRAMES:
            self._memory[number] = content
        return False

    def _at(self, place: int, length: int) -> bytes | memoryview | None:
        """Bytes of one frame, at `place` of the bundle's content."""
        data = self._content.get(place, length)
        if data is None and self._memory:
            starts = self._placement.starts
            number = bisect_right(starts, place) - 1
            content = self._memory.get(number)
            if content is not None:
                data = content[place - starts[number] : place - starts[number] + length]
        return data

    def read_ahead(self, number: int) -> None:
        """Ask the kernel to read a frame from the disk into memory, without waiting. Never
        fails."""
        starts = self._placement.starts
        self._content.read_ahead(starts[number], starts[number + 1] - starts[number])

    def compare(self, blob: int, offset: int, content: bytes) -> None:
        """Compare the file with a frame of the image, which was found right.

        Raises: CorruptError if the bundle brought anything else.
        """
        for start, count, place, _ in self._placement.within(blob, offset, len(content)):
            # What the disk has damaged was nobody's claim.
            data = self._at(place, count)
            if data is not None and data != content[start - offset : start - offset + count]:
                raise CorruptError(
                    f"bytes {start} to {start + count} of a stream are not those of the image"
                )

    # ---- the end --------------------------------------------------------------------------

    def refute(self) -> None:
        """Mark the file as wrong for all processes of the node. Never raises."""
        self._content.refute()

    def close(self) -> None:
        """Close the file. Idempotent. It need not be durable: the image's own frames follow."""
        self._content.close(durable=False)

    def remove(self) -> None:
        """Close the file and remove it, unless another process uses it."""
        self.close()
        self._cache.remove(self.key)


def _not_held(frame: BundleFrame, streams: Sequence[CachedStream]) -> Iterator[BundleExtent]:
    for extent in frame.extents:
        if not streams[extent.blob].holds_bytes(extent.offset, extent.length):
            yield extent


class Placement:
    """Finds the bytes of streams in a bundle, in a microsecond. Immutable; thread-safe.

    The content of a bundle is the content of its frames, one behind the other.
    """

    def __init__(self, frames: Sequence[BundleFrame], blob_count: int) -> None:
        self.starts = array("Q", accumulate((f.stream_length for f in frames), initial=0))
        """Where the content of each frame begins in the content of the bundle, and where it ends
        altogether."""
        located: list[list[tuple[int, int, int, int]]] = [[] for _ in range(blob_count)]
        for number, frame in enumerate(frames):
            start = self.starts[number]
            for extent, position in zip(frame.extents, frame.positions, strict=True):
                end = extent.offset + extent.length
                located[extent.blob].append((extent.offset, end, number, start + position))
        self._columns: list[tuple[array[int], array[int], array[int], array[int]]] = []
        for entries in located:
            entries.sort()
            offsets, ends, numbers, places = zip(*entries, strict=True) if entries else ((),) * 4
            columns = array("Q", offsets), array("Q", ends), array("I", numbers), array("Q", places)
            self._columns.append(columns)

    def within(self, blob: int, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Return the parts of a stream's `[offset, offset + length)` in the bundle, ascending, each
        (offset in the stream, length, offset in the bundle's content, number of the frame)."""
        offsets, ends, numbers, places = self._columns[blob]
        stop = offset + length
        i = max(bisect_right(offsets, offset) - 1, 0)
        while i < len(offsets) and offsets[i] < stop:
            start = max(offset, offsets[i])
            end = min(stop, ends[i])
            if start < end:
                yield start, end - start, places[i] + start - offsets[i], numbers[i]
            i += 1

    def place_of(self, blob: int, offset: int, length: int) -> int:
        """Return where the bytes of a stream lie in the bundle's content, if one extent has all of
        them; else -1."""
        offsets, ends, _, places = self._columns[blob]
        i = bisect_right(offsets, offset) - 1
        if i < 0 or offset + length > ends[i]:
            return -1
        return places[i] + offset - offsets[i]

    def frames_for(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the numbers of the frames that hold any of `[offset, offset + length)`,
        ascending."""
        return sorted({number for _, _, _, number in self.within(blob, offset, length)})
