"""Figures of faults: their waits, and the source of the bytes.

`FaultRecorder` counts, from any thread; `FaultFigures` and `SourceFigures` are frozen copies.
"""

import threading
from bisect import bisect_left
from collections import deque

from msgspec import Struct

from bootseer.transfer.figures import percentile

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds: from a wait for a frame that is nearly here to a store that hardly answers."""

_KEPT_WAITS_COUNT = 8192
"""Percentiles are over the latest faults; bounded for a mount that lives for weeks."""


class FaultFigures(Struct, frozen=True):
    """Counts since the worker started."""

    fault_count: int
    """Reads that found something missing."""
    failed_count: int
    """How many faults were answered with an error."""
    bundle_wait_count: int
    """How many faults were answered by waiting for the bundle."""
    fault_wait_ns: int
    """All faults' waits together."""
    wait_p50_ns: int
    """Over the latest 8192 faults, as the next; 0 before the first."""
    wait_p99_ns: int
    wait_max_ns: int
    """Over all."""
    wait_counts: tuple[int, ...]
    """Faults by wait: one number for each bound in `BUCKETS_S`, and one for those beyond; none is
    counted twice."""
    fault_frame_count: int
    """Frames of blobs that faults fetched."""
    readahead_frame_count: int


class SourceFigures(Struct, frozen=True):
    """Uncompressed bytes by what brought them, since the worker started."""

    cache_bytes: int
    """Asked for, and here already: the only ones that are counted again when they are read again,
    past the kernel's own cache."""
    bundle_bytes: int
    fault_bytes: int
    """Bytes that came because of faults, without the bundle's."""
    readahead_bytes: int
    """Were fetched ahead of a reader."""
    fill_bytes: int
    """Came in the background."""


class FaultRecorder:
    """Counters of one server's streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault_count = self._failed_count = self._bundle_wait_count = 0
        self._wait_ns = self._max_ns = 0
        self._waits_ns: deque[int] = deque(maxlen=_KEPT_WAITS_COUNT)
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._fault_frames = self._readahead_frames = 0
        # Written without the lock, which a hit must not cost: a lost count is no harm.
        self._hit_bytes = 0
        self._fault_bytes = self._readahead_bytes = self._fill_bytes = 0

    @property
    def fault_count(self) -> int:
        """Faults so far, those under way left out."""
        return self._fault_count

    def hit(self, length: int) -> None:
        """A read was answered from the cache."""
        self._hit_bytes += length

    def fault(self, wait_ns: int, *, failed: bool) -> None:
        """A read had to wait."""
        with self._lock:
            self._fault_count += 1
            self._failed_count += failed
            self._wait_ns += wait_ns
            self._max_ns = max(self._max_ns, wait_ns)
            self._waits_ns.append(wait_ns)
            self._counts[bisect_left(BUCKETS_S, wait_ns / 1e9)] += 1

    def bundle_wait(self) -> None:
        """A fault waited for the bundle."""
        with self._lock:
            self._bundle_wait_count += 1

    def frames(self, *, fault_count: int = 0, readahead_count: int = 0) -> None:
        """Counts frames that were asked for."""
        with self._lock:
            self._fault_frames += fault_count
            self._readahead_frames += readahead_count

    def came(self, *, fault: int = 0, readahead: int = 0, fill: int = 0) -> None:
        """Counts uncompressed bytes that came."""
        with self._lock:
            self._fault_bytes += fault
            self._readahead_bytes += readahead
            self._fill_bytes += fill

    def snapshot(self) -> FaultFigures:
        """Return a frozen copy of the figures of faults."""
        with self._lock:
            ordered = sorted(self._waits_ns)
            return FaultFigures(
                fault_count=self._fault_count,
                failed_count=self._failed_count,
                bundle_wait_count=self._bundle_wait_count,
                fault_wait_ns=self._wait_ns,
                wait_p50_ns=percentile(ordered, 0.50),
                wait_p99_ns=percentile(ordered, 0.99),
                wait_max_ns=self._max_ns,
                wait_counts=tuple(self._counts),
                fault_frame_count=self._fault_frames,
                readahead_frame_count=self._readahead_frames,
            )

    def sources(self, bundle_bytes: int) -> SourceFigures:
        """Returns the bytes by source; the bundle's are counted elsewhere."""
        with self._lock:
            return SourceFigures(
                self._hit_bytes,
                bundle_bytes,
                self._fault_bytes,
                self._readahead_bytes,
                self._fill_bytes,
            )
