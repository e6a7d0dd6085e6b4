"""Recording of the file ranges that a command reads below a directory while it starts.

Names come from fanotify if that is permitted, else from inotify, else from the page cache. Ranges
are those in the page cache at the end. A `WarmRecording` belongs to one thread.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence

from bootseer.errors import BootseerError, UnsupportedError
from bootseer.linux.processes import wait_readable
from bootseer.prefetch.warm.opens import FanotifyWatch, InotifyWatch, OpenWatch, directories
from bootseer.prefetch.warm.plan import GAP_BYTES
from bootseer.prefetch.warm.record import (
    FILE_COUNT_MAX,
    FileRange,
    WarmFile,
    WarmRecord,
    bounded,
    subtract,
)
from bootseer.prefetch.warm.residency import cached_ranges
from bootseer.store.local.beneath import FilesBeneath

_log = logging.getLogger(__name__)

METHODS = ("auto", "fanotify", "inotify", "residency")
ARM_S = 15.0
"""The longest preparation of a recording, for which the command waits once."""


class WarmRecording:
    """Recording that begins with its construction and ends with `finish`."""

    def __init__(self, root: str, method: str = "auto") -> None:
        """Prepare a recording. Raises: UnsupportedError if `method` cannot be used; OSError."""
        self._root = root
        self._opened: dict[bytes, None] = {}
        self._watch: OpenWatch | None = None
        self._before: dict[bytes, tuple[FileRange, ...]] = {}
        if method != "residency":
            self._watch = _open_watch(root, method)
        if self._watch is None:
            self._before = {path: ranges for path, _, ranges in _scan(root) if ranges}

    @property
    def method(self) -> str:
        """Return the method in use."""
        return self._watch.method if self._watch else "residency"

    def run(self, until: Sequence[int], window_s: float) -> None:
        """Record until a descriptor of `until` is readable, at most `window_s` seconds."""
        deadline_s = time.monotonic() + window_s
        watched = [self._watch.fileno()] if self._watch else []
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            readable = wait_readable([*watched, *until], remaining_s)
            self._note_opened()
            if any(fd in readable for fd in until):
                return

    def _note_opened(self) -> None:
        if self._watch is not None:
            for path in self._watch.opened():
                if len(self._opened) < FILE_COUNT_MAX:
                    self._opened.setdefault(path)

    def finish(self, identity: str, workload: str) -> WarmRecord:
        """End the recording, and return its record."""
        method = self.method
        if self._watch is not None:
            self._note_opened()
            if self._watch.is_lossy:
                _log.warning("the kernel dropped events: the record lacks files")
            self.close()
            files = bounded(_files(self._root, self._opened))
        else:
            files = bounded(_difference(self._root, self._before))
        return WarmRecord(identity, workload, method, 1, time.time_ns(), files)

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._watch is not None:
            self._watch.close()


def _open_watch(root: str, method: str) -> OpenWatch | None:
    """Return a watch by `method`, for "auto" by the best one, or None if no watch is possible."""
    if method in ("auto", "fanotify"):
        try:
            return FanotifyWatch(root)
        except UnsupportedError as error:
            if method == "fanotify":
                raise
            _log.info("%s; inotify is used", error)
    try:
        return InotifyWatch(root, ARM_S)
    except UnsupportedError as error:
        if method == "inotify":
            raise
        _log.info("%s; only the page cache is compared", error)
        return None


def _files(root: str, paths: Sequence[bytes] | dict[bytes, None]) -> Iterator[WarmFile]:
    """Yield the opened files, each with its ranges in the page cache now.

    Ranges that were cached before count as well: the file is used, and a new node will not have
    them. If the kernel does not tell which pages are cached (another user's file), the whole file
    counts.
    """
    with FilesBeneath(root) as beneath:
        for path in paths:
            with contextlib.suppress(OSError, BootseerError):
                fd = beneath.open(path)
                try:
                    status, ranges = os.fstat(fd), cached_ranges(fd)
                finally:
                    os.close(fd)
                yield _warm_file(path, status, ranges)


def _warm_file(
    path: bytes, status: os.stat_result, ranges: tuple[FileRange, ...] | None
) -> WarmFile:
    size_bytes = status.st_size
    if ranges is None or size_bytes <= GAP_BYTES:
        ranges = (FileRange(0, size_bytes),) if size_bytes else ()
    return WarmFile(path, size_bytes, status.st_mtime_ns, ranges)


def _difference(root: str, before: dict[bytes, tuple[FileRange, ...]]) -> Iterator[WarmFile]:
    """Yield the files with ranges that came into the page cache since, in order of directories."""
    for path, status, ranges in _scan(root):
        fresh = subtract(ranges, before.get(path, ()))
        if fresh:
            yield WarmFile(path, status.st_size, status.st_mtime_ns, fresh)


def _scan(root: str) -> Iterator[tuple[bytes, os.stat_result, tuple[FileRange, ...]]]:
    """Yield every regular file below `root` with its cached ranges, if the kernel tells any."""
    with FilesBeneath(root) as beneath:
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
