"""When a read is late, compared with its peers. Pure; the caller locks."""

from collections import deque
from statistics import median

_PEERS = 64
# So few say nothing yet about what is usual.
_PEERS_MIN = 4
# Shorter than this, anything can be the cause: a collection of garbage in a DataNode, for one.
_FLOOR_S = 0.3
# Without the hope of another disk, a second request helps only against a connection that is stuck.
_STUCK_FLOOR_S = 1.0
# Before anything is known of this storage's pace.
_UNKNOWN_FLOOR_S = 1.0
_RATIO = 4.0
# Second requests cost what they ask for. Those that come first pay for more; of those that do not,
# there is one for every ten reads.
_CREDIT_MAX = 8.0
_CREDIT_PER_READ = 0.1
_CREDIT_PER_WIN = 2.0


class Pace:
    """How fast the reads of one storage were lately."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_PEERS)
        self._median: float | None = None
        self._credit = _CREDIT_MAX

    def spend(self) -> bool:
        """Whether a second request may be made now; counts it."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def note(self, count: int, seconds: float, *, is_second: bool = False) -> None:
        """A read of `count` bytes took so long; `is_second`: the second request came first."""
        self._credit += _CREDIT_PER_WIN if is_second else _CREDIT_PER_READ
        self._credit = min(self._credit, _CREDIT_MAX)
        self._rates.append(count / max(seconds, 1e-6))
        self._median = None

    def usual_bytes_per_s(self) -> float | None:
        """The median of the latest reads; None while there are too few."""
        if len(self._rates) < _PEERS_MIN:
            return None
        if self._median is None:
            self._median = median(self._rates)
        return self._median

    def is_late(
        self, length: int, done_bytes: int, elapsed_s: float, silent_s: float, has_replicas: bool
    ) -> bool:
        """Whether a read of `length` bytes, of which `done_bytes` came in `elapsed_s` and nothing
        in the last `silent_s`, should be asked for again."""
        usual = self.usual_bytes_per_s()
        expected_s = length / usual if usual else 0.0
        if silent_s >= max(_STUCK_FLOOR_S, _RATIO * expected_s):
            return True
        if not has_replicas or elapsed_s < max(_FLOOR_S, expected_s):
            return False
        if usual is None:
            return elapsed_s >= _UNKNOWN_FLOOR_S
        # Measured by what has come so far: it shows much earlier than at the end.
        return done_bytes / elapsed_s < usual / _RATIO
