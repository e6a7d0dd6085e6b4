"""Chunks of stored objects for many callers: each chunk is read once and verified for all of them.

A `ChunkFetcher` shares the reads under way; a `FetchEngine` carries them out. A `_ChunkRun` is one
read of neighbouring chunks, a job of the engine; a `_Ticket` is one caller's request for chunks.

Thread safety: any thread may call any method. Callbacks (`deliver`, `on_progress`, `is_cached`)
must not wait for the fetcher that calls them. The engine's lock guards tickets and runs. A fetcher
does not survive fork(2): make it in the process that uses it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from msgspec import Struct

from bootseer.base.closing import Closing
from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.engine import (
    EngineFigures,
    FetchEngine,
    JobAttempt,
    JobState,
    ReadInto,
    ReadJob,
)
from bootseer.transfer.policy import REQUEST, Policy, as_bootseer_error, fresh_copy, is_retryable
from bootseer.transfer.ranges import Chunk, Fetch, Priority, covering, remaining

logger = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[Chunk, memoryview], None]
"""Called once per chunk with its verified bytes, from a worker thread, before any waiter wakes."""
Reader: TypeAlias = Callable[[str, int, memoryview, Attempt], int]
"""`read(key, offset, buffer, attempt)` fills the buffer and returns the count. It records its
progress in `attempt`, and may stop early once the attempt was given up."""
Verify: TypeAlias = Callable[[Chunk, memoryview], bool]
"""Returns whether the bytes are those of the chunk; called from worker threads."""


def matches_digest(chunk: Chunk, data: memoryview) -> bool:
    """Return whether `data` has the chunk's digest, or the chunk has none."""
    return chunk.digest is None or content_digest(data) == chunk.digest


# ---- statistics ----------------------------------------------------------------------------------

# Percentiles are over the latest demands; enough for a stable p99, bounded for a mount that lives
# for weeks.
_KEPT_WAITS_COUNT = 8192


class FetchStatistics(Struct, frozen=True):
    """Counts since the fetcher was made."""

    fetch_count: int
    """Reads that brought all their bytes."""
    fetched_bytes: int
    """Bytes of the reads, tolerated gaps and refetches included."""
    delivered_count: int
    """Chunks that were verified and handed over."""
    delivered_bytes: int
    retry_count: int
    """Attempts that failed and were tried again."""
    corrupt_count: int
    """Chunks that did not match their digest, each time."""
    failed_count: int
    """Chunks given up."""
    hung_count: int
    """Reads abandoned because they outlived their deadline."""
    demand_count: int
    joined_count: int
    """Demanded chunks that were on their way already."""
    demand_wait_p50_ns: int
    """Median wait of the latest 8192 demands; 0 before the first."""
    demand_wait_p99_ns: int
    """99th percentile of the same waits."""
    demand_wait_max_ns: int
    """Longest of the same waits."""


def percentile(ordered: Sequence[int], fraction: float) -> int:
    """Return the nearest-rank percentile of sorted values; 0 for no values."""
    if not ordered:
        return 0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class FetchCounters(EngineFigures):
    """Counters of one fetcher. Not thread-safe: its engine's lock guards it."""

    def __init__(self) -> None:
        self.fetch_count = 0
        self.fetched_bytes = 0
        self.delivered_count = 0
        self.delivered_bytes = 0
        self.retry_count = 0
        self.corrupt_count = 0
        self.failed_count = 0
        self.hung_count = 0
        self.demand_count = 0
        self.joined_count = 0
        self._waits_ns: deque[int] = deque(maxlen=_KEPT_WAITS_COUNT)

    def won(self, one: JobAttempt, seconds: float) -> None:
        self.fetch_count += 1
        self.fetched_bytes += one.job.length

    def retried(self, job: ReadJob, error: BaseException) -> None:
        self.retry_count += 1

    def damaged(self, job: ReadJob) -> None:
        self.corrupt_count += 1

    def late(self, one: JobAttempt) -> None:
        self.retry_count += 1

    def hung(self, one: JobAttempt) -> None:
        self.hung_count += 1

    def demand_done(self, wait_ns: int) -> None:
        """Count a demand that returned or failed after `wait_ns`. Any thread, without the lock."""
        self._waits_ns.append(wait_ns)

    def snapshot(self) -> FetchStatistics:
        """Return a frozen copy."""
        ordered = sorted(self._waits_ns)
        return FetchStatistics(
            fetch_count=self.fetch_count,
            fetched_bytes=self.fetched_bytes,
            delivered_count=self.delivered_count,
            delivered_bytes=self.delivered_bytes,
            retry_count=self.retry_count,
            corrupt_count=self.corrupt_count,
            failed_count=self.failed_count,
            hung_count=self.hung_count,
            demand_count=self.demand_count,
            joined_count=self.joined_count,
            demand_wait_p50_ns=percentile(ordered, 0.50),
            demand_wait_p99_ns=percentile(ordered, 0.99),
            demand_wait_max_ns=ordered[-1] if ordered else 0,
        )


# ---- fetching ------------------------------------------------------------------------------------


class _Ticket:
    """Request of one caller for a number of chunks, with the event that the caller waits for."""

    __slots__ = ("done", "error", "has_left", "is_urgent", "remaining_count", "settled_s", "wanted")

    def __init__(self, count: int, *, is_urgent: bool) -> None:
        self.remaining_count = count
        self.is_urgent = is_urgent
        """Whether a thread waits for exactly these chunks now."""
        self.has_left = False
        """Whether the caller gave up, so that nothing is tried again for it."""
        self.error: BootseerError | None = None
        """The first failure."""
        self.settled_s = 0.0
        """Monotonic time at which the last chunk came or failed."""
        self.wanted: set[_Wanted] = set()
        self.done = threading.Event()
        if count == 0:
            self.done.set()

    def settle(self, error: BootseerError | None) -> None:
        """Note that one chunk was delivered, or failed with `error`."""
        self.remaining_count -= 1
        self.settled_s = time.monotonic()
        if error is not None:
            self.fail(error)
        elif self.remaining_count == 0:
            self.done.set()

    def fail(self, error: BootseerError) -> None:
        """Wake the caller with `error`, unless it has failed already."""
        self.error = self.error or error
        self.done.set()


class _Wanted:
    """Chunk that has not come yet, with the callers who want it."""

    __slots__ = ("chunk", "requests", "run")

    def __init__(self, chunk: Chunk, run: "_ChunkRun") -> None:
        self.chunk = chunk
        self.run = run
        self.requests: list[tuple[_Ticket, Deliver]] = []

    @property
    def is_urgent(self) -> bool:
        """Whether a thread waits for this chunk now."""
        return any(ticket.is_urgent and not ticket.has_left for ticket, _ in self.requests)

    @property
    def is_wanted(self) -> bool:
        """Whether a caller still wants this chunk."""
        return any(not ticket.has_left for ticket, _ in self.requests)

    def add(self, ticket: _Ticket, deliver: Deliver) -> None:
        """Add `ticket`, which gets this chunk through `deliver`."""
        self.requests.append((ticket, deliver))
        ticket.wanted.add(self)

    def drop(self, ticket: _Ticket) -> None:
        """Remove `ticket`, which no longer wants this chunk."""
        self.requests = [pair for pair in self.requests if pair[0] is not ticket]
        ticket.wanted.discard(self)


class _ChunkRun(ReadJob):
    """Read of neighbouring chunks.

    Chunks leave the run when no caller wants them any more, or when they are read alone instead.
    Before the next attempt, the read is cut to the remaining chunks (`split`).
    """

    def __init__(self, owner: "ChunkFetcher", fetch: Fetch) -> None:
        super().__init__(fetch.key, fetch.length, _name(fetch))
        self.fetch = fetch
        self.wanted: dict[Chunk, _Wanted] = {}
        """The chunks that the run still has to bring."""
        self._owner = owner
        self._wrong: dict[JobAttempt, list[Chunk]] = {}
        """Chunks that came damaged beside sound ones, by attempt."""

    def open(self, one: JobAttempt) -> ReadInto:
        fetch, read = self.fetch, self._owner.read
        one.tells_progress = True

        def read_into(start: int, buffer: memoryview, attempt: Attempt) -> int:
            return read(fetch.key, fetch.offset + start, buffer, attempt)

        return read_into

    def buffer(self, one: JobAttempt) -> memoryview:
        return self._owner.take_buffer(self.length)

    def spare_buffer(self) -> memoryview:
        return self._owner.take_buffer(self.length)

    def piece(self, chunk: Chunk, data: memoryview) -> memoryview:
        """Return the bytes of one chunk, a slice of `data`, which are the bytes of the run."""
        return data[chunk.offset - self.fetch.offset : chunk.end - self.fetch.offset]

    def check(self, one: JobAttempt, data: memoryview) -> None:
        chunks, verify = tuple(self.wanted), self._owner.verify
        wrong = [chunk for chunk in chunks if not verify(chunk, self.piece(chunk, data))]
        if wrong and len(wrong) == len(chunks):
            raise _damage(wrong[0])
        if wrong:
            self._wrong[one] = wrong

    def land(self, one: JobAttempt, data: memoryview) -> None:
        wrong = self._wrong.get(one, [])
        chunks = [chunk for chunk in tuple(self.wanted) if chunk not in wrong]
        self._owner.land(self, chunks, data)
        if wrong:
            self._owner.read_again(self, wrong)

    def split(self, error: BaseException | None) -> Sequence[ReadJob]:
        return self._trim() if error is None else self._isolate(error)

    def _trim(self) -> list[ReadJob]:
        """Cut the read to the remaining chunks; return runs for those behind a gap."""
        if len(self.wanted) == len(self.fetch.chunks):
            return []
        parts = remaining(self.fetch, self.wanted.__contains__)
        if parts and parts[0] is not self.fetch:
            self.fetch, self.length, self.what = parts[0], parts[0].length, _name(parts[0])
            self.earlier = None
        return [self.part(fetch) for fetch in parts[1:]]

    def _isolate(self, error: BaseException) -> list[ReadJob]:
        """Return a run for each chunk that a thread waits for, so that none waits for a large read.

        Chunks without callers are settled with `error` instead of being tried again.
        """
        for wanted in tuple(self.wanted.values()):
            if not wanted.is_wanted:
                self._owner.settle(wanted, as_bootseer_error(error, f"read {self.what}"))
        if len(self.wanted) < 2 or not is_retryable(error):
            return []
        urgent = [chunk for chunk, wanted in self.wanted.items() if wanted.is_urgent]
        return [self.alone(chunk) for chunk in urgent]

    @property
    def is_wanted(self) -> bool:
        return bool(self.wanted)

    def part(self, fetch: Fetch) -> "_ChunkRun":
        """Move the chunks of `fetch` to a run of their own with the state of this one."""
        other = _ChunkRun(self._owner, fetch)
        other.take_over(self)
        for chunk in dict.fromkeys(fetch.chunks):
            wanted = other.wanted[chunk] = self.wanted.pop(chunk)
            wanted.run = other
        return other

    def alone(self, chunk: Chunk) -> "_ChunkRun":
        """Move one chunk to a run of its own, which begins anew and is urgent."""
        other = self.part(covering((chunk,), Priority.DEMAND))
        other.priority = Priority.DEMAND
        other.failure_count = other.wrong_count = 0
        other.moved_s = None
        return other

    def ended(self) -> None:
        self._wrong.clear()
        error = self.error
        for wanted in tuple(self.wanted.values()):
            # Without an error, each chunk was settled before.
            ours = None if error is None else as_bootseer_error(error, f"read {self.what}")
            self._owner.settle(wanted, ours)


def _name(fetch: Fetch) -> str:
    return f"bytes {fetch.offset} to {fetch.offset + fetch.length} of {fetch.key}"


def _damage(chunk: Chunk) -> CorruptError:
    return CorruptError(
        f"bytes {chunk.offset} to {chunk.end} of {chunk.key} do not match their digest; "
        "the stored object or the network is damaged"
    )


class Batch:
    """Fetches that were submitted together."""

    def __init__(self, owner: "ChunkFetcher", ticket: _Ticket) -> None:
        self._owner = owner
        self._ticket = ticket

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every chunk is delivered. Raises: the first failure; DeadlineError.

        The wait ends without a timeout, too: each read has a deadline, and reads for which no
        thread is left fail as well. A cancelled batch raises UnavailableError. Running into
        `timeout_s` does not cancel the batch.
        """
        if not self._ticket.done.wait(timeout_s):
            raise DeadlineError(
                f"{self._ticket.remaining_count} chunks were not there after {timeout_s} s"
            )
        if self._ticket.error is not None:
            raise fresh_copy(self._ticket.error)

    @property
    def remaining_count(self) -> int:
        """Chunks neither delivered nor failed yet."""
        return self._ticket.remaining_count

    def cancel(self) -> None:
        """Cancel queued reads. Reads in flight are still delivered. Idempotent."""
        with self._owner.engine.lock:
            if self._owner.leave(self._ticket):
                self._ticket.fail(UnavailableError("the transfer was cancelled"))


class ChunkFetcher(Closing):
    """Reads chunks of stored objects on behalf of many callers. Thread-safe."""

    def __init__(
        self,
        read: Reader,
        *,
        threads: int = 8,
        demand_threads: int = 4,
        deadline_s: float = 30.0,
        stall_s: float | None = None,
        policy: Policy = REQUEST,
        demand_policy: Policy | None = None,
        take_buffer: Callable[[int], memoryview] = lambda length: memoryview(bytearray(length)),
        fill_bytes_per_s: float | None = None,
        is_cached: Callable[[Chunk], bool] = lambda chunk: False,
        on_progress: Callable[[int], None] = lambda count: None,
        verify: Verify = matches_digest,
    ) -> None:
        """Make a fetcher of one store.

        Args:
            read: Reads bytes of the store.
            threads: Threads for all reads.
            demand_threads: Threads for demands only.
            deadline_s: Seconds without any bytes from any of its attempts after which a read fails.
            stall_s: Seconds without any bytes after which an attempt is given up and its thread
                replaced; a third of the deadline by default.
            policy: When a read that failed is tried again.
            demand_policy: The policy of reads that a thread waits for, if it is another one.
            take_buffer: Returns memory of this length, in which a read is delivered. Called from
                worker threads; must not wait.
            fill_bytes_per_s: Bandwidth limit of reads with the priority FILL.
            is_cached: Finds chunks that came after the caller checked its cache. Called under the
                lock, so it must be quick.
            on_progress: Gets the bytes of each delivered chunk, from worker threads.
            verify: Decides whether a chunk's bytes are right.
        """
        self.read = read
        self.take_buffer = take_buffer
        self.verify = verify
        self._deadline_s = deadline_s
        self._is_cached = is_cached
        self._on_progress = on_progress
        self._counters = FetchCounters()
        self._wanted: dict[Chunk, _Wanted] = {}
        policies = dict.fromkeys(Priority, policy)
        policies[Priority.DEMAND] = demand_policy or policy
        self.engine = FetchEngine(
            policies,
            threads=threads,
            demand_threads=demand_threads,
            deadline_s=deadline_s,
            stall_s=deadline_s / 3 if stall_s is None else stall_s,
            fill_bytes_per_s=fill_bytes_per_s,
            figures=self._counters,
        )

    # ---- for callers --------------------------------------------------------------------------

    def submit(self, fetches: Iterable[Fetch], deliver: Deliver) -> Batch:
        """Queue fetches behind everything of the same or a lower priority number.

        Each chunk that waits costs about half a kilobyte of memory.
        Raises: UnavailableError when the fetcher is closed.
        """
        fetches = list(fetches)
        ticket = _Ticket(sum(len(set(fetch.chunks)) for fetch in fetches), is_urgent=False)
        for fetch in fetches:
            # The lock is taken anew for each, so that a long plan never holds up a demand.
            with self.engine.lock:
                self._request(fetch, fetch.priority, ticket, deliver)
        return Batch(self, ticket)

    def demand(self, chunk: Chunk, deliver: Deliver, *, deadline_s: float | None = None) -> None:
        """Return once `chunk` has been delivered. Raises: as `demand_all`."""
        self.demand_all((covering((chunk,), Priority.DEMAND),), deliver, deadline_s=deadline_s)

    def demand_all(
        self, fetches: Iterable[Fetch], deliver: Deliver, *, deadline_s: float | None = None
    ) -> None:
        """Return once the chunks of all `fetches` have been delivered; their priority is DEMAND.

        A queued read moves to the front. A read in flight is waited for; if it fails and is larger
        than the chunk, the chunk is read alone at once. Any other chunk is read at once, by threads
        that are reserved for demands.

        Args:
            fetches: What to read; their own priority does not matter.
            deliver: See `Deliver`.
            deadline_s: Seconds without any bytes after which the wait ends, if not the fetcher's.

        Raises: at the first failure, DeadlineError, CorruptError, UnavailableError, NotFoundError
        or any error of `deliver`.
        """
        started_s = time.monotonic()
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        fetches = list(fetches)
        ticket = _Ticket(sum(len(set(fetch.chunks)) for fetch in fetches), is_urgent=True)
        with self.engine.lock:
            self.engine.check_open()
            self._counters.demand_count += 1
            for fetch in fetches:
                self._request(fetch, Priority.DEMAND, ticket, deliver)
        has_come = self._wait(ticket, started_s, deadline_s)
        self._counters.demand_done(int((time.monotonic() - started_s) * 1e9))
        if not has_come or ticket.error is not None:
            with self.engine.lock:
                self.leave(ticket)
        if ticket.error is not None:
            raise fresh_copy(ticket.error)
        if not has_come and not ticket.done.is_set():
            keys = ", ".join(dict.fromkeys(fetch.key for fetch in fetches))
            raise DeadlineError(
                f"{ticket.remaining_count} chunks of {keys} were not there after {deadline_s} s; "
                "the store may be overloaded or out of reach"
            )

    def statistics(self) -> FetchStatistics:
        """Return the counts so far."""
        with self.engine.lock:
            return self._counters.snapshot()

    def close(self) -> None:
        """Fail all waiters and end the threads. Idempotent.

        Nothing is delivered afterwards. A thread that hangs in a read is left behind as a daemon
        and ends when the read does.
        """
        self.engine.close()

    def _wait(self, ticket: _Ticket, started_s: float, deadline_s: float) -> bool:
        """Wait for `ticket`; return False if nothing came for `deadline_s`."""
        silent_s = 0.0
        while not ticket.done.wait(max(0.0, deadline_s - silent_s)):
            with self.engine.lock:
                now_s = time.monotonic()
                since_s = max(started_s, ticket.settled_s)
                runs = {wanted.run for wanted in ticket.wanted}
                silent_s = min(
                    (self.engine.silent_s(run, since_s, now_s) for run in runs), default=0.0
                )
            if silent_s >= deadline_s:
                return False
        return True

    # ---- sharing; the lock is held ------------------------------------------------------------

    def _request(self, fetch: Fetch, priority: Priority, ticket: _Ticket, deliver: Deliver) -> None:
        """Queue reads for the chunks of `fetch`, sharing the reads under way."""
        self.engine.check_open()
        fresh: set[Chunk] = set()
        for chunk in dict.fromkeys(fetch.chunks):
            wanted = self._wanted.get(chunk)
            if wanted is not None:
                wanted.add(ticket, deliver)
                self._counters.joined_count += ticket.is_urgent
                self._hasten(wanted, priority, is_urgent=ticket.is_urgent)
            elif self._is_cached(chunk):
                # The chunk came after the caller checked its cache.
                ticket.settle(None)
            else:
                fresh.add(chunk)
        for part in remaining(fetch, fresh.__contains__):
            run = _ChunkRun(self, part)
            for chunk in dict.fromkeys(part.chunks):
                wanted = run.wanted[chunk] = self._wanted[chunk] = _Wanted(chunk, run)
                wanted.add(ticket, deliver)
            self.engine.add(run, priority)

    def _hasten(self, wanted: _Wanted, priority: Priority, *, is_urgent: bool) -> None:
        """Note that another caller wants the chunk, maybe sooner."""
        run = wanted.run
        is_alone = len(run.wanted) == 1
        if run.state is JobState.WAITING or is_alone:
            self.engine.hasten(run, priority)
        elif run.state is JobState.RESTING and is_urgent:
            self.engine.add(run.alone(wanted.chunk), Priority.DEMAND)

    def leave(self, ticket: _Ticket) -> int:
        """Give up the request `ticket`; return the number of its chunks that will not come.

        Reads that have not started are dropped unless another ticket wants them; reads in flight
        are still delivered.
        """
        ticket.has_left = True
        dropped_count = 0
        for wanted in tuple(ticket.wanted):
            run = wanted.run
            if run.state in (JobState.WAITING, JobState.RESTING):
                dropped_count += 1
                wanted.drop(ticket)
                if not wanted.requests:
                    del run.wanted[wanted.chunk], self._wanted[wanted.chunk]
                    if not run.wanted:
                        self.engine.withdraw(run)
        return dropped_count

    def settle(self, wanted: _Wanted, error: BootseerError | None) -> None:
        """Note that a chunk was delivered, or failed, and wake its waiters."""
        self._forget(wanted)
        self._count(wanted.chunk, is_delivered=error is None)
        for ticket, _ in wanted.requests:
            ticket.wanted.discard(wanted)
            ticket.settle(error)

    def _forget(self, wanted: _Wanted) -> None:
        if self._wanted.get(wanted.chunk) is wanted:
            del self._wanted[wanted.chunk]
        wanted.run.wanted.pop(wanted.chunk, None)

    def _count(self, chunk: Chunk, *, is_delivered: bool) -> None:
        if is_delivered:
            self._counters.delivered_count += 1
            self._counters.delivered_bytes += chunk.length
        else:
            self._counters.failed_count += 1

    # ---- delivery; without the lock -----------------------------------------------------------

    def land(self, run: _ChunkRun, chunks: Sequence[Chunk], data: memoryview) -> None:
        """Deliver each chunk to all its callers, including those that join now, and wake them."""
        undelivered = deque(chunks)
        errors: dict[Deliver, BootseerError | None] = {}
        while undelivered:
            delivered_bytes = undelivered[0].length if errors else 0
            # Once per delivery: with more, threads that deliver little would wait for each other.
            with self.engine.lock:
                deliver = self._next_delivery(run, undelivered, errors)
            if delivered_bytes and not errors:
                self._note_progress(delivered_bytes)
            if deliver is None:
                return
            chunk = undelivered[0]
            try:
                deliver(chunk, run.piece(chunk, data))
                errors[deliver] = None
            except BaseException as error:  # No error of a callback may end a thread.
                errors[deliver] = as_bootseer_error(error, f"keep a chunk of {chunk.key}")

    def _next_delivery(
        self, run: _ChunkRun, undelivered: deque[Chunk], errors: dict[Deliver, BootseerError | None]
    ) -> Deliver | None:
        """Return the next callback of the first undelivered chunk, or None if there is none.

        Once all callbacks of a chunk were called, its callers are woken and the next chunk is
        looked at. Each callback is called once, however many callers name it. The lock is held.

        `errors`: callbacks of the chunk that were called, each with its error or None.
        """
        while undelivered and run.state is JobState.LANDING:
            wanted = run.wanted.get(undelivered[0])
            if wanted is not None:
                for _, deliver in wanted.requests:
                    if deliver not in errors:
                        return deliver
                self._forget(wanted)
                self._count(wanted.chunk, is_delivered=not any(errors.values()))
                for ticket, deliver in wanted.requests:
                    ticket.wanted.discard(wanted)
                    ticket.settle(errors[deliver])
            errors.clear()
            undelivered.popleft()
        return None

    def _note_progress(self, count: int) -> None:
        try:
            self._on_progress(count)
        except Exception:
            logger.exception("a progress callback failed")

    def read_again(self, run: _ChunkRun, wrong: Sequence[Chunk]) -> None:
        """Read again, alone, each chunk of a run that came damaged while others were sound."""
        with self.engine.lock:
            for chunk in wrong:
                wanted = run.wanted.get(chunk)
                if wanted is None or run.state is not JobState.LANDING:
                    continue
                alone = run.part(covering((chunk,), run.priority))
                if wanted.is_urgent:
                    alone.priority = Priority.DEMAND
                alone.wrong_count += 1
                self._counters.corrupt_count += 1
                self.engine.rest_or_end(alone, _damage(chunk))
