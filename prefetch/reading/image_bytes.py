"""Bytes of an image's streams, read through the node cache, which is filled on demand.

A read is answered from the first place that has its bytes:

1. the streams of the node cache, which hold proven bytes (`cache.stream`);
2. the files of bundles (`bundle.file`), whose bytes are not proven yet; while a replay fetches the
   bundle, a fault waits for its frame;
3. the frames of the blob in the store: verified, kept in the stream, and compared with the bundle
   files. Frames behind them are read ahead when faults follow each other;
4. the registry, which sends the whole stream if the store has lost the blob (`reading.registry`).

If the disk takes no more, the latest frames are kept in memory. `ImageBytes` is thread-safe; every
wait has a deadline.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.prefetch.bundle.file import BundleFile, BundleFiles
from bootseer.prefetch.bundle.replay import BundleReplay
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache
from bootseer.prefetch.reading.faults import (
    Budget,
    FaultRecorder,
    LateRanges,
    ReadAheadPolicy,
    SourceFigures,
)
from bootseer.prefetch.reading.registry import Repair, Repairs
from bootseer.transfer.chunks import ChunkFetcher, Reader
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE
from bootseer.transfer.ranges import Chunk, Fetch, Priority, plan

_log = logging.getLogger(__name__)

_MEMORY_BYTES = 64 * 2**20
"""Decoded frames kept in memory on a full disk: enough for the frames of all server threads."""
_LOOKUP_S = 0.25
"""Longest wait of a fault for the lookup of the bundle as the server starts: the bundle file of the
node may have the bytes."""
_FANOUT_LOOKUP_S = 1.5
"""The same wait in a start with a fan-out, whose nodes wait for nodes that begin later."""
_OTHER_SERVER_S = 2.0
_OTHER_SERVER_SHARE = 0.1
"""Limits, in seconds and as a share of the deadline, of the wait for another server of the node
that fetches the same frames. It reads from the same store, so that a second request would rarely be
faster."""
_POLL_S = 0.001
_BUNDLE_SHARE = 0.25
_BUNDLE_S_MAX = 10.0
"""Limits of the wait for a frame of the bundle without any bytes: a store that sends nothing for so
long hangs."""
_STORE_SHARE = 2 / 3
"""Share of a read's deadline for the store, if there is a registry: enough for two attempts."""
Buffer: TypeAlias = bytes | memoryview
Range: TypeAlias = tuple[int, int, int]
"""Number of a blob, offset in its stream, length."""


class ImageBytes:
    """Bytes of the streams of an image's blobs. `close` it at the end."""

    def __init__(
        self,
        blobs: Sequence[Blob],
        read_object: Reader,
        cache: NodeCache,
        *,
        deadline_s: float = 30.0,
        workers: int = 8,
        fill_bytes_per_s: float | None = None,
        on_progress: Callable[[int], None] = lambda count: None,
        repair: Repair | None = None,
        on_damage: Callable[[Sequence[Chunk]], None] = lambda chunks: None,
        image_key: str | None = None,
        vouched: Container[str] = (),
        on_refuted: Callable[[Sequence[Range]], None] = lambda ranges: None,
        decode: Callable[[int, int, memoryview], bytes] | None = None,
    ) -> None:
        """Open the blobs' streams.

        `read_object` and `decode` are those of a `LayerReader`; by default all frames are zstd
        frames. `repair` fetches the whole stream of a blob that the store has lost. For `vouched`
        and `image_key` see `NodeCache.open_blob`. `fill_bytes_per_s` limits the rate of the lowest
        priority. `on_progress` is called with the stored bytes of each part that has arrived,
        `on_damage` with chunks that may be damaged (it must be quick), and `on_refuted`, in a
        thread of its own, with the ranges of a bundle that was found to be wrong.
        Raises: BootseerError if the cache cannot be opened.
        """
        self.blobs = blobs
        self.faults = FaultRecorder()
        self.on_damage = on_damage
        self.replay: BundleReplay | None = None
        """Replay of this start's bundle, once `use` was called with it."""
        self.cache = cache
        self._image_key = image_key
        self._decode = decode or self._decode_frame
        self._deadline_s = deadline_s
        self._numbers = {
            blob_key(blob.digest): number for number, blob in enumerate(blobs) if blob.frames
        }
        self._repairs = Repairs(repair)
        self._has_repair = repair is not None
        self._on_refuted = on_refuted
        self._late = LateRanges()
        self._memory = _FrameMemory()
        self._ahead = ReadAheadPolicy()
        self._bundles = BundleFiles(self._refuted)
        self._looked_up = threading.Event()
        self._looked_up.set()
        self._lookup_s = _LOOKUP_S
        self._switching = threading.Lock()
        # Streams that a thread may still read. They are closed at the end.
        self._replaced: list[CachedStream] = []
        self._is_closed = False
        self.streams: list[CachedStream] = []
        """Stream of each blob. It is replaced if a pulled stream turns out to be damaged, or if the
        registry has sent one."""
        try:
            for blob in blobs:
                self.streams.append(cache.open_blob(blob, vouched=vouched, image_key=image_key))
        except BaseException:
            for stream in self.streams:
                stream.close()
            raise
        self.fetcher = ChunkFetcher(
            read_object,
            threads=workers,
            deadline_s=deadline_s,
            # If there is a registry, it is asked after a few attempts. If not, a store that refuses
            # connections, as while it restarts, is asked again until the deadline.
            demand_policy=REQUEST if repair else UNTIL_DEADLINE,
            fill_bytes_per_s=fill_bytes_per_s,
            is_cached=self._is_here,
            on_progress=on_progress,
        )

    # ---- reading ------------------------------------------------------------------------------

    def read(
        self,
        blob: int,
        offset: int,
        length: int,
        *,
        reader: int = -1,
        end: int = 0,
        budget: Budget | None = None,
    ) -> Buffer:
        """Return `length` bytes at `offset` of the stream of blob number `blob`.

        Waits no longer than one deadline without any bytes, or several while the registry sends
        bytes. `budget` is the rest of a deadline that several reads share. `reader` identifies a
        file whose bytes in the stream end at `end`: behind faults of a file that follow each other,
        frames are read ahead.
        Raises: DeadlineError, CorruptError, UnavailableError, NotFoundError, OSError.
        """
        content = self.streams[blob].get(offset, length)
        if content is None:
            content = self._gather(blob, offset, length)
        if content is not None:
            self.faults.hit(length)
            return content
        started_ns = time.monotonic_ns()
        failed = True
        try:
            self._late.check(blob, offset, length)
            budget = budget or self.new_budget()
            try:
                data = self._fault(blob, offset, length, reader, end, budget)
            except DeadlineError as error:
                self._late.note(blob, offset, length, error)
                raise
            failed = False
            budget.restart()
            return data
        finally:
            self.faults.fault(time.monotonic_ns() - started_ns, failed=failed)

    def new_budget(self) -> Budget:
        """Return the budget of a read that is made of several."""
        return Budget(self._deadline_s)

    def get(self, blob: int, offset: int, length: int) -> Buffer | None:
        """Return bytes of a stream; None unless all are on this node. Raises: OSError."""
        content = self.streams[blob].get(offset, length)
        return self._gather(blob, offset, length) if content is None else content

    def _gather(self, blob: int, offset: int, length: int) -> Buffer | None:
        """Return bytes that the stream does not hold, or not all of them.

        Pieces come from bundle files, the stream and memory. Return None if one is missing.
        """
        if not self._bundles and not self._memory.is_used:
            return None
        content = self._bundles.get(blob, offset, length)
        if content is not None:
            return content
        stream = self.streams[blob]
        pieces: list[Buffer] = []
        position, end = offset, min(offset + length, stream.stream_length)
        for number in range(*stream.pieces(offset, length)):
            stop = min(stream.starts[number + 1], end)
            piece = stream.get(position, stop - position)
            if piece is None:
                piece = self._unkept(stream, blob, number, position, stop - position)
            if piece is None:
                return None
            pieces.append(piece)
            position = stop
        return b"".join(pieces) if position == offset + length else None

    def _unkept(
        self, stream: CachedStream, blob: int, number: int, offset: int, length: int
    ) -> Buffer | None:
        """Return bytes of a piece that the stream does not hold, from memory or a bundle file."""
        if stream.takes_frames:
            content = self._memory.get(blob, number)
            if content is not None:
                start = offset - stream.starts[number]
                return content[start : start + length]
        return self._bundles.get(blob, offset, length)

    def _missing(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the pieces of a range whose wanted bytes are not on this node."""
        stream = self.streams[blob]
        found = []
        for number in stream.missing(offset, length):
            start = max(offset, stream.starts[number])
            stop = min(offset + length, stream.starts[number + 1])
            if self._unkept(stream, blob, number, start, stop - start) is None:
                found.append(number)
        return found

    def _fault(
        self, blob: int, offset: int, length: int, reader: int, end: int, budget: Budget
    ) -> Buffer:
        if not self._looked_up.is_set():
            with budget.spending(min(self._lookup_s, budget.left_s)) as limit_s:
                self._looked_up.wait(limit_s)
            if (content := self.get(blob, offset, length)) is not None:
                return content
        replay = self.replay
        if replay is not None:
            # A share of the deadline, so that there is time left for the blob.
            with budget.spending(min(_BUNDLE_SHARE * budget.left_s, _BUNDLE_S_MAX)) as limit_s:
                has_waited = replay.demand(blob, offset, length, limit_s)
            if has_waited:
                self.faults.bundle_wait()
                if (content := self.get(blob, offset, length)) is not None:
                    return content
        try:
            share = _STORE_SHARE if self._has_repair else 1.0
            with budget.spending(share * budget.left_s) as limit_s:
                self._fetch(blob, offset, length, reader, end, limit_s)
        except BootseerError as error:
            if isinstance(error, CorruptError) and self.blobs[blob].frames:
                missing = self._missing(blob, offset, length)
                self.on_damage([self.chunk(blob, number) for number in missing])
            if (content := self.get(blob, offset, length)) is not None:
                return content  # A bundle or another server brought it meanwhile.
            self._repairs.fetch(
                self.blobs[blob], lambda: self._use_replacement(blob), error, budget.left_s
            )
        content = self.get(blob, offset, length)
        if content is None:
            raise CorruptError(
                f"bytes {offset} to {offset + length} of the stream "
                f"{self.blobs[blob].stream_digest} came and were lost; read them again"
            )
        return content

    def _fetch(
        self, blob: int, offset: int, length: int, reader: int, end: int, limit_s: float
    ) -> None:
        """Fetch the missing frames of a range from the store, and read ahead behind them."""
        if not self.blobs[blob].frames:
            raise CorruptError(
                f"the stream {self.blobs[blob].stream_digest} is stored nowhere yet, and this "
                "node has lost a part of it; pull the image again"
            )
        self._use_frames(blob)
        numbers = self._missing(blob, offset, length)
        if not numbers:
            return
        if reader >= 0:
            self._read_ahead(blob, numbers, reader, end)
        stream = self.streams[blob]
        first, stop = numbers[0], numbers[-1] + 1
        others_s = time.monotonic() + min(_OTHER_SERVER_S, limit_s * _OTHER_SERVER_SHARE)
        while not stream.announce(first, stop) and time.monotonic() < others_s:
            time.sleep(_POLL_S)
            if stream.holds(first, stop):
                return
        try:
            if stream.holds(first, stop):
                return
            chunks = [self.chunk(blob, number) for number in numbers]
            self.faults.frames(fault_count=len(chunks))
            # The fetcher checks at the last moment which of them are present by then.
            fetches = plan(chunks, lambda chunk: False, priority=Priority.DEMAND, max_gap_bytes=0)
            self.fetcher.demand_all(fetches, self._deliver_fault, deadline_s=limit_s)
        except UnavailableError as error:
            if self._has_repair or self._is_closed:
                raise
            raise DeadlineError(f"{error}; it was asked until the deadline") from error
        finally:
            stream.withdraw(first, stop)

    def _read_ahead(self, blob: int, numbers: Sequence[int], reader: int, end: int) -> None:
        """Fetch frames behind those of a fault, if faults of the reader follow each other."""
        last = frames_for(self.blobs[blob], end - 1, 1).stop
        ahead = self._ahead.frames_for(reader, numbers[0], numbers[-1] + 1, last)
        if ahead:
            self.faults.frames(readahead_count=len(ahead))
            chunks = [self.chunk(blob, number) for number in ahead]
            fetches = plan(chunks, self._is_here, max_gap_bytes=0)
            self.fetcher.submit(fetches, self._deliver_ahead)

    # ---- replacing a stream -------------------------------------------------------------------

    def _use_frames(self, blob: int) -> CachedStream:
        """Return the stream that takes the blob's frames, which readers use from now on.

        A pulled stream that lacks a piece is replaced by it. Frames are never written to a pulled
        stream, since other images read that, too.
        """
        with self._switching:
            stream = self.streams[blob]
            if stream.takes_frames:
                return stream
            frames = self.cache.open_frames(self.blobs[blob])
            self._replaced.append(stream)
            self.streams[blob] = frames
        _log.warning("%s is damaged: the layer is read from the store", stream.directory)
        return frames

    def _use_replacement(self, blob: int) -> bool:
        """Use the stream that the registry sent for a blob. Return whether it is whole."""
        stored = self.blobs[blob]
        if not stored.frames:
            return self.streams[blob].holds(0, self.streams[blob].count)
        if self._image_key is None:
            return False
        with self._switching:
            sent = self.cache.open_replacement(stored, self._image_key)
            if sent is None or sent.stream_length != stored.stream_length:
                return False
            self._replaced.append(self.streams[blob])
            self.streams[blob] = sent
            return True

    # ---- bundles ------------------------------------------------------------------------------

    def expect_bundle(self, *, has_fanout: bool = False) -> None:
        """Make faults wait a moment for the lookup of the bundle, until `use` is called.

        `has_fanout`: whether other nodes bring the bundle, some of which may begin later.
        """
        self._lookup_s = _FANOUT_LOOKUP_S if has_fanout else _LOOKUP_S
        self._looked_up.clear()

    def use(
        self,
        file: BundleFile | None,
        refuse: Callable[[], None] = lambda: None,
        replay: BundleReplay | None = None,
    ) -> None:
        """Read from a bundle file, which this object closes, and let faults wait for its replay.

        `refuse` is called if this server finds wrong bytes in the file, before other servers learn
        of that.
        """
        if file is not None:
            self._bundles.add(file, refuse)
        if replay is not None:
            self.replay = replay
        self._looked_up.set()

    def unproven(self) -> list[Range]:
        """Return the ranges that only bundle files hold."""
        return [(one.blob, one.offset, one.length) for one in self._bundles.unproven(self.streams)]

    def drop_refuted(self) -> None:
        """Drop the bundle files that another server of the image has refuted."""
        self._bundles.drop_refuted()

    def _refuted(self, file: BundleFile, error: CorruptError) -> None:
        if self.replay is not None and self.replay.bundle is file.bundle:
            self.replay.refute(error)
        ranges = [tuple(extent) for frame in file.bundle.frames for extent in frame.extents]
        # In another thread, because a reader may wait for this one, and the kernel for the reader.
        threading.Thread(
            target=self._on_refuted, args=(ranges,), name="refuted", daemon=True
        ).start()

    # ---- frames of blobs ----------------------------------------------------------------------

    def chunk(self, blob: int, number: int) -> Chunk:
        """Return frame `number` of a blob as a chunk of the fetcher."""
        stored = self.blobs[blob]
        frame = stored.frames[number]
        return Chunk(blob_key(stored.digest), frame.offset, frame.length, frame.digest)

    def fill_fetches(self, ranges: Iterable[Range] | None = None) -> list[Fetch]:
        """Return fetches of the frames of `ranges` that the streams do not hold.

        By default they are those of the whole image, at half a kilobyte of memory for each 128 KiB.
        """
        if ranges is None:
            ranges = [(blob, 0, one.stream_length) for blob, one in enumerate(self.blobs)]
        wanted: dict[tuple[int, int], None] = {}
        for blob, offset, length in ranges:
            if not self.blobs[blob].frames:
                continue
            missing = self.streams[blob].missing(offset, length)
            if missing and not self.streams[blob].takes_frames:
                missing = self._use_frames(blob).missing(offset, length)
            wanted.update(((blob, number), None) for number in missing)
        chunks = (self.chunk(*one) for one in wanted)
        return plan(chunks, lambda chunk: False, priority=Priority.FILL)

    def fill(self, fetches: Sequence[Fetch] | None = None) -> None:
        """Carry out `fetches`, by default those of the whole image, at the lowest priority.

        Returns when all bytes have arrived. Raises: as `read`.
        """
        wanted = self.fill_fetches() if fetches is None else fetches
        self.fetcher.submit(wanted, self._deliver_fill).wait()

    def _decode_frame(self, blob: int, number: int, data: memoryview) -> bytes:
        return decode_frame(self.blobs[blob].frames[number], data)

    def _place_of(self, chunk: Chunk) -> tuple[int, int, Frame]:
        blob = self._numbers[chunk.key]
        frames = self.blobs[blob].frames
        number = bisect_right(frames, chunk.offset, key=attrgetter("offset")) - 1
        return blob, number, frames[number]

    def _is_here(self, chunk: Chunk) -> bool:
        """Return whether a chunk is present. Reads nothing: the fetcher holds its lock."""
        if chunk.key not in self._numbers:
            replay = self.replay
            return replay is not None and replay.is_cached(chunk)
        blob, number, _ = self._place_of(chunk)
        stream = self.streams[blob]
        return stream.takes_frames and stream.is_known_to_hold(number, number + 1)

    def _deliver_fault(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.received(fault=self._deliver(chunk, data))

    def _deliver_ahead(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.received(readahead=self._deliver(chunk, data))

    def _deliver_fill(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.received(fill=self._deliver(chunk, data))

    def _deliver(self, chunk: Chunk, data: memoryview) -> int:
        """Keep a frame of a blob. Return its uncompressed size, or 0 if it was already present."""
        blob, number, frame = self._place_of(chunk)
        stream = self.streams[blob]
        if not stream.takes_frames or stream.is_known_to_hold(number, number + 1):
            return 0
        known = self._memory.get(blob, number)
        content = self._decode(blob, number, data) if known is None else known
        if not stream.put(number, content):
            self._memory.put(blob, number, content)
        self._bundles.compare(blob, frame.stream_offset, content)
        return frame.stream_length if known is None else 0

    # ---- the rest -----------------------------------------------------------------------------

    @property
    def proven_bytes(self) -> int:
        """Bytes of the image in the streams, which are proven."""
        return sum(stream.present_bytes() for stream in self.streams)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the image on this node."""
        return self.proven_bytes + sum(length for _, _, length in self.unproven())

    @property
    def image_bytes(self) -> int:
        """Uncompressed size of all streams."""
        return sum(blob.stream_length for blob in self.blobs)

    @property
    def is_full(self) -> bool:
        """Whether the disk refused the last write."""
        return any(one.is_full for one in self.streams) or self._bundles.is_full

    def verify(self, may_go_on: Callable[[], bool]) -> None:
        """After a crash of the machine, compare all pieces with their checksums."""
        for stream in self.streams:
            if stream.is_doubtful:
                stream.check_all(may_go_on)

    def sources(self) -> SourceFigures:
        """Return the bytes by source so far."""
        replay = self.replay
        return self.faults.sources(replay.fetched_bytes if replay else 0)

    def close(self, *, durable: bool = True) -> None:
        """End all transfers and close the cache. Idempotent.

        Bundle files whose bytes are all proven are removed. `durable`: see `CachedStream.close`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.replay is not None:
            self.replay.stop()
        self.fetcher.close()
        self._bundles.close(self.streams)
        for stream in self._replaced:
            stream.close()
        for stream in self.streams:
            stream.close(durable=durable)


class _FrameMemory:
    """The latest decoded frames, for a node whose disk takes no more. Thread-safe."""

    def __init__(self) -> None:
        self.is_used = False
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def put(self, blob: int, number: int, content: bytes) -> None:
        """Keep a frame's content. Older frames are dropped to stay below `_MEMORY_BYTES`."""
        with self._lock:
            self.is_used = True
            key = (blob, number)
            if key not in self._frames:
                self._frames[key] = content
                self._size_bytes += len(content)
            while self._size_bytes > _MEMORY_BYTES and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._size_bytes -= len(dropped)

    def get(self, blob: int, number: int) -> bytes | None:
        """Return a frame's content; None if it is not kept."""
        if not self.is_used:
            return None
        with self._lock:
            return self._frames.get((blob, number))
