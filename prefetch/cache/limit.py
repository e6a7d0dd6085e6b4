"""Size limit of the node's cache.

All folders of `cache_dir` count, whatever is in them, but for those of running containers and of
work in progress. Room is made by removing streams, never one that is in use or on its way in, and
records that no start has used for a month. Thread-safe; several processes at once do no harm.
"""

import contextlib
import logging
import os
import stat
import threading
import time
from pathlib import Path

from msgspec import Struct

from bootseer.linux.disk_usage import statuses_below
from bootseer.linux.locks import remove_unused_lock
from bootseer.prefetch.cache.damage import DAMAGED
from bootseer.prefetch.cache.indexes import INDEXES
from bootseer.prefetch.cache.node_cache import STREAMS, NodeCache

_log = logging.getLogger(__name__)

_TEMPORARY = frozenset(("containers", "tmp", "work", "run"))
"""Folders that are removed with the container or work that writes to them."""

_RECORDS_S = 30 * 86400.0
"""Life of a record, index or damage note after its last use. A later start fetches it again."""
_FOLDERS_S = 600.0
"""Pause between two walks through the folders with many files; streams are counted each time."""
_FREE_SHARE = 0.05
"""Share of the disk that is left free."""


class CacheFolder(Struct, frozen=True):
    """Folder below `cache_dir`."""

    name: str
    size_bytes: int
    counts: bool
    """Whether the folder counts towards the limit."""


def folders(cache_dir: Path) -> list[CacheFolder]:
    """Return the folders of the cache, the largest first. Never raises."""
    found = []
    with contextlib.suppress(OSError):
        for path in cache_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                size = _size_of(path)
                found.append(CacheFolder(path.name, size, path.name not in _TEMPORARY))
    return sorted(found, key=lambda one: -one.size_bytes)


def _size_of(directory: Path) -> int:
    """Return the disk space of the files below a directory, counting each inode once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for status in statuses_below(directory):
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        total += 512 * status.st_blocks
    return total


def trim_records(cache_dir: Path) -> int:
    """Remove indexes, damage notes and catalogue records that no start used for a month.

    Also removes lock files of killed publishers. Return the number of files. Never raises.
    """
    oldest_s = time.time() - _RECORDS_S
    catalogue = cache_dir / "catalogue"
    count = sum(map(remove_unused_lock, catalogue.glob("*.lock")))
    for folder in (cache_dir / INDEXES, cache_dir / DAMAGED, *catalogue.glob("*")):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                        os.unlink(entry.path)
                        count += 1
    return count


class CacheRoom:
    """Enforcement of the limit of one cache. Thread-safe."""

    def __init__(self, cache_dir: Path, limit_bytes: int) -> None:
        self._cache_dir = cache_dir
        self._limit_bytes = limit_bytes
        self._cache = NodeCache(cache_dir)
        self._lock = threading.Lock()
        self._others_bytes = 0
        self._next_walk_s = 0.0

    def make_room(self, wanted_bytes: int = 0) -> bool:
        """Remove the longest unused streams until `wanted_bytes` more fit below the limit.

        Return False if they do not fit, since streams in use stay, or if the disk is nearly full.
        Never raises.
        """
        with self._lock:
            if time.monotonic() >= self._next_walk_s:
                trim_records(self._cache_dir)
                self._others_bytes = sum(
                    one.size_bytes
                    for one in folders(self._cache_dir)
                    if one.counts and one.name != STREAMS
                )
                self._next_walk_s = time.monotonic() + _FOLDERS_S
            allowed_bytes = self._limit_bytes - self._others_bytes - wanted_bytes
            freed = self._cache.trim(max(0, allowed_bytes))
            if freed:
                _log.info("removed %d bytes of unused images from the cache", freed)
            held = sum(one.size_bytes for one in self._cache.streams())
        try:
            disk = os.statvfs(self._cache_dir)
        except OSError:
            return False
        return held <= allowed_bytes and disk.f_frsize * disk.f_bavail - wanted_bytes > (
            _FREE_SHARE * disk.f_frsize * disk.f_blocks
        )
