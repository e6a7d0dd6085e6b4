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
_RATIO = 4.0


class Pace:
    """How fast the reads of one storage were lately."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_PEERS)
        self._median: float | None = None

    def note(self, count: int, seconds: float) -> None:
        """A read of `count` bytes took so long."""
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
        if usual is None or not has_replicas or elapsed_s < _FLOOR_S:
            return False
        # Measured by what has come so far, not only by the whole: it shows much earlier.
        return done_bytes / elapsed_s < usual / _RATIO
