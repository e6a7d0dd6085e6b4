"""Open directories of a mount, with recently listed files and recently changed names.

Names are sorted, so that a listing that was begun with a predecessor of this process continues at
the same place. Thread-safe.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer.store.backend import FileInfo

_MAX_LISTED = 100_000
_MAX_CHANGED = 10_000
_REPLY_ENTRIES = 256
# The server uses the cookies 1 and 2 for "." and "..".
_FIRST_COOKIE = 3


class ListedName(NamedTuple):
    """Name in a directory. `cookie` continues the listing behind this name."""

    name: str
    is_dir: bool
    cookie: int


class Listings:
    """Snapshots of open directories by handle, and the status of recently listed files."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._open: dict[int, list[tuple[str, bool]]] = {}
        self._listed: dict[str, tuple[float, FileInfo]] = {}
        self._changed: dict[str, int] = {}
        """Paths by the number of their last change."""
        self._all_changed = 0
        """Number of a change after which every path may have changed."""
        self.change_count = 0
        """Number of changes of this mount so far."""
        # A number that no predecessor of this process has used.
        self._next = time.monotonic_ns()

    def open(
        self,
        infos: Iterable[FileInfo],
        local_names: Iterable[str],
        now_s: float,
        before: int,
        handle: int | None = None,
    ) -> int:
        """Keep a snapshot of a directory; return its handle, a new one unless `handle` is given.

        `local_names`: files that only this mount knows. `before`: `change_count` before the storage
        was listed.
        """
        with self._lock:
            if len(self._listed) > _MAX_LISTED:
                self._listed.clear()
            names: dict[str, bool] = {}
            for info in infos:
                if not self._has_changed(info.path, before):
                    self._listed[info.path] = (now_s, info)
                names[info.path.rpartition("/")[2]] = info.is_dir
            for name in local_names:
                names.setdefault(name, False)
            if handle is None:
                handle = self._next
                self._next += 1
            self._open[handle] = sorted(names.items())
            return handle

    def read(self, handle: int, offset: int) -> Sequence[ListedName] | None:
        """Return the names behind the cookie `offset`; None if the handle is unknown."""
        with self._lock:
            names = self._open.get(handle)
            if names is None:
                return None
            start = max(0, offset - _FIRST_COOKIE + 1)
            page = names[start : start + _REPLY_ENTRIES]
        return [
            ListedName(name, is_dir, start + index + _FIRST_COOKIE)
            for index, (name, is_dir) in enumerate(page)
        ]

    def close(self, handle: int) -> None:
        """Remove a snapshot."""
        with self._lock:
            self._open.pop(handle, None)

    def take(self, path: str, now_s: float) -> tuple[float, FileInfo] | None:
        """Remove and return the status with which a file was just listed, and its time.

        `ls -l` looks up each listed name; with this, only files that may be layouts are read.
        """
        with self._lock:
            listed = self._listed.pop(path, None)
        return listed if listed is not None and now_s - listed[0] < self._keep_s else None

    def drop(self, path: str) -> None:
        """Remove the listed status of a file, and note that the file has changed."""
        with self._lock:
            self._listed.pop(path, None)
            self.change_count += 1
            self._changed[path] = self.change_count
            if len(self._changed) > _MAX_CHANGED:
                self._changed.clear()
                self._all_changed = self.change_count

    def clear(self) -> None:
        """Remove the listed status of all files, and note that any name may have changed."""
        with self._lock:
            self._listed.clear()
            self._changed.clear()
            self.change_count += 1
            self._all_changed = self.change_count

    def has_changed(self, path: str, before: int) -> bool:
        """Return whether `path` may have changed since `change_count` was `before`."""
        with self._lock:
            return self._has_changed(path, before)

    def _has_changed(self, path: str, before: int) -> bool:
        return max(self._all_changed, self._changed.get(path, 0)) > before
