"""Threads that carry out fetches for a whole mount, most urgent first.

Owns its threads and their queue. Some of the threads take only what somebody waits for, so that
read-ahead can never hold up a fault. A thread that is stuck in a dead server is replaced, up to a
bound; all are daemons, so that a stuck one cannot keep the process alive.
"""

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from enum import IntEnum

_log = logging.getLogger(__name__)

_MAX_REPLACEMENTS = 64


class Urgency(IntEnum):
    """Lower runs first."""

    DEMAND = 0
    """Somebody is waiting."""
    READAHEAD = 1
    """A sequential reader will be here soon."""
    WARM = 2
    """A start that has not opened the file yet."""


class FetchPool:
    """A fixed number of fetching threads."""

    def __init__(self, thread_count: int = 16, demand_only_count: int = 4) -> None:
        self._ready = threading.Condition()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closed = False
        self._replacements = 0
        for index in range(thread_count):
            self._start(demand_only=index < demand_only_count)

    def submit(self, urgency: Urgency, job: Callable[[], None]) -> None:
        """Run `job` on one of the threads. A job must not raise; submitted twice it runs twice."""
        with self._ready:
            heapq.heappush(self._heap, (urgency, next(self._order), job))
            # Whoever wakes first may be a thread that must not take this job: wake all.
            self._ready.notify_all()

    def replace_stuck(self) -> None:
        """A job did not end within its deadline: add a thread in place of the one it holds."""
        with self._ready:
            if self._closed or self._replacements >= _MAX_REPLACEMENTS:
                return
            self._replacements += 1
        _log.warning("a fetch is stuck; adding a thread in its place")
        self._start(demand_only=False)

    def close(self) -> None:
        """Drop what is queued and let the threads end. Does not wait for a stuck one."""
        with self._ready:
            self._closed = True
            self._heap.clear()
            self._ready.notify_all()

    def _start(self, demand_only: bool) -> None:
        threading.Thread(
            target=self._run, args=(demand_only,), name="stripe-fetch", daemon=True
        ).start()

    def _run(self, demand_only: bool) -> None:
        while True:
            with self._ready:
                while not self._closed and not (
                    self._heap and (not demand_only or self._heap[0][0] == Urgency.DEMAND)
                ):
                    self._ready.wait()
                if self._closed:
                    return
                _, _, job = heapq.heappop(self._heap)
            try:
                job()
            except Exception:
                _log.exception("a fetch job failed in a way it should have handled")
