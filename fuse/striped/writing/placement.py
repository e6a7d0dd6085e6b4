"""Spreads the parts that are written at once over the servers of the storage.

HDFS draws a server for each block. Eight parts on four DataNodes so share the busiest one by three
or four, and a striped file is as slow as its slowest part. So a part that was drawn to a server
with more open parts than another one is drawn again, before more than its first bytes are written.
Owns the count of open parts by server, for all files of a mount. Thread-safe.
"""

import threading
from collections import Counter

DRAWS_MAX = 12
# From this draw on, a server with one part more than the least will do.
_PATIENT_DRAWS = 9
# All servers are known after so many draws, for each known one, that showed no new one.
_DRAWS_PER_SERVER = 2


class Placement:
    """Open parts by server."""

    def __init__(self) -> None:
        self.block_bytes = 0
        """The storage cuts parts into blocks of so many bytes; 0 as long as nobody knows."""
        self._open_counts: Counter[str] = Counter()
        self._stale_draws = 0
        self._lock = threading.Lock()

    def take(self, servers: tuple[str, ...], draw: int) -> bool:
        """Whether a part should stay on `servers`, which are then counted until `release`.

        `draw` counts from 0; the last one is always taken. Only parts of one replica are drawn
        again: of three servers that write together, nobody can choose.
        """
        with self._lock:
            for server in servers:
                if server not in self._open_counts:
                    self._open_counts[server] = 0
                    self._stale_draws = 0
            self._stale_draws += 1
            if len(servers) == 1 and draw + 1 < DRAWS_MAX:
                limit = min(self._open_counts.values())
                if self._stale_draws < _DRAWS_PER_SERVER * len(self._open_counts):
                    limit = 0
                if draw >= _PATIENT_DRAWS:
                    limit += 1
                if self._open_counts[servers[0]] > limit:
                    return False
            self._open_counts.update(servers)
            return True

    def release(self, servers: tuple[str, ...]) -> None:
        """A part has ended."""
        with self._lock:
            self._open_counts.subtract(servers)
