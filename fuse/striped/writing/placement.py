"""Spreads the parts that are written at once over the servers of the storage.

HDFS draws a server for each block. Eight parts on four DataNodes so share the busiest one by three
or four, and a striped file is as slow as its slowest part. So a part that was drawn to a server
with more open parts than another one is drawn again, before more than its first bytes are written.
Owns the count of open parts by server, for all files of a mount. Thread-safe.
"""

import threading
from collections import Counter

# What a part that is being written costs in memory, by default 24 MiB: 8 MiB that our HDFS writer
# keeps for another try, some 11 MiB in HDFS's client (measured), the rest of a unit.
_UNITS_PER_PART = 6

DRAWS_MAX = 12
# From this draw on, a server with one part more than the least will do.
_PATIENT_DRAWS = 9
# All servers are known after so many draws, for each known one, that showed no new one.
_DRAWS_PER_SERVER = 2


class Placement:
    """Open parts by server, and how many may be open."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: what all files together may take, roughly."""
        self.block_bytes = 0
        """The storage cuts parts into blocks of so many bytes; 0 as long as nobody knows."""
        self._memory_bytes = memory_bytes
        self._file_count = 0
        self._open_counts: Counter[str] = Counter()
        self._stale_draws = 0
        self._lock = threading.Lock()

    def begin_file(self) -> None:
        """One more file is written; `end_file` must follow."""
        with self._lock:
            self._file_count += 1

    def end_file(self) -> None:
        """One file less is written."""
        with self._lock:
            self._file_count -= 1

    def part_count(self, wanted: int, unit_bytes: int) -> int:
        """How many parts a file should have now: of many files each is written by fewer, which
        keep as many servers busy."""
        with self._lock:
            parts_max = self._memory_bytes // (_UNITS_PER_PART * unit_bytes)
            return min(wanted, max(2, parts_max // max(1, self._file_count)))

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
