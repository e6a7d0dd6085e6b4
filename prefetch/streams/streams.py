"""The streams of a tree's blobs, read through the node cache; what is missing is fetched.

Alone decides where a missing byte comes from: the bundle, while a replay has it on its way, else
the blob's own frames, else a second source of the whole stream. Frames enter the cache only
verified; what else comes is claimed, until they have come (`image_stream`). Where the cache's disk
is full, frames are kept in a small memory instead. Any thread may call `read`; no wait is without a
deadline.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.prefetch.bundle.replay import Replay
from bootseer.prefetch.cache.node_cache import SECTOR_BYTES, NodeCache
from bootseer.prefetch.streams.budget import Budget, LateRanges
from bootseer.prefetch.streams.claims import Claims
from bootseer.prefetch.streams.fault_figures import FaultFigures, FaultRecorder, SourceFigures
from bootseer.prefetch.streams.frame_memory import FrameMemory
from bootseer.prefetch.streams.readahead import ReadAhead
from bootseer.prefetch.streams.repairs import Repair, Repairs
from bootseer.transfer.chunks import ChunkFetcher, Reader
from bootseer.transfer.figures import Statistics
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE
from bootseer.transfer.ranges import Chunk, Fetch, Priority, plan

_MEMORY_BYTES = 64 * 2**20
"""Decoded frames kept where the disk takes none: enough for the frames of all server threads."""

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


class BlobStreams:
    """Reads bytes of the streams of `blobs`. Close it."""

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
        claimant: str | None = None,
        is_local: bool = False,
        refuse: Callable[[], None] = lambda: None,
        on_refuted: Callable[[Sequence[tuple[int, int, int]]], None] = lambda ranges: None,
    ) -> None:
        """Open the blobs' caches.

        Args:
            read_object: `Store.read_verified`.
            fill_bytes_per_s: Caps what is fetched at the lowest priority.
            on_progress: Gets the stored bytes of each part that came.
            repair: Is asked when a frame of a blob cannot be had.
            on_damage: Gets chunks of which one at least came damaged, whatever happens then; it
                must be quick.
            claimant: The image for which claims are believed (`stream_keys.claimant_of`); without,
                all that is read is proven.
            is_local: See `NodeCache.open_image`.
            refuse, on_refuted: See `Claims`.

        Raises: BootseerError when the cache cannot be opened.
        """
        self.blobs = blobs
        self.replay: Replay | None = None
        """Set once a bundle is known; see `replay.Replay.start`."""
        self.faults = FaultRecorder()
        self._deadline_s = deadline_s
        self._numbers = {
            blob_key(blob.digest): number for number, blob in enumerate(blobs) if blob.frames
        }
        self._repairs = Repairs(repair)
        self._late = LateRanges()
        self._is_closed = False
        self.on_damage = on_damage
        mark = None if claimant is None else cache.claims_mark(claimant)
        self.caches = cache.open_image(blobs, mark=mark, is_local=is_local)
        self.claims = Claims(self.caches, mark, refuse, on_refuted)
        self._memory = FrameMemory(_MEMORY_BYTES)
        self._ahead = ReadAhead()
        self.fetcher = ChunkFetcher(
            read_object,
            threads=workers,
            deadline_s=deadline_s,
            # A second source need not wait for the end of the first one. Without one, a store that
            # refuses at once, as one that restarts, is asked again until the deadline.
            demand_policy=REQUEST if repair else UNTIL_DEADLINE,
            fill_bytes_per_s=fill_bytes_per_s,
            is_cached=self._is_verified,
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
    ) -> bytes | memoryview:
        """`length` bytes at `offset` of the stream of blob number `blob`.

        Waits no longer than one deadline without any bytes, whichever server is asked, or several
        while a second source brings bytes; `budget` is the rest of one that several reads share.
        `reader` identifies who reads on (a file) and `end` where that ends: reads of one reader
        that follow each other are fetched ahead. Raises: DeadlineError, CorruptError,
        UnavailableError, NotFoundError, OSError.
        """
        cache = self.caches[blob]
        content = cache.get(offset, length)
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
        """Returns a budget: one deadline for several reads."""
        return Budget(self._deadline_s)

    def _fault(
        self, blob: int, offset: int, length: int, reader: int, end: int, budget: Budget
    ) -> bytes | memoryview:
        cache = self.caches[blob]
        replay = self.replay
        if replay is not None:
            # The blobs are still to be asked within the deadline.
            with budget.spending(min(_BUNDLE_SHARE * budget.left_s, _BUNDLE_S_MAX)) as limit_s:
                has_waited = replay.demand(blob, offset, length, limit_s)
            if has_waited:
                self.faults.bundle_wait()
                content = cache.get(offset, length)
                if content is not None:
                    return content
        try:
            share = _STORE_SHARE if self._repairs.are_possible else 1.0
            with budget.spending(share * budget.left_s) as limit_s:
                self._fetch(blob, offset, length, reader, end, limit_s)
        except BootseerError as error:
            if isinstance(error, CorruptError):
                missing = self._missing_frames(blob, offset, length)
                self.on_damage([self.chunk(blob, number) for number in missing])
            self._repairs.bring(self.blobs[blob], cache, error, budget.left_s)
        content = cache.get(offset, length)
        if content is not None:
            return content
        return self._memory.assemble(blob, self.blobs[blob], cache, offset, length)

    def _fetch(
        self, blob: int, offset: int, length: int, reader: int, end: int, limit_s: float
    ) -> None:
        if not self.blobs[blob].frames:
            raise CorruptError(
                f"the stream {self.blobs[blob].stream_digest} is stored nowhere yet, and this "
                "node has lost a part of it; pull the image again"
            )
        numbers = self._missing_frames(blob, offset, length)
        if numbers:
            self._read_ahead(blob, numbers, reader, end)
            self._fetch_now(blob, numbers, limit_s)

    def _missing_frames(self, blob: int, offset: int, length: int) -> list[int]:
        found: dict[int, None] = {}
        for start, count in self.caches[blob].missing(offset, length):
            for number in frames_for(self.blobs[blob], start, count):
                found[number] = None
        return [number for number in found if self._memory.get(blob, number) is None]

    def _fetch_now(self, blob: int, numbers: Sequence[int], limit_s: float) -> None:
        frames, cache = self.blobs[blob].frames, self.caches[blob]
        first, last = frames[numbers[0]], frames[numbers[-1]]
        offset = first.stream_offset
        length = last.stream_offset + last.stream_length - offset
        others_s = time.monotonic() + min(_OTHERS_S, limit_s * _OTHERS_SHARE)
        while not cache.proven.announce(offset, length) and time.monotonic() < others_s:
            time.sleep(_POLL_S)
            if cache.has(offset, length):
                return
        try:
            if cache.has(offset, length):
                return
            chunks = [self.chunk(blob, number) for number in numbers]
            self.faults.frames(fault_count=len(chunks))
            # Planned without looking into the cache again: the fetcher does, at the last moment.
            fetches = plan(chunks, lambda chunk: False, priority=Priority.DEMAND, max_gap_bytes=0)
            self.fetcher.demand_all(fetches, self._deliver_fault, deadline_s=limit_s)
        except UnavailableError as error:
            if self._repairs.are_possible or self._is_closed:
                raise
            raise DeadlineError(f"{error}; it was asked until the deadline") from error
        finally:
            cache.proven.withdraw(offset, length)

    def _read_ahead(self, blob: int, numbers: Sequence[int], reader: int, end: int) -> None:
        """Ask for frames behind those that a fault needs, when faults follow each other."""
        if reader < 0:
            return
        last = frames_for(self.blobs[blob], end - 1, 1).stop
        ahead = self._ahead.behind(reader, numbers[0], numbers[-1] + 1, last)
        if ahead:
            self.faults.frames(readahead_count=len(ahead))
            chunks = [self.chunk(blob, number) for number in ahead]
            fetches = plan(chunks, self._is_verified, max_gap_bytes=0)
            self.fetcher.submit(fetches, self._deliver_ahead)

    # ---- frames of blobs ----------------------------------------------------------------------

    def chunk(self, blob: int, number: int) -> Chunk:
        """Frame `number` of a blob as what the fetcher fetches."""
        stored = self.blobs[blob]
        frame = stored.frames[number]
        return Chunk(blob_key(stored.digest), frame.offset, frame.length, frame.digest)

    def fill_fetches(
        self,
        ranges: Iterable[tuple[int, int, int]] | None = None,
        priority: Priority = Priority.FILL,
    ) -> list[Fetch]:
        """Fetches of what is stored and not proven yet of `ranges`, each (number of a blob, offset,
        length); by default of everything, which takes half a kilobyte for each 128 KiB."""
        if ranges is None:
            ranges = [(blob, 0, one.stream_length) for blob, one in enumerate(self.blobs)]
        wanted = {
            (blob, number): None
            for blob, offset, length in ranges
            for start, count in self.caches[blob].proven.missing(offset, length)
            for number in frames_for(self.blobs[blob], start, count)
        }
        return plan((self.chunk(*one) for one in wanted), lambda chunk: False, priority=priority)

    def fill(self, fetches: Sequence[Fetch] | None = None) -> None:
        """Bring `fetches`, by default everything, here in the background priority. Returns when
        they are. Raises: as `read`."""
        wanted = self.fill_fetches() if fetches is None else fetches
        self.fetcher.submit(wanted, self._deliver_fill).wait()

    def _place_of(self, chunk: Chunk) -> tuple[int, int, Frame]:
        blob = self._numbers[chunk.key]
        frames = self.blobs[blob].frames
        number = bisect_right(frames, chunk.offset, key=attrgetter("offset")) - 1
        return blob, number, frames[number]

    def _is_verified(self, chunk: Chunk) -> bool:
        """Whether a chunk is here, without reading: it is asked under the fetcher's lock."""
        if chunk.key not in self._numbers:
            replay = self.replay
            return replay is not None and replay.is_cached(chunk)
        blob, _, frame = self._place_of(chunk)
        return self.caches[blob].proven.holds_now(frame.stream_offset, frame.stream_length)

    def _deliver_fault(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(fault=self._deliver(chunk, data))

    def _deliver_ahead(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(readahead=self._deliver(chunk, data))

    def _deliver_fill(self, chunk: Chunk, data: memoryview) -> None:
        self.faults.came(fill=self._deliver(chunk, data))

    def _deliver(self, chunk: Chunk, data: memoryview) -> int:
        """Keep a frame; how many bytes came, 0 for one that another thread brought meanwhile."""
        blob, number, frame = self._place_of(chunk)
        cache = self.caches[blob]
        if cache.proven.holds_now(frame.stream_offset, frame.stream_length):
            return 0
        # A sector that two frames share is never marked; tar streams cut by us have none.
        is_whole = not (frame.stream_offset % SECTOR_BYTES or frame.stream_length % SECTOR_BYTES)
        content = self._memory.get(blob, number)
        came_bytes = frame.stream_length if content is None else 0
        if content is None:
            content = decode_frame(frame, data)
        elif not is_whole:
            return 0
        try:
            kept = cache.prove(frame.stream_offset, content)
        except CorruptError as error:
            kept = False
            if self.claims.refute(error) and self.replay is not None:
                self.replay.give_up(error)
        if not kept or not is_whole:
            self._memory.put(blob, number, content)
        return came_bytes

    def look_for_refutation(self) -> None:
        """Drop what is claimed if another server of the image on this node has found it wrong."""
        error = self.claims.look()
        if error is not None and self.replay is not None:
            self.replay.give_up(error)

    # ---- the rest -----------------------------------------------------------------------------

    @property
    def proven_bytes(self) -> int:
        """How much of the image is here and was compared with its index."""
        return sum(cache.proven.present_bytes() for cache in self.caches)

    @property
    def cached_bytes(self) -> int:
        """How much of the image is here."""
        return sum(cache.present_bytes() for cache in self.caches)

    @property
    def image_bytes(self) -> int:
        """Returns the uncompressed size of all streams."""
        return sum(blob.stream_length for blob in self.blobs)

    @property
    def is_full(self) -> bool:
        """Whether the disk refused a write."""
        return any(cache.is_full for cache in self.caches)

    def verify(self, may_go_on: Callable[[], bool]) -> None:
        """Verify what a crash of the machine may have torn, if there was one."""
        for cache in self.caches:
            cache.verify_all(may_go_on)

    def figures(self) -> FaultFigures:
        """What faults cost so far."""
        return self.faults.snapshot()

    def sources(self) -> SourceFigures:
        """Returns the bytes so far by source."""
        replay = self.replay
        return self.faults.sources(replay.fetched_bytes if replay else 0)

    def statistics(self) -> Statistics:
        """What was moved so far."""
        return self.fetcher.statistics()

    def close(self, *, durable: bool = True) -> None:
        """End all transfers and let go of the cache (see `StreamCache.close`). Idempotent."""
        self._is_closed = True
        if self.replay is not None:
            self.replay.stop()
        self.fetcher.close()
        for cache in self.caches:
            cache.close(durable=durable)
