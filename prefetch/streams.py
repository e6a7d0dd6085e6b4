"""The streams of a tree's blobs, read through the node cache; what is missing is fetched.

Alone decides where a missing byte comes from: the bundle, while a replay has it on its way, else
the blob's own frames. Bytes enter the cache only verified. Where the cache's disk is full, frames
are kept in a small memory instead. Any thread may call `read`; no wait is without a deadline.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import CorruptError
from bootseer.prefetch.cache import SECTOR_BYTES, NodeCache
from bootseer.prefetch.replay import Replay
from bootseer.transfer.executor import Executor
from bootseer.transfer.plan import Chunk, Fetch, Priority, plan
from bootseer.transfer.statistics import Statistics

_log = logging.getLogger(__name__)

ReadObject: TypeAlias = Callable[[str, int, int], bytes]
"""`read(key, offset, length)` of the store."""

_MEMORY_BYTES = 64 * 2**20
"""Decoded frames kept where the disk takes none: enough for the frames of all server threads."""
_READAHEAD_FRAMES_MAX = 16
"""2 MiB of a file that is read from start to end: hides 10 ms of latency at 200 MB/s."""
_READERS_MAX = 1024


@dataclass(slots=True)
class _Reader:
    """How far one file has been fetched by reads that followed each other."""

    next_frame: int
    window: int


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """Counts since the server started."""

    fault_count: int
    """Reads that found something missing."""
    bundle_wait_count: int
    """Of these: answered by waiting for the bundle."""
    fault_wait_ns: int
    """All faults' waits together."""
    fault_frame_count: int
    """Frames of blobs that faults fetched."""
    readahead_frame_count: int


class _FrameMemory:
    """The last decoded frames, for a cache that keeps none. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def put(self, blob: int, frame: Frame, content: bytes) -> None:
        with self._lock:
            key = (blob, frame.stream_offset)
            if key not in self._frames:
                self._frames[key] = content
                self._size_bytes += len(content)
            while self._size_bytes > self._limit_bytes and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._size_bytes -= len(dropped)

    def get(self, blob: int, frame: Frame) -> bytes | None:
        with self._lock:
            return self._frames.get((blob, frame.stream_offset))


class BlobStreams:
    """Reads bytes of the streams of `blobs`. Close it."""

    def __init__(
        self,
        blobs: Sequence[Blob],
        read_object: ReadObject,
        cache: NodeCache,
        *,
        deadline_s: float = 30.0,
        workers: int = 8,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`on_progress` gets the stored bytes of each part that came. Raises: BootseerError when
        the cache cannot be opened."""
        self.blobs = blobs
        self.replay: Replay | None = None
        """Set once a bundle is known; see `replay.Replay.start`."""
        self._deadline_s = deadline_s
        self._numbers = {blob_key(blob.digest): number for number, blob in enumerate(blobs)}
        self.caches = []
        try:
            for blob in blobs:
                self.caches.append(cache.open_stream(blob.stream_digest, blob.stream_length))
        except BaseException:
            for opened in self.caches:
                opened.close()
            raise
        self._memory = _FrameMemory(_MEMORY_BYTES)
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._lock = threading.Lock()
        self._fault_count = self._bundle_wait_count = self._fault_wait_ns = 0
        self._fault_frame_count = self._readahead_frame_count = 0
        self.executor = Executor(
            read_object,
            workers=workers,
            deadline_s=deadline_s,
            is_cached=self._is_cached,
            on_progress=on_progress,
        )

    # ---- reading ------------------------------------------------------------------------------

    def read(
        self, blob: int, offset: int, length: int, *, reader: int = -1, end: int = 0
    ) -> bytes | memoryview:
        """`length` bytes at `offset` of the stream of blob number `blob`.

        `reader` identifies who reads on (a file) and `end` where that ends: reads of one reader
        that follow each other are fetched ahead.
        Raises: DeadlineError, CorruptError, UnavailableError, NotFoundError, OSError.
        """
        cache = self.caches[blob]
        if cache.has(offset, length):
            return cache.read(offset, length)
        started_ns = time.monotonic_ns()
        try:
            return self._fault(blob, offset, length, reader, end)
        finally:
            with self._lock:
                self._fault_count += 1
                self._fault_wait_ns += time.monotonic_ns() - started_ns

    def _fault(
        self, blob: int, offset: int, length: int, reader: int, end: int
    ) -> bytes | memoryview:
        cache = self.caches[blob]
        replay = self.replay
        if replay is not None and replay.demand(blob, offset, length, self._deadline_s):
            with self._lock:
                self._bundle_wait_count += 1
            if cache.has(offset, length):
                return cache.read(offset, length)
        numbers = self._missing_frames(blob, offset, length)
        if numbers:
            self._read_ahead(blob, numbers, reader, end)
            self._fetch_now(blob, numbers)
        if cache.has(offset, length):
            return cache.read(offset, length)
        return self._assemble(blob, offset, length)

    def _missing_frames(self, blob: int, offset: int, length: int) -> list[int]:
        found: dict[int, None] = {}
        for start, count in self.caches[blob].missing(offset, length):
            for number in frames_for(self.blobs[blob], start, count):
                found[number] = None
        return [n for n in found if self._memory.get(blob, self.blobs[blob].frames[n]) is None]

    def _fetch_now(self, blob: int, numbers: Sequence[int]) -> None:
        chunks = [self.chunk(blob, number) for number in numbers]
        with self._lock:
            self._fault_frame_count += len(chunks)
        if len(chunks) == 1:
            self.executor.demand(chunks[0], self._deliver)
            return
        fetches = plan(chunks, self._is_cached, priority=Priority.DEMAND, max_gap_bytes=0)
        self.executor.submit(fetches, self._deliver).wait(self._deadline_s)

    def _read_ahead(self, blob: int, numbers: Sequence[int], reader: int, end: int) -> None:
        """Ask for frames behind those that a fault needs, when faults follow each other."""
        if reader < 0:
            return
        first, after = numbers[0], numbers[-1] + 1
        with self._lock:
            state = self._readers.pop(reader, None)
            if state is None or not state.next_frame - state.window <= first <= state.next_frame:
                state = _Reader(after, 0)
            else:
                state.window = min(max(2 * state.window, 1), _READAHEAD_FRAMES_MAX)
            self._readers[reader] = state
            while len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
            start = max(after, state.next_frame)
            last = frames_for(self.blobs[blob], end - 1, 1)
            stop = min(after + state.window, last.stop) if state.window else start
            state.next_frame = max(state.next_frame, start, stop)
            self._readahead_frame_count += max(stop - start, 0)
        if start < stop:
            chunks = [self.chunk(blob, number) for number in range(start, stop)]
            self.executor.submit(plan(chunks, self._is_cached, max_gap_bytes=0), self._deliver)

    def _assemble(self, blob: int, offset: int, length: int) -> bytes:
        """The bytes from cache and memory, where the cache could not keep all of them."""
        pieces = []
        position = offset
        for number in frames_for(self.blobs[blob], offset, length):
            frame = self.blobs[blob].frames[number]
            stop = min(offset + length, frame.stream_offset + frame.stream_length)
            content = self._memory.get(blob, frame)
            if content is not None:
                start = position - frame.stream_offset
                pieces.append(content[start : stop - frame.stream_offset])
            elif self.caches[blob].has(position, stop - position):
                pieces.append(self.caches[blob].read(position, stop - position))
            else:
                raise CorruptError(f"bytes {position} to {stop} of {self.blobs[blob].digest} lost")
            position = stop
        return b"".join(pieces)

    # ---- frames of blobs ----------------------------------------------------------------------

    def chunk(self, blob: int, number: int) -> Chunk:
        """Frame `number` of a blob as what the executor fetches."""
        stored = self.blobs[blob]
        frame = stored.frames[number]
        return Chunk(blob_key(stored.digest), frame.offset, frame.length, frame.digest)

    def fill_fetches(self, priority: Priority = Priority.FILL) -> list[Fetch]:
        """Fetches of everything that is not here yet."""
        chunks = (
            self.chunk(blob, number)
            for blob, stored in enumerate(self.blobs)
            for number in range(len(stored.frames))
        )
        return plan(chunks, self._is_cached, priority=priority)

    def fill(self) -> None:
        """Bring everything here, in the background priority. Returns when it is.

        Raises: as `read`.
        """
        self.executor.submit(self.fill_fetches(), self._deliver).wait()

    def _frame_of(self, chunk: Chunk) -> tuple[int, Frame]:
        blob = self._numbers[chunk.key]
        frames = self.blobs[blob].frames
        return blob, frames[bisect_right(frames, chunk.offset, key=attrgetter("offset")) - 1]

    def _is_cached(self, chunk: Chunk) -> bool:
        if chunk.key not in self._numbers:
            replay = self.replay
            return replay is not None and replay.is_cached(chunk)
        blob, frame = self._frame_of(chunk)
        return self.caches[blob].has(frame.stream_offset, frame.stream_length)

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        blob, frame = self._frame_of(chunk)
        content = decode_frame(frame, data)
        kept = self.caches[blob].write(frame.stream_offset, content)
        # A sector that two frames share is never marked; tar streams cut by us have none.
        if not kept or frame.stream_offset % SECTOR_BYTES or frame.stream_length % SECTOR_BYTES:
            self._memory.put(blob, frame, content)

    # ---- the rest -----------------------------------------------------------------------------

    def figures(self) -> FaultFigures:
        """What faults cost so far."""
        with self._lock:
            return FaultFigures(
                self._fault_count,
                self._bundle_wait_count,
                self._fault_wait_ns,
                self._fault_frame_count,
                self._readahead_frame_count,
            )

    def statistics(self) -> Statistics:
        """What was moved so far."""
        return self.executor.statistics()

    def close(self) -> None:
        """End all transfers and let go of the cache. Idempotent."""
        self.executor.close()
        for cache in self.caches:
            cache.close()
