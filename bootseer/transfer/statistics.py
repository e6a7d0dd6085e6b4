"""What an executor has done so far, in numbers.

`Recorder` is written under the executor's lock; `Statistics` is the frozen copy that others see.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

# Percentiles are over the latest demands; enough for a stable p99, bounded for a mount that lives
# for weeks.
_KEPT_WAITS_COUNT = 8192


class Statistics(Struct, frozen=True):
    """A snapshot. Counts are since the executor was made."""

    fetch_count: int
    """Reads that returned, good or bad bytes."""
    fetched_bytes: int
    """What those reads returned, tolerated gaps and refetches included."""
    delivered_count: int
    """Chunks that were verified and handed over."""
    delivered_bytes: int
    retry_count: int
    """Attempts that failed and were tried again."""
    corrupt_count: int
    """Chunks that did not match their digest, each time."""
    failed_count: int
    """Chunks given up."""
    hung_count: int
    """Reads abandoned because they outlived their deadline."""
    demand_count: int
    joined_count: int
    """Demanded chunks that were on their way already."""
    demand_wait_p50_ns: int
    """Over the latest 8192 demands, as are the next two; 0 before the first."""
    demand_wait_p99_ns: int
    demand_wait_max_ns: int


def percentile(ordered: Sequence[int], fraction: float) -> int:
    """The nearest-rank percentile of sorted values; 0 for none."""
    if not ordered:
        return 0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Recorder(Struct):
    """Counters of one executor. Not thread-safe: its owner's lock guards it."""

    fetch_count: int = 0
    fetched_bytes: int = 0
    delivered_count: int = 0
    delivered_bytes: int = 0
    retry_count: int = 0
    corrupt_count: int = 0
    failed_count: int = 0
    hung_count: int = 0
    demand_count: int = 0
    joined_count: int = 0
    _waits_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_WAITS_COUNT))

    def demand_done(self, wait_ns: int) -> None:
        """One demand returned or failed after `wait_ns`."""
        self._waits_ns.append(wait_ns)

    def snapshot(self) -> Statistics:
        """A frozen copy."""
        ordered = sorted(self._waits_ns)
        return Statistics(
            fetch_count=self.fetch_count,
            fetched_bytes=self.fetched_bytes,
            delivered_count=self.delivered_count,
            delivered_bytes=self.delivered_bytes,
            retry_count=self.retry_count,
            corrupt_count=self.corrupt_count,
            failed_count=self.failed_count,
            hung_count=self.hung_count,
            demand_count=self.demand_count,
            joined_count=self.joined_count,
            demand_wait_p50_ns=percentile(ordered, 0.50),
            demand_wait_p99_ns=percentile(ordered, 0.99),
            demand_wait_max_ns=ordered[-1] if ordered else 0,
        )
