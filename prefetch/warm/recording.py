"""Records what is touched below a directory while a command starts.

Alone decides how: names from fanotify where that is permitted, else from inotify, else from the
page cache alone; pages always from the page cache, at the end. A `Recording` belongs to one thread.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence

from bootseer.errors import BootseerError, UnsupportedError
from bootseer.linux.processes import wait_readable
from bootseer.prefetch.warm.beneath import Beneath
from bootseer.prefetch.warm.opens import FanotifyWatch, InotifyWatch, OpenWatch, directories
from bootseer.prefetch.warm.plan import GAP_BYTES
from bootseer.prefetch.warm.record import (
    FILE_COUNT_MAX,
    Range,
    WarmFile,
    WarmRecord,
    bounded,
    without,
)
from bootseer.prefetch.warm.residency import cached_ranges

_log = logging.getLogger(__name__)

METHODS = ("auto", "fanotify", "inotify", "residency")
ARM_S = 15.0
"""What preparing may take: the command waits for it, once."""


class Recording:
    """A recording, from its making, which is when everything is prepared, to `finish`."""

    def __init__(self, root: str, method: str = "auto") -> None:
        """Raises: UnsupportedError where the `method` asked for cannot be had; OSError."""
        self._root = root
        self._opened: dict[bytes, None] = {}
        self._watch: OpenWatch | None = None
        self._before: dict[bytes, tuple[Range, ...]] = {}
        if method != "residency":
            self._watch = _open_watch(root, method)
        if self._watch is None:
            self._before = {path: ranges for path, _, ranges in _scan(root) if ranges}

    @property
    def method(self) -> str:
        """Which method it is."""
        return self._watch.method if self._watch else "residency"

    def run(self, until: Sequence[int], window_s: float) -> None:
        """Take notes until a descriptor of `until` is readable, at most `window_s` seconds."""
        deadline_s = time.monotonic() + window_s
        watched = [self._watch.fileno()] if self._watch else []
        while (left_s := deadline_s - time.monotonic()) > 0:
            readable = wait_readable([*watched, *until], left_s)
            self._take_notes()
            if any(fd in readable for fd in until):
                return

    def _take_notes(self) -> None:
        if self._watch is not None:
            for path in self._watch.opened():
                if len(self._opened) < FILE_COUNT_MAX:
                    self._opened.setdefault(path)

    def finish(self, identity: str, workload: str) -> WarmRecord:
        """What was touched since the making."""
        method = self.method
        if self._watch is not None:
            # What came between the last look and the end.
            self._take_notes()
            if self._watch.is_lossy:
                _log.warning("the kernel dropped events: the record lacks files")
            self.close()
            files = bounded(_files(self._root, self._opened))
        else:
            files = bounded(_difference(self._root, self._before))
        return WarmRecord(identity, workload, method, 1, time.time_ns(), files)

    def close(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.close()


def _open_watch(root: str, method: str) -> OpenWatch | None:
    """A watch by `method`, or by the best that works; None: only the page cache is left."""
    if method in ("auto", "fanotify"):
        try:
            return FanotifyWatch(root)
        except UnsupportedError as error:
            if method == "fanotify":
                raise
            _log.info("%s; inotify it is", error)
    try:
        return InotifyWatch(root, ARM_S)
    except UnsupportedError as error:
        if method == "inotify":
            raise
        _log.info("%s; the page cache alone it is", error)
        return None


def _files(root: str, paths: Sequence[bytes] | dict[bytes, None]) -> Iterator[WarmFile]:
    """The opened files, and what of each is in the page cache now.

    All of it counts, also what was there before: that the file was opened says that it is used,
    and on a new node nothing of it will be there. Where the kernel does not say what is cached
    (another user's file), the whole file counts.
    """
    with Beneath(root) as beneath:
        for path in paths:
            with contextlib.suppress(OSError, BootseerError):
                fd = beneath.open(path)
                try:
                    status, ranges = os.fstat(fd), cached_ranges(fd)
                finally:
                    os.close(fd)
                yield _warm_file(path, status, ranges)


def _warm_file(path: bytes, status: os.stat_result, ranges: tuple[Range, ...] | None) -> WarmFile:
    size_bytes = status.st_size
    if ranges is None or size_bytes <= GAP_BYTES:
        ranges = (Range(0, size_bytes),) if size_bytes else ()
    return WarmFile(path, size_bytes, status.st_mtime_ns, ranges)


def _difference(root: str, before: dict[bytes, tuple[Range, ...]]) -> Iterator[WarmFile]:
    """What came into the page cache meanwhile, in the order of directories."""
    for path, status, ranges in _scan(root):
        fresh = without(ranges, before.get(path, ()))
        if fresh:
            yield WarmFile(path, status.st_size, status.st_mtime_ns, fresh)


def _scan(root: str) -> Iterator[tuple[bytes, os.stat_result, tuple[Range, ...]]]:
    """Every regular file below `root` that is partly cached, as far as the kernel tells us."""
    with Beneath(root) as beneath:
        for folder in directories(root):
            try:
                with os.scandir(os.path.join(os.fsencode(root), folder)) as entries:
                    names = sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
            except OSError:
                continue
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    fd = beneath.open(path)
                    try:
                        status, ranges = os.fstat(fd), cached_ranges(fd)
                    finally:
                        os.close(fd)
                    if ranges and stat.S_ISREG(status.st_mode):
                        yield path, status, ranges
