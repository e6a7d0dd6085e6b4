"""The engine: the threads of two pools, and the clock that watches over them.

Owns the one lock, the threads and the running attempts; the `Scheduler` has what is under way.
The demand pool reads DEMAND alone; the shared pool reads everything, DEMAND first.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError, DeadlineError, UnavailableError
from bootseer.transfer.pace import LOOK_AFTER_S, TokenBucket
from bootseer.transfer.pending import PendingChunk, Phase, Reader, Reading, Task
from bootseer.transfer.plan import Priority
from bootseer.transfer.policy import Policy, as_bootseer_error
from bootseer.transfer.running import Running
from bootseer.transfer.scheduler import Scheduler
from bootseer.transfer.statistics import Recorder
from bootseer.transfer.worker_pool import Worker, WorkerPool

logger = logging.getLogger(__name__)

# How long `close` waits for threads that are inside a read; one that hangs is a daemon and is left.
_CLOSE_S = 2.0


class Engine:
    """Carries out what is queued in `scheduler`. Methods need `lock` held unless they say that they
    take it themselves."""

    def __init__(
        self,
        read: Reader,
        policy: Policy,
        take_buffer: Callable[[int], memoryview],
        *,
        workers: int,
        demand_workers: int,
        deadline_s: float,
        attempt_deadline_s: float,
        fill_bytes_per_s: float | None,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.lock = threading.Lock()
        self.recorder = Recorder()
        self.scheduler = Scheduler(policy, self.recorder, self._wake)
        self._read = read
        self._take_buffer = take_buffer
        self._deadline_s = deadline_s
        self._attempt_deadline_s = attempt_deadline_s
        self._on_progress = on_progress
        self._demand_pool = self._make_pool("demand", demand_workers)
        self._shared_pool = self._make_pool("transfer", workers)
        self._bucket: TokenBucket | None = None
        if fill_bytes_per_s is not None:
            self._bucket = TokenBucket(fill_bytes_per_s, now_s=time.monotonic())
        self._fill_at_s = math.inf
        self._running = Running()
        self._clock: threading.Thread | None = None
        self._clock_alarm = threading.Condition(self.lock)
        self._clock_due_s = math.inf
        self._is_closed = False

    def check_open(self) -> None:
        """Raises: UnavailableError when closed. Otherwise the engine runs from here on."""
        if self._is_closed:
            raise UnavailableError("the transfer was stopped")
        if self._clock is None:
            self._clock = threading.Thread(
                target=self._keep_time, name="bootseer-transfer-clock", daemon=True
            )
            self._clock.start()

    def close(self) -> None:
        """Fail everything and end the threads. Takes the lock. Idempotent."""
        pools = (self._demand_pool, self._shared_pool)
        with self.lock:
            if not self._is_closed:
                self._is_closed = True
                self._running.clear()
                self.scheduler.fail_everything(UnavailableError("the transfer was stopped"))
            for pool in pools:
                pool.wake_all()
            self._clock_alarm.notify_all()
        until_s = time.monotonic() + _CLOSE_S
        left_count = sum(pool.join(until_s) for pool in pools)
        if left_count:
            logger.warning("%d reads still hang; their threads end with them", left_count)
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join(_CLOSE_S)

    def _make_pool(self, name: str, size: int) -> WorkerPool:
        # As many replacements as threads: an outage that hangs all reads once is survived.
        return WorkerPool(name, size=size, spare_count=2 * size, lock=self.lock, run=self._work)

    def _pools_for(self, priority: Priority) -> tuple[WorkerPool, ...]:
        if priority is Priority.DEMAND:
            return (self._demand_pool, self._shared_pool)
        return (self._shared_pool,)

    def _wake(self, priority: Priority) -> None:
        """See that a thread comes for what has just been queued."""
        pools = self._pools_for(priority)
        if any(pool.wake_idle() for pool in pools) or any(pool.spawn() for pool in pools):
            return
        if any(pool.stalled_since_s is not None for pool in pools):
            self._alarm(time.monotonic())

    def _alarm(self, at_s: float) -> None:
        """Have the clock look around at `at_s` at the latest."""
        if at_s < self._clock_due_s:
            self._clock_due_s = at_s
            self._clock_alarm.notify()

    def _take(self, pool: WorkerPool) -> Task | None:
        """The next task for a thread of `pool`."""
        queue = self.scheduler.queue
        task = self._running.next_late(is_demanded=pool is self._demand_pool)
        task = task or queue.pop(Priority.DEMAND)
        if task is not None or pool is self._demand_pool:
            return task
        return queue.pop(Priority.PREFETCH) or self._take_fill()

    def _take_fill(self) -> Task | None:
        queue = self.scheduler.queue
        if self._bucket is None:
            return queue.pop(Priority.FILL)
        now_s = time.monotonic()
        task = None
        if self._bucket.ready_at_s(now_s) <= now_s:
            task = queue.pop(Priority.FILL)
            if task is not None:
                self._bucket.take(task.fetch.length, now_s)
        if queue.peek(Priority.FILL) is not None:
            # The clock sends a thread for the next one when its time has come.
            self._fill_at_s = self._bucket.ready_at_s(now_s)
            self._alarm(self._fill_at_s)
        return task

    def _is_late(self, task: Task) -> bool:
        """Whether `task` waited in the queue beyond its deadline; then it is given up here."""
        if task.deadline_s is None or time.monotonic() < task.deadline_s:
            return False
        late = DeadlineError(
            f"{task.fetch.key} could not be read within {self._deadline_s:g} s; "
            "the store answers too slowly"
        )
        self.scheduler.fail(task.pending_chunks.values(), late)
        return True

    def _start_attempt(self, worker: Worker, task: Task) -> Reading:
        now_s = time.monotonic()
        if task.deadline_s is None:
            task.deadline_s = now_s + self._deadline_s
        task.phase = Phase.READING
        task.attempts_made += 1
        attempt = Reading(worker, task, self._attempt_deadline_s, now_s)
        self._running.add(attempt)
        self._alarm(min(attempt.deadline_s, now_s + LOOK_AFTER_S))
        return attempt

    def _is_void(self, attempt: Reading) -> bool:
        return attempt not in self._running

    def _work(self, worker: Worker) -> None:
        """Life of one worker thread. Takes the lock."""
        pool = worker.pool
        while True:
            with self.lock:
                if not pool.rejoin(worker):
                    return
                while True:
                    if self._is_closed:
                        return
                    task = self._take(pool)
                    if task is None:
                        pool.sleep()
                    elif not self._is_late(task):
                        break
                attempt = self._start_attempt(worker, task)
            self._carry_out(attempt)
            # Nothing of the last read may stay alive while the thread is idle.
            del task, attempt

    def _carry_out(self, attempt: Reading) -> None:
        """Read, verify, deliver. Takes the lock; never raises."""
        fetch = attempt.fetch
        try:
            count = attempt.fill(self._read, self._take_buffer(fetch.length))
            if count != fetch.length:
                raise CorruptError(
                    f"the store returned {count} of {fetch.length} bytes of {fetch.key} "
                    f"from {fetch.offset}"
                )
        except BaseException as error:  # a worker outlives whatever a reader raises
            with self.lock:
                if not self._is_void(attempt):
                    now_s = time.monotonic()
                    self._failed(attempt, error, now_s)
                    self._alarm(self.scheduler.wake_rested(now_s))
            return
        with self.lock:
            if self._is_void(attempt):
                return
            self._running.won(attempt, time.monotonic())
            self.recorder.fetch_count += 1
            self.recorder.fetched_bytes += fetch.length
            # Verifying and delivering get as long again, so that a full disk queue is no failure.
            attempt.is_landing = True
            attempt.deadline_s = time.monotonic() + self._attempt_deadline_s
        whole = attempt.buffer
        corrupt: list[PendingChunk] = []
        for pending in attempt.pending_chunks:
            chunk = pending.chunk
            piece = whole[chunk.offset - fetch.offset : chunk.end - fetch.offset]
            if chunk.digest is not None and content_digest(piece) != chunk.digest:
                corrupt.append(pending)
            elif not self._deliver(attempt, pending, piece):
                return
        with self.lock:
            if self._is_void(attempt):
                return
            self._running.discard(attempt)
            now_s = time.monotonic()
            for pending in corrupt:
                chunk = pending.chunk
                damage = CorruptError(
                    f"bytes {chunk.offset} to {chunk.end} of {chunk.key} do not match their "
                    "digest; the stored object or the network is damaged"
                )
                self.scheduler.chunk_corrupt(pending, damage, now_s)
            self._alarm(self.scheduler.wake_rested(now_s))

    def _deliver(self, attempt: Reading, pending: PendingChunk, piece: memoryview) -> bool:
        """Hand `piece` to all requesters, also those that ask meanwhile, then wake them. False:
        the attempt was given up. Takes the lock; never raises."""
        done_count = 0
        while True:
            with self.lock:
                if self._is_void(attempt):
                    return False
                if done_count == len(pending.deliveries):
                    self.scheduler.finish(pending)
                    break
                delivery = pending.deliveries[done_count]
            try:
                delivery.deliver(pending.chunk, piece)
            except BaseException as error:  # a worker outlives whatever a callback raises
                delivery.error = as_bootseer_error(error, f"keep a chunk of {pending.chunk.key}")
            done_count += 1
        if self._on_progress is not None:
            try:
                self._on_progress(pending.chunk.length)
            except Exception:
                logger.exception("a progress callback failed")
        return True

    def _keep_time(self) -> None:
        """Life of the clock thread: deadlines, retries, the rate cap, stalls. Takes the lock."""
        with self.lock:
            while not self._is_closed:
                now_s = time.monotonic()
                for attempt in self._running.overdue(now_s):
                    self._give_up(attempt, now_s)
                for attempt in self._running.newly_late(now_s):
                    self._ask_again(attempt)
                rested_at_s = self.scheduler.wake_rested(now_s)
                if self._fill_at_s <= now_s:
                    self._fill_at_s = math.inf
                    self._wake(Priority.FILL)
                stalled_at_s = self._fail_stalled(now_s)
                self._clock_due_s = min(
                    rested_at_s, self._fill_at_s, stalled_at_s, self._running.due_s(now_s)
                )
                idle = self._clock_due_s == math.inf
                self._clock_alarm.wait(
                    None if idle else max(0.0, self._clock_due_s - time.monotonic())
                )

    def _ask_again(self, attempt: Reading) -> None:
        """The attempt is late: have another thread, by another connection, bring what it lacks."""
        logger.debug("asking again for %s, which is late", attempt.fetch.key)
        self.recorder.retry_count += 1
        attempt.worker.pool.abandon(attempt.worker)
        self._wake(attempt.task.priority)

    def _failed(self, attempt: Reading, error: BaseException, now_s: float) -> None:
        """The attempt brought an error; the task goes on, with the bytes that came."""
        self._running.discard(attempt)
        if isinstance(error, CorruptError):
            attempt.task.earlier = None
        else:
            attempt.task.earlier = attempt
            if attempt.has_progressed:
                attempt.task.attempts_made = 0
        if not self._running.beside(attempt):
            self.scheduler.attempt_failed(attempt.task, error, now_s)

    def _give_up(self, attempt: Reading, now_s: float) -> None:
        """The attempt outlived its deadline: replace its thread, and try elsewhere."""
        self._running.discard(attempt)
        self.recorder.hung_count += 1
        attempt.worker.pool.abandon(attempt.worker)
        fetch = attempt.fetch
        doing = "keeping" if attempt.is_landing else "reading"
        error = DeadlineError(
            f"{doing} bytes {fetch.offset} to {fetch.offset + fetch.length} of {fetch.key} "
            f"did not go on for {self._attempt_deadline_s:g} s"
        )
        logger.warning("%s", error)
        if attempt.is_landing:
            # The callback may still be at it: the same bytes must not reach it a second time.
            self.scheduler.fail(attempt.task.pending_chunks.values(), error)
        else:
            attempt.attempt.give_up()
            self._failed(attempt, error, now_s)
        # The abandoned thread may be replaced, by one that comes for what waits.
        for priority in Priority:
            if self.scheduler.queue.peek(priority) is not None:
                self._wake(priority)

    def _fail_stalled(self, now_s: float) -> float:
        """Give up what no thread can come for; when to look again (monotonic, inf: no stall)."""
        look_again_s = math.inf
        for priority in Priority:
            since_s = [pool.stalled_since_s for pool in self._pools_for(priority)]
            stalls_s = [stall_s for stall_s in since_s if stall_s is not None]
            if len(stalls_s) < len(since_s) or self.scheduler.queue.peek(priority) is None:
                continue
            fails_at_s = max(stalls_s) + self._deadline_s
            if fails_at_s <= now_s:
                self.scheduler.fail_queued(
                    priority, DeadlineError("every connection to the store hangs")
                )
            else:
                look_again_s = min(look_again_s, fails_at_s)
        return look_again_s
