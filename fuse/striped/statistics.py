"""Counters of the reads and writes of one storage.

`Counters` is thread-safe and cheap enough to be called for every chunk. `Statistics` is a
consistent copy of all counts. Counts only grow: a rate is the difference of two copies, divided by
the difference of their `uptime_s`.
"""

import threading
import time
from typing import Any

from msgspec import Struct


class SourceStatistics(Struct, frozen=True):
    """Counts of one place that stores bytes: a DataNode, or the number of a part."""

    name: str
    read_bytes: int = 0
    read_count: int = 0
    read_busy_ns: int = 0
    """Time spent in its reads, added up over parallel reads."""
    late_count: int = 0
    """Reads of this place that were also requested elsewhere, because it answered late."""
    written_bytes: int = 0
    write_count: int = 0


class Statistics(Struct, frozen=True):
    """Copy of all counts of a storage at one moment."""

    uptime_s: float = 0.0
    served_bytes: int = 0
    """Handed to readers."""
    fetched_bytes: int = 0
    """Read from the storage and verified."""
    fetch_count: int = 0
    fetch_busy_ns: int = 0
    """Time spent in fetches, added up over parallel fetches."""
    read_retry_count: int = 0
    """Reads that failed and were asked for again."""
    corrupt_count: int = 0
    """Reads whose bytes did not match their checksum."""
    late_count: int = 0
    """Reads that were asked for a second time while the first was still under way."""
    late_won_count: int = 0
    """Late reads whose second request was answered first."""
    stuck_count: int = 0
    """Reads that were given up at the deadline."""
    written_bytes: int = 0
    """Acknowledged by the storage."""
    write_count: int = 0
    write_busy_ns: int = 0
    write_retry_count: int = 0
    """Parts or units that failed and were written again."""
    published_count: int = 0
    sources: tuple[SourceStatistics, ...] = ()
    """Counts by place, ordered by name, as far as the storage's client names the place."""


_COUNTED = frozenset(Statistics.__struct_fields__) - {"uptime_s", "sources"}
_COUNTED_BY_SOURCE = frozenset(SourceStatistics.__struct_fields__) - {"name"}
# A hostile or broken storage must not make the table grow without bound.
_SOURCES_MAX = 1024


class Counters:
    """Counts of one storage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._sources: dict[str, dict[str, int]] = {}

    def add(self, **counts: int) -> None:
        """Add to counters of `Statistics`, by field name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def add_for(self, source: str, **counts: int) -> None:
        """Add to counters of one source, by field name of `SourceStatistics`."""
        with self._lock:
            known = self._sources.get(source)
            if known is None:
                if len(self._sources) >= _SOURCES_MAX:
                    return
                known = self._sources[source] = dict.fromkeys(_COUNTED_BY_SOURCE, 0)
            for name, count in counts.items():
                known[name] += count

    def read(self) -> Statistics:
        """Return a copy of all counts."""
        with self._lock:
            values: dict[str, Any] = dict(self._counts)
            sources = tuple(
                SourceStatistics(name, **counts) for name, counts in sorted(self._sources.items())
            )
        return Statistics(uptime_s=time.monotonic() - self._start_s, sources=sources, **values)
