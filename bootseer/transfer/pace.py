"""Pace of reads: whether a read is late, and the bandwidth of background reads.

`Pace` is the part of the policy of attempts that judges a read while it lasts: by the rates of its
peers, and by its silence. Callers pass the time (monotonic seconds).
"""

import threading
from collections import deque

_PEERS = 64
# Fewer reads do not tell a usual rate.
_PEERS_MIN = 4
# Shorter delays have many causes, such as a garbage collection in a DataNode.
_FLOOR_S = 0.3
# A disk reads its first byte, and TCP repeats a lost packet, in less time.
_SILENT_FLOOR_S = 1.0
_RATIO = 4.0
# Second requests cost bandwidth. One that wins earns credit for more; otherwise there is credit for
# one second request for every ten reads.
_CREDIT_MAX = 8.0
_CREDIT_PER_READ = 0.1
_CREDIT_PER_WIN = 2.0

LOOK_S = 0.1
"""Interval in which a read is checked, from `LOOK_AFTER_S` on."""
LOOK_AFTER_S = _FLOOR_S
FLOOR_BYTES_PER_S = 8 * 1024
"""A slower rate counts as silence: a twentieth of the slowest line over which jobs are started. For
short reads see `floor_bytes_per_s`."""
_DEADLINES_MAX = 4.0
"""Number of deadlines that a short read may take while bytes keep coming. On a line that many nodes
share, each connection may get less than `FLOOR_BYTES_PER_S`, and a new connection would get no
more."""
STALL_S = 15.0
"""A connection that was silent for this time is given up, whatever the rates of its peers and the
credit: TCP's fourth repetition of a lost packet has come by then."""


def floor_bytes_per_s(length: float, deadline_s: float) -> float:
    """Return the rate below which a read of `length` bytes counts as silent.

    A read that never counts as silent either ends within four deadlines, or runs at
    `FLOOR_BYTES_PER_S` or more.
    """
    return min(FLOOR_BYTES_PER_S, length / (_DEADLINES_MAX * deadline_s))


class ByteProgress:
    """Progress of one attempt: when bytes came last."""

    __slots__ = ("_floor_bytes_per_s", "_seen_bytes", "seen_s")

    def __init__(self, now_s: float, floor_bytes_per_s: float = FLOOR_BYTES_PER_S) -> None:
        """`floor_bytes_per_s`: rate below which bytes do not count."""
        self.seen_s = now_s
        """Time at which bytes were seen last."""
        self._floor_bytes_per_s = floor_bytes_per_s
        self._seen_bytes = 0

    def silent_s(self, done_bytes: int, now_s: float) -> float:
        """Return the seconds without bytes, or with a trickle alone, when `done_bytes` are here."""
        if done_bytes - self._seen_bytes > self._floor_bytes_per_s * (now_s - self.seen_s):
            self._seen_bytes, self.seen_s = done_bytes, now_s
        return now_s - self.seen_s


class Pace:
    """Rates of the latest reads of one storage. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: deque[float] = deque(maxlen=_PEERS)
        self._median: float | None = None
        self._credit = _CREDIT_MAX

    def spend(self) -> bool:
        """Take the credit for a second request; return False if there is none."""
        with self._lock:
            if not self.has_credit:
                return False
            self._credit -= 1.0
            return True

    @property
    def has_credit(self) -> bool:
        """Whether a second request could be made now."""
        return self._credit >= 1.0

    def note(self, count: int, seconds: float, *, is_second: bool = False) -> None:
        """Note that a read of `count` bytes took `seconds`; `is_second`: a second request won."""
        gain = _CREDIT_PER_WIN if is_second else _CREDIT_PER_READ
        with self._lock:
            self._credit = min(self._credit + gain, _CREDIT_MAX)
            self._rates.append(count / max(seconds, 1e-6))
            self._median = None

    def usual_bytes_per_s(self) -> float | None:
        """Return the median rate of the latest reads; None while there are too few."""
        with self._lock:
            if len(self._rates) < _PEERS_MIN:
                return None
            if self._median is None:
                # The module `statistics` would load all of `random` and `decimal`.
                ordered, half = sorted(self._rates), len(self._rates) // 2
                self._median = (ordered[half] + ordered[-1 - half]) / 2
            return self._median

    def silent_limit_s(self, length: int) -> float:
        """Return the seconds without bytes after which a read of `length` bytes is late."""
        usual = self.usual_bytes_per_s()
        return max(_SILENT_FLOOR_S, _RATIO * length / usual if usual else 0.0)

    def is_late(
        self, length: int, done_bytes: int, elapsed_s: float, silent_s: float, *, has_replicas: bool
    ) -> bool:
        """Return whether a second request should be made for a read of `length` bytes.

        Args:
            length: Bytes of the read.
            done_bytes: Bytes that came in `elapsed_s`.
            elapsed_s: Time since the read began.
            silent_s: Time since the last bytes came.
            has_replicas: Whether another disk can serve the read. If not, another connection may be
                as slow: slowness counts only once the read has taken as long as a silence may last.
        """
        if done_bytes >= length:
            return False
        silent_limit_s = self.silent_limit_s(length)
        if silent_s >= silent_limit_s:
            return True
        usual = self.usual_bytes_per_s()
        if usual is None or elapsed_s < max(_FLOOR_S, length / usual):
            return False
        if not has_replicas and elapsed_s < silent_limit_s:
            return False
        # The rate so far shows slowness much earlier than the end of the read would.
        return done_bytes / elapsed_s < usual / _RATIO


class TokenBucket:
    """Rate limiter with the average `bytes_per_s`. Not thread-safe."""

    def __init__(self, bytes_per_s: float, *, now_s: float, burst_s: float = 0.25) -> None:
        """`burst_s`: seconds whose bytes may be taken at once after a pause."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = bytes_per_s * burst_s
        self._level_bytes = self._burst_bytes
        self._updated_s = now_s

    def ready_at_s(self, now_s: float) -> float:
        """Return the time from which the next take is allowed; at most `now_s` for now."""
        self._refill(now_s)
        if self._level_bytes >= 0:
            return now_s
        return now_s - self._level_bytes / self._bytes_per_s

    def take(self, count_bytes: int, now_s: float) -> None:
        """Take `count_bytes`. The level may fall below zero, so that later takes wait longer."""
        self._refill(now_s)
        self._level_bytes -= count_bytes

    def _refill(self, now_s: float) -> None:
        gained_bytes = max(0.0, now_s - self._updated_s) * self._bytes_per_s
        self._level_bytes = min(self._burst_bytes, self._level_bytes + gained_bytes)
        self._updated_s = max(self._updated_s, now_s)
