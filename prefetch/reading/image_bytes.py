"""Bytes of an image's streams, read through the node cache, which is filled on demand.

A read is answered from the first place that has its bytes:

1. the streams of the node cache, which hold proven bytes (`cache.stream`);
2. what bundles brought for this image (`bundle.file`), which nothing proves yet; while a replay has
   the bundle on its way, a fault waits for it;
3. the frames of the blob, out of the store: verified, kept in the stream, and compared with what a
   bundle brought of them. Faults that follow each other are read ahead;
4. a second source of the whole stream (`repairs`), where the store has lost the blob.

Where the disk takes nothing, the last frames are kept in memory. `ImageBytes` is thread-safe; no
wait is without a deadline.
"""

import contextlib
import logging
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from msgspec import Struct

from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.prefetch.bundle.file import BundleFile
from bootseer.prefetch.bundle.replay import Replay
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache
from bootseer.prefetch.reading.fault_figures import FaultFigures, FaultRecorder, SourceFigures
from bootseer.prefetch.reading.repairs import Repair, Repairs
from bootseer.transfer.chunks import ChunkFetcher, Reader
from bootseer.transfer.figures import Statistics
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE
from bootseer.transfer.ranges import Chunk, Fetch, Priority, plan

_log = logging.getLogger(__name__)

_MEMORY_BYTES = 64 * 2**20
"""Decoded frames kept where the disk takes none: enough for the frames of all server threads."""
_BUNDLES_MAX = 2
"""Bundles that are asked: the one of this start, and the one that the node used before."""
_LOOK_S = 0.25
"""A fault waits no longer for the bundle that the node has, which is opened as the server starts: a
fault before that would fetch what is here."""
_OTHERS_S = 2.0
_OTHERS_SHARE = 0.1
"""A share of the deadline: for another server of the node that is fetching the same. It reads from
the same store, so that to ask oneself would rarely be faster."""
_POLL_S = 0.001
_BUNDLE_SHARE = 0.25
_BUNDLE_S_MAX = 10.0
"""A share of the deadline: a frame of the bundle of which nothing has come by then comes from a
store that hangs."""
_STORE_SHARE = 2 / 3
"""A share of a read's deadline, where there is a second source: enough for two attempts at the
store."""
_AHEAD_FRAMES_MAX = 16
"""2 MiB of a file that is read from start to end: hides 10 ms of latency at 200 MB/s."""
_READERS_MAX = 1024
_AGAIN_S = 1.0
"""The kernel's second request comes within milliseconds; a program that tries again comes later."""
_RANGES_MAX = 64
"""No more than the server threads can have under way at once, several times over."""

Buffer: TypeAlias = bytes | memoryview
Range: TypeAlias = tuple[int, int, int]
"""Number of a blob, offset in its stream, length."""


class Budget:
    """Rest of one read's deadline: how long it may still wait without any bytes. For one thread."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.left_s = deadline_s
        """Seconds; 0 when it is used up."""

    @contextlib.contextmanager
    def spending(self, limit_s: float) -> Iterator[float]:
        """Charge the time that the body takes, at most `limit_s`, which it gets.

        A body that waits no longer than `limit_s` without bytes takes more only while bytes come.
        """
        start_s = time.monotonic()
        try:
            yield limit_s
        finally:
            self.left_s -= min(time.monotonic() - start_s, limit_s)

    def restart(self) -> None:
        """Begin anew, because bytes have come."""
        self.left_s = self._deadline_s


class ImageBytes:
    """The bytes of the streams of `blobs`. Close it."""

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
        owner: str | None = None,
        vouched: Container[str] = (),
        on_refuted: Callable[[Sequence[Range]], None] = lambda ranges: None,
        decode: Callable[[int, int, memoryview], bytes] | None = None,
    ) -> None:
        """Open the blobs' streams.

        Args:
            read_object: `Store.read_verified`.
            fill_bytes_per_s: Caps what is fetched at the lowest priority.
            on_progress: Gets the stored bytes of each part that came.
            repair: Is asked when a frame of a blob cannot be had.
            on_damage: Gets chunks of which one at least came damaged, whatever happens then; it
                must be quick.
            owner: The image (`stream_keys.owner_of`), for streams that a registry sent for it.
            vouched: Digests of streams that this node may have pulled (`NodeCache.open_blob`).
            on_refuted: Gets the ranges of which wrong bytes may have been read, because a bundle
                brought them, whichever server found that. Called in a thread of its own.
            decode: Turns frame (blob, number) into its content, verified: `LayerReader.decode`. By
                default all are zstd frames.

        Raises: BootseerError if the cache cannot be opened.
        """
        self.blobs = blobs
        self.faults = FaultRecorder()
        self.on_damage = on_damage
        self.replay: Replay | None = None
        """The bundle of this start, once it is on its way (`use`)."""
        self.cache = cache
        self._owner = owner
        self._decode = decode or self._decode_frame
        self._deadline_s = deadline_s
        self._numbers = {
            blob_key(blob.digest): number for number, blob in enumerate(blobs) if blob.frames
        }
        self._repairs = Repairs(repair)
        self._has_repair = repair is not None
        self._on_refuted = on_refuted
        self._late = _LateRanges()
        self._memory = _FrameMemory(_MEMORY_BYTES)
        self._ahead = _ReadAhead()
        self._bundles: tuple[tuple[BundleFile, Callable[[], None]], ...] = ()
        self._has_looked = threading.Event()
        self._has_looked.set()
        self._changing = threading.Lock()
        self._left: list[CachedStream | BundleFile] = []
        self._is_closed = False
        self.streams: list[CachedStream] = []
        """The stream of each blob. An item changes when a pulled stream turns out to be damaged,
        and when a registry has sent one."""
        try:
            for blob in blobs:
                self.streams.append(cache.open_blob(blob, vouched=vouched, owner=owner))
        except BaseException:
            for stream in self.streams:
                stream.close()
            raise
        self.fetcher = ChunkFetcher(
            read_object,
            threads=workers,
            deadline_s=deadline_s,
            # A second source need not wait for the end of the first one. Without one, a store that
            # refuses at once, as one that restarts, is asked again until the deadline.
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

        Waits no longer than one deadline without any bytes, whichever server is asked, or several
        while a second source brings bytes; `budget` is the rest of one that several reads share.
        `reader` identifies who reads on (a file) and `end` where that ends: reads of one reader
        that follow each other are fetched ahead. Raises: DeadlineError, CorruptError,
        UnavailableError, NotFoundError, OSError.
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
        """Return a budget: one deadline for several reads."""
        return Budget(self._deadline_s)

    def get(self, blob: int, offset: int, length: int) -> Buffer | None:
        """Return bytes of a stream without waiting; None unless all are here. Raises: OSError."""
        content = self.streams[blob].get(offset, length)
        return self._gather(blob, offset, length) if content is None else content

    def _gather(self, blob: int, offset: int, length: int) -> Buffer | None:
        """The bytes, piece by piece from the place that has them; None if some are nowhere here."""
        if not self._bundles and not self._memory.is_used:
            return None
        for file, _ in self._bundles:
            content = file.get(blob, offset, length)
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
        """Bytes of one piece that the stream does not hold, from memory or a bundle."""
        if stream.takes_frames:
            content = self._memory.get(blob, number)
            if content is not None:
                start = offset - stream.starts[number]
                return content[start : start + length]
        for file, _ in self._bundles:
            found = file.get(blob, offset, length)
            if found is not None:
                return found
        return None

    def _missing(self, blob: int, offset: int, length: int) -> list[int]:
        """Return the pieces of a range that neither cache, memory nor bundles have."""
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
        if not self._has_looked.is_set():
            with budget.spending(min(_LOOK_S, budget.left_s)) as limit_s:
                self._has_looked.wait(limit_s)
            if (content := self.get(blob, offset, length)) is not None:
                return content
        replay = self.replay
        if replay is not None:
            # The blobs are still to be asked within the deadline.
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
            self._repairs.bring(
                self.blobs[blob], lambda: self._use_sent(blob), error, budget.left_s
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
        if not self.blobs[blob].frames:
            raise CorruptError(
                f"the stream {self.blobs[blob].stream_digest} is stored nowhere yet, and this "
                "node has lost a part of it; pull the image again"
            )
        self._for_frames(blob)
        numbers = self._missing(blob, offset, length)
        if numbers:
            self._read_ahead(blob, numbers, reader, end)
            self._fetch_now(blob, numbers, limit_s)

    def _fetch_now(self, blob: int, numbers: Sequence[int], limit_s: float) -> None:
        stream = self.streams[blob]
        first, stop = numbers[0], numbers[-1] + 1
        others_s = time.monotonic() + min(_OTHERS_S, limit_s * _OTHERS_SHARE)
        while not stream.announce(first, stop) and time.monotonic() < others_s:
            time.sleep(_POLL_S)
            if stream.holds(first, stop):
                return
        try:
            if stream.holds(first, stop):
                return
            chunks = [self.chunk(blob, number) for number in numbers]
            self.faults.frames(fault_count=len(chunks))
            # Planned without looking into the cache again: the fetcher does, at the last moment.
            fetches = plan(chunks, lambda chunk: False, priority=Priority.DEMAND, max_gap_bytes=0)
            self.fetcher.demand_all(fetches, self._deliver_fault, deadline_s=limit_s)
        except UnavailableError as error:
            if self._has_repair or self._is_closed:
                raise
            raise DeadlineError(f"{error}; it was asked until the deadline") from error
        finally:
            stream.withdraw(first, stop)

    def _read_ahead(self, blob: int, numbers: Sequence[int], reader: int, end: int) -> None:
        """Ask for frames behind those that a fault needs, when faults follow each other."""
        if reader < 0:
            return
        last = frames_for(self.blobs[blob], end - 1, 1).stop
        ahead = self._ahead.behind(reader, numbers[0], numbers[-1] + 1, last)
        if ahead:
            self.faults.frames(readahead_count=len(ahead))
            chunks = [self.chunk(blob, number) for number in ahead]
            fetches = plan(chunks, self._is_here, max_gap_bytes=0)
            self.fetcher.submit(fetches, self._deliver_ahead)

    # ---- which stream a blob is read from -----------------------------------------------------

    def _for_frames(self, blob: int) -> CachedStream:
        """The stream that takes the blob's frames. A pulled stream that lacks a piece is left for
        it: no frame is ever written to that, since other images read it, too."""
        with self._changing:
            stream = self.streams[blob]
            if stream.takes_frames:
                return stream
            frames = self.cache.open_frames(self.blobs[blob])
            self._left.append(stream)
            self.streams[blob] = frames
        _log.warning("%s is damaged: the layer is read from the store", stream.directory)
        return frames

    def _use_sent(self, blob: int) -> bool:
        """Switch a blob to the stream that the second source sent. Return whether it is whole."""
        stored = self.blobs[blob]
        if not stored.frames:
            return self.streams[blob].holds(0, self.streams[blob].count)
        if self._owner is None:
            return False
        with self._changing:
            sent = self.cache.open_own(stored, self._owner)
            if sent is None or sent.stream_length != stored.stream_length:
                return False
            self._left.append(self.streams[blob])
            self.streams[blob] = sent
            return True

    # ---- bundles ------------------------------------------------------------------------------

    def expect_bundle(self) -> None:
        """Let faults wait a moment for a bundle of the node, until `use` is called."""
        self._has_looked.clear()

    def use(
        self,
        file: BundleFile | None,
        refuse: Callable[[], None] = lambda: None,
        replay: Replay | None = None,
    ) -> None:
        """Read what `file` has, and wait for what `replay` has on its way. `refuse` is called when
        this server has found its bytes wrong, before any other is told. The file is closed with
        this object."""
        if file is not None:
            with self._changing:
                known = [one for one in self._bundles if one[0] is not file]
                kept = ((file, refuse), *known)
                self._bundles = kept[:_BUNDLES_MAX]
                self._left += [one for one, _ in kept[_BUNDLES_MAX:]]
        if replay is not None:
            self.replay = replay
        self._has_looked.set()

    def unproven(self) -> list[Range]:
        """Return the ranges that only bundles brought."""
        return [
            (extent.blob, extent.offset, extent.length)
            for file, _ in self._bundles
            for extent in file.unproven(self.streams)
        ]

    def look_for_refutation(self) -> None:
        """Drop the bundles that another server of the image has refuted."""
        for file, _ in self._bundles:
            if file.is_refuted:
                self._drop(
                    file,
                    CorruptError(
                        "another server of the image on this node found that bytes of a bundle are "
                        "not those of the image"
                    ),
                )

    def _compare(self, blob: int, offset: int, content: bytes) -> None:
        """Compare what bundles brought with a frame that was found right."""
        for file, refuse in self._bundles:
            try:
                file.compare(blob, offset, content)
            except CorruptError as error:
                # In this order: a server that starts now must not find the bundle.
                refuse()
                file.refute()
                self._drop(file, error)

    def _drop(self, file: BundleFile, error: CorruptError) -> None:
        with self._changing:
            kept = tuple(one for one in self._bundles if one[0] is not file)
            if len(kept) == len(self._bundles):
                return
            self._bundles = kept
            # A thread may be reading it: closed at the end.
            self._left.append(file)
        _log.error(
            "a bundle brought bytes that are not those of the image: %s. It is not used any more, "
            "and the image is read without it. What has read the image so far may have got wrong "
            "bytes: start it again, and find out who can write to `hot/` and `bundles/` of the "
            "store",
            error,
        )
        if self.replay is not None and self.replay.bundle is file.bundle:
            self.replay.refute(error)
        ranges = [tuple(extent) for frame in file.bundle.frames for extent in frame.extents]
        # Not here: a reader waits for this thread, and the kernel for the reader.
        threading.Thread(
            target=self._on_refuted, args=(ranges,), name="refuted", daemon=True
        ).start()

    # ---- frames of blobs ----------------------------------------------------------------------

    def chunk(self, blob: int, number: int) -> Chunk:
        """Return frame `number` of a blob as a chunk of the fetcher."""
        stored = self.blobs[blob]
        frame = stored.frames[number]
        return Chunk(blob_key(stored.digest), frame.offset, frame.length, frame.digest)

    def fill_fetches(
        self, ranges: Iterable[Range] | None = None, priority: Priority = Priority.FILL
    ) -> list[Fetch]:
        """Return fetches of the stored frames of `ranges` that are not here; by default of
        everything, which takes half a kilobyte for each 128 KiB."""
        if ranges is None:
            ranges = [(blob, 0, one.stream_length) for blob, one in enumerate(self.blobs)]
        wanted: dict[tuple[int, int], None] = {}
        for blob, offset, length in ranges:
            if not self.blobs[blob].frames:
                continue
            missing = self.streams[blob].missing(offset, length)
            if missing and not self.streams[blob].takes_frames:
                missing = self._for_frames(blob).missing(offset, length)
            wanted.update(((blob, number), None) for number in missing)
        return plan((self.chunk(*one) for one in wanted), lambda chunk: False, priority=priority)

    def fill(self, fetches: Sequence[Fetch] | None = None) -> None:
        """Bring `fetches`, by default everything, here in the background priority. Returns when
        they are. Raises: as `read`."""
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
        """Whether a chunk is here, without reading: it is asked under the fetcher's lock."""
        if chunk.key not in self._numbers:
            replay = self.replay
            return replay is not None and replay.is_cached(chunk)
        blob, number, _ = self._place_of(chunk)
        stream = self.streams[blob]
        return stream.takes_frames and stream.holds_now(number, number + 1)

    def _deliver_fault(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(fault=self._deliver(chunk, data))

    def _deliver_ahead(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(readahead=self._deliver(chunk, data))

    def _deliver_fill(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(fill=self._deliver(chunk, data))

    def _deliver(self, chunk: Chunk, data: memoryview) -> int:
        """Keep a frame; how many bytes came, 0 for one that another thread brought meanwhile."""
        blob, number, frame = self._place_of(chunk)
        stream = self.streams[blob]
        if not stream.takes_frames or stream.holds_now(number, number + 1):
            return 0
        known = self._memory.get(blob, number)
        content = self._decode(blob, number, data) if known is None else known
        if not stream.put(number, content):
            self._memory.put(blob, number, content)
        self._compare(blob, frame.stream_offset, content)
        return frame.stream_length if known is None else 0

    # ---- the rest -----------------------------------------------------------------------------

    @property
    def proven_bytes(self) -> int:
        """Bytes of the image that are here and were compared with its index."""
        return sum(stream.present_bytes() for stream in self.streams)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the image that are here."""
        return self.proven_bytes + sum(length for _, _, length in self.unproven())

    @property
    def image_bytes(self) -> int:
        """Uncompressed size of all streams."""
        return sum(blob.stream_length for blob in self.blobs)

    @property
    def is_full(self) -> bool:
        """Whether the disk refused the last write."""
        return any(one.is_full for one in self.streams) or any(
            file.is_full for file, _ in self._bundles
        )

    def verify(self, may_go_on: Callable[[], bool]) -> None:
        """Compare the pieces that a crash of the machine may have lost, after one."""
        for stream in self.streams:
            if stream.is_doubtful:
                stream.check_all(may_go_on)

    def figures(self) -> FaultFigures:
        """Return the figures of faults so far."""
        return self.faults.snapshot()

    def sources(self) -> SourceFigures:
        """Return the bytes so far by source."""
        replay = self.replay
        return self.faults.sources(replay.fetched_bytes if replay else 0)

    def statistics(self) -> Statistics:
        """Return the statistics of the fetcher."""
        return self.fetcher.statistics()

    def close(self, *, durable: bool = True) -> None:
        """End all transfers and close the cache (see `CachedStream.close`). Bundles that are all
        proven by now are removed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.replay is not None:
            self.replay.stop()
        self.fetcher.close()
        for file, _ in self._bundles:
            if not file.is_refuted and file.is_proven(self.streams):
                file.remove()
            file.close()
        for one in self._left:
            one.close()
        for stream in self.streams:
            stream.close(durable=durable)


class _Late(Struct, frozen=True):
    blob: int
    start: int
    end: int
    until_s: float
    error: BootseerError


class _LateRanges:
    """Ranges that could not be had within their deadline a moment ago. Thread-safe."""

    def __init__(self) -> None:
        self._ranges: list[_Late] = []
        self._lock = threading.Lock()

    def note(self, blob: int, offset: int, length: int, error: BootseerError) -> None:
        """Note that a read of this range has waited for all of its deadline, in vain."""
        now_s = time.monotonic()
        late = _Late(blob, offset, offset + length, now_s + _AGAIN_S, error)
        with self._lock:
            self._ranges = [one for one in self._ranges if one.until_s > now_s][-_RANGES_MAX:]
            self._ranges.append(late)

    def check(self, blob: int, offset: int, length: int) -> None:
        """Raise DeadlineError for a range that a read has waited for until a moment ago."""
        if not self._ranges:
            return
        now_s = time.monotonic()
        for one in tuple(self._ranges):
            overlaps = one.start < offset + length and offset < one.end
            if one.blob == blob and overlaps and one.until_s > now_s:
                raise DeadlineError(str(one.error))


class _FrameMemory:
    """The last decoded frames, for a node whose disk takes no more. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.is_used = False
        self._limit_bytes = limit_bytes
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def put(self, blob: int, number: int, content: bytes) -> None:
        """Keep a frame's content, at the cost of older ones."""
        with self._lock:
            self.is_used = True
            key = (blob, number)
            if key not in self._frames:
                self._frames[key] = content
                self._size_bytes += len(content)
            while self._size_bytes > self._limit_bytes and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._size_bytes -= len(dropped)

    def get(self, blob: int, number: int) -> bytes | None:
        """Return the content, if it is still kept."""
        if not self.is_used:
            return None
        with self._lock:
            return self._frames.get((blob, number))


class _Reader(Struct):
    """Progress of one file that is read from start to end."""

    next_frame: int
    window: int


class _ReadAhead:
    """Decides which frames to fetch behind those that a fault needs. Thread-safe."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    def behind(self, reader: int, first: int, after: int, last: int) -> range:
        """Return the frames to fetch ahead of a reader.

        `reader` has a fault on the frames from `first` up to `after`; `last` ends its file.
        """
        with self._lock:
            state = self._readers.pop(reader, None)
            if state is None or not state.next_frame - state.window <= first <= state.next_frame:
                state = _Reader(after, 0)
            else:
                state.window = min(max(2 * state.window, 1), _AHEAD_FRAMES_MAX)
            self._readers[reader] = state
            while len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
            start = max(after, state.next_frame)
            stop = min(after + state.window, last) if state.window else start
            state.next_frame = max(state.next_frame, start, stop)
            return range(start, stop)
