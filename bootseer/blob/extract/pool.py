"""Pool of the worker processes of an extraction: starts them, sends tasks, receives their reports.

The processes are started while the caller still plans, inherit only the descriptors that they need,
and have ended when `close` returns. A `WorkerPool` belongs to one thread; a second thread brings
the bytes that tasks need.
"""

import contextlib
import fcntl
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import blake3
import zstandard

import bootseer
from bootseer.base.documents import from_line
from bootseer.blob.extract import worker
from bootseer.errors import UnavailableError
from bootseer.linux import processes

# Tasks per worker that are queued or running, so that no worker waits for its next task.
_AHEAD = 3
_FEEDER_FAILED = 2**32 - 1
_READ_BYTES = 1 << 16
# Larger than any descriptor number of a worker.
_HIGH_FD = 64
# With these, glibc's allocator keeps the memory of a frame for the next one instead of returning it
# to the kernel, which would have to clear its pages again (mallopt(3)).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
FILES_MAX = _HIGH_FD - worker.FILES_FD
_STARTER = (
    "import sys; sys.path += sys.argv[1:]; from bootseer.blob.extract import worker; worker.main()"
)

_log = logging.getLogger(__name__)

OnReport = Callable[[int, dict[str, Any]], None]


class WorkerPool:
    """Worker processes of one extraction."""

    def __init__(self, count: int, root_fd: int, files: Sequence[int]) -> None:
        """Start `count` workers, which import their modules at once.

        They inherit `root_fd` and the descriptors `files`, at most FILES_MAX. Raises: OSError.
        """
        self.count = count
        self._pids: dict[int, int] = {}
        self._feeder: threading.Thread | None = None
        self._feeder_error: BaseException | None = None
        self._is_stopped = False
        # Contains the index of a worker once per further task that the worker can take.
        self._room: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open: list[int] = []
        self._tasks: list[int] = []
        try:
            self.columns_fd = self._own(os.memfd_create("bootseer-extract-plan"))
            self.stored_fd = self._own(os.memfd_create("bootseer-extract-blob"))
            self.records_fd = self._own(os.memfd_create("bootseer-extract-records"))
            self._results, self._reports = map(self._own, os.pipe2(os.O_CLOEXEC))
            memories = (self.columns_fd, self.stored_fd, self.records_fd)
            given = (self._reports, *memories, root_fd, *files)
            for _ in range(count):
                tasks, end = map(self._own, os.pipe2(os.O_CLOEXEC))
                self._tasks.append(end)
                pid = _spawn((tasks, *given))
                # Only the worker keeps the reading end, so that its pipe ends when we end.
                self._disown(tasks)
                self._pids[pid] = -1
                self._pids[pid] = self._own(os.pidfd_open(pid))
        except BaseException:
            self.close()
            raise

    def _own(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def _disown(self, fd: int) -> None:
        self._open.remove(fd)
        os.close(fd)

    def run(
        self,
        strands: Sequence[Iterable[int]],
        bring: Callable[[int], None],
        on_report: OnReport,
    ) -> None:
        """Run all tasks of `strands`; the columns file must be complete.

        `bring(task)` is called before a task is sent, `on_report(task, report)` after it was done.
        With several strands each worker has its own, and afterwards takes tasks from the end of the
        longest other strand; a single strand is shared by all workers.

        Raises: as `bring` and `on_report`; UnavailableError if a worker ends early.
        """
        remaining = [deque(strand) for strand in strands]
        count = sum(map(len, remaining))
        for _ in range(_AHEAD):
            for worker_number in range(len(self._tasks)):
                self._room.put(worker_number)
        workers: dict[int, int] = {}
        self._feeder = threading.Thread(
            target=self._feed, args=(remaining, workers, bring), name="blob-extract", daemon=True
        )
        self._feeder.start()
        for task, report in self._read_reports():
            if task == _FEEDER_FAILED:
                assert self._feeder_error is not None
                raise self._feeder_error
            on_report(task, report)
            self._room.put(workers.pop(task))
            count -= 1
            if not count:
                return

    def _feed(
        self, strands: list[deque[int]], workers: dict[int, int], bring: Callable[[int], None]
    ) -> None:
        try:
            while any(strands):
                number = self._room.get()
                if self._is_stopped:
                    return
                own = strands[number % len(strands)]
                # Take the last task of another strand, the farthest from that worker's next one.
                task = own.popleft() if own else max(strands, key=len).pop()
                bring(task)
                workers[task] = number
                try:
                    os.write(self._tasks[number], worker.TASK.pack(task))
                except BrokenPipeError:
                    raise _killed() from None
        except BaseException as error:
            self._feeder_error = error
            os.write(self._reports, worker.RESULT.pack(0, _FEEDER_FAILED))

    def _read_reports(self) -> Iterator[tuple[int, dict[str, Any]]]:
        poller = select.poll()
        poller.register(self._results, select.POLLIN)
        for pidfd in self._pids.values():
            poller.register(pidfd, select.POLLIN)
        data = b""
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._results not in ready:
                raise _killed()
            data += os.read(self._results, _READ_BYTES)
            while len(data) >= worker.RESULT.size:
                length, task = worker.RESULT.unpack_from(data)
                end = worker.RESULT.size + length
                if len(data) < end:
                    break
                body, data = data[worker.RESULT.size : end], data[end:]
                yield task, from_line(body, dict[str, Any]) if body else {}

    def close(self) -> None:
        """Kill the workers and wait for their end. Idempotent.

        A worker that hangs in a file system which does not answer is left behind with a warning.
        """
        self._is_stopped = True
        self._room.put(0)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends_s = time.monotonic() + processes.KILLED_S
        for pid in self._pids:
            if processes.reap(pid, max(0.0, ends_s - time.monotonic())) is None:
                _log.warning(
                    "the worker process %d was killed and has not ended: the file system that it "
                    "writes to does not answer",
                    pid,
                )
        self._pids.clear()
        if self._feeder is not None:
            # The reads of the thread have a deadline.
            self._feeder.join()
        for fd in self._open:
            os.close(fd)
        self._open.clear()


def _killed() -> UnavailableError:
    return UnavailableError("a worker process of the extraction was killed")


def _spawn(given: Iterable[int]) -> int:
    """Start a worker with these descriptors, from TASKS_FD on, and return its process id.

    Raises: OSError.
    """
    own = Path(worker.__file__)
    packages = {
        str(Path(module.__file__ or "").parents[1]) for module in (bootseer, zstandard, blake3)
    }
    if not own.is_file() or not sys.executable:
        raise FileNotFoundError("Python's modules are not files")
    # Isolated mode without site: no modules of the caller's directory or variables are imported.
    command = [sys.executable, "-I", "-S", "-c", _STARTER, *sorted(packages)]
    high = []
    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in given]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high, worker.TASKS_FD)),
        ]
        # A new process group, so that a keyboard interrupt reaches the parent only.
        return os.posix_spawn(
            sys.executable, command, os.environ | _ALLOCATOR, file_actions=actions, setpgroup=0
        )
    finally:
        for fd in high:
            os.close(fd)
