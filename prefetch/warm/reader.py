"""Reading of planned ranges into the page cache: several files at once, each in ascending order.

Each thread reads one window of at most WINDOW_BYTES at a time, so that page faults of the start do
not wait behind more than that at the storage.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.prefetch.warm.plan import WarmJob, WarmPlan
from bootseer.prefetch.warm.record import FileRange
from bootseer.prefetch.warm.residency import is_cached, is_residency_known
from bootseer.store.local.beneath import FilesBeneath

_log = logging.getLogger(__name__)

WINDOW_BYTES = 2**20
"""Bytes of a window: one request to a stripe of Lustre, or eight requests of 128 KiB elsewhere."""

_ADVICE_BYTES_MIN = 128 * 1024
"""Least bytes for which an advice takes effect. The kernel cuts each advice to the device's
read-ahead, but not below this default (force_page_cache_readahead)."""

DEFAULT_THREAD_COUNT = 4
_POLL_S = 0.05


class WarmFigures(Struct):
    """Counts of a read-ahead."""

    read_bytes: int = 0
    cached_bytes: int = 0
    """Bytes that were in the page cache already."""
    file_count: int = 0
    """Parts of files that were read."""
    stale_count: int = 0
    """Files that were changed or removed since the record."""
    stale_bytes: int = 0
    failed_count: int = 0
    """Files that could not be opened or read."""
    seconds: float = 0.0
    is_complete: bool = False


class _ReadAheadThreads:
    def __init__(self, root: str, plan: WarmPlan, stop: Callable[[], bool]) -> None:
        self._root = root
        self._stop = stop
        self._advice_bytes = _advice_bytes(root)
        self._lock = threading.Lock()
        self._jobs: Iterator[WarmJob] = iter(plan.jobs)
        self._stale: set[bytes] = set()
        self._running_count = 0
        self.on_bytes: Callable[[int], None] = lambda count: None
        self.figures = WarmFigures()
        self.ended = threading.Event()

    def start(self, thread_count: int) -> None:
        self._running_count = thread_count
        for number in range(thread_count):
            # Daemons, because a thread that hangs in a dead file system must not keep the process.
            threading.Thread(target=self._run, name=f"warm-{number}", daemon=True).start()

    def _run(self) -> None:
        try:
            scratch = memoryview(bytearray(WINDOW_BYTES))
            with FilesBeneath(self._root) as beneath:
                while not self._stop():
                    with self._lock:
                        job = next(self._jobs, None)
                    if job is None:
                        return
                    self._do(beneath, job, scratch)
        except Exception:
            # The other threads go on.
            _log.exception("a thread of the read-ahead ended")
        finally:
            with self._lock:
                self._running_count -= 1
                if not self._running_count:
                    self.figures.is_complete = next(self._jobs, None) is None and not self._stop()
                    self.ended.set()

    def _do(self, beneath: FilesBeneath, job: WarmJob, scratch: memoryview) -> None:
        file = job.file
        try:
            status = beneath.stat(file.path)
            if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise FileNotFoundError
            fd = beneath.open(file.path)
        except (FileNotFoundError, NotADirectoryError):
            with self._lock:
                self.figures.stale_bytes += sum(found.length for found in job.ranges)
                if file.path not in self._stale:
                    self._stale.add(file.path)
                    self.figures.stale_count += 1
            return
        except OSError as error:
            self._failed(job, error)
            return
        try:
            for found in job.ranges:
                self._read(fd, found, scratch)
        except OSError as error:
            self._failed(job, error)
        else:
            with self._lock:
                self.figures.file_count += 1
        finally:
            os.close(fd)

    def _failed(self, job: WarmJob, error: OSError) -> None:
        _log.info("cannot read %s ahead: %s", os.fsdecode(job.file.path), error.strerror)
        with self._lock:
            self.figures.failed_count += 1

    def _read(self, fd: int, found: FileRange, scratch: memoryview) -> None:
        for offset in range(found.offset, found.end, WINDOW_BYTES):
            if self._stop():
                return
            window = FileRange(offset, min(WINDOW_BYTES, found.end - offset))
            is_there = is_residency_known(fd) and is_cached(fd, window)
            if not is_there:
                # The advice requests all of the window at once, however little the file system
                # reads ahead; the read below waits for it, or reads itself if there was no effect.
                with contextlib.suppress(OSError):
                    for at in range(window.offset, window.end, self._advice_bytes):
                        length = min(self._advice_bytes, window.end - at)
                        os.posix_fadvise(fd, at, length, os.POSIX_FADV_WILLNEED)
                if not _read_fully(fd, window, scratch):
                    return
            with self._lock:
                if is_there:
                    self.figures.cached_bytes += window.length
                else:
                    self.figures.read_bytes += window.length
                self.on_bytes(window.length)


def _advice_bytes(root: str) -> int:
    """Return the number of bytes that one advice may cover on the file system of `root`."""
    try:
        device = os.stat(root).st_dev
        folder = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
        size_bytes = int((folder / "read_ahead_kb").read_text()) * 1024
    except (OSError, ValueError):
        return _ADVICE_BYTES_MIN  # Overlayfs and others have no device of their own.
    return min(max(size_bytes, _ADVICE_BYTES_MIN), WINDOW_BYTES)


def _read_fully(fd: int, window: FileRange, scratch: memoryview) -> bool:
    done = 0
    while done < window.length:
        count = os.preadv(fd, [scratch[done : window.length]], window.offset + done)
        if not count:
            return False
        done += count
    return True


def read_ahead(
    root: str,
    plan: WarmPlan,
    *,
    thread_count: int = DEFAULT_THREAD_COUNT,
    deadline_s: float,
    stop: Callable[[], bool] = lambda: False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> WarmFigures:
    """Read the plan's files below `root`, until `stop` returns True or `deadline_s` have passed.

    Several threads call `stop` and `on_bytes`. Errors of files are counted and not raised. Threads
    that hang at the deadline are left behind.
    """
    started_s = time.monotonic()

    def is_over() -> bool:
        return time.monotonic() - started_s > deadline_s or stop()

    work = _ReadAheadThreads(root, plan, is_over)
    work.on_bytes = on_bytes
    work.start(max(1, min(thread_count, len(plan.jobs))))
    while not work.ended.wait(_POLL_S) and not is_over():
        pass
    # A thread that does not hang ends after its window.
    work.ended.wait(1.0)
    work.figures.seconds = time.monotonic() - started_s
    return work.figures
