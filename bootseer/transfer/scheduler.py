"""The scheduler: which chunks are pending, who waits for them, and what follows a failed read.

Owns the in-flight sharing (a chunk is never read twice at the same time), promotion, splitting,
retries and cancellation. Reads nothing and starts no thread: the executor carries out what is in
`queue`. Not thread-safe: every method needs the executor's lock.
"""

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterable

from bootseer.errors import BootseerError
from bootseer.transfer.pending import Deliver, PendingChunk, Phase, Task, Ticket
from bootseer.transfer.plan import Chunk, Fetch, Priority, covering, remaining
from bootseer.transfer.policy import Policy, as_bootseer_error, dice, is_retryable
from bootseer.transfer.statistics import Recorder

logger = logging.getLogger(__name__)


class TaskQueue:
    """Tasks by priority. One that was promoted or cancelled leaves a stale entry behind, which
    is skipped when it surfaces: moving a task costs one push, never a search."""

    def __init__(self) -> None:
        self._heaps: dict[Priority, list[tuple[int, int, Task]]] = {p: [] for p in Priority}
        self._tie = itertools.count()

    def put(self, task: Task) -> None:
        """Queue `task` by its priority and sequence."""
        task.phase = Phase.QUEUED
        entry = (task.sequence, next(self._tie), task)
        heapq.heappush(self._heaps[task.priority], entry)

    def peek(self, priority: Priority) -> Task | None:
        """The next task of this priority, left where it is."""
        heap = self._heaps[priority]
        while heap:
            task = heap[0][2]
            if task.phase is Phase.QUEUED and task.priority is priority:
                return task
            heapq.heappop(heap)
        return None

    def pop(self, priority: Priority) -> Task | None:
        """The next task of this priority, taken out."""
        task = self.peek(priority)
        if task is not None:
            heapq.heappop(self._heaps[priority])
        return task

    def clear(self) -> None:
        """Forget everything."""
        for heap in self._heaps.values():
            heap.clear()


class Scheduler:
    """The state of all transfers of one executor."""

    def __init__(
        self, policy: Policy, recorder: Recorder, wake: Callable[[Priority], None]
    ) -> None:
        """`wake(priority)` is called whenever a task of that priority has been queued."""
        self.queue = TaskQueue()
        self._policy = policy
        self._recorder = recorder
        self._wake = wake
        self._pending: dict[Chunk, PendingChunk] = {}
        self._resting: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()

    def request(
        self,
        fetch: Fetch,
        ticket: Ticket,
        deliver: Deliver,
        is_cached: Callable[[Chunk], bool] | None,
    ) -> None:
        """Have every chunk of `fetch` brought once, sharing what is under way already."""
        fresh: set[Chunk] = set()
        for chunk in dict.fromkeys(fetch.chunks):
            pending = self._pending.get(chunk)
            if pending is not None:
                pending.add(ticket, deliver)
                self._hasten(pending, fetch.priority, ticket.is_urgent)
                self._recorder.joined_count += ticket.is_urgent
            elif is_cached is not None and is_cached(chunk):
                # It landed between the caller's look into the cache and this call.
                ticket.settle(None)
            else:
                fresh.add(chunk)
        for part in remaining(fetch, fresh.__contains__):
            task = Task(part, fetch.priority, next(self._numbers))
            for chunk in part.chunks:
                if chunk not in task.pending_chunks:
                    pending = task.pending_chunks[chunk] = self._pending[chunk] = PendingChunk(
                        chunk, task
                    )
                    pending.add(ticket, deliver)
            self._enqueue(task)

    def leave(self, ticket: Ticket) -> int:
        """`ticket` gives up. What has not started for another requester is dropped; what is being
        read is still delivered. Returns how many of its chunks will not come."""
        ticket.has_left = True
        dropped_count = 0
        touched: set[Task] = set()
        for pending in tuple(ticket.pending_chunks):
            task = pending.task
            if task.phase in (Phase.QUEUED, Phase.RESTING):
                dropped_count += 1
                pending.drop(ticket)
                if not pending.deliveries:
                    self._remove(pending)
                    touched.add(task)
        for task in touched:
            self._cut(task)
        return dropped_count

    def finish(self, pending: PendingChunk, error: BootseerError | None = None) -> None:
        """The chunk was handed to its deliveries, or failed with `error`: wake who waits."""
        self._remove(pending)
        if error is not None or any(delivery.error for delivery in pending.deliveries):
            self._recorder.failed_count += 1
        else:
            self._recorder.delivered_count += 1
            self._recorder.delivered_bytes += pending.chunk.length
        for delivery in pending.deliveries:
            for ticket in delivery.tickets:
                ticket.pending_chunks.discard(pending)
                ticket.settle(error or delivery.error)

    def attempt_failed(self, task: Task, error: BaseException, now_s: float) -> None:
        """The attempt under way brought nothing: try again, or give up."""
        # Who waits does not wait for a large read twice: it gets a small one of its own.
        may_split = len(task.pending_chunks) > 1 and is_retryable(error)
        others: list[PendingChunk] = []
        for pending in tuple(task.pending_chunks.values()):
            if not pending.is_wanted:
                # Cancelled while it was being read: no second attempt, but an answer.
                self.finish(pending, as_bootseer_error(error, f"read {task.fetch.key}"))
            elif may_split and pending.is_urgent:
                self._isolate(pending, Priority.DEMAND, attempts_made=0)
                self._enqueue(pending.task)
                self._recorder.retry_count += 1
            else:
                others.append(pending)
        for rest in {pending.task: None for pending in others}:
            self._cut(rest)
        for rest in {pending.task: None for pending in others}:
            self._rest_or_fail(rest, error, now_s)

    def chunk_corrupt(self, pending: PendingChunk, error: BaseException, now_s: float) -> None:
        """The chunk came with the wrong digest: read it again, alone."""
        self._recorder.corrupt_count += 1
        attempts_made = pending.task.attempts_made
        priority = Priority.DEMAND if pending.is_urgent else pending.task.priority
        self._isolate(pending, priority, attempts_made=attempts_made)
        self._rest_or_fail(pending.task, error, now_s)

    def wake_rested(self, now_s: float) -> float:
        """Queue what has rested; when the next one is due (monotonic, inf: none rests)."""
        while self._resting:
            due_s, _, task = self._resting[0]
            if task.phase is not Phase.RESTING or task.resume_at_s != due_s:
                heapq.heappop(self._resting)
            elif due_s <= now_s:
                heapq.heappop(self._resting)
                self._enqueue(task)
            else:
                return due_s
        return math.inf

    def fail_queued(self, priority: Priority, error: BootseerError) -> None:
        """Give up everything that waits in the queue at this priority."""
        while (task := self.queue.pop(priority)) is not None:
            self.fail(task.pending_chunks.values(), error)

    def fail_everything(self, error: BootseerError) -> None:
        """Give up all there is."""
        self.fail(self._pending.values(), error)
        self.queue.clear()
        self._resting.clear()

    def fail(self, pending_chunks: Iterable[PendingChunk], error: BootseerError) -> None:
        """Give up these chunks."""
        for pending in tuple(pending_chunks):
            self.finish(pending, error)

    def _enqueue(self, task: Task) -> None:
        self.queue.put(task)
        self._wake(task.priority)

    def _hasten(self, pending: PendingChunk, priority: Priority, is_urgent: bool) -> None:
        """Another requester wants the chunk, maybe sooner."""
        task = pending.task
        alone = len(task.pending_chunks) == 1
        if task.phase is Phase.QUEUED and priority < task.priority:
            task.priority = priority
            task.sequence = next(self._numbers)
            self._enqueue(task)
        elif task.phase is Phase.RESTING and is_urgent and not alone:
            self._isolate(pending, Priority.DEMAND, attempts_made=0)
            self._cut(task)
            self._enqueue(pending.task)
        elif alone:
            # Counts from its next attempt on.
            task.priority = min(task.priority, priority)

    def _isolate(self, pending: PendingChunk, priority: Priority, *, attempts_made: int) -> None:
        """Move a chunk to a task of its own, which the caller queues or lets rest; the caller
        also cuts the old one."""
        del pending.task.pending_chunks[pending.chunk]
        if not pending.task.pending_chunks:
            pending.task.phase = Phase.DONE
        fetch = covering((pending.chunk,), priority)
        pending.task = Task(
            fetch,
            priority,
            next(self._numbers),
            pending_chunks={pending.chunk: pending},
            attempts_made=attempts_made,
            deadline_s=pending.task.deadline_s if attempts_made else None,
        )

    def _remove(self, pending: PendingChunk) -> None:
        """Forget a chunk; the caller cuts its task."""
        if self._pending.get(pending.chunk) is pending:
            del self._pending[pending.chunk]
        pending.task.pending_chunks.pop(pending.chunk, None)
        if not pending.task.pending_chunks:
            pending.task.phase = Phase.DONE

    def _cut(self, task: Task) -> None:
        """Make `task` read only what it still has to bring; where a chunk was taken out of its
        middle, the rest becomes a task of its own in the same state."""
        parts = remaining(task.fetch, task.pending_chunks.__contains__)
        if not parts:
            task.phase = Phase.DONE
            return
        task.fetch = parts[0]
        for part in parts[1:]:
            twin = Task(
                part,
                task.priority,
                task.sequence,
                phase=task.phase,
                attempts_made=task.attempts_made,
                deadline_s=task.deadline_s,
            )
            for chunk in part.chunks:
                pending = twin.pending_chunks[chunk] = task.pending_chunks.pop(chunk)
                pending.task = twin
            if task.phase is Phase.QUEUED:
                self._enqueue(twin)
            elif task.phase is Phase.RESTING:
                self._rest(twin, task.resume_at_s)

    def _rest(self, task: Task, resume_at_s: float) -> None:
        task.phase = Phase.RESTING
        task.resume_at_s = resume_at_s
        heapq.heappush(self._resting, (resume_at_s, next(self._numbers), task))

    def _rest_or_fail(self, task: Task, error: BaseException, now_s: float) -> None:
        fetch = task.fetch
        what = f"read bytes {fetch.offset} to {fetch.offset + fetch.length} of {fetch.key}"
        left_s = math.inf if task.deadline_s is None else task.deadline_s - now_s
        fraction = dice()
        delay_s = self._policy.pause_s(error, task.attempts_made, left_s, fraction)
        if delay_s is not None:
            logger.debug("will %s again in %.3f s: %s", what, delay_s, error)
            self._recorder.retry_count += 1
            self._rest(task, now_s + delay_s)
        else:
            self.fail(task.pending_chunks.values(), as_bootseer_error(error, what))
