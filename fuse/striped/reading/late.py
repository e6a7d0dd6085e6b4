"""Watches the reads that are under way, and says which ones fall behind the others.

Owns one thread, which lives while reads last. Thread-safe.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from bootseer.store.backend import Reader
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import LOOK_S, Pace, Progress

_log = logging.getLogger(__name__)

_IDLE_TICKS = 50

Wanted = TypeVar("Wanted")


class Run(Generic[Wanted]):
    """One attempt at a fetch, under way."""

    __slots__ = (
        "attempt",
        "buffer",
        "fetch",
        "has_replicas",
        "is_second",
        "length",
        "number",
        "progress",
        "readers",
        "start_bytes",
        "started_s",
        "was_late",
    )

    def __init__(
        self,
        fetch: Wanted,
        buffer: memoryview,
        number: int,
        reader: Reader,
        *,
        is_second: bool,
        earlier: "Run[Wanted] | None" = None,
    ) -> None:
        """`number`: the reader's. It goes on behind the bytes that `earlier` has brought."""
        self.fetch = fetch
        self.attempt = Attempt()
        self.buffer = buffer
        self.start_bytes = 0
        self.readers = [reader]
        """The readers whose bytes are in the buffer."""
        if earlier is not None:
            start = self.start_bytes = earlier.done_bytes
            self.readers += earlier.readers
            if buffer is not earlier.buffer:
                buffer[:start] = earlier.buffer[:start]
        self.length = len(buffer) - self.start_bytes
        self.number = number
        self.has_replicas = reader.has_replicas
        self.is_second = is_second
        self.started_s = time.monotonic()
        self.progress = Progress(self.started_s)
        self.was_late = False

    @property
    def done_bytes(self) -> int:
        """How much is in the buffer."""
        return self.start_bytes + self.attempt.done_bytes


class LateWatch(Generic[Wanted]):
    """Looks at all runs ten times a second."""

    def __init__(self, on_late: Callable[[Run[Wanted]], object]) -> None:
        """`on_late` is called, in the watch's thread, for a run that is late, until it sets
        `was_late`. It must not wait."""
        self._on_late = on_late
        self._lock = threading.Lock()
        self._runs: set[Run[Wanted]] = set()
        self._pace = Pace()
        self._is_alive = False

    def won(self, run: Run[Wanted]) -> float:
        """`run` brought what was wanted, before any other; returns how long it took, in seconds."""
        seconds = time.monotonic() - run.started_s
        self._pace.note(run.length, seconds, is_second=run.is_second)
        return seconds

    @property
    def has_credit(self) -> bool:
        """Whether one more second request may be made."""
        return self._pace.has_credit

    def spend(self) -> None:
        """Count one more second request."""
        self._pace.spend()

    @contextlib.contextmanager
    def watching(self, run: Run[Wanted]) -> Iterator[None]:
        """Watch `run` while the body lasts."""
        with self._lock:
            self._runs.add(run)
            begin = not self._is_alive
            self._is_alive = True
        if begin:
            threading.Thread(target=self._work, name="stripe-late", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._runs.discard(run)

    def _work(self) -> None:
        idle_ticks = 0
        while True:
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            with self._lock:
                idle_ticks = 0 if self._runs else idle_ticks + 1
                if idle_ticks > _IDLE_TICKS:
                    self._is_alive = False
                    return
                late = [run for run in self._runs if not run.was_late and self._is_late(run, now_s)]
            for run in late:
                try:
                    self._on_late(run)
                except Exception:
                    # Only for speed; the thread looks after other reads, too.
                    _log.exception("a late read is not asked for again")

    def _is_late(self, run: Run[Wanted], now_s: float) -> bool:
        done = run.attempt.done_bytes
        silent_s = run.progress.silent_s(done, now_s)
        return self._pace.is_late(
            run.length, done, now_s - run.started_s, silent_s, run.has_replicas
        )
