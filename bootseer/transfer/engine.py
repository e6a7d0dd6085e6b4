"""The fetch engine: carries out reads of stored bytes for many callers, in parallel.

The engine decides when a read begins, is tried again, is requested a second time, or is given up. A
`ReadJob` defines the bytes to read, their check and their delivery.

    WAITING --a thread is free--> READING --bytes checked--> LANDING --delivered--> ENDED
       ^                             |
       +---------- RESTING <---------+  an attempt failed; the policy decides about the next one

Every state leads to ENDED: by a final error, by `withdraw` and by `close`. The rules are:

- Bytes are checked before an attempt wins, so that a fast but damaged replica does not beat a sound
  one.
- An attempt that brings nothing for `stall_s` is given up and its thread replaced. A job fails when
  none of its attempts brought anything for `deadline_s`. An attempt whose reader does not report
  progress has the whole deadline. A trickle counts as nothing only if the job would take several
  deadlines at that rate: on a crowded line all connections trickle.
- An attempt that is slower than its peers (`pace`) is joined by a second one, on another thread and
  so on another connection. The first attempt with correct bytes wins.
- Each attempt continues behind the bytes of the last one. It uses the same buffer unless the thread
  of the last attempt may still write there.
- Jobs with the priority DEMAND run in their order and have threads of their own. Of the other jobs,
  the next one is at the place (file or block) with the fewest reads under way.
- Resting jobs hold no thread.

Thread safety: one lock guards the engine and the fields of its jobs. It is held for bookkeeping
only, never during a read, a check or a delivery. Each method says whether its caller holds it.
"""

import heapq
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TypeAlias

from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import (
    FLOOR_BYTES_PER_S,
    LOOK_AFTER_S,
    LOOK_S,
    STALL_S,
    ByteProgress,
    Pace,
    TokenBucket,
    floor_bytes_per_s,
)
from bootseer.transfer.policy import Policy, as_bootseer_error, random_fraction
from bootseer.transfer.ranges import Priority

logger = logging.getLogger(__name__)

ReadInto: TypeAlias = Callable[[int, memoryview, Attempt], int]
"""`read(start, buffer, attempt)` fills the buffer from byte `start` of the job; returns the
count."""

# Threads that hang in a read are daemons; `close` waits no longer than this for them.
_CLOSE_S = 2.0
# Interval in which a waiter checks whether its caller was interrupted.
_POLL_S = 0.25
# Threads that may replace each thread while it hangs: enough for an outage that hangs all reads.
_REPLACEMENTS = 2
_SECOND_ATTEMPTS_MAX = 5


class JobState(Enum):
    """Stage of a job; the module's docstring has the transitions."""

    WAITING = auto()
    READING = auto()
    """One attempt is under way, or several if the first is late."""
    RESTING = auto()
    LANDING = auto()
    ENDED = auto()


class ReadJob:
    """Read of consecutive stored bytes.

    Subclasses override the methods. The engine calls `open`, `buffer`, `spare_buffer`, `check` and
    `land` without its lock, from any of its threads; it holds the lock when it calls `split`,
    `late` and `ended`, which must be quick. The fields are the engine's.
    """

    def __init__(self, place: str, length: int, what: str) -> None:
        """Make a job that `FetchEngine.add` starts.

        Args:
            place: Name of the stored file, or block of a file, for which jobs compete.
            length: Number of bytes to read.
            what: Name of the job in messages, such as "bytes 0 to 5 of blobs/x".
        """
        self.place = place
        self.length = length
        self.what = what
        self.state = JobState.ENDED
        self.priority = Priority.PREFETCH
        self.sequence = 0
        """Rank among the jobs of one priority."""
        self.failure_count = 0
        """Failed attempts since bytes came."""
        self.wrong_count = 0
        """Attempts that brought wrong bytes."""
        self.second_count = 0
        """Attempts that were made because another one was late."""
        self.resume_s = 0.0
        """Monotonic time at which a resting job is due."""
        self.moved_s: float | None = None
        """Monotonic time at which bytes came last, or the first attempt began."""
        self.attempts: list[JobAttempt] = []
        """The attempts under way."""
        self.avoided_readers: set[int] = set()
        """Numbers of the readers that failed or are late."""
        self.earlier: JobAttempt | None = None
        """The attempt whose bytes the next attempt continues."""
        self.failure: BaseException | None = None
        """The last failure other than silence."""
        self.error: BaseException | None = None
        """The reason why the job failed; set when it ends."""
        self.done: threading.Event | None = None
        """Set when the job has ended; made by the first waiter."""

    def open(self, one: "JobAttempt") -> ReadInto:
        """Return the function that reads for `one`, and set the attributes of `one` about it.

        Raises as the storage does.
        """
        raise NotImplementedError

    def buffer(self, one: "JobAttempt") -> memoryview:
        """Return memory of `length` bytes for `one`. May wait, and may raise."""
        return memoryview(bytearray(self.length))

    def spare_buffer(self) -> memoryview | None:
        """Return memory for a second attempt, or None. Must not wait."""
        return memoryview(bytearray(self.length))

    def check(self, one: "JobAttempt", data: memoryview) -> None:
        """Raise CorruptError if `data` is damaged; any other error fails the attempt, too."""

    def land(self, one: "JobAttempt", data: memoryview) -> None:
        """Deliver the bytes that `one` brought. An error that this raises is the job's."""

    def split(self, error: BaseException | None) -> "Sequence[ReadJob]":
        """Return jobs that take over a part of this one, to be queued at once.

        Called before an attempt, with None, if no other one is under way: the job may become
        shorter.
        Called after a failed attempt with its error.
        """
        return ()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody needs the job after `split`; otherwise it ends without an error."""
        return True

    def late(self, one: "JobAttempt") -> None:
        """Note that `one` is late and another reader is about to be asked."""

    def waiter_error(self, error: BaseException) -> BaseException:
        """Return the error that the waiters of this job get if `error` ended it."""
        return as_bootseer_error(error, f"read {self.what}")

    def ended(self) -> None:
        """Note that the job has ended; `error` says how."""

    def take_over(self, other: "ReadJob") -> None:
        """Take over the rank, failures and deadline of the job `other`, when it is split."""
        self.priority, self.sequence = other.priority, other.sequence
        self.failure_count, self.wrong_count = other.failure_count, other.wrong_count
        self.moved_s, self.failure = other.moved_s, other.failure


class JobAttempt:
    """Attempt of one thread at a job. Its `attempt` is the part that the reader sees."""

    def __init__(
        self,
        job: ReadJob,
        worker: "ReadWorker",
        buffer: memoryview | None,
        now_s: float,
        floor_bytes_per_s: float,
    ) -> None:
        """Begin an attempt.

        Args:
            job: What is read.
            worker: The thread that reads.
            buffer: Memory of a second attempt, made because another one is late; None for a first.
            now_s: Monotonic time.
            floor_bytes_per_s: Rate below which the attempt counts as silent.
        """
        self.job = job
        self.worker = worker
        self.is_second = buffer is not None
        """Whether this attempt was made because another one at the job is late."""
        self.attempt = Attempt()
        self.attempt.asks_elsewhere = bool(job.avoided_readers) or job.earlier is not None
        self.attempt.follows_damage = job.wrong_count > 0
        self.buffer = memoryview(b"") if buffer is None else buffer
        self.started_s = now_s
        self.progress = ByteProgress(now_s, floor_bytes_per_s)
        self._floor_bytes_per_s = floor_bytes_per_s
        self.deadline_s = math.inf
        self.start_bytes = 0
        """Bytes at the front of the buffer that an earlier attempt brought."""
        self.is_opened = False
        self.was_late = False
        self.has_returned = False
        """Whether the thread will not write into the buffer any more."""
        # Set by `ReadJob.open`.
        self.number = -1
        """Number of the reader, if the job has several."""
        self.has_replicas = False
        """Whether another reader may be served by another disk."""
        self.tells_progress = False
        """Whether the reader records its progress in `attempt`."""

    @property
    def done_bytes(self) -> int:
        """Bytes of the job that are in the buffer."""
        return min(self.start_bytes + self.attempt.done_bytes, len(self.buffer))

    def read(self, earlier: "JobAttempt | None") -> memoryview:
        """Read the job behind the bytes that `earlier` brought; return all of its bytes, checked.

        Raises as the reader and `ReadJob.check` do.
        """
        job = self.job
        read_into = job.open(self)
        if not self.is_second:
            reusable = earlier is not None and earlier.has_returned and len(earlier.buffer)
            self.buffer = earlier.buffer if earlier and reusable else job.buffer(self)
        # Time for opening and for memory does not count for the pace.
        self.started_s = time.monotonic()
        self.progress = ByteProgress(self.started_s, self._floor_bytes_per_s)
        self.is_opened = True
        buffer = self.buffer
        if earlier is not None:
            start = self.start_bytes = earlier.done_bytes
            if buffer is not earlier.buffer:
                buffer[:start] = earlier.buffer[:start]
        count = self.start_bytes
        if count < len(buffer):
            count += read_into(count, buffer[count:], self.attempt)
        if not self.attempt.is_given_up:
            if count != len(buffer):
                raise CorruptError(f"the storage gave {count} of {len(buffer)} bytes: {job.what}")
            job.check(self, buffer)
        return buffer

    def note_progress(self, now_s: float) -> None:
        """Note in `ReadJob.moved_s` when bytes of this attempt came last."""
        if self.attempt.waits:
            self.progress.seen_s = now_s
        self.progress.silent_s(self.attempt.done_bytes, now_s)
        if self.progress.seen_s > self.started_s:
            self.job.moved_s = max(self.job.moved_s or 0.0, self.progress.seen_s)

    def is_late(self, pace: Pace, now_s: float) -> bool:
        """Return whether another connection should be asked for the same bytes."""
        job = self.job
        if self.was_late or not self.is_opened or job.second_count >= _SECOND_ATTEMPTS_MAX:
            return False
        if self.attempt.waits:
            return False
        if job.state is not JobState.READING or job.priority is Priority.FILL:
            return False
        done_bytes, elapsed_s = self.attempt.done_bytes, now_s - self.started_s
        silent_s = self.progress.silent_s(done_bytes, now_s)
        length = job.length - self.start_bytes
        return pace.is_late(length, done_bytes, elapsed_s, silent_s, has_replicas=self.has_replicas)


class EngineFigures:
    """Base class of receivers of an engine's counts. Called with the engine's lock held."""

    def won(self, one: JobAttempt, seconds: float) -> None:
        """Count an attempt that brought all bytes of its job in `seconds`."""

    def retried(self, job: ReadJob, error: BaseException) -> None:
        """Count a job that is tried again after `error`."""

    def damaged(self, job: ReadJob) -> None:
        """Count an attempt that brought wrong bytes."""

    def late(self, one: JobAttempt) -> None:
        """Count a late attempt, whose bytes a second attempt reads as well."""

    def hung(self, one: JobAttempt) -> None:
        """Count an attempt that was given up because nothing came."""


class ReadWorker:
    """Thread of a crew."""

    __slots__ = ("crew", "is_abandoned", "thread")

    def __init__(self, crew: "Crew") -> None:
        self.crew = crew
        self.is_abandoned = False
        self.thread: threading.Thread | None = None


class Crew:
    """Threads of one kind, started when first needed. The caller of each method holds the lock.

    A thread that hangs in a read cannot be ended. It is abandoned: another one takes its place, up
    to a bound, and it rejoins when its read returns.
    """

    def __init__(
        self, name: str, size: int, work: Callable[[ReadWorker], None], lock: threading.Lock
    ) -> None:
        self._name = name
        self._size = size
        self._work = work
        self._idle = threading.Condition(lock)
        self._idle_count = 0
        self._abandoned_count = 0
        self._numbers = itertools.count(1)
        self.workers: set[ReadWorker] = set()
        self.stalled_since_s: float | None = None
        """Monotonic time since which every thread hangs and no other may be started."""

    def wake(self) -> bool:
        """Wake or start a thread; return False if none is idle and no other may be started."""
        if self._idle_count:
            # Counted as busy from here on, so that two jobs never rely on the same thread.
            self._idle_count -= 1
            self._idle.notify()
            return True
        working_count = len(self.workers) - self._abandoned_count
        if working_count >= self._size or not self._may_grow:
            return False
        worker = ReadWorker(self)
        name = f"bootseer-{self._name}-{next(self._numbers)}"
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        self.workers.add(worker)
        try:
            worker.thread.start()
        except RuntimeError as error:
            self.workers.discard(worker)
            logger.warning("cannot start a thread for reads: %s", error)
            self._note_stall()
            return False
        self.stalled_since_s = None
        return True

    def wake_all(self) -> None:
        """Wake every idle thread, to let it end."""
        self._idle_count = 0
        self._idle.notify_all()

    def sleep(self) -> None:
        """Wait for `wake`."""
        self._idle_count += 1
        self._idle.wait()

    @property
    def _may_grow(self) -> bool:
        return len(self.workers) < (1 + _REPLACEMENTS) * self._size

    @property
    def can_lend(self) -> bool:
        """Whether a thread could be had for a second attempt."""
        return bool(self._idle_count) or self._may_grow

    def abandon(self, worker: ReadWorker) -> None:
        """Free the place of `worker` for another thread until its read returns."""
        if not worker.is_abandoned:
            worker.is_abandoned = True
            self._abandoned_count += 1
            self._note_stall()

    def rejoin(self, worker: ReadWorker) -> bool:
        """Count `worker` as working again; return False if its place is taken and it must end."""
        if not worker.is_abandoned:
            return True
        worker.is_abandoned = False
        self._abandoned_count -= 1
        self.stalled_since_s = None
        return len(self.workers) - self._abandoned_count <= self._size

    def leave(self, worker: ReadWorker) -> None:
        """Remove a thread that ends."""
        self.workers.discard(worker)
        self._abandoned_count -= worker.is_abandoned

    def _note_stall(self) -> None:
        is_stuck = not self._may_grow or not self.workers
        if is_stuck and len(self.workers) == self._abandoned_count:
            self.stalled_since_s = time.monotonic()


class JobQueue:
    """Waiting jobs, by priority, place and rank. The caller of each method holds the lock.

    A job that was withdrawn, or whose priority changed, leaves a stale entry behind, which is
    skipped when it reaches the front: moving a job costs one push, never a search.
    """

    def __init__(self) -> None:
        self._heaps: dict[Priority, dict[str, list[tuple[int, int, ReadJob]]]] = {
            priority: {} for priority in Priority
        }
        self._tie = itertools.count()
        self.under_way: Counter[str] = Counter()
        """Number of reads under way by place."""

    def put(self, job: ReadJob) -> None:
        """Queue `job`."""
        heap = self._heaps[job.priority].setdefault(self._place(job), [])
        heapq.heappush(heap, (job.sequence, next(self._tie), job))

    def peek(self, priority: Priority) -> ReadJob | None:
        """Return the next job of a priority, left in the queue."""
        best: tuple[int, int, ReadJob] | None = None
        heaps = self._heaps[priority]
        for place in tuple(heaps):
            heap = heaps[place]
            job = None
            while heap:
                sequence, _, job = heap[0]
                if job.state is JobState.WAITING and job.priority is priority:
                    break
                heapq.heappop(heap)
            if job is None or not heap:
                del heaps[place]
                continue
            found = (self.under_way[place] if place else 0, sequence, job)
            if best is None or found[:2] < best[:2]:
                best = found
        return None if best is None else best[2]

    def take(self, job: ReadJob) -> None:
        """Remove `job`, which `peek` has returned."""
        heapq.heappop(self._heaps[job.priority][self._place(job)])

    def clear(self) -> None:
        """Remove every job."""
        for heaps in self._heaps.values():
            heaps.clear()

    @staticmethod
    def _place(job: ReadJob) -> str:
        # Demands are served in their order, wherever they read.
        return "" if job.priority is Priority.DEMAND else job.place


class FetchEngine:
    """Threads, queue and clock for the reads of one storage, mount or image.

    An engine does not survive fork(2): make it in the process that uses it.
    """

    def __init__(
        self,
        policies: Mapping[Priority, Policy],
        *,
        threads: int,
        demand_threads: int,
        deadline_s: float,
        stall_s: float,
        fill_bytes_per_s: float | None = None,
        figures: EngineFigures | None = None,
        name: str = "the transfer",
    ) -> None:
        """Make an engine; the first job starts threads.

        Args:
            policies: When a job of each priority is tried again.
            threads: Number of threads for every job.
            demand_threads: Number of threads for jobs with the priority DEMAND alone.
            deadline_s: Seconds without any bytes after which a job fails.
            stall_s: Seconds without any bytes after which an attempt is given up.
            fill_bytes_per_s: Limit of the rate at which jobs with the priority FILL begin.
            figures: Gets the counts; called with the lock held.
            name: Name of the storage, mount or image in the message of `close`.
        """
        self.lock = threading.Lock()
        self._policies = policies
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._figures = figures or EngineFigures()
        self._name = name
        self._queue = JobQueue()
        self._demand_crew = Crew("demand", demand_threads, self._work, self.lock)
        self._shared_crew = Crew("transfer", threads, self._work, self.lock)
        self._jobs: set[ReadJob] = set()
        self._running: set[JobAttempt] = set()
        """The valid attempts; the result of any other attempt is ignored."""
        self._late: deque[tuple[JobAttempt, memoryview]] = deque()
        """Late attempts, each with memory for a second attempt that no thread has begun yet."""
        self._resting: list[tuple[float, int, ReadJob]] = []
        self._numbers = itertools.count(1)
        self._pace = Pace()
        self.bytes_moved_s = 0.0
        """Monotonic time at which bytes came last, for any job. Any thread may read it."""
        self._bucket: TokenBucket | None = None
        if fill_bytes_per_s is not None:
            self._bucket = TokenBucket(fill_bytes_per_s, now_s=time.monotonic())
        self._fill_s = math.inf
        self._clock: threading.Thread | None = None
        self._alarm = threading.Condition(self.lock)
        self._due_s = math.inf
        self._is_closed = False

    # ---- jobs; the caller holds the lock ------------------------------------------------------

    def add(self, job: ReadJob, priority: Priority) -> None:
        """Queue `job` behind the others of its priority. Raises: UnavailableError when closed."""
        self.check_open()
        job.priority = priority
        job.sequence = next(self._numbers)
        self._enqueue(job)

    def check_open(self) -> None:
        """Raise UnavailableError if the engine is closed."""
        if self._is_closed:
            raise UnavailableError(f"{self._name} was closed")

    def hasten(self, job: ReadJob, priority: Priority) -> None:
        """Raise the priority of `job`; lowering it is ignored."""
        if priority >= job.priority:
            return
        job.priority = priority
        if job.state is JobState.WAITING:
            job.sequence = next(self._numbers)
            self._enqueue(job)

    def withdraw(self, job: ReadJob) -> bool:
        """Drop a job that waits or rests; return False if it is being read."""
        if job.state not in (JobState.WAITING, JobState.RESTING):
            return False
        job.state = JobState.ENDED
        self._jobs.discard(job)
        return True

    def end(self, job: ReadJob, error: BaseException | None) -> None:
        """End `job` now, in any state. Idempotent."""
        if job.state is JobState.ENDED:
            return
        job.state, job.error = JobState.ENDED, error
        job.earlier = job.failure = None
        self._jobs.discard(job)
        for one in tuple(job.attempts):
            self._drop(one)
        job.ended()
        if job.done is not None:
            job.done.set()

    def silent_s(self, job: ReadJob, since_s: float, now_s: float) -> float:
        """Return the seconds since bytes came for `job`, at most those since `since_s`.

        A job that waits in the queue waits for others: their bytes count as its own.
        """
        for one in job.attempts:
            one.note_progress(now_s)
        moved_s = job.moved_s or 0.0
        if job.state is JobState.WAITING:
            moved_s = max(moved_s, self.bytes_moved_s)
        return now_s - max(moved_s, since_s)

    # ---- jobs; the caller does not hold the lock ----------------------------------------------

    def wait(self, job: ReadJob, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until `job` has ended; end it if nothing came within the deadline.

        `cancelled` is called several times a second. Raises: InterruptedError if it returns True.
        """
        with self.lock:
            if job.state is JobState.ENDED:
                return
            done = job.done = job.done or threading.Event()
        began_s = time.monotonic()
        while not done.wait(min(_POLL_S, self._deadline_s)):
            if cancelled():
                raise InterruptedError
            now_s = time.monotonic()
            with self.lock:
                if self.silent_s(job, began_s, now_s) >= self._deadline_s:
                    self._fail_silent(job)

    def close(self) -> None:
        """Fail every job, tell every waiter, and end the threads. Idempotent.

        A thread that hangs in a read is left behind and ends when the read does.
        """
        with self.lock:
            if not self._is_closed:
                self._is_closed = True
                for job in tuple(self._jobs):
                    self.end(job, job.waiter_error(UnavailableError(f"{self._name} was closed")))
                self._queue.clear()
                self._resting.clear()
                self._late.clear()
            crews = (self._demand_crew, self._shared_crew)
            for crew in crews:
                crew.wake_all()
            self._alarm.notify_all()
            threads = [worker.thread for crew in crews for worker in crew.workers]
        until_s = time.monotonic() + _CLOSE_S
        left_count = 0
        for thread in (*threads, self._clock):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
                left_count += thread.is_alive()
        if left_count:
            logger.warning("%d reads still hang; their threads end with them", left_count)

    # ---- threads ------------------------------------------------------------------------------

    def _crews_for(self, priority: Priority) -> tuple[Crew, ...]:
        if priority is Priority.DEMAND:
            return (self._demand_crew, self._shared_crew)
        return (self._shared_crew,)

    def _enqueue(self, job: ReadJob) -> None:
        if self._clock is None:
            clock = threading.Thread(
                target=self._keep_time, name="bootseer-transfer-clock", daemon=True
            )
            clock.start()
            self._clock = clock
        job.state = JobState.WAITING
        self._jobs.add(job)
        self._queue.put(job)
        self._wake(job.priority)

    def _wake(self, priority: Priority) -> None:
        crews = self._crews_for(priority)
        if not any(crew.wake() for crew in crews) and any(c.stalled_since_s for c in crews):
            self._wake_clock_by(0.0)

    def _wake_clock_by(self, at_s: float) -> None:
        """Wake the clock thread at `at_s` at the latest."""
        if at_s < self._due_s:
            self._due_s = at_s
            self._alarm.notify()

    def _work(self, worker: ReadWorker) -> None:
        """Run a thread of a crew. Takes the lock."""
        crew = worker.crew
        try:
            while True:
                with self.lock:
                    if not crew.rejoin(worker):
                        return
                    while (begun := self._begin(worker)) is None:
                        if self._is_closed:
                            return
                        crew.sleep()
                self._carry_out(*begun)
                del begun  # An idle thread must not keep the buffers of its last read alive.
        finally:
            with self.lock:
                crew.leave(worker)

    def _begin(self, worker: ReadWorker) -> "tuple[JobAttempt, JobAttempt | None] | None":
        """Return the next attempt for this thread, and the one whose bytes it continues."""
        while not self._is_closed:
            now_s = time.monotonic()
            buffer = None
            found = self._next_late(worker)
            if found is not None:
                job, buffer = found
            else:
                waiting = self._next_waiting(worker, now_s)
                if waiting is None:
                    return None
                job = waiting
                if job.moved_s is not None and self.silent_s(job, 0.0, now_s) >= self._deadline_s:
                    self._fail_silent(job)
                    continue
                for part in job.split(None):
                    self._enqueue(part)
                if not job.is_wanted:
                    self.end(job, None)
                    continue
                self._queue.take(job)
            if job.moved_s is None:
                job.moved_s = now_s
            job.state = JobState.READING
            floor = floor_bytes_per_s(job.length, self._deadline_s)
            one = JobAttempt(job, worker, buffer, now_s, floor)
            self._extend(one)
            job.attempts.append(one)
            job.second_count += one.is_second
            self._running.add(one)
            self._queue.under_way[job.place] += 1
            self._wake_clock_by(min(one.deadline_s, now_s + LOOK_AFTER_S))
            return one, job.earlier
        return None

    def _next_late(self, worker: ReadWorker) -> tuple[ReadJob, memoryview] | None:
        for late in self._late:
            if worker.crew in self._crews_for(late[0].job.priority):
                self._late.remove(late)
                return late[0].job, late[1]
        return None

    def _next_waiting(self, worker: ReadWorker, now_s: float) -> ReadJob | None:
        queue = self._queue
        job = queue.peek(Priority.DEMAND)
        if job is not None or worker.crew is self._demand_crew:
            return job
        job = queue.peek(Priority.PREFETCH)
        if job is not None:
            return job
        job = queue.peek(Priority.FILL)
        if job is not None and self._bucket is not None:
            is_due = self._bucket.ready_at_s(now_s) <= now_s
            if is_due:
                self._bucket.take(job.length, now_s)
            # The clock wakes a thread when the next one is due.
            self._fill_s = self._bucket.ready_at_s(now_s)
            self._wake_clock_by(self._fill_s)
            if not is_due:
                return None
        return job

    def _carry_out(self, one: JobAttempt, earlier: JobAttempt | None) -> None:
        """Read, check and deliver. Takes the lock; never raises."""
        job = one.job
        failure: BaseException | None = None
        try:
            data = one.read(earlier)
        except BaseException as error:  # No error of a reader may end a thread.
            # A job that has ended meanwhile may have released what its methods need.
            _forget_frames(error, is_expected=one.attempt.is_given_up)
            failure = error
        del earlier
        with self.lock:
            one.has_returned = True
            if one not in self._running:
                return
            now_s = time.monotonic()
            if failure is not None:
                self._failed(one, failure, now_s)
                return
            self._won(one, now_s)
        try:
            job.land(one, data)
        except BaseException as error:  # No error of a callback may end a thread.
            _forget_frames(error)
            failure = job.waiter_error(error)
        with self.lock:
            if one in self._running:
                self._forget(one)
                self.end(job, failure)

    # ---- the end of an attempt; the lock is held ------------------------------------------------

    def _won(self, one: JobAttempt, now_s: float) -> None:
        job, seconds = one.job, now_s - one.started_s
        for other in tuple(job.attempts):
            if other is not one:
                self._drop(other)
        job.state = JobState.LANDING
        job.earlier = None
        self.bytes_moved_s = job.moved_s = now_s
        # Delivery gets `stall_s` again, so that a full disk queue is no failure.
        one.deadline_s = now_s + self._stall_s
        self._pace.note(job.length - one.start_bytes, seconds, is_second=one.is_second)
        self._figures.won(one, seconds)

    def _failed(
        self, one: JobAttempt, error: BaseException, now_s: float, *, is_silence: bool = False
    ) -> None:
        """Note that an attempt failed; its job continues behind the bytes that came."""
        job = one.job
        one.note_progress(now_s)
        self._forget(one)
        job.avoided_readers.add(one.number)
        is_wrong = isinstance(error, CorruptError)
        if is_wrong:
            self._figures.damaged(job)
        if job.attempts:
            return  # Another attempt is under way.
        if is_wrong:
            job.wrong_count += 1
        elif one.attempt.done_bytes >= FLOOR_BYTES_PER_S * STALL_S:
            # More than a trickle: failures count anew.
            job.failure_count, job.failure = 1, None
        else:
            job.failure_count += 1
        job.earlier = one if len(one.buffer) and not is_wrong else None
        if job.failure is None or not is_silence:
            job.failure = error
        for part in job.split(error):
            self._figures.retried(job, error)
            self._enqueue(part)
        if job.is_wanted:
            self.rest_or_end(job, error)
        else:
            self.end(job, None)

    def rest_or_end(self, job: ReadJob, error: BaseException) -> None:
        """Try `job` again after `error` if its policy allows, or end it."""
        now_s = time.monotonic()
        count = job.wrong_count if isinstance(error, CorruptError) else job.failure_count
        left_s = self._deadline_s - self.silent_s(job, 0.0 if job.moved_s else now_s, now_s)
        pause_s = self._policies[job.priority].pause_s(error, count, left_s, random_fraction())
        if pause_s is None:
            self.end(job, job.waiter_error(job.failure or error))
            return
        logger.debug("reading %s again in %.3f s: %s", job.what, pause_s, error)
        self._figures.retried(job, error)
        self._jobs.add(job)
        if pause_s > 0:
            job.state, job.resume_s = JobState.RESTING, now_s + pause_s
            heapq.heappush(self._resting, (job.resume_s, next(self._numbers), job))
            self._wake_clock_by(job.resume_s)
        else:
            self._enqueue(job)

    def _drop(self, one: JobAttempt) -> None:
        """Invalidate an attempt. Another thread replaces its thread until its read returns."""
        self._forget(one)
        one.attempt.give_up()
        one.worker.crew.abandon(one.worker)

    def _forget(self, one: JobAttempt) -> None:
        self._running.discard(one)
        one.job.attempts.remove(one)
        if self._late:
            # Its second attempt is no longer needed.
            self._late = deque(late for late in self._late if late[0] is not one)
        place = one.job.place
        self._queue.under_way[place] -= 1
        if not self._queue.under_way[place]:
            del self._queue.under_way[place]

    def _fail_silent(self, job: ReadJob) -> None:
        self.end(job, job.waiter_error(job.failure or self._no_answer(job)))

    def _no_answer(self, job: ReadJob) -> DeadlineError:
        return DeadlineError(f"cannot read {job.what}: no answer within {self._deadline_s:g} s")

    # ---- the clock ----------------------------------------------------------------------------

    def _keep_time(self) -> None:
        """Run the clock thread, which watches deadlines, rests and late reads. Takes the lock."""
        while True:
            for one in self._late_attempts():
                self._ask_again(one)
            with self.lock:
                if self._is_closed:
                    return
                now_s = time.monotonic()
                due_s = [self._check_attempt(one, now_s) for one in tuple(self._running)]
                if self._fill_s <= now_s:
                    self._fill_s = math.inf
                    self._wake(Priority.FILL)
                due_s += [self._wake_rested(now_s), self._fill_s, self._fail_stalled(now_s)]
                self._due_s = min(due_s)
                is_idle = self._due_s == math.inf
                self._alarm.wait(None if is_idle else max(0.0, self._due_s - time.monotonic()))

    def _check_attempt(self, one: JobAttempt, now_s: float) -> float:
        """Check one attempt; return the time of the next check."""
        if one.job.state is JobState.READING:
            one.note_progress(now_s)
            self.bytes_moved_s = max(self.bytes_moved_s, one.job.moved_s or 0.0)
            self._extend(one)
        if one.deadline_s <= now_s:
            self._give_up(one, now_s)
            return now_s
        look_s = math.inf if one.was_late else max(one.started_s + LOOK_AFTER_S, now_s + LOOK_S)
        return min(look_s, one.deadline_s)

    def _extend(self, one: JobAttempt) -> None:
        """Move the deadline of an attempt according to the time at which bytes came last."""
        one.deadline_s = (one.job.moved_s or one.started_s) + self._deadline_s
        if one.tells_progress:
            one.deadline_s = min(one.deadline_s, one.progress.seen_s + self._stall_s)

    def _give_up(self, one: JobAttempt, now_s: float) -> None:
        """End an attempt that passed its deadline, replace its thread, and let the job go on."""
        job = one.job
        is_landing = job.state is JobState.LANDING
        doing = "keeping" if is_landing else "reading"
        error = DeadlineError(f"{doing} {job.what} did not go on for {self._stall_s:g} s")
        logger.warning("%s", error)
        self._figures.hung(one)
        one.attempt.give_up()
        one.worker.crew.abandon(one.worker)
        if is_landing:
            # The callback may still be running, and must not get the same bytes twice.
            self.end(job, error)
        else:
            self._failed(one, self._no_answer(job), now_s, is_silence=True)
        for priority in Priority:
            if self._queue.peek(priority) is not None:
                self._wake(priority)

    def _wake_rested(self, now_s: float) -> float:
        while self._resting:
            due_s, _, job = self._resting[0]
            is_resting = job.state is JobState.RESTING and job.resume_s == due_s
            if is_resting and due_s > now_s:
                return due_s
            heapq.heappop(self._resting)
            if is_resting:
                self._enqueue(job)
        return math.inf

    def _fail_stalled(self, now_s: float) -> float:
        """End jobs for which no thread can be had; return the time of the next check."""
        again_s = math.inf
        for priority in Priority:
            crews = self._crews_for(priority)
            since_s = [c.stalled_since_s for c in crews if c.stalled_since_s is not None]
            if len(since_s) < len(crews) or self._queue.peek(priority) is None:
                continue
            fails_s = max(since_s) + self._deadline_s
            if fails_s > now_s:
                again_s = min(again_s, fails_s)
                continue
            while (job := self._queue.peek(priority)) is not None:
                self.end(
                    job, job.waiter_error(DeadlineError("every connection to the store hangs"))
                )
        return again_s

    # ---- second attempts ------------------------------------------------------------------------

    def _late_attempts(self) -> "list[JobAttempt]":
        """Return the attempts that are late. Takes the lock."""
        with self.lock:
            if not self._pace.has_credit:
                return []
            now_s = time.monotonic()
            return [one for one in self._running if one.is_late(self._pace, now_s)]

    def _ask_again(self, one: JobAttempt) -> None:
        """Queue a second attempt for the rest of `one`, which is late. Takes the lock.

        Credit is spent last: a read that cannot be requested now is checked again later.
        """
        job, crew = one.job, one.worker.crew
        try:
            buffer = job.spare_buffer()
        except Exception:
            logger.exception("a late read is not asked for again")
            return
        with self.lock:
            is_late = one in self._running and job.state is JobState.READING and not one.was_late
            if buffer is None or not is_late or not crew.can_lend or not self._pace.spend():
                return
            logger.debug("asking again for %s, which is late", job.what)
            one.was_late = True
            job.avoided_readers.add(one.number)
            job.late(one)
            self._figures.late(one)
            crew.abandon(one.worker)
            late = [other for other in job.attempts if other.was_late]
            if len(late) > 1:
                # Two late attempts share the bandwidth of a slow server: the better one stays.
                worst = min(late, key=lambda other: other.done_bytes)
                self._drop(worst)
                late.remove(worst)
            job.earlier = late[0]
            self._late.append((late[0], buffer))
            self._wake(job.priority)


def _forget_frames(error: BaseException, *, is_expected: bool = False) -> None:
    """Remove the frames from `error`, which may be kept for long and would keep their buffers.

    Unless it `is_expected`, an error that is neither the system's nor ours is logged.
    """
    if not is_expected and not isinstance(error, (OSError, BootseerError)):
        logger.warning("a read failed in an unforeseen way", exc_info=error)
    one: BaseException | None = error
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
