"""The worker processes of an extraction: starts them, hands out tasks, learns what came of them.

Alone owns these processes: they are started while the caller still plans, have nothing of its
descriptors but what they need, and are gone when `close` returns. A `Pool` belongs to one thread;
a second one, of its own, brings what tasks need.
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
from bootseer.blob.extract import process as worker
from bootseer.errors import UnavailableError
from bootseer.linux import processes

# Tasks that are ready or under way, for each worker: enough that it never waits for the next.
_AHEAD = 3
_FEEDER_FAILED = 2**32 - 1
_READ_BYTES = 1 << 16
# Above all that a worker's own may be.
_HIGH_FD = 64
# The allocator of glibc keeps the memory of a frame for the next one, instead of handing it back to
# the kernel, which would have to clear its pages again (mallopt(3)).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
FILES_MAX = _HIGH_FD - worker.FILES_FD
_STARTER = (
    "import sys; sys.path += sys.argv[1:]; from bootseer.blob.extract import process; "
    "process.main()"
)

_log = logging.getLogger(__name__)

OnReport = Callable[[int, dict[str, Any]], None]


class Pool:
    """Some worker processes."""

    def __init__(self, count: int, root_fd: int, files: Sequence[int]) -> None:
        """Start `count` of them, which load what they need. `files`: descriptors that they get,
        too, at most FILES_MAX. Raises: OSError."""
        self.count = count
        self._pids: dict[int, int] = {}
        self._feeder: threading.Thread | None = None
        self._feeder_error: BaseException | None = None
        self._is_stopped = False
        # The number of a worker, for each task that it has room for.
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
                # Held by the worker alone, so that it ends with us.
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
        """Carry out tasks, each after `bring` has brought what it needs; `on_report` is called
        for each with what the worker says. Each worker has a strand of its own, and at its end
        goes on with the longest of the others; of one strand all take. The columns have been
        written.

        Raises: what `bring` and `on_report` raise; UnavailableError when a worker ends early.
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
                # Of another worker's the last, as far as can be from what that one does.
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
        """Kill the workers. Nothing is written any more when this returns, unless a worker waits
        for a file system that does not answer: a warning says so, and nobody waits for it.
        Idempotent."""
        self._is_stopped = True
        self._room.put(0)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends_s = time.monotonic() + processes.KILLED_S
        for pid in self._pids:
            if processes.reap(pid, max(0.0, ends_s - time.monotonic())) is None:
                _log.warning(
                    "the process %d, which writes files, was killed and has not ended: its file "
                    "system does not answer",
                    pid,
                )
        self._pids.clear()
        if self._feeder is not None:
            # What it waits for has a deadline.
            self._feeder.join()
        for fd in self._open:
            os.close(fd)
        self._open.clear()


def _killed() -> UnavailableError:
    return UnavailableError("a process that writes files was killed")


def _spawn(given: Iterable[int]) -> int:
    """A worker that has these descriptors, from TASKS_FD on. Its process id. Raises: OSError."""
    own = Path(worker.__file__)
    packages = {
        str(Path(module.__file__ or "").parents[1]) for module in (bootseer, zstandard, blake3)
    }
    if not own.is_file() or not sys.executable:
        raise FileNotFoundError("the interpreter's programs are no files")
    # Isolated and without site: nothing of the caller's directory or variables is loaded.
    command = [sys.executable, "-I", "-S", "-c", _STARTER, *sorted(packages)]
    high = []
    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in given]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high, worker.TASKS_FD)),
        ]
        # A process group of its own, so that an interrupt reaches its parent alone.
        return os.posix_spawn(
            sys.executable, command, os.environ | _ALLOCATOR, file_actions=actions, setpgroup=0
        )
    finally:
        for fd in high:
            os.close(fd)
