"""The attempts under way of an executor: which of them are late, and which one counts.

An attempt that is late stays, and another one begins behind the bytes that it has brought; the
first that ends is the one that counts.
"""

import math
from collections import deque

from bootseer.transfer.pace import LOOK_AFTER_S, LOOK_S, Pace
from bootseer.transfer.pending import Reading, Task
from bootseer.transfer.plan import Priority


class Running:
    """The attempts under way, and those that are late. Not thread-safe: the executor's lock guards
    it."""

    def __init__(self) -> None:
        self._readings: set[Reading] = set()
        self._late: deque[Reading] = deque()
        self._pace = Pace()

    def __contains__(self, reading: Reading) -> bool:
        return reading in self._readings

    def add(self, reading: Reading) -> None:
        """It begins."""
        self._readings.add(reading)

    def discard(self, reading: Reading) -> None:
        """It is over, or void."""
        self._readings.discard(reading)

    def clear(self) -> None:
        """All are void, and stop as soon as they can."""
        for reading in self._readings:
            reading.attempt.give_up()
        self._readings.clear()

    def overdue(self, now_s: float) -> list[Reading]:
        """The attempts that have outlived their deadlines."""
        return [one for one in self._readings if one.is_overdue(now_s)]

    def due_s(self, now_s: float) -> float:
        """When to look next for those that are late or overdue (monotonic, inf: none runs)."""
        begun_s = [one.started_s for one in self._readings if not one.was_late]
        look_s = max(min(begun_s) + LOOK_AFTER_S, now_s + LOOK_S) if begun_s else math.inf
        return min([look_s, *(one.deadline_s for one in self._readings)])

    def newly_late(self, now_s: float) -> list[Reading]:
        """The attempts whose bytes another thread is to ask for, too; `next_late` gives them to
        it."""
        found = []
        for reading in self._readings:
            if reading.is_late(self._pace, now_s) and self._pace.spend():
                reading.was_late = True
                reading.task.earlier = reading
                found.append(reading)
        self._late.extend(found)
        return found

    def next_late(self, *, is_demanded: bool) -> Task | None:
        """The task of a late attempt that no other thread is at yet; `is_demanded`: of a demand
        only."""
        self._late = deque(one for one in self._late if one in self._readings)
        for reading in self._late:
            if not is_demanded or reading.task.priority is Priority.DEMAND:
                self._late.remove(reading)
                return reading.task
        return None

    def beside(self, reading: Reading) -> list[Reading]:
        """Other attempts at the same task."""
        return [one for one in self._readings if one.task is reading.task and one is not reading]

    def won(self, reading: Reading, now_s: float) -> None:
        """It has brought all bytes: others at the same task are void, and let go of."""
        brought = reading.fetch.length - reading.start_bytes
        beside = self.beside(reading)
        is_second = bool(beside) and not reading.was_late
        self._pace.note(brought, now_s - reading.started_s, is_second=is_second)
        for other in beside:
            self._readings.discard(other)
            other.attempt.give_up()
            # Until its read has ended, another thread works in its stead.
            other.worker.pool.abandon(other.worker)
