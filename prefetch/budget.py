"""The one deadline of a read: what is left of it for each place that is asked, and who has had it.

Of a read that fails the kernel asks a second time: first it had read ahead, then it wants the page.
So a range whose time is used up fails at once for a moment. Thread-safe.
"""

import threading
import time

from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError

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
