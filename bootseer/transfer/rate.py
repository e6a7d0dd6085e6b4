"""A token bucket: how much of the network the background may take.

Holds numbers only; the caller brings the time (monotonic seconds) and the lock.
"""


class TokenBucket:
    """Lets `bytes_per_s` through on average. Not thread-safe."""

    def __init__(self, bytes_per_s: float, *, now_s: float, burst_s: float = 0.25) -> None:
        """`burst_s`: how many seconds' worth may go at once after a pause."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = bytes_per_s * burst_s
        self._level_bytes = self._burst_bytes
        self._updated_s = now_s

    def ready_at_s(self, now_s: float) -> float:
        """When the next take is allowed; `now_s` or earlier: now."""
        self._refill(now_s)
        if self._level_bytes >= 0:
            return now_s
        return now_s - self._level_bytes / self._bytes_per_s

    def take(self, count_bytes: int, now_s: float) -> None:
        """Account for `count_bytes`. The level may go below zero: one read is never split, the
        ones after it wait longer."""
        self._refill(now_s)
        self._level_bytes -= count_bytes

    def _refill(self, now_s: float) -> None:
        gained_bytes = max(0.0, now_s - self._updated_s) * self._bytes_per_s
        self._level_bytes = min(self._burst_bytes, self._level_bytes + gained_bytes)
        self._updated_s = max(self._updated_s, now_s)
