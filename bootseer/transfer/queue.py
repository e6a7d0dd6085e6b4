"""The order in which reads are carried out: by priority, then as submitted.

Owns the waiting tasks and nothing else. Not thread-safe: the executor's lock guards it.
"""

import heapq
import itertools

from bootseer.transfer.flight import Phase, Task
from bootseer.transfer.plan import Priority


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
