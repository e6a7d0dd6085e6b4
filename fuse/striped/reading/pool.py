"""Threads that carry out fetches for a whole mount, most urgent first, evenly over the sources.

Owns its threads and their queue. Some of the threads take only what a reader waits for, so that
read-ahead can never hold up a fault. Of what no reader waits for yet, the fetch from the source
with the fewest under way comes first, so that no source idles while another has a queue. What is to
be tried again later rests without a thread. A thread that is held up in a slow server is made up
for, within a bound; all are daemons, so that a stuck one cannot keep the process alive.
"""

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum

_log = logging.getLogger(__name__)

_LENT_MAX = 64


class Urgency(IntEnum):
    """Lower runs first."""

    DEMAND = 0
    """A reader is waiting."""
    READAHEAD = 1
    """A sequential reader will be here soon, or a reader waits for much at once."""
    WARM = 2
    """A start that has not opened the file yet."""


_Job = tuple[str, Callable[[], None]]


class FetchPool:
    """A number of fetching threads."""

    def __init__(self, thread_count: int = 16, demand_only_count: int = 4) -> None:
        self.thread_count = thread_count
        lock = threading.Lock()
        # Who may take any job and who takes only urgent ones are woken separately: one thread for
        # each job.
        self._any, self._urgent = threading.Condition(lock), threading.Condition(lock)
        self._idle = {True: 0, False: 0}
        self._queues: dict[Urgency, deque[_Job]] = {urgency: deque() for urgency in Urgency}
        self._resting: list[tuple[float, int, _Job]] = []
        """A heap of jobs that are due at a monotonic time, and their numbers."""
        self._rested_count = 0
        self._under_way: Counter[str] = Counter()
        self._closed = False
        self._lent = 0
        self._surplus = 0
        for index in range(thread_count):
            self._start(demand_only=index < demand_only_count)

    def submit(self, urgency: Urgency, job: Callable[[], None], source: str = "") -> None:
        """Run `job`, which reads from `source`, on one of the threads. A job must not raise;
        submitted twice it runs twice."""
        with self._any:
            if self._closed:
                return
            self._queues[urgency].append((source, job))
            if urgency == Urgency.DEMAND and self._idle[True]:
                self._urgent.notify()
            else:
                self._any.notify()

    def submit_later(self, pause_s: float, job: Callable[[], None], source: str = "") -> None:
        """As `submit`, of a job that a reader waits for, after a pause."""
        with self._any:
            self._rested_count += 1
            due_s = time.monotonic() + pause_s
            heapq.heappush(self._resting, (due_s, self._rested_count, (source, job)))
            # All: whoever takes the next job, the others wait no longer than that.
            self._any.notify_all()
            self._urgent.notify_all()

    def lend(self) -> bool:
        """A job is held up: have one thread more until `give_back`. False: there are too many."""
        with self._any:
            if self._closed or self._lent >= _LENT_MAX:
                return False
            self._lent += 1
        self._start(demand_only=False)
        return True

    def give_back(self) -> None:
        """A job that a thread was lent for has ended after all."""
        with self._any:
            self._lent -= 1
            self._surplus += 1
            self._any.notify()

    def close(self) -> None:
        """Drop what is queued and let the threads end. Does not wait for a stuck one."""
        with self._any:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            self._resting.clear()
            self._any.notify_all()
            self._urgent.notify_all()

    def _start(self, demand_only: bool) -> None:
        threading.Thread(
            target=self._run, args=(demand_only,), name="stripe-fetch", daemon=True
        ).start()

    def _run(self, demand_only: bool) -> None:
        wakes = self._urgent if demand_only else self._any
        while True:
            with wakes:
                while (taken := self._take(demand_only)) is None:
                    if self._closed:
                        return
                    if self._surplus and not demand_only:
                        self._surplus -= 1
                        return
                    self._idle[demand_only] += 1
                    wakes.wait(self._rest_s())
                    self._idle[demand_only] -= 1
                source, job = taken
                self._under_way[source] += 1
            try:
                job()
            except Exception:
                # This thread has jobs of other files to do.
                _log.exception("a fetch job failed in a way it should have handled")
            del job, taken  # what it fetched is not ours to keep
            with wakes:
                self._under_way[source] -= 1
                if not self._under_way[source]:
                    del self._under_way[source]

    def _rest_s(self) -> float | None:
        """How long the next job that rests does so; None: there is none. The lock is held."""
        return max(0.0, self._resting[0][0] - time.monotonic()) if self._resting else None

    def _take(self, demand_only: bool) -> _Job | None:
        """The job to do next; the lock is held."""
        if self._closed:
            return None
        urgent = self._queues[Urgency.DEMAND]
        while self._resting and self._resting[0][0] <= time.monotonic():
            urgent.append(heapq.heappop(self._resting)[2])
        if urgent:
            return urgent.popleft()
        if demand_only:
            return None
        for queue in self._queues.values():
            if queue:
                index = min(range(len(queue)), key=lambda at: self._under_way[queue[at][0]])
                job = queue[index]
                del queue[index]
                return job
        return None
