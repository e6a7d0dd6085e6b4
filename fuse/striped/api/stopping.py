"""How work on many threads comes to an early end: at its next report of progress.

Owns nothing else. Thread-safe.
"""

import errno
import os
import threading
from collections.abc import Callable


class Stoppable:
    """`on_progress` that raises InterruptedError once `stop` was called."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Interrupts every thread that reports progress from here on. Idempotent."""
        self._is_stopped.set()

    def __call__(self, count: int) -> None:
        if self._is_stopped.is_set():
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        self._on_progress(count)
