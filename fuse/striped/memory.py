"""Memory for file contents: one budget for a whole mount, shared by all its readers and writers.

Memory is held in two ways. A *charge* is a count of bytes that the holder has allocated elsewhere,
such as the units of a writer. A *buffer* is memory of this module: a slab, which is an anonymous
mapping that is used again without being zeroed (zeroing and faulting in new memory costs more than
the read from a fast storage). A slab counts until the last view of it is gone, for example of a
reply on its way to the kernel.

Bytes that can be read again from elsewhere are *offered* (`Droppable`): they stay in memory until
other threads need the memory, and are then dropped in the order of their tiers.

Takers are served in the order in which they came, so that a large taker gets its memory too. If
no memory was returned for half a second, takers behind the first one may hold the memory that the
first one waits for. Then any taker whose request fits is served, and buffers that their owners gave
up (but of which views exist) no longer count.

Memory beyond the budget is bounded and small: the unit that each open writer is filling, replies on
their way to the kernel, and views that a caller keeps while others wait.

Thread safety: any thread may call any method. The lock is innermost: a caller may hold other locks,
except where `Droppable.drop` may be called, in `take`, `charge`, their `try_` forms, and `offer` of
the tier KEPT.
"""

import ctypes
import enum
import mmap
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from bootseer.errors import DeadlineError

# Memory of a mount's process beside file contents: the interpreter and its libraries (40 MiB), the
# server threads' request buffers (16), packets that hdfs-native holds for streams.
_PROCESS_BYTES = 96 * 2**20
# Least memory for contents, whatever the budget: 16 units of 4 MiB are needed.
_CONTENT_MIN_BYTES = 64 * 2**20
# Time without returned memory after which takers are no longer served in order.
_QUIET_S = 0.5
_POLL_S = 0.2
_PAGE_BYTES = 4096
# Measured for the first use of memory, in CPU s/GiB beyond the read: private 0.3, shared (Python's
# default) 0.5, private huge pages 0.7 to 1.0.
_SLAB_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def content_bytes(limit_bytes: int) -> int:
    """Return the memory for file contents in a process that is to stay within `limit_bytes`."""
    rest = limit_bytes - min(_PROCESS_BYTES, limit_bytes // 4)
    return max(rest, min(limit_bytes, _CONTENT_MIN_BYTES))


class Tier(enum.IntEnum):
    """Order in which offered bytes are dropped."""

    PASSED = 0
    """Units behind the position of a sequential reader."""
    CACHED = 1
    """Other bytes that were read, or read ahead."""
    KEPT = 2
    """Units of writers that the storage may still lose. They hold at most half of the memory: the
    rest is for units on their way, and for readers."""


class Droppable:
    """Bytes in memory that can be read again. `Memory` owns the fields; its lock guards them."""

    length: int
    """Number of bytes."""
    users = 0
    """Number of threads that use the bytes now; bytes in use are not dropped."""
    tier: Tier | None = None
    """Tier in which the bytes are offered; None if they are not."""
    is_dropped = False

    def drop(self) -> None:
        """Return the memory. Called once, by a thread that needs memory and holds no lock."""
        raise NotImplementedError


class Memory:
    """Memory budget of one mount, with the buffers and the droppable bytes in it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """Number of bytes held now."""
        self.peak_bytes = 0
        """Largest number of bytes that were ever held."""
        self.spare_bytes = 0
        """Number of bytes in unused slabs. Together with the used bytes they fit the budget."""
        # Reentrant: the last view of a slab may die in a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._takers: deque[object] = deque()
        """Takers that wait, in the order in which they are served."""
        self._give_count = 0
        self._given_s = 0.0
        self._offered: dict[Tier, OrderedDict[Droppable, None]] = {
            tier: OrderedDict() for tier in Tier
        }
        self._kept_bytes = 0
        self._spare: dict[int, list[mmap.mmap]] = {}
        self._in_use: dict[int, weakref.ref[object]] = {}
        """Buffers by the number of their owner object."""
        self._given_up: dict[int, int] = {}
        """Sizes of buffers that their owners gave up; views of them may still exist."""
        self._uncounted: set[int] = set()
        """Buffers that do not count in the budget any more."""

    # ---- charges ------------------------------------------------------------------------------

    def charge(self, count: int, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Count `count` bytes as held. Block until it is the caller's turn and they are free.

        Raise DeadlineError if no memory was returned for `timeout_s`, and InterruptedError if
        `cancelled`, which is called now and then, returns True.
        """
        self._acquire(count, timeout_s, cancelled, is_slab=False)

    def try_charge(self, count: int) -> bool:
        """Count `count` bytes as held if they are free or can be freed by dropping others.

        Return False also while other takers wait.
        """
        return self._try_acquire(count, is_slab=False)

    def give(self, count: int) -> None:
        """Return `count` bytes that were charged."""
        with self._changed:
            self.used_bytes -= count
            self._give_count += 1
            self._given_s = time.monotonic()
            self._changed.notify_all()

    # ---- buffers ------------------------------------------------------------------------------

    def take(self, length: int, timeout_s: float, cancelled: Callable[[], bool]) -> memoryview:
        """Return a buffer of `length` bytes with any content. Block and raise as `charge`."""
        size = _slab_bytes(length)
        self._acquire(size, timeout_s, cancelled, is_slab=True)
        return self._buffer(size, length)

    def try_take(self, length: int) -> memoryview | None:
        """Return a buffer as `take`, or None as `try_charge`."""
        size = _slab_bytes(length)
        return self._buffer(size, length) if self._try_acquire(size, is_slab=True) else None

    def give_up(self, buffer: memoryview) -> None:
        """Note that the owner of `buffer` no longer uses it. Others may still have views of it."""
        with self._changed:
            number = id(buffer.obj)
            if number in self._in_use:
                self._given_up[number] = _slab_bytes(len(buffer))

    def _buffer(self, size: int, length: int) -> memoryview:
        with self._changed:
            spare = self._spare.get(size)
            slab = spare.pop() if spare else None
            if slab is not None:
                self.spare_bytes -= size
            else:
                self._trim(0)
        if slab is None:
            slab = mmap.mmap(-1, size, flags=_SLAB_FLAGS)
        # Each use has an owner object of its own, which dies with the last view.
        owner = (ctypes.c_char * size).from_buffer(slab)
        number = id(owner)
        self._in_use[number] = weakref.ref(owner, lambda _: self._ended(number, size, slab))
        return memoryview(owner).cast("B")[:length]

    def _ended(self, number: int, size: int, slab: mmap.mmap) -> None:
        with self._changed:
            del self._in_use[number]
            self._given_up.pop(number, None)
            self._spare.setdefault(size, []).append(slab)
            self.spare_bytes += size
            if number not in self._uncounted:
                self.give(size)
            self._uncounted.discard(number)
            self._trim(0)

    def _uncount_given_up(self) -> None:
        """Stop counting the buffers that their owners gave up; the lock is held."""
        count = sum(self._given_up.values())
        self._uncounted.update(self._given_up)
        self._given_up.clear()
        if count:
            self.give(count)

    def _trim(self, expected_bytes: int) -> None:
        """Return spare slabs that do not fit the budget to the system; the lock is held.

        `expected_bytes`: part of the used bytes that will be taken from the spare slabs.
        """
        keep_bytes = max(0, self.limit_bytes - self.used_bytes) + expected_bytes
        if self.spare_bytes <= keep_bytes:
            return
        # A copy: allocating memory may start a garbage collection, which may free a slab.
        for size, slabs in list(self._spare.items()):
            while slabs and self.spare_bytes > keep_bytes:
                slabs.pop()
                self.spare_bytes -= size

    # ---- bytes that can be dropped ------------------------------------------------------------

    def offer(self, entry: Droppable, tier: Tier) -> None:
        """Allow `entry` to be dropped, after all others of its tier. Entries may change tiers."""
        with self._changed:
            if entry.is_dropped:
                return
            self._remove(entry)
            self._offered[tier][entry] = None
            entry.tier = tier
            if tier is Tier.KEPT:
                self._kept_bytes += entry.length
            excess_bytes = self._kept_bytes - self.limit_bytes // 2
        if tier is Tier.KEPT and excess_bytes > 0:
            self._drop(excess_bytes, (Tier.KEPT,))

    def withdraw(self, entry: Droppable) -> None:
        """Forbid to drop `entry`, unless it was dropped (`Droppable.is_dropped`)."""
        with self._changed:
            self._remove(entry)

    def use(self, entry: Droppable) -> bool:
        """Keep `entry` from being dropped until `end_use`; return False if it was dropped."""
        with self._changed:
            if entry.is_dropped:
                return False
            entry.users += 1
            return True

    def end_use(self, entry: Droppable) -> None:
        """End a `use`."""
        with self._changed:
            entry.users -= 1

    def _remove(self, entry: Droppable) -> None:
        if entry.tier is not None:
            del self._offered[entry.tier][entry]
            if entry.tier is Tier.KEPT:
                self._kept_bytes -= entry.length
            entry.tier = None

    def _drop(self, count: int, tiers: tuple[Tier, ...] = tuple(Tier)) -> None:
        """Drop entries with `count` bytes in all, or all entries; no lock is held."""
        while count > 0:
            with self._changed:
                entry = self._next_unused(tiers)
                if entry is None:
                    return
                self._remove(entry)
                entry.is_dropped = True
            entry.drop()
            count -= entry.length

    def _next_unused(self, tiers: tuple[Tier, ...]) -> Droppable | None:
        for tier in tiers:
            for entry in self._offered[tier]:
                if not entry.users:
                    return entry
        return None

    # ---- taking -------------------------------------------------------------------------------

    def _try_acquire(self, count: int, *, is_slab: bool) -> bool:
        # Dropping is tried twice, because others may still have views of dropped bytes.
        for may_drop in (True, True, False):
            with self._changed:
                if self._takers:
                    return False
                if self._fits(count):
                    self._count(count, is_slab=is_slab)
                    return True
                missing_bytes = self.used_bytes + count - self.limit_bytes
            if may_drop:
                self._drop(missing_bytes)
        return False

    def _acquire(
        self, count: int, timeout_s: float, cancelled: Callable[[], bool], *, is_slab: bool
    ) -> None:
        if self._try_acquire(count, is_slab=is_slab):
            return
        turn = object()
        start_s = time.monotonic()
        with self._changed:
            self._takers.append(turn)
        try:
            while not self._acquire_in_turn(turn, count, start_s, is_slab=is_slab):
                if cancelled():
                    raise InterruptedError
                if time.monotonic() - max(start_s, self._given_s) >= timeout_s:
                    raise DeadlineError(
                        f"no memory became free within {timeout_s:.0f} s: the storage takes or "
                        "gives nothing, or the mount's memory budget is too small"
                    )
        finally:
            with self._changed:
                self._takers.remove(turn)
                self._changed.notify_all()

    def _acquire_in_turn(self, turn: object, count: int, start_s: float, *, is_slab: bool) -> bool:
        """Take the bytes if they are free now; else wait a moment, and return False."""
        with self._changed:
            is_quiet = time.monotonic() - max(start_s, self._given_s) >= _QUIET_S
            if is_quiet:
                self._uncount_given_up()
            elif self._takers[0] is not turn:
                self._changed.wait(_POLL_S)
                return False
            if self._fits(count):
                self._count(count, is_slab=is_slab)
                return True
            seen_count = self._give_count
            missing_bytes = self.used_bytes + count - self.limit_bytes
        self._drop(missing_bytes)
        with self._changed:
            if self._give_count == seen_count:
                self._changed.wait(_POLL_S)
        return False

    def _fits(self, count: int) -> bool:
        # A taker larger than the whole budget is served when nothing else is held.
        return self.used_bytes + count <= self.limit_bytes or self.used_bytes == 0

    def _count(self, count: int, *, is_slab: bool) -> None:
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._trim(count if is_slab else 0)


def _slab_bytes(length: int) -> int:
    """Return the size of the slab for `length` bytes: a page, doubled until it is large enough.

    There are few sizes, so that slabs can be used again.
    """
    size = _PAGE_BYTES
    while size < length:
        size *= 2
    return size
