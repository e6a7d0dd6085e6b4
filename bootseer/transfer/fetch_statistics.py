"""Counts of a `ChunkFetcher`: `Recorder`, and `FetchStatistics`, a frozen copy of it."""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from bootseer.transfer.engine import EngineFigures, ReadJob, Try

# Percentiles are over the latest demands; enough for a stable p99, bounded for a mount that lives
# for weeks.
_KEPT_WAITS_COUNT = 8192


class FetchStatistics(Struct, frozen=True):
    """Counts since the fetcher was made."""

    fetch_count: int
    """Reads that brought all their bytes."""
    fetched_bytes: int
    """Bytes of the reads, tolerated gaps and refetches included."""
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
    """Median wait of the latest 8192 demands; 0 before the first. The next two: likewise."""
    demand_wait_p99_ns: int
    demand_wait_max_ns: int


def percentile(ordered: Sequence[int], fraction: float) -> int:
    """Return the nearest-rank percentile of sorted values; 0 for no values."""
    if not ordered:
        return 0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Recorder(EngineFigures):
    """Counters of one fetcher. Not thread-safe: its engine's lock guards it."""

    def __init__(self) -> None:
        self.fetch_count = 0
        self.fetched_bytes = 0
        self.delivered_count = 0
        self.delivered_bytes = 0
        self.retry_count = 0
        self.corrupt_count = 0
        self.failed_count = 0
        self.hung_count = 0
        self.demand_count = 0
        self.joined_count = 0
        self._waits_ns: deque[int] = deque(maxlen=_KEPT_WAITS_COUNT)

    def won(self, one: Try, seconds: float) -> None:
        self.fetch_count += 1
        self.fetched_bytes += one.job.length

    def retried(self, job: ReadJob, error: BaseException) -> None:
        self.retry_count += 1

    def damaged(self, job: ReadJob) -> None:
        self.corrupt_count += 1

    def late(self, one: Try) -> None:
        self.retry_count += 1

    def hung(self, one: Try) -> None:
        self.hung_count += 1

    def demand_done(self, wait_ns: int) -> None:
        """Count a demand that returned or failed after `wait_ns`. Any thread, without the lock."""
        self._waits_ns.append(wait_ns)

    def snapshot(self) -> FetchStatistics:
        """Return a frozen copy."""
        ordered = sorted(self._waits_ns)
        return FetchStatistics(
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
