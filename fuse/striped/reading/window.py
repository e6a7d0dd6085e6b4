"""The chunks of file contents that a mount holds in memory, and those on their way.

Owns what is cached, what is in flight, and which chunk is given up first. Thread-safe. Nothing is
fetched twice at the same time; a chunk is handed out only after its checksums matched; every wait
ends by the deadline or when the asking process is interrupted.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from bootseer.errors import DeadlineError
from bootseer.fuse.striped.reading.buffers import BufferPool
from bootseer.fuse.striped.reading.chunks import Chunk, Key, OpenFile
from bootseer.fuse.striped.reading.fetch import Fetch
from bootseer.fuse.striped.reading.fetching import Fetcher, as_raisable
from bootseer.fuse.striped.reading.pool import FetchPool, Urgency
from bootseer.fuse.striped.view import Span

_POLL_S = 0.25
# A large file is read through few buffers, used again and again: to touch new memory costs more
# than any other step of a read (0.6 to 0.9 CPU s/GiB). The last few units stay for requests that
# were overtaken by later ones.
_PASSED_MAX = 4


class Window:
    """All chunks of one mount."""

    def __init__(
        self, fetcher: Fetcher, buffers: BufferPool, pool: FetchPool, patience_s: float, url: str
    ) -> None:
        self._fetcher = fetcher
        self._buffers = buffers
        self._pool = pool
        self._patience_s = patience_s
        self._url = url
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()

    # ---- finding and fetching -------------------------------------------------------------

    def demand(
        self,
        file: OpenFile,
        position: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> Chunk:
        """The chunk that holds `position` of a read up to `end`, here or on its way; held for the
        caller until `let_go`. Raises as taking memory does."""
        found = self.find(file, position)
        if found is not None:
            return found
        unit = file.view.unit_at(position)
        covered = min(end, unit.end) - position
        if whole_units or covered * 2 >= unit.length:
            span, is_unit = unit, True
        else:
            span, is_unit = file.view.block_at(position), False
        buffer = self._buffers.take(span.length, self._patience_s, cancelled)
        return self._start(file, span, is_unit, Urgency.DEMAND, buffer, hold=True)

    def read_ahead(self, file: OpenFile, start: int, end: int, urgency: Urgency) -> int:
        """Start fetching whole units from `start` while memory lasts; returns how far it came."""
        position = start
        end = min(end, file.view.size_bytes)
        while position < end:
            unit = file.view.unit_at(position)
            if not self.has(file, unit):
                buffer = self._buffers.try_take(unit.length)
                if buffer is None:
                    return position
                self._start(file, unit, True, urgency, buffer, hold=False)
            position = unit.end
        return position

    def find(self, file: OpenFile, position: int) -> Chunk | None:
        """The chunk that holds `position`, held for the caller and made urgent, if there is one."""
        identity = file.view.identity
        with self._lock:
            for key in (
                (identity, file.view.unit_at(position).start, True),
                (identity, file.view.block_at(position).start, False),
            ):
                chunk = self._chunks.get(key)
                if chunk is not None:
                    chunk.waiters += 1
                    # Units stay in the order in which they were fetched: what was read ahead and is
                    # still to come must not go before what somebody has just read.
                    if not chunk.key[2]:
                        self._chunks.move_to_end(key)
                    if chunk.urgency is not None and chunk.urgency > Urgency.DEMAND:
                        self._queue(file, chunk, Urgency.DEMAND)
                    return chunk
        return None

    def has(self, file: OpenFile, unit: Span) -> bool:
        """Whether a whole unit is here or on its way."""
        with self._lock:
            return (file.view.identity, unit.start, True) in self._chunks

    def _start(
        self,
        file: OpenFile,
        span: Span,
        is_unit: bool,
        urgency: Urgency,
        buffer: memoryview,
        *,
        hold: bool,
    ) -> Chunk:
        """Queues the fetch of `span` into `buffer`, unless another thread just has."""
        key = (file.view.identity, span.start, is_unit)
        made: Fetch | None = None
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = Chunk(key, span)
                arrived = chunk
                made = Fetch(file, span, lambda f: self._arrived(arrived, f), buffer=buffer)
                chunk.fetch = made
                self._queue(file, chunk, urgency)
            if hold:
                chunk.waiters += 1
        if made is not None:
            self._fetcher.want(made)
        return chunk

    def _queue(self, file: OpenFile, chunk: Chunk, urgency: Urgency) -> None:
        chunk.urgency = urgency
        source = self._fetcher.source_of(file, chunk.span)
        self._pool.submit(urgency, lambda: self._work(chunk), source)

    def _work(self, chunk: Chunk) -> None:
        """Carry out a fetch, on a thread of the pool."""
        with self._lock:
            # A chunk that became urgent is queued twice: only the first to come does the work.
            if chunk.urgency is None or self._chunks.get(chunk.key) is not chunk:
                return
            chunk.urgency = None
            fetch = chunk.fetch
        if fetch is not None:
            self._fetcher.run(fetch)

    def _arrived(self, chunk: Chunk, fetch: Fetch) -> None:
        with self._lock:
            chunk.fetch = None
            chunk.data = fetch.data
            chunk.error = fetch.error
            if fetch.error is not None:
                self._forget(chunk)
        chunk.ready.set()

    def starves_others(self, file: OpenFile, chunk: Chunk) -> bool:
        """Whether `chunk` is not here yet while a source has brought all that it was asked for
        behind it, and so has nothing to do."""
        if chunk.data is not None:
            return False
        identity, start, _ = chunk.key
        with self._lock:
            later = [c for c in self._chunks.values() if c.key[0] == identity and c.key[1] > start]
        busy = {self._fetcher.source_of(file, c.span) for c in [chunk, *later] if c.data is None}
        return any(
            c.data is not None and self._fetcher.source_of(file, c.span) not in busy for c in later
        )

    # ---- waiting --------------------------------------------------------------------------

    def wait(self, file: OpenFile, chunk: Chunk, cancelled: Callable[[], bool]) -> None:
        """Return when the chunk is here, or has failed. Raises: DeadlineError, InterruptedError."""
        silence = self._fetcher.silence()
        while not chunk.ready.wait(min(_POLL_S, self._patience_s)):
            if cancelled():
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            if silence.of(chunk.fetch) >= self._patience_s:
                with self._lock:
                    fetch, chunk.fetch = chunk.fetch, None
                    self._forget(chunk)
                if fetch is not None:
                    self._fetcher.abandon(fetch)
                    if fetch.outage is not None:
                        raise as_raisable(fetch.outage, file.view.path)
                raise DeadlineError(
                    f"cannot read {file.view.path} at {chunk.span.start}: no answer from "
                    f"{self._url} within {self._patience_s:.0f} s"
                )

    def wait_for_units(
        self, file: OpenFile, start: int, end: int, cancelled: Callable[[], bool]
    ) -> BaseException | None:
        """Wait for those units that are here or on their way; returns what one of them failed
        with. Raises as `wait`."""
        position = start
        while position < end:
            unit = file.view.unit_at(position)
            with self._lock:
                chunk = self._chunks.get((file.view.identity, unit.start, True))
            if chunk is not None:
                self.wait(file, chunk, cancelled)
                if chunk.error is not None:
                    return chunk.error
            position = unit.end
        return None

    # ---- giving up memory -----------------------------------------------------------------

    def let_go(self, chunks: list[Chunk]) -> None:
        """The caller needs the chunks that it holds no more."""
        with self._lock:
            for chunk in chunks:
                chunk.waiters -= 1

    def passed(self, file: OpenFile, chunks: list[Chunk], end: int, *, is_only: bool) -> None:
        """A sequential reader has come to `end`: what it leaves behind goes first when memory is
        needed; at once where it `is_only` reader of a file that is too large to stay anyway."""
        is_large = file.view.size_bytes > self._buffers.limit_bytes
        with self._lock:
            for chunk in chunks:
                if chunk.span.end <= end and chunk.key in self._chunks:
                    self._chunks.move_to_end(chunk.key, last=False)
                    if is_only and is_large:
                        file.passed.append(chunk.key)
            while len(file.passed) > _PASSED_MAX:
                oldest = self._chunks.get(file.passed.popleft())
                if oldest is not None and oldest.data is not None and not oldest.waiters:
                    self._forget(oldest)

    def reclaim(self, count: int) -> None:
        """Gives up about `count` bytes that no reader waits for."""
        with self._lock:
            for chunk in list(self._chunks.values()):
                if count <= 0:
                    return
                if chunk.data is not None and not chunk.waiters:
                    count -= chunk.span.length
                    self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        """Drop a chunk, failed or given up; the lock is held. Its memory is free when nobody
        looks at it any more."""
        if self._chunks.get(chunk.key) is chunk:
            del self._chunks[chunk.key]
            if chunk.data is not None:
                self._buffers.give_up(chunk.data)
