"""When to ask again, and how long to wait before. Pure but for the random part of a wait.

Alone owns the numbers: how often, how patiently, and below which rate a stream counts as dead.
"""

import email.utils
import random
from datetime import UTC, datetime

from bootseer.errors import UnavailableError

ATTEMPTS_MAX = 5
"""Rounds over all servers. With the waits between (0.2 + 0.4 + 0.8 + 1.6 s) some 3 s, which rides
out a restart behind a load balancer, and gives way soon to a start without the registry."""
BASE_S = 0.2
_CAP_S = 10.0

STALL_S = 15.0
"""A stream that sends less than the floor in this time is given up, and resumed."""
FLOOR_BYTES_PER_S = 8 * 1024
"""A twentieth of what the slowest line anybody starts jobs over gives."""

_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))


class TransientError(UnavailableError):
    """A server cannot answer now; `retry_after_s` is when it said to come back."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _TRANSIENT


def retry_after_s(header: str | None, now: datetime) -> float:
    """Seconds that `Retry-After` asks for (RFC 9110, 10.2.3): a number or a date; 0 where it says
    nothing that can be understood."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())


def backoff_s(failures_count: int) -> float:
    """How long to wait after so many failures in a row. Half of it is random, so that the nodes of
    a job, which all failed at once, do not all come back at once."""
    wait_s = min(_CAP_S, BASE_S * 2.0 ** min(failures_count - 1, 30))
    return wait_s * (0.5 + random.random() / 2)


class Floor:
    """Watches whether a stream keeps above the floor. Counts only time spent in waiting for it,
    not what its reader takes. For one thread."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._waited_s = 0.0
        self._count_bytes = 0

    def is_dead(self, count_bytes: int, waited_s: float) -> bool:
        """Note one read; True when a window ended below the floor."""
        self._waited_s += waited_s
        self._count_bytes += count_bytes
        if self._waited_s < self._window_s:
            return False
        dead = self._count_bytes < FLOOR_BYTES_PER_S * self._waited_s
        self._waited_s = 0.0
        self._count_bytes = 0
        return dead
