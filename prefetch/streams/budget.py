"""The one deadline of a read: what is left of it for each place that is asked, and who has had it.

A store that refuses at once, as one that restarts or a share that is not mounted, is asked again
until the deadline. Of a read that fails the kernel asks a second time: first it had read ahead,
then it wants the page. So a range whose time is used up fails at once for a moment. Thread-safe.
"""

import threading
import time
from collections.abc import Sequence

from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.transfer.chunks import ChunkFetcher, Deliver
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts
from bootseer.transfer.ranges import Fetch

_AGAIN_S = 1.0
"""The kernel's second request comes within milliseconds; a program that tries again comes later."""
_RANGES_MAX = 64
"""No more than the server threads can have under way at once, several times over."""


class Budget:
    """What is left of one read's deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._until_s = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds; 0 when it is used up."""
        return max(0.0, self._until_s - time.monotonic())

    def part_s(self, share: float) -> float:
        """A share of what is left."""
        return share * self.left_s


class Patience:
    """Waits for a store that cannot be reached, until the deadline or until it is closed."""

    def __init__(self, *, has_other: bool) -> None:
        """`has_other`: there is a second source, which need not wait for the first one's end."""
        self._has_other = has_other
        self._closing = threading.Event()

    def close(self) -> None:
        """End the budget: no reader waits any more. Idempotent."""
        self._closing.set()

    def demand(
        self, fetcher: ChunkFetcher, fetches: Sequence[Fetch], deliver: Deliver, budget: Budget
    ) -> None:
        """`ChunkFetcher.demand_all`, again and again until it does not end in UnavailableError.

        Raises: as it does; DeadlineError when the time is used up; UnavailableError where there is
        a second source, and when this is closed.
        """
        attempts = Attempts(UNTIL_DEADLINE, budget.left_s)
        while True:
            try:
                return fetcher.demand_all(fetches, deliver, deadline_s=budget.left_s)
            except UnavailableError as error:
                pause_s = attempts.pause_s(error)
                if self._has_other or self._closing.wait(pause_s or 0.0):
                    raise
                if pause_s is None:
                    raise DeadlineError(f"{error}; it was asked until the deadline") from error


class _Late(Struct, frozen=True):
    blob: int
    start: int
    end: int
    until_s: float
    error: BootseerError


class LateRanges:
    """What could not be had within its deadline a moment ago."""

    def __init__(self) -> None:
        self._ranges: list[_Late] = []
        self._lock = threading.Lock()

    def note(self, blob: int, offset: int, length: int, error: BootseerError) -> None:
        """A read of this range has waited for all of its deadline, in vain."""
        now_s = time.monotonic()
        late = _Late(blob, offset, offset + length, now_s + _AGAIN_S, error)
        with self._lock:
            self._ranges = [one for one in self._ranges if one.until_s > now_s][-_RANGES_MAX:]
            self._ranges.append(late)

    def check(self, blob: int, offset: int, length: int) -> None:
        """Raises: DeadlineError for what a read has waited for until a moment ago."""
        if not self._ranges:
            return
        now_s = time.monotonic()
        for one in tuple(self._ranges):
            overlaps = one.start < offset + length and offset < one.end
            if one.blob == blob and overlaps and one.until_s > now_s:
                raise DeadlineError(str(one.error))
