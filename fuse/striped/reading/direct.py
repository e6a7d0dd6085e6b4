"""Reads that go straight into a caller's buffer, many at once.

Owns how many are under way for one call. When a `reading` block is left, however that happens, the
buffers that were handed in are not written to any more. Thread-safe; one block belongs to one
thread.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

from bootseer.errors import DeadlineError
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.reading.fetch import Fetch
from bootseer.fuse.striped.reading.fetching import Fetcher, as_raisable
from bootseer.fuse.striped.reading.pool import FetchPool, Urgency
from bootseer.fuse.striped.view import Span

_POLL_S = 0.25
# Enough that the pool always has fetches from several sources to choose from.
_AHEAD_PER_THREAD = 4


class _Pending:
    """A fetch, and when it is done."""

    def __init__(self, file: OpenFile, span: Span, target: memoryview) -> None:
        self.done = threading.Event()
        self.fetch = Fetch(file, span, lambda _: self.done.set(), target=target)


class DirectReads:
    """What one mount or copy reads past the window."""

    def __init__(self, fetcher: Fetcher, pool: FetchPool, patience_s: float, url: str) -> None:
        self._fetcher = fetcher
        self._pool = pool
        self._patience_s = patience_s
        self._url = url

    @contextlib.contextmanager
    def reading(self, file: OpenFile, cancelled: Callable[[], bool]) -> Iterator["DirectReading"]:
        """Fetches of one call; leaving the block waits for all of them, or gives them up."""
        reading = DirectReading(self, file, cancelled)
        try:
            yield reading
            reading.finish()
        finally:
            reading.give_up()

    def start(self, file: OpenFile, span: Span, target: memoryview) -> _Pending:
        """Queue the fetch of `span` into `target`."""
        pending = _Pending(file, span, target)
        self._fetcher.want(pending.fetch)
        source = self._fetcher.source_of(file, span)
        # Not as a demand: those are served in their order, these evenly over the sources.
        self._pool.submit(Urgency.READAHEAD, lambda: self._fetcher.run(pending.fetch), source)
        return pending

    def wait(self, pending: _Pending, cancelled: Callable[[], bool]) -> None:
        """Return when the bytes are there. Raises what the fetch failed with, DeadlineError,
        InterruptedError."""
        silence = self._fetcher.silence()
        fetch = pending.fetch
        path = fetch.file.view.path
        while not pending.done.wait(min(_POLL_S, self._patience_s)):
            if cancelled():
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            if silence.of(fetch) >= self._patience_s:
                self._fetcher.abandon(fetch)
                if fetch.outage is not None:
                    raise as_raisable(fetch.outage, path)
                raise DeadlineError(
                    f"cannot read {path} at {fetch.span.start}: no answer from "
                    f"{self._url} within {self._patience_s:.0f} s"
                )
        if fetch.error is not None:
            raise as_raisable(fetch.error, path)

    @property
    def pending_max(self) -> int:
        """How many fetches of one call are queued at once."""
        return _AHEAD_PER_THREAD * self._pool.thread_count


class DirectReading:
    """The fetches of one call."""

    def __init__(self, reads: DirectReads, file: OpenFile, cancelled: Callable[[], bool]) -> None:
        self._reads = reads
        self._file = file
        self._cancelled = cancelled
        self._pending: deque[_Pending] = deque()

    def fetch(self, span: Span, target: memoryview) -> None:
        """Fetch `span` into `target`; waits while too many are under way."""
        if len(self._pending) >= self._reads.pending_max:
            self._reads.wait(self._pending[0], self._cancelled)
            self._pending.popleft()
        self._pending.append(self._reads.start(self._file, span, target))

    def finish(self) -> None:
        """Wait for all. Raises as `DirectReads.wait`."""
        while self._pending:
            self._reads.wait(self._pending[0], self._cancelled)
            self._pending.popleft()

    def give_up(self) -> None:
        """Stop what has not ended."""
        for pending in self._pending:
            pending.fetch.give_up()
        self._pending.clear()
