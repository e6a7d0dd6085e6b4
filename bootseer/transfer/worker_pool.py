"""A pool of worker threads, and what becomes of a thread that hangs in a read.

Owns the threads and their counts. A thread that hangs cannot be ended, only abandoned: its pool
starts another in its place, up to a bound, and takes it back if it ever returns. All methods but
`join` need the executor's lock.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable

from msgspec import Struct

logger = logging.getLogger(__name__)


class Worker(Struct, eq=False):
    """One thread of a pool."""

    pool: "WorkerPool"
    thread: threading.Thread | None = None
    is_abandoned: bool = False


class WorkerPool:
    """Up to `size` working threads, started when first needed, and up to `spare_count` abandoned
    ones beside them."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        spare_count: int,
        lock: threading.Lock,
        run: Callable[[Worker], None],
    ) -> None:
        self._name = name
        self._size = size
        self._spare_count = spare_count
        self._run = run
        self._idle = threading.Condition(lock)
        self._idle_count = 0
        self._workers: set[Worker] = set()
        self._abandoned_count = 0
        self._numbers = itertools.count(1)
        self.stalled_since_s: float | None = None
        """Since when every thread hangs and none may be added; None: the pool works."""

    def sleep(self) -> None:
        """Idle until woken; releases the lock meanwhile. Called by a worker of this pool."""
        self._idle_count += 1
        self._idle.wait()

    def wake_idle(self) -> bool:
        """Wake one idle thread; False: none is idle.

        The thread counts as busy from here on, so that two tasks never rely on the same one.
        """
        if self._idle_count == 0:
            return False
        self._idle_count -= 1
        self._idle.notify()
        return True

    def wake_all(self) -> None:
        """Wake every idle thread, to let it end."""
        self._idle_count = 0
        self._idle.notify_all()

    def spawn(self) -> bool:
        """Start one more thread; False: the pool is full, or the system refuses."""
        if self._working_count >= self._size:
            return False
        if len(self._workers) >= self._size + self._spare_count:
            return False
        worker = Worker(self)
        worker.thread = threading.Thread(
            target=self._live,
            args=(worker,),
            name=f"bootseer-{self._name}-{next(self._numbers)}",
            daemon=True,
        )
        self._workers.add(worker)
        try:
            worker.thread.start()
        except RuntimeError as error:
            self._workers.discard(worker)
            logger.warning("cannot start a %s thread: %s", self._name, error)
            self._note_stall()
            return False
        self.stalled_since_s = None
        return True

    def abandon(self, worker: Worker) -> None:
        """Count `worker`, which hangs, no longer as working."""
        if not worker.is_abandoned:
            worker.is_abandoned = True
            self._abandoned_count += 1
            self._note_stall()

    def rejoin(self, worker: Worker) -> bool:
        """`worker` came back; False: it is not needed any more and must end."""
        if not worker.is_abandoned:
            return True
        worker.is_abandoned = False
        self._abandoned_count -= 1
        self.stalled_since_s = None
        # It is counted as working again here, hence the strict comparison.
        return self._working_count <= self._size

    def join(self, deadline_s: float) -> int:
        """Wait for the threads to end, until the monotonic `deadline_s`; how many have not.

        Without the lock. A thread that joins its own pool does not wait for itself.
        """
        threads = [worker.thread for worker in list(self._workers)]
        left_count = 0
        for thread in threads:
            if thread is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline_s - time.monotonic()))
            left_count += thread.is_alive()
        return left_count

    @property
    def _working_count(self) -> int:
        return len(self._workers) - self._abandoned_count

    def _note_stall(self) -> None:
        full = len(self._workers) >= self._size + self._spare_count
        if self._working_count == 0 and (full or not self._workers):
            self.stalled_since_s = time.monotonic()

    def _live(self, worker: Worker) -> None:
        try:
            self._run(worker)
        finally:
            with self._idle:
                self._workers.discard(worker)
                if worker.is_abandoned:
                    self._abandoned_count -= 1
