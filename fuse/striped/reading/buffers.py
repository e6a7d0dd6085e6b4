"""The memory that file contents are read into, reused instead of asked for again.

Owns the slabs: anonymous mappings that are not zeroed when they are used again (zeroing and
faulting in new memory costs more than the read from a fast storage). A slab is in use, and counts
in the budget, until the last view of it is gone, wherever that is: also on its way to the kernel.
Only a caller that keeps the views it got, while others wait for memory, has them beyond the budget.
Spare slabs are given back to the system as soon as they and what is in use exceed the budget.
Thread-safe.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable

from bootseer.fuse.striped.memory import MemoryBudget

_PAGE_BYTES = 4096
# Measured for the first use of memory, in CPU s/GiB beyond the read: private 0.3, shared (Python's
# default) 0.5, private huge pages 0.7 to 1.0.
_SLAB_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class BufferPool:
    """Buffers of one mount."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        # One lock for both: a view may die anywhere, also while either is locked.
        self._lock = budget.lock
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._spare_bytes = 0
        self._used: dict[int, weakref.ref[object]] = {}
        self._given_up: dict[int, int] = {}
        """The sizes of slabs of which only others have views."""
        self._let_out: set[int] = set()
        """Buffers that no longer count in the budget."""
        budget.set_trimmer(self._trim)
        budget.set_last_resort(self._let_others_have)

    @property
    def limit_bytes(self) -> int:
        """How much may be in use."""
        return self._budget.limit_bytes

    @property
    def spare_bytes(self) -> int:
        """Kept for the next to come."""
        return self._spare_bytes

    def take(self, length: int, timeout_s: float, cancelled: Callable[[], bool]) -> memoryview:
        """A buffer of `length` bytes with any content. Raises as `MemoryBudget.take`."""
        size = _slab_bytes(length)
        self._budget.take(size, timeout_s, cancelled, reuses=True)
        return self._view(size, length)

    def try_take(self, length: int) -> memoryview | None:
        """Takes a buffer like `take`; None where no memory is free or given up at once."""
        size = _slab_bytes(length)
        return self._view(size, length) if self._budget.try_take(size, reuses=True) else None

    def _view(self, size: int, length: int) -> memoryview:
        with self._lock:
            spare = self._spare.get(size)
            slab = spare.pop() if spare else None
            if slab is not None:
                self._spare_bytes -= size
        if slab is None:
            self._budget.trim()
            slab = mmap.mmap(-1, size, flags=_SLAB_FLAGS)
        # An object of its own for each use: its death is the end of all views.
        array = (ctypes.c_char * size).from_buffer(slab)
        number = id(array)
        self._used[number] = weakref.ref(array, lambda _: self._ended(number, size, slab))
        return memoryview(array).cast("B")[:length]

    def _ended(self, number: int, size: int, slab: mmap.mmap) -> None:
        with self._lock:
            del self._used[number]
            self._given_up.pop(number, None)
            is_charged = number not in self._let_out
            self._let_out.discard(number)
            self._spare.setdefault(size, []).append(slab)
            self._spare_bytes += size
        if is_charged:
            self._budget.give(size)
        else:
            self._budget.trim()

    def give_up(self, buffer: memoryview) -> None:
        """The owner of `buffer` lets go of it; others may have views of it still."""
        with self._lock:
            number = id(buffer.obj)
            if number in self._used:
                self._given_up[number] = _slab_bytes(len(buffer))

    def _let_others_have(self) -> None:
        with self._lock:
            count = sum(self._given_up.values())
            self._let_out.update(self._given_up)
            self._given_up.clear()
        if count:
            self._budget.give(count)

    def _trim(self, keep_bytes: int) -> None:
        if self._spare_bytes <= keep_bytes:
            return
        # A copy: whatever allocates may collect garbage, and so end the use of a slab.
        for size, slabs in list(self._spare.items()):
            while slabs and self._spare_bytes > keep_bytes:
                slabs.pop()
                self._spare_bytes -= size


def _slab_bytes(length: int) -> int:
    """Few sizes, so that slabs are of use to others: pages, doubled until it fits."""
    size = _PAGE_BYTES
    while size < length:
        size *= 2
    return size
