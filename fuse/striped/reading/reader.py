"""Parallel, verified reads through one window of memory for a whole mount.

`StripedReader` knows which files are open, and decides which bytes are fetched for each read and
ahead of it. `Window` has the units that are in memory or on their way: no unit is fetched twice at
once, and bytes are returned only after their checksums matched. A `FetchEngine` makes the reads. A
wait ends after a deadline without bytes, or when the requesting process is interrupted.

Thread-safe; callers must not hold the engine's lock, which guards the window.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, UnavailableError
from bootseer.fuse.striped.memory import Droppable, Memory, Tier
from bootseer.fuse.striped.reading.opened import CopiedUnit, Key, OpenFile, Sources, UnitRead
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import ByteRange, FileView
from bootseer.store.backend import Backend, HasDescriptor
from bootseer.transfer.engine import EngineFigures, FetchEngine, JobAttempt, JobState, ReadJob
from bootseer.transfer.policy import UNTIL_DEADLINE
from bootseer.transfer.ranges import Priority

if TYPE_CHECKING:
    from bootseer.fanout.local import SharedRanges

# Queued reads straight into a caller's buffer, for each thread: enough for the engine to choose
# among several stored files.
_AHEAD_PER_THREAD = 4
# Units that a copy reads at once, for each processor: more displace each other from its cache.
# With 2 processors, 6 at once took 15 % less CPU time than 12, in the gateway of a bucket as well.
_COPIED_PER_CPU = 3
# Time without a finished read of a copy after which the copy waits for its first read, whose error
# or deadline ends the copy.
_NO_SLOT_S = 1.0
_WARM_STEP_BYTES = 32 * 2**20
_ACTIVE_S = 10.0
# The active streams are counted at most this often: each count visits every open file.
_COUNTED_S = 0.1
# A large file is read through few buffers, which are reused: page faults of new memory cost more
# than any other step of a read (0.6 to 0.9 CPU s/GiB). The last few units stay for requests that
# later requests overtook.
_PASSED_MAX = 4


def _never() -> bool:
    return False


class _Figures(EngineFigures):
    """Adapter that counts the reads of an engine in the mount's counters."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def won(self, one: JobAttempt, seconds: float) -> None:
        count, busy_ns = one.job.length, int(seconds * 1e9)
        self._counters.add(
            fetched_bytes=count, fetch_count=1, fetch_busy_ns=busy_ns, late_won_count=one.is_second
        )
        self._counters.add_for(_place_of(one), read_bytes=count, read_count=1, read_busy_ns=busy_ns)

    def retried(self, job: ReadJob, error: BaseException) -> None:
        self._counters.add(read_retry_count=1)

    def damaged(self, job: ReadJob) -> None:
        self._counters.add(corrupt_count=1)

    def late(self, one: JobAttempt) -> None:
        self._counters.add(late_count=1)
        self._counters.add_for(_place_of(one), late_count=1)

    def hung(self, one: JobAttempt) -> None:
        self._counters.add(stuck_count=1)


def _place_of(one: JobAttempt) -> str:
    """Return the name of the place that an attempt reads from: the DataNode, or the part."""
    assert isinstance(one.job, UnitRead)
    return one.attempt.server or one.job.view.source_name(one.job.span)


class CachedRead(UnitRead, Droppable):
    """Read whose bytes stay in memory for later readers, until the memory is needed."""

    def __init__(
        self, window: "Window", key: Key, file: OpenFile, span: ByteRange, buffer: memoryview
    ):
        super().__init__(
            window.sources,
            window.memory,
            file,
            span,
            patience_s=window.patience_s,
            buffer=buffer,
        )
        self.key = key
        self._window = window

    def ended(self) -> None:
        super().ended()
        self._window.ended(self)

    def drop(self) -> None:
        self._window.drop(self)


class Window:
    """Units of one mount in memory."""

    def __init__(
        self, sources: Sources, engine: FetchEngine, memory: Memory, patience_s: float
    ) -> None:
        self.sources = sources
        self.memory = memory
        self.patience_s = patience_s
        self._engine = engine
        self._lock = engine.lock
        self._reads: dict[Key, CachedRead] = {}

    # ---- finding and fetching -----------------------------------------------------------------

    def demand(
        self,
        file: OpenFile,
        position: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> CachedRead:
        """Return the read that holds `position` of a request up to `end`, here or on its way.

        The read is in use by the caller until `end_use`. Raises: as `Memory.take`.
        """
        view = file.view
        unit, block = view.unit_at(position), view.block_at(position)
        with self._lock:
            for key in ((view.identity, unit.start, True), (view.identity, block.start, False)):
                found = self._reads.get(key)
                if found is not None and self.memory.use(found):
                    # Units keep the order in which they were fetched, so that a unit that was read
                    # ahead is not dropped before a unit that has just been read.
                    if not key[2]:
                        self.memory.offer(found, Tier.CACHED)
                    self._engine.hasten(found, Priority.DEMAND)
                    return found
        covered = min(end, unit.end) - position
        is_unit = whole_units or covered * 2 >= unit.length
        span = unit if is_unit else block
        buffer = self.memory.take(span.length, self.patience_s, cancelled)
        return self._start(file, span, is_unit, Priority.DEMAND, buffer, hold=True)

    def read_ahead(self, file: OpenFile, start: int, end: int, priority: Priority) -> int:
        """Start fetching whole units from `start` while memory lasts; return how far it came."""
        position = start
        end = min(end, file.view.size_bytes)
        while position < end:
            unit = file.view.unit_at(position)
            if not self.has(file.view, unit):
                buffer = self.memory.try_take(unit.length)
                if buffer is None:
                    return position
                self._start(file, unit, True, priority, buffer, hold=False)
            position = unit.end
        return position

    def has(self, view: FileView, unit: ByteRange) -> bool:
        """Return whether a whole unit is in memory or on its way."""
        with self._lock:
            return (view.identity, unit.start, True) in self._reads

    def _start(
        self,
        file: OpenFile,
        span: ByteRange,
        is_unit: bool,
        priority: Priority,
        buffer: memoryview,
        *,
        hold: bool,
    ) -> CachedRead:
        """Queue the read of `span` into `buffer`, unless another thread just has."""
        key = (file.view.identity, span.start, is_unit)
        with self._lock:
            read = self._reads.get(key)
            if read is not None and (not hold or self.memory.use(read)):
                return read
            read = CachedRead(self, key, file, span, buffer)
            self._engine.add(read, priority)
            # Offered at the request, so that the oldest request is dropped first, and in use until
            # the bytes have arrived.
            self.memory.offer(read, Tier.CACHED)
            self.memory.use(read)
            if hold:
                self.memory.use(read)
            self._reads[key] = read
            return read

    def starves_others(self, file: OpenFile, read: UnitRead) -> bool:
        """Return whether a stored file is idle while `read` is waited for.

        It is idle if all units after `read` that were requested from it are in memory.
        """
        if read.data is not None:
            return False
        identity, start = file.view.identity, read.span.start
        with self._lock:
            later = [r for key, r in self._reads.items() if key[0] == identity and key[1] > start]
        busy = {each.place for each in (read, *later) if each.data is None}
        return any(each.data is not None and each.place not in busy for each in later)

    # ---- waiting ------------------------------------------------------------------------------

    def wait_for_units(
        self, file: OpenFile, start: int, end: int, cancelled: Callable[[], bool]
    ) -> None:
        """Wait for those units that are here or on their way. Raises: as `wait_for`."""
        position = start
        while position < end:
            unit = file.view.unit_at(position)
            with self._lock:
                read = self._reads.get((file.view.identity, unit.start, True))
            if read is not None:
                wait_for(self._engine, read, cancelled)
            position = unit.end

    # ---- giving up memory ---------------------------------------------------------------------

    def end_use(self, reads: Sequence[CachedRead]) -> None:
        """End the caller's use of the reads that `demand` returned."""
        for read in reads:
            self.memory.end_use(read)

    def leave_behind(
        self, file: OpenFile, reads: Sequence[CachedRead], end: int, *, is_only: bool
    ) -> None:
        """Offer the units behind a sequential reader, which has come to `end`, to be dropped first.

        The units of a file that is larger than the memory are dropped at once if the file has no
        other reader.
        """
        is_large = file.view.size_bytes > self.memory.limit_bytes
        with self._lock:
            for read in reads:
                if self._reads.get(read.key) is read and read.span.end <= end:
                    self.memory.offer(read, Tier.PASSED)
                    if is_only and is_large:
                        file.passed.append(read.key)
            while len(file.passed) > _PASSED_MAX:
                oldest = self._reads.get(file.passed.popleft())
                if oldest is not None and oldest.data is not None and not oldest.users:
                    self._forget(oldest)

    def ended(self, read: CachedRead) -> None:
        """Note that a read has failed, or that its bytes are here; the lock is held."""
        self.memory.end_use(read)
        if read.error is not None:
            self._forget(read)

    def drop(self, read: CachedRead) -> None:
        """Drop the bytes of a read; see `Droppable.drop`."""
        with self._lock:
            self._forget(read)

    def _forget(self, read: CachedRead) -> None:
        """Drop a read that failed or whose bytes are dropped; the lock is held.

        The memory is free once no view of it is left.
        """
        self.memory.withdraw(read)
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
        if read.data is not None:
            self.memory.give_up(read.data)


def wait_for(engine: FetchEngine, read: UnitRead, cancelled: Callable[[], bool]) -> None:
    """Return when the bytes of `read` have arrived.

    Raises: the error of the read; DeadlineError if no bytes came for the engine's deadline;
    InterruptedError if `cancelled` returns True.
    """
    try:
        engine.wait(read, cancelled)
    except InterruptedError:
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR)) from None
    read.raise_error()


class StripedReader:
    """Reader of all files of one mount."""

    def __init__(
        self,
        backend: Backend,
        memory: Memory,
        *,
        thread_count: int,
        patience_s: float,
        counters: Counters | None = None,
    ) -> None:
        """Read from `backend` with up to `thread_count` threads.

        `patience_s`: seconds without any bytes after which a read fails.
        """
        self._sources = Sources(backend)
        self._memory = memory
        self._patience_s = patience_s
        self._counters = counters or Counters()
        demand_threads = max(1, thread_count // 4)
        self._direct_max = _AHEAD_PER_THREAD * thread_count
        self._copied_max = thread_count - demand_threads
        self._engine = FetchEngine(
            dict.fromkeys(Priority, UNTIL_DEADLINE),
            threads=thread_count - demand_threads,
            demand_threads=demand_threads,
            deadline_s=patience_s,
            stall_s=patience_s / 3,
            figures=_Figures(self._counters),
            name=backend.url,
        )
        self._window = Window(self._sources, self._engine, self._memory, patience_s)
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        self._active_count = 0
        self._counted_until_s = 0.0

    @property
    def fetched_bytes(self) -> int:
        """Count of bytes that were read from the storage so far."""
        return self._counters.read().fetched_bytes

    def share(self, ranges: "SharedRanges") -> None:
        """Take these ranges of parts from other nodes, as far as they arrive in time."""
        self._sources.shared = ranges

    def end_sharing(self, ranges: "SharedRanges") -> None:
        """Open parts without these ranges from now on."""
        if self._sources.shared is ranges:
            self._sources.shared = None

    def cached_bytes(self, view: FileView, length: int) -> int:
        """Return how many of the first `length` bytes are in memory or on their way."""
        count = position = 0
        while position < min(length, view.size_bytes):
            unit = view.unit_at(position)
            count += unit.length * self._window.has(view, unit)
            position = unit.end
        return count

    def end_reads(self) -> None:
        """Fail all reads that are waited for, and end the threads."""
        self._engine.close()

    # ---- open files -----------------------------------------------------------------------

    def open(self, view: FileView) -> OpenFile:
        """Start reading a generation; `close` must follow."""
        with self._lock:
            file = self._files.setdefault(view.identity, OpenFile(view))
            file.open_count += 1
            return file

    def close(self, file: OpenFile) -> None:
        """End one use of `file`. Cached bytes stay until memory is needed."""
        with self._lock:
            file.open_count -= 1
            if not file.open_count:
                self._files.pop(file.view.identity, None)

    def open_files(self) -> list[OpenFile]:
        """Return a snapshot of the open files."""
        with self._lock:
            return list(self._files.values())

    def descriptor(self, file: OpenFile) -> HasDescriptor | None:
        """Return a reader whose descriptor the kernel can read `file` from.

        Return None unless `file` is an ordinary file of this node that has not been replaced.
        """
        view = file.view
        if view.layout is not None or file.pinned is not None or not view.size_bytes:
            return None
        try:
            reader = file.parts.replicas(self._sources.backend, view.path).descriptor()
            return reader if reader is not None and view.matches(reader.current()) else None
        except (BootseerError, OSError):
            return None  # A read will raise the error.

    # ---- reading --------------------------------------------------------------------------

    def read(
        self,
        file: OpenFile,
        offset: int,
        length: int,
        cancelled: Callable[[], bool] = _never,
    ) -> list[memoryview]:
        """Return `[offset, offset + length)`, shorter only at the end of the file, in pieces.

        Raises: CorruptError, DeadlineError, UnavailableError, InterruptedError.
        """
        if file.pinned is not None:
            return [memoryview(file.pinned)[offset : offset + length]]
        end = min(offset + length, file.view.size_bytes)
        if offset >= end:
            return []
        with self._lock:
            now_s = time.monotonic()
            advice = file.streams.observe(offset, end, self._window_max_bytes(file, now_s), now_s)
        wanted = self._demand(file, offset, end, advice.whole_units, cancelled)
        if advice.ahead_end > advice.ahead_start:
            reached = self._window.read_ahead(
                file, advice.ahead_start, advice.ahead_end, Priority.PREFETCH
            )
            if reached < min(advice.ahead_end, file.view.size_bytes):
                with self._lock:
                    file.streams.note_shortfall(advice.ahead_end, reached)
        return self._collect(file, wanted, offset, end, advice.whole_units, cancelled)

    def read_bytes(self, file: OpenFile, offset: int, length: int) -> bytes:
        """Return the bytes of `read` in one piece."""
        return b"".join(self.read(file, offset, length))

    def read_into(
        self,
        file: OpenFile,
        offset: int,
        buffer: memoryview,
        cancelled: Callable[[], bool] = _never,
    ) -> int:
        """Fill `buffer` from `offset`; return the count, short only at the end of the file.

        Whole stripe units are fetched straight into `buffer`, all in parallel; only the ends, and
        units that are in the window already, are copied. After an error nothing more is written
        into `buffer`. Raises as `read`.
        """
        if file.pinned is not None:
            piece = memoryview(file.pinned)[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            return len(piece)
        end = min(offset + len(buffer), file.view.size_bytes)
        straight: deque[UnitRead] = deque()
        copied: list[tuple[int, int]] = []
        position = offset
        try:
            while position < end:
                unit = file.view.unit_at(position)
                stop = min(unit.end, end)
                is_whole = position == unit.start and stop == unit.end
                if is_whole and not self._window.has(file.view, unit):
                    if len(straight) >= self._direct_max:
                        wait_for(self._engine, straight[0], cancelled)
                        straight.popleft()
                    target = buffer[position - offset : stop - offset]
                    straight.append(self._read_straight(file, unit, target))
                else:
                    copied.append((position, stop))
                position = stop
            # Copy while the whole units are on their way.
            for start, stop in copied:
                at = start - offset
                reads = self._demand(file, start, stop, False, cancelled)
                for piece in self._collect(file, reads, start, stop, False, cancelled):
                    buffer[at : at + len(piece)] = piece
                    at += len(piece)
            while straight:
                wait_for(self._engine, straight[0], cancelled)
                straight.popleft()
        finally:
            for read in straight:
                with self._engine.lock:
                    self._engine.end(read, UnavailableError("the caller has given up"))
                read.leave_target()
        return max(0, end - offset)

    def copy(
        self,
        file: OpenFile,
        consume: Callable[[int, memoryview], None],
        on_progress: Callable[[int], None],
    ) -> None:
        """Pass all bytes of `file` to `consume(offset, piece)`, in any order.

        The engine's threads call `consume`, several at once, so that few buffers are needed and the
        bytes are still in the processor's cache. `on_progress` is called by the caller's thread
        with counts of bytes. When this has raised, `consume` is not called any more. Raises: as
        `read`; an OSError of `consume`.
        """
        slots = threading.Semaphore(
            min(self._copied_max, _COPIED_PER_CPU * len(os.sched_getaffinity(0)))
        )
        under_way: deque[CopiedUnit] = deque()

        def wait_for_first() -> None:
            wait_for(self._engine, under_way[0], _never)
            on_progress(under_way.popleft().length)

        position = 0
        try:
            while position < file.view.size_bytes:
                # A full disk must not wait for a read ahead of it, whose server may be silent.
                for read in under_way:
                    if read.error is not None:
                        wait_for(self._engine, read, _never)
                while under_way and under_way[0].state is JobState.ENDED:
                    wait_for_first()
                while not slots.acquire(timeout=_NO_SLOT_S):
                    wait_for_first()
                unit = file.view.unit_at(position)
                read = CopiedUnit(
                    self._sources,
                    self._memory,
                    file,
                    unit,
                    consume,
                    slots,
                    patience_s=self._patience_s,
                )
                with self._engine.lock:
                    self._engine.add(read, Priority.PREFETCH)
                under_way.append(read)
                position = unit.end
            while under_way:
                wait_for_first()
        finally:
            for read in under_way:
                with self._engine.lock:
                    self._engine.end(read, UnavailableError("the caller has given up"))
                read.leave()

    def _read_straight(self, file: OpenFile, unit: ByteRange, target: memoryview) -> UnitRead:
        read = UnitRead(
            self._sources, self._memory, file, unit, patience_s=self._patience_s, target=target
        )
        with self._engine.lock:
            # Demands are served in order; these reads are spread evenly over the stored files.
            self._engine.add(read, Priority.PREFETCH)
        return read

    def warm(self, file: OpenFile, budget_bytes: int, cancelled: Callable[[], bool]) -> int:
        """Fetch the start of a file, at most `budget_bytes`, with the lowest priority.

        Waits until the bytes are in memory, and returns their count.
        """
        end = min(budget_bytes, file.view.size_bytes)
        position = 0
        while position < end and not cancelled():
            step_end = min(position + _WARM_STEP_BYTES, end)
            reached = self._window.read_ahead(file, position, step_end, Priority.FILL)
            self._window.wait_for_units(file, position, min(reached, step_end), cancelled)
            if reached < step_end:
                return reached
            position = reached
        return position

    # ---- the steps of a read --------------------------------------------------------------

    def _window_max_bytes(self, file: OpenFile, now_s: float) -> int:
        """Return the share of one stream in the mount's memory, which active streams divide."""
        since_s = now_s - _ACTIVE_S
        if now_s >= self._counted_until_s:
            self._counted_until_s = now_s + _COUNTED_S
            for one in self._files.values():
                one.active_count = one.streams.active_count(since_s)
            self._active_count = sum(one.active_count for one in self._files.values())
        else:
            self._active_count -= file.active_count
            file.active_count = file.streams.active_count(since_s)
            self._active_count += file.active_count
        return self._memory.limit_bytes * 3 // 4 // max(1, self._active_count)

    def _demand(
        self,
        file: OpenFile,
        offset: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> list[CachedRead]:
        """Return reads that cover the range. The caller holds each until `_collect` has ended."""
        reads: list[CachedRead] = []
        position = offset
        try:
            while position < end:
                read = self._window.demand(file, position, end, whole_units, cancelled)
                reads.append(read)
                position = read.span.end
        except BaseException:
            self._window.end_use(reads)
            raise
        return reads

    def _collect(
        self,
        file: OpenFile,
        reads: list[CachedRead],
        offset: int,
        end: int,
        sequential: bool,
        cancelled: Callable[[], bool],
    ) -> list[memoryview]:
        result: list[memoryview] = []
        position = offset
        try:
            for read in reads:
                if sequential and self._window.starves_others(file, read):
                    with self._lock:
                        file.streams.widen_window(end)
                wait_for(self._engine, read, cancelled)
                assert read.data is not None
                stop = min(end, read.span.end)
                result.append(read.data[position - read.span.start : stop - read.span.start])
                position = stop
        finally:
            self._window.end_use(reads)
        # Another descriptor of the file (another rank of the node) may read these units next.
        if sequential and file.open_count < 2:
            with self._lock:
                is_only = file.streams.active_count(time.monotonic() - _ACTIVE_S) == 1
            self._window.leave_behind(file, reads, end, is_only=is_only)
        self._counters.add(served_bytes=end - offset)
        return result
