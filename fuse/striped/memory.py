"""One memory budget for a whole mount, shared by all its readers and writers.

Owns the count of bytes in use. Thread-safe. What is held beyond it is bounded and small: the unit
that each open writer is filling, and replies on their way to the kernel.
"""

import threading
import time
from collections.abc import Callable

from bootseer.errors import DeadlineError

# What a mount's process takes beside file contents: the interpreter and its libraries (40 MiB), the
# server threads' request buffers (16), packets that hdfs-native holds for streams that are read.
_PROCESS_BYTES = 96 * 2**20
# Small budgets are for contents all the same: 16 units of 4 MiB are the least that works.
_CONTENT_MIN_BYTES = 64 * 2**20
# When nothing became free for so long, takers stop waiting for what may never come back.
_QUIET_S = 0.5


def content_bytes(limit_bytes: int) -> int:
    """What is left for file contents where a whole process should stay within `limit_bytes`."""
    rest = limit_bytes - min(_PROCESS_BYTES, limit_bytes // 4)
    return max(rest, min(limit_bytes, _CONTENT_MIN_BYTES))


class MemoryBudget:
    """Bytes that may be held; takers wait, or first make others give up what they can spare."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self.lock = threading.RLock()
        """Guards the counts, and what else must not be locked separately (`buffers`)."""
        self._changed = threading.Condition(self.lock)
        self._reclaimers: list[Callable[[int], None]] = []
        self._trim: Callable[[int], None] = lambda count: None
        self._let_out: Callable[[], None] = lambda: None

    def add_reclaimer(self, reclaim: Callable[[int], None]) -> None:
        """`reclaim(count)` is called, without any lock held here, to free about `count` bytes; it
        calls `give` for what it frees. The one that was added first is asked first."""
        self._reclaimers.append(reclaim)

    def set_trimmer(self, trim: Callable[[int], None]) -> None:
        """`trim(count)` is called, with the lock held, when no more than `count` bytes may be kept
        for later use beside those that are in use."""
        self._trim = trim

    def set_last_resort(self, let_out: Callable[[], None]) -> None:
        """`let_out` is called, without any lock held here, when takers have waited in vain: it
        calls `give` for what only others still hold, who may never let go."""
        self._let_out = let_out

    @property
    def used_bytes(self) -> int:
        """What is held now."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held."""
        return self._peak_bytes

    def try_take(self, count: int, *, reuses: bool = False) -> bool:
        """Take `count` bytes if they are free, or can be freed at once. `reuses`: they come out of
        what is kept for later use, if it has them."""
        for reclaim in (*self._reclaimers, None):
            with self._changed:
                if self._fits(count):
                    self._take(count, reuses)
                    return True
                missing = self._used_bytes + count - self.limit_bytes
            if reclaim is not None:
                reclaim(missing)
        return False

    def take(
        self,
        count: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
        *,
        reuses: bool = False,
    ) -> None:
        """Take `count` bytes; wait while nothing is free.

        Raises DeadlineError when no holder gave anything back for `timeout_s`. Returns without
        having taken anything only by raising. `cancelled` is asked now and then; when it says True
        the wait ends with InterruptedError.
        """
        quiet_s = time.monotonic()
        deadline = quiet_s + timeout_s
        while not self.try_take(count, reuses=reuses):
            with self._changed:
                before = self._used_bytes
                self._changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
                if self._used_bytes < before:
                    quiet_s = time.monotonic()
                    deadline = quiet_s + timeout_s
            if time.monotonic() >= quiet_s + _QUIET_S:
                quiet_s = time.monotonic()
                self._let_out()
            if cancelled():
                raise InterruptedError
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no memory became free within {timeout_s:.0f} s: the storage takes or gives "
                    "nothing, or the mount's memory budget is too small"
                )

    def give(self, count: int) -> None:
        """Return `count` bytes."""
        with self._changed:
            self._used_bytes -= count
            self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        # A single taker larger than the whole budget is let through alone, rather than never.
        return self._used_bytes + count <= self.limit_bytes or self._used_bytes == 0

    def _take(self, count: int, reuses: bool) -> None:
        self._used_bytes += count
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        self.trim(count if reuses else 0)

    def trim(self, expected_bytes: int = 0) -> None:
        """Let go of what is kept for later use beyond the budget, and of `expected_bytes` less."""
        with self.lock:
            self._trim(max(0, self.limit_bytes - self._used_bytes) + expected_bytes)
