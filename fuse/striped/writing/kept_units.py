"""Stripe units on their way to the storage, and those that it has but may still lose.

Owns which units are *kept*: handed to the storage, not yet durable, and held for another try only
as long as their memory is not needed. Thread-safe.
"""

import threading
from collections import OrderedDict

from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.store.backend import Piece


class Unit:
    """One stripe unit of a part; its memory is charged to the budget while it has pieces."""

    __slots__ = ("first_block", "length", "pieces")

    def __init__(self, pieces: list[Piece], length: int, first_block: int) -> None:
        self.pieces: list[Piece] | None = pieces
        """The bytes in pieces; None once the memory was given back."""
        self.length = length
        self.first_block = first_block


class KeptUnits:
    """Kept units of all files of a mount; the oldest are given up first."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        # The other half is for what is on its way, and for readers.
        self._limit_bytes = budget.limit_bytes // 2
        self._units: OrderedDict[Unit, None] = OrderedDict()
        self._bytes = 0
        self._held_bytes = 0
        self._set_aside_bytes = 0
        self._lock = threading.Lock()
        budget.add_reclaimer(self.reclaim)

    def hold(self, count: int) -> bool:
        """Whether `count` bytes may be held that nobody can make us give up; else all of the
        budget could be held by parts that wait for more. `let_go` must follow."""
        with self._lock:
            rest_bytes = self._limit_bytes * 7 // 4 - self._set_aside_bytes
            if self._held_bytes + count > min(self._limit_bytes, rest_bytes):
                return False
            self._held_bytes += count
            return True

    def set_aside(self, count: int) -> None:
        """So many bytes more are held by others, whom nobody can make give them up either."""
        with self._lock:
            self._set_aside_bytes += count

    def let_go(self, count: int) -> None:
        """`count` bytes are not held any more."""
        with self._lock:
            self._held_bytes -= count

    def keep(self, unit: Unit) -> None:
        """Allows the memory of `unit` to be given back from now on."""
        with self._lock:
            self._units[unit] = None
            self._bytes += unit.length
            excess = self._bytes - self._limit_bytes
        if excess > 0:
            self.reclaim(excess)

    def take(self, unit: Unit) -> bool:
        """Whether `unit` was kept; it is the caller's again, and charged as before."""
        with self._lock:
            if unit not in self._units:
                return False
            del self._units[unit]
            self._bytes -= unit.length
            return True

    def release(self, unit: Unit) -> None:
        """`unit` will not be needed again: give its memory back, if it still has any."""
        self.take(unit)
        if unit.pieces is not None:
            unit.pieces = None
            self._budget.give(unit.length)

    def reclaim(self, count: int) -> None:
        """Give up about `count` bytes."""
        freed = 0
        with self._lock:
            while freed < count and self._units:
                unit, _ = self._units.popitem(last=False)
                self._bytes -= unit.length
                unit.pieces = None
                freed += unit.length
        if freed:
            self._budget.give(freed)
