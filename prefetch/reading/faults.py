"""Faults, which are reads that find bytes missing: deadlines, read-ahead, repeats and figures.

`FaultRecorder` counts; `FaultFigures` and `SourceFigures` are frozen copies of its counts. All
classes but `Budget` are thread-safe.
"""

import contextlib
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator

from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError
from bootseer.transfer.chunks import percentile

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of waits."""

_KEPT_WAITS_COUNT = 8192
"""Number of the latest waits over which percentiles are computed."""

_AHEAD_FRAMES_MAX = 16
"""2 MiB of a file that is read from start to end: hides 10 ms of latency at 200 MB/s."""
_READERS_MAX = 1024
_REPEATED_S = 1.0
"""Time for which a range that could not be read fails at once: the kernel repeats a failed request
within milliseconds."""
_RANGES_MAX = 64
"""The most such ranges that are remembered: more than the server threads can have under way."""


class Budget:
    """Time that a read may still wait without any bytes. For one thread."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.left_s = deadline_s
        """Seconds; 0 when it is used up."""

    @contextlib.contextmanager
    def spending(self, limit_s: float) -> Iterator[float]:
        """Charge the time that the body takes, at most `limit_s`, which the body gets.

        The body must not wait longer than `limit_s` without bytes.
        """
        start_s = time.monotonic()
        try:
            yield limit_s
        finally:
            self.left_s -= min(time.monotonic() - start_s, limit_s)

    def restart(self) -> None:
        """Restore the full deadline, because bytes have arrived."""
        self.left_s = self._deadline_s


class _Late(Struct, frozen=True):
    blob: int
    start: int
    end: int
    until_s: float
    error: BootseerError


class LateRanges:
    """Ranges whose last read has just ended at its deadline. Thread-safe."""

    def __init__(self) -> None:
        self._ranges: list[_Late] = []
        self._lock = threading.Lock()

    def note(self, blob: int, offset: int, length: int, error: BootseerError) -> None:
        """Note that a read of this range has ended at its deadline."""
        now_s = time.monotonic()
        late = _Late(blob, offset, offset + length, now_s + _REPEATED_S, error)
        with self._lock:
            self._ranges = [one for one in self._ranges if one.until_s > now_s][-_RANGES_MAX:]
            self._ranges.append(late)

    def check(self, blob: int, offset: int, length: int) -> None:
        """Raise DeadlineError if the range overlaps one that was noted a moment ago."""
        if not self._ranges:
            return
        now_s = time.monotonic()
        for one in tuple(self._ranges):
            overlaps = one.start < offset + length and offset < one.end
            if one.blob == blob and overlaps and one.until_s > now_s:
                raise DeadlineError(str(one.error))


class _SequentialReader(Struct):
    """Progress of a file that is read from start to end."""

    next_frame: int
    window: int


class ReadAheadPolicy:
    """Choice of the frames that are fetched ahead of a reader. Thread-safe."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, _SequentialReader] = OrderedDict()
        self._lock = threading.Lock()

    def frames_for(self, reader: int, first: int, after: int, last: int) -> range:
        """Return the frames to fetch ahead of a reader that has a fault on `[first, after)`.

        `last` is the end of the frames of the reader's file.
        """
        with self._lock:
            state = self._readers.pop(reader, None)
            if state is None or not state.next_frame - state.window <= first <= state.next_frame:
                state = _SequentialReader(after, 0)
            else:
                state.window = min(max(2 * state.window, 1), _AHEAD_FRAMES_MAX)
            self._readers[reader] = state
            while len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
            start = max(after, state.next_frame)
            stop = min(after + state.window, last) if state.window else start
            state.next_frame = max(state.next_frame, start, stop)
            return range(start, stop)


class FaultFigures(Struct, frozen=True):
    """Counts of faults, reads that found bytes missing, since the worker started."""

    fault_count: int
    failed_count: int
    """Faults that were answered with an error."""
    bundle_wait_count: int
    """Faults that waited for a frame of the bundle."""
    fault_wait_ns: int
    """Sum of all waits."""
    wait_p50_ns: int
    """Median of the latest 8192 waits; 0 before the first."""
    wait_p99_ns: int
    """99th percentile of the latest 8192 waits; 0 before the first."""
    wait_max_ns: int
    wait_counts: tuple[int, ...]
    """Histogram: faults up to each bound in `BUCKETS_S` and above the one before, and those above
    the last bound."""
    fault_frame_count: int
    """Frames of blobs that faults fetched."""
    readahead_frame_count: int
    """Frames of blobs that were fetched ahead of a reader."""


class SourceFigures(Struct, frozen=True):
    """Uncompressed bytes by source, since the worker started."""

    cache_bytes: int
    """Bytes of reads that found all of their bytes in the cache, counted at each read."""
    bundle_bytes: int
    """Bytes that the replay of the bundle fetched."""
    fault_bytes: int
    """Bytes of blobs that faults fetched."""
    readahead_bytes: int
    """Bytes of blobs that were fetched ahead of a reader."""
    fill_bytes: int
    """Bytes of blobs that the background fill fetched."""


class FaultRecorder:
    """Counters of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault_count = self._failed_count = self._bundle_wait_count = 0
        self._wait_ns = self._max_ns = 0
        self._waits_ns: deque[int] = deque(maxlen=_KEPT_WAITS_COUNT)
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._fault_frames = self._readahead_frames = 0
        # Written without the lock, to keep hits fast: a lost count does no harm.
        self._hit_bytes = 0
        self._fault_bytes = self._readahead_bytes = self._fill_bytes = 0

    @property
    def fault_count(self) -> int:
        """Number of faults that have ended."""
        return self._fault_count

    def hit(self, length: int) -> None:
        """Count a read that was answered from the cache."""
        self._hit_bytes += length

    def fault(self, wait_ns: int, *, failed: bool) -> None:
        with self._lock:
            self._fault_count += 1
            self._failed_count += failed
            self._wait_ns += wait_ns
            self._max_ns = max(self._max_ns, wait_ns)
            self._waits_ns.append(wait_ns)
            self._counts[bisect_left(BUCKETS_S, wait_ns / 1e9)] += 1

    def bundle_wait(self) -> None:
        with self._lock:
            self._bundle_wait_count += 1

    def frames(self, *, fault_count: int = 0, readahead_count: int = 0) -> None:
        with self._lock:
            self._fault_frames += fault_count
            self._readahead_frames += readahead_count

    def received(self, *, fault: int = 0, readahead: int = 0, fill: int = 0) -> None:
        with self._lock:
            self._fault_bytes += fault
            self._readahead_bytes += readahead
            self._fill_bytes += fill

    def snapshot(self) -> FaultFigures:
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
        """Return the bytes by source. `bundle_bytes` are counted by the replay."""
        with self._lock:
            return SourceFigures(
                self._hit_bytes,
                bundle_bytes,
                self._fault_bytes,
                self._readahead_bytes,
                self._fill_bytes,
            )
