"""How much this node's cache holds, whatever lies in it, and making room below the limit.

Knows which folders of `cache_dir` count; what lies in them is their owners'. Only streams are
removed here, none that is in use or on its way in, and by the node's catalogue what it has not
needed for long. Any thread; several processes at once do no harm.
"""

import contextlib
import logging
import shutil
import stat
import threading
import time
from pathlib import Path

from msgspec import Struct

from bootseer.linux.disk_usage import statuses_below
from bootseer.prefetch.cache.damage import trim_damage
from bootseer.prefetch.cache.node_cache import STREAMS, NodeCache
from bootseer.prefetch.index.node_catalogue import NodeCatalogue

_log = logging.getLogger(__name__)

_PASSING = frozenset(("containers", "tmp", "work", "run"))
"""What containers write and what is being made: it goes with them, and is no cache."""

_OTHERS_S = 600.0
"""So often are folders walked that hold many files; streams are few, and counted each time."""
_FREE_SHARE = 0.05
"""The share of the disk that is left free by work that can wait, as the background fill."""


class CacheFolder(Struct, frozen=True):
    """One folder of `cache_dir`."""

    name: str
    size_bytes: int
    counts: bool
    """Whether the folder counts towards the limit."""


def folders(cache_dir: Path) -> list[CacheFolder]:
    """What lies in the cache, the largest first. Never raises."""
    found = []
    with contextlib.suppress(OSError):
        for path in cache_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                size = _size_of(path)
                found.append(CacheFolder(path.name, size, path.name not in _PASSING))
    return sorted(found, key=lambda one: -one.size_bytes)


def _size_of(directory: Path) -> int:
    """What its files occupy on the disk, each file once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for status in statuses_below(directory):
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        total += 512 * status.st_blocks
    return total


class CacheRoom:
    """Keeps one cache below its limit. Thread-safe."""

    def __init__(self, cache_dir: Path, limit_bytes: int) -> None:
        self._cache_dir = cache_dir
        self._limit_bytes = limit_bytes
        self._cache = NodeCache(cache_dir)
        self._lock = threading.Lock()
        self._others_bytes = 0
        self._others_again_s = 0.0

    def make(self, wanted_bytes: int = 0) -> bool:
        """Remove what was not used for longest until `wanted_bytes` more fit below the limit.

        False when they do not, or when the disk is nearly full: what is in use stays. Never raises.
        """
        with self._lock:
            if time.monotonic() >= self._others_again_s:
                NodeCatalogue(self._cache_dir).trim()
                trim_damage(self._cache_dir)
                self._others_bytes = sum(
                    one.size_bytes
                    for one in folders(self._cache_dir)
                    if one.counts and one.name != STREAMS
                )
                self._others_again_s = time.monotonic() + _OTHERS_S
            allowed_bytes = self._limit_bytes - self._others_bytes - wanted_bytes
            freed = self._cache.trim(max(0, allowed_bytes))
            if freed:
                _log.info("removed %d bytes of unused images from the cache", freed)
            held = sum(one.size_bytes for one in self._cache.streams())
        try:
            disk = shutil.disk_usage(self._cache_dir)
        except OSError:
            return False
        return held <= allowed_bytes and disk.free - wanted_bytes > _FREE_SHARE * disk.total
