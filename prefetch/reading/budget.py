"""The one deadline of a read: the rest for each place that is asked, and ranges that used it up.

Of a read that fails the kernel asks a second time: first it had read ahead, then it wants the page.
So a range whose time is used up fails at once for a moment.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError

_AGAIN_S = 1.0
"""The kernel's second request comes within milliseconds; a program that tries again comes later."""
_RANGES_MAX = 64
"""No more than the server threads can have under way at once, several times over."""


class Budget:
    """Rest of one read's deadline: how long it may still wait without any bytes. For one thread."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.left_s = deadline_s
        """Seconds; 0 when it is used up."""

    @contextlib.contextmanager
    def spending(self, limit_s: float) -> Iterator[float]:
        """Charge the time that the body takes, at most `limit_s`, which it gets.

        A body that waits no longer than `limit_s` without bytes takes more only while bytes come.
        """
        start_s = time.monotonic()
        try:
            yield limit_s
        finally:
            self.left_s -= min(time.monotonic() - start_s, limit_s)

    def restart(self) -> None:
        """Begin anew, because bytes have come."""
        self.left_s = self._deadline_s


class _Late(Struct, frozen=True):
    blob: int
    start: int
    end: int
    until_s: float
    error: BootseerError


class LateRanges:
    """Ranges that could not be had within their deadline a moment ago. Thread-safe."""

    def __init__(self) -> None:
        self._ranges: list[_Late] = []
        self._lock = threading.Lock()

    def note(self, blob: int, offset: int, length: int, error: BootseerError) -> None:
        """Note that a read of this range has waited for all of its deadline, in vain."""
        now_s = time.monotonic()
        late = _Late(blob, offset, offset + length, now_s + _AGAIN_S, error)
        with self._lock:
            self._ranges = [one for one in self._ranges if one.until_s > now_s][-_RANGES_MAX:]
            self._ranges.append(late)

    def check(self, blob: int, offset: int, length: int) -> None:
        """Raise DeadlineError for a range that a read has waited for until a moment ago."""
        if not self._ranges:
            return
        now_s = time.monotonic()
        for one in tuple(self._ranges):
            overlaps = one.start < offset + length and offset < one.end
            if one.blob == blob and overlaps and one.until_s > now_s:
                raise DeadlineError(str(one.error))
