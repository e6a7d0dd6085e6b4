"""Files of the bytes that bundles brought, on this node's disk: claimed, not proven.

An index vouches for the frames of blobs, but not for the bytes of a bundle. So the content of a
bundle is kept in a stream of its own in the node cache, with one piece for each frame of the
bundle, and serves only the image (index and store) for which it was fetched (docs/format/cache.md,
"Proven and claimed"). All servers of the image share the file. When a proven frame shows that one
of its bytes is wrong, the file is marked as refuted, and no process reads it any more.

Thread-safe, except that `close` must come last.
"""

import hashlib
import logging
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from bootseer.errors import CorruptError
from bootseer.prefetch.bundle.format import Bundle, BundleExtent, BundleFrame
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache

_log = logging.getLogger(__name__)

_MEMORY_FRAMES = 64
"""Frames kept in memory on a full disk (32 MiB): more than all requests under way at once bring."""
_FILES_MAX = 2
"""Most bundle files that are read: the file of this start, and the file used before."""


def file_key(bundle: Bundle, image_key: str) -> str:
    """Return the key of the file of a bundle for one image (`node_cache.image_key_of`).

    The digests of the frames are a part of the key. So two bundles share a file only if their bytes
    are equal, as those of a bundle and its translation.
    """
    hasher = hashlib.sha256(image_key.encode("ascii"))
    for frame in bundle.frames:
        hasher.update(frame.digest)
    return f"bundle:{hasher.hexdigest()}"


class BundleFile:
    """File of the content of one bundle, filled frame by frame."""

    def __init__(self, cache: NodeCache, bundle: Bundle, image_key: str, blob_count: int) -> None:
        """Open the file, and create it if it is new. Raises: BootseerError."""
        self.bundle = bundle
        self.key = file_key(bundle, image_key)
        self._cache = cache
        self._extents = ExtentMap(bundle.frames, blob_count)
        self._content = cache.open_pieces(self.key, self._extents.starts)
        # Frames that were under way when the disk became full.
        self._memory: dict[int, bytes] = {}

    # ---- present frames -------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Return whether a frame is present. Reads it only after a crash of the machine."""
        is_kept = number in self._memory or self._content.holds(number, number + 1)
        return is_kept and not self.is_refuted

    def is_known_present(self, number: int) -> bool:
        """Return whether a frame is known to be present. Reads nothing."""
        is_kept = number in self._memory or self._content.is_known_to_hold(number, number + 1)
        return is_kept and not self.is_refuted

    def is_available(self, number: int, streams: Sequence[CachedStream]) -> bool:
        """Return whether a frame is present, or the image's `streams` hold all of its extents."""
        return self.has(number) or not any(_not_held(self.bundle.frames[number], streams))

    def is_whole(self, streams: Sequence[CachedStream]) -> bool:
        """Return whether each frame is present, or its extents are in the image's `streams`."""
        return all(self.is_available(number, streams) for number in range(len(self.bundle.frames)))

    @property
    def is_full(self) -> bool:
        """Whether the disk refused the last write."""
        return self._content.is_full

    @property
    def is_refuted(self) -> bool:
        """Whether a process of this node has found wrong bytes in the file."""
        return self._content.is_refuted

    def frames_for(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the numbers of the frames that hold any of these bytes of a stream, ascending."""
        return self._extents.frames_for(blob, offset, length)

    def unproven(self, streams: Sequence[CachedStream]) -> Iterator[BundleExtent]:
        """Yield the extents of present frames that the image's `streams` do not hold yet."""
        for number, frame in enumerate(self.bundle.frames):
            if self.has(number):
                yield from _not_held(frame, streams)

    def is_proven(self, streams: Sequence[CachedStream]) -> bool:
        """Return whether the image's `streams` hold all extents of the bundle."""
        return not any(any(_not_held(frame, streams)) for frame in self.bundle.frames)

    # ---- reading and writing --------------------------------------------------------------

    def get(self, blob: int, offset: int, length: int) -> bytes | memoryview | None:
        """Return bytes of a stream; None unless all of them are present. Raises: OSError."""
        if self._content.is_refuted:
            return None
        place = self._extents.place_of(blob, offset, length)
        if place >= 0:
            return self._at(place, length)
        pieces: list[bytes | memoryview] = []
        position = offset
        for start, count, place, _ in self._extents.within(blob, offset, length):
            data = self._at(place, count) if start == position else None
            if data is None:
                return None
            pieces.append(data)
            position = start + count
        if position != offset + length:
            return None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def put(self, number: int, content: bytes) -> bool:
        """Write the content of a frame. Return False if the disk takes no more.

        The frame is kept in memory then, and the caller should fetch no others.
        """
        if self._content.put(number, content):
            return True
        if len(self._memory) < _MEMORY_FRAMES:
            self._memory[number] = content
        return False

    def _at(self, place: int, length: int) -> bytes | memoryview | None:
        """Return bytes of one frame by their offset in the bundle's content."""
        data = self._content.get(place, length)
        if data is None and self._memory:
            starts = self._extents.starts
            number = bisect_right(starts, place) - 1
            content = self._memory.get(number)
            if content is not None:
                data = content[place - starts[number] : place - starts[number] + length]
        return data

    def read_ahead(self, number: int) -> None:
        """Ask the kernel to read a frame from the disk ahead, without waiting. Never raises."""
        starts = self._extents.starts
        self._content.read_ahead(starts[number], starts[number + 1] - starts[number])

    def compare(self, blob: int, offset: int, content: bytes) -> None:
        """Compare the file with proven bytes of a stream.

        Raises: CorruptError if the file has other bytes.
        """
        for start, count, place, _ in self._extents.within(blob, offset, len(content)):
            # None if absent, or damaged on the disk, which is no fault of the bundle.
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
        """Close the file. Idempotent."""
        # Without a flush to the disk: frames of the image's own blobs will replace the file.
        self._content.close(durable=False)

    def remove(self) -> None:
        """Close the file, and remove it unless another process uses it."""
        self.close()
        self._cache.remove(self.key)


def _not_held(frame: BundleFrame, streams: Sequence[CachedStream]) -> Iterator[BundleExtent]:
    for extent in frame.extents:
        if not streams[extent.blob].holds_bytes(extent.offset, extent.length):
            yield extent


class BundleFiles:
    """The bundle files that one server reads, the latest first. Thread-safe."""

    def __init__(self, on_refuted: Callable[[BundleFile, CorruptError], None]) -> None:
        """`on_refuted` gets each file that was found to be wrong, once no read uses it any more."""
        self._on_refuted = on_refuted
        self._used: tuple[tuple[BundleFile, Callable[[], None]], ...] = ()
        # Files that a thread may still read. They are closed at the end.
        self._unused: list[BundleFile] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether any file is read."""
        return bool(self._used)

    def add(self, file: BundleFile, refuse: Callable[[], None]) -> None:
        """Read `file` first. `refuse` marks its bundle, so that this node never uses it again."""
        with self._lock:
            used = ((file, refuse), *(one for one in self._used if one[0] is not file))
            self._used = used[:_FILES_MAX]
            self._unused += [one for one, _ in used[_FILES_MAX:]]

    def get(self, blob: int, offset: int, length: int) -> bytes | memoryview | None:
        """Return bytes of a stream; None unless one file has all of them. Raises: OSError."""
        for file, _ in self._used:
            content = file.get(blob, offset, length)
            if content is not None:
                return content
        return None

    def unproven(self, streams: Sequence[CachedStream]) -> list[BundleExtent]:
        """Return the extents that only these files hold, and not the image's `streams`."""
        return [extent for file, _ in self._used for extent in file.unproven(streams)]

    @property
    def is_full(self) -> bool:
        """Whether the disk refused the last write of a file."""
        return any(file.is_full for file, _ in self._used)

    def compare(self, blob: int, offset: int, content: bytes) -> None:
        """Compare the files with proven bytes of a stream. Refute those that differ."""
        for file, refuse in self._used:
            try:
                file.compare(blob, offset, content)
            except CorruptError as error:
                # In this order: a server that starts now must not find the bundle.
                refuse()
                file.refute()
                self._drop(file, error)

    def drop_refuted(self) -> None:
        """Read no more of the files that another server of the image has refuted."""
        for file, _ in self._used:
            if file.is_refuted:
                error = "another server of the image on this node found wrong bytes in a bundle"
                self._drop(file, CorruptError(error))

    def _drop(self, file: BundleFile, error: CorruptError) -> None:
        with self._lock:
            used = tuple(one for one in self._used if one[0] is not file)
            if len(used) == len(self._used):
                return
            self._used = used
            self._unused.append(file)
        _log.error(
            "a bundle brought bytes that are not those of the image: %s. It is not used any more, "
            "and the image is read without it. Programs that have read the image may have got "
            "wrong bytes: start them again, and find out who can write to `hot/` and `bundles/` "
            "of the store",
            error,
        )
        self._on_refuted(file, error)

    def close(self, streams: Sequence[CachedStream]) -> None:
        """Close all files. Remove those whose extents the image's `streams` all hold."""
        for file, _ in self._used:
            if not file.is_refuted and file.is_proven(streams):
                file.remove()
            file.close()
        for file in self._unused:
            file.close()


class ExtentMap:
    """Map from the bytes of streams to their places in a bundle's content. Immutable.

    The content of a bundle is the content of its frames, one after the other. A lookup takes a
    microsecond.
    """

    def __init__(self, frames: Sequence[BundleFrame], blob_count: int) -> None:
        self.starts = array("Q", accumulate((f.stream_length for f in frames), initial=0))
        """Offset of each frame's content in the bundle's content, followed by its total length."""
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
        """Yield the parts of a stream's `[offset, offset + length)` that are in the bundle.

        Each is (offset in the stream, length, offset in the bundle's content, frame number),
        ascending.
        """
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
        """Return the place of bytes that lie in one extent in the bundle's content; else -1."""
        offsets, ends, _, places = self._columns[blob]
        i = bisect_right(offsets, offset) - 1
        if i < 0 or offset + length > ends[i]:
            return -1
        return places[i] + offset - offsets[i]

    def frames_for(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the numbers of the frames that overlap the range, ascending."""
        return sorted({number for _, _, _, number in self.within(blob, offset, length)})
