"""Parallel, verified reads through one window of memory for a whole mount.

Owns the cache of fetched chunks (whole stripe units for sequential readers, single blocks for
random ones), what is in flight, and the rule which chunk is given up first. Thread-safe. A chunk is
handed out only after its checksums matched; nothing is fetched twice at the same time; every wait
ends by the deadline or when the asking process is interrupted.
"""

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from bootseer.errors import DeadlineError
from bootseer.fuse.striped.chunks import Chunk, Key, OpenFile
from bootseer.fuse.striped.fetching import Fetcher, as_raisable
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.pool import FetchPool, Urgency
from bootseer.fuse.striped.view import FileView, Span
from bootseer.store.backend import Backend

# Enough that every part of a default file (8 units of 4 MiB) is fetched while another such round
# is being read.
MAX_WINDOW_BYTES = 64 * 2**20
_ACTIVE_S = 10.0
_POLL_S = 0.25


def _never() -> bool:
    return False


class StripedReader:
    """All reads of one mount."""

    def __init__(
        self, backend: Backend, budget: MemoryBudget, pool: FetchPool, deadline_s: float
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._pool = pool
        self._deadline_s = deadline_s
        self._fetcher = Fetcher(backend, deadline_s)
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()
        self.fetched_bytes = 0
        budget.add_reclaimer(self._reclaim)

    # ---- open files -----------------------------------------------------------------------

    def open(self, view: FileView) -> OpenFile:
        """Start reading a generation; `close` must follow."""
        with self._lock:
            file = self._files.setdefault(view.identity, OpenFile(view))
            file.open_count += 1
            return file

    def close(self, file: OpenFile) -> bool:
        """Returns whether that was the last one. What is cached stays, until memory is needed."""
        with self._lock:
            file.open_count -= 1
            if file.open_count:
                return False
            self._files.pop(file.view.identity, None)
            return True

    def open_files(self) -> list[OpenFile]:
        """A snapshot of what is open."""
        with self._lock:
            return list(self._files.values())

    # ---- reading --------------------------------------------------------------------------

    def read(
        self,
        file: OpenFile,
        offset: int,
        length: int,
        cancelled: Callable[[], bool] = _never,
    ) -> list[memoryview]:
        """Bytes `[offset, offset + length)`, shorter only at the end of the file, in pieces.

        Raises: CorruptError, DeadlineError, UnavailableError, InterruptedError.
        """
        if file.pinned is not None:
            return [memoryview(file.pinned)[offset : offset + length]]
        end = min(offset + length, file.view.size_bytes)
        if offset >= end:
            return []
        with self._lock:
            now_s = time.monotonic()
            advice = file.streams.observe(offset, end, self._window_max_bytes(now_s), now_s)
        wanted = self._demand(file, offset, end, advice.whole_units, cancelled)
        if advice.ahead_end > advice.ahead_start:
            reached = self._read_ahead(
                file, advice.ahead_start, advice.ahead_end, Urgency.READAHEAD
            )
            if reached < min(advice.ahead_end, file.view.size_bytes):
                with self._lock:
                    file.streams.fell_short(advice.ahead_end, reached)
        return self._collect(file, wanted, offset, end, advice.whole_units, cancelled)

    def read_bytes(self, file: OpenFile, offset: int, length: int) -> bytes:
        """As `read`, in one piece."""
        return b"".join(self.read(file, offset, length))

    def warm(self, file: OpenFile, budget_bytes: int, cancelled: Callable[[], bool]) -> int:
        """Fetch the start of a file, at most `budget_bytes`, below every other urgency.

        Waits for it; returns how many bytes are here.
        """
        end = min(budget_bytes, file.view.size_bytes)
        position = 0
        while position < end and not cancelled():
            step_end = min(position + MAX_WINDOW_BYTES // 2, end)
            reached = self._read_ahead(file, position, step_end, Urgency.WARM)
            self._await_cached(file, position, min(reached, step_end), cancelled)
            if reached < step_end:
                return reached
            position = reached
        return position

    # ---- deciding what to fetch -----------------------------------------------------------

    def _window_max_bytes(self, now_s: float) -> int:
        """The share of one stream: the mount's memory is divided among those that are active."""
        active = sum(f.streams.active_count(now_s - _ACTIVE_S) for f in self._files.values())
        return min(MAX_WINDOW_BYTES, self._budget.limit_bytes * 3 // 4 // max(1, active))

    def _demand(
        self,
        file: OpenFile,
        offset: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> list[Chunk]:
        """The chunks that cover the range, each here or on its way; the caller owns a waiter's
        share in each until `_collect` is done with it."""
        chunks: list[Chunk] = []
        position = offset
        try:
            while position < end:
                found = self._find(file, position)
                if found is None:
                    unit = file.view.unit_at(position)
                    covered = min(end, unit.end) - position
                    if whole_units or covered * 2 >= unit.length:
                        span, is_unit = unit, True
                    else:
                        span, is_unit = file.view.block_at(position), False
                    self._budget.take(span.length, self._deadline_s, cancelled)
                    found = self._start(file, span, is_unit, Urgency.DEMAND, hold=True)
                chunks.append(found)
                position = found.span.end
        except BaseException:
            self._let_go(chunks)
            raise
        return chunks

    def _read_ahead(self, file: OpenFile, start: int, end: int, urgency: Urgency) -> int:
        """Start fetching whole units from `start` while memory lasts; returns how far it came."""
        position = start
        end = min(end, file.view.size_bytes)
        while position < end:
            unit = file.view.unit_at(position)
            with self._lock:
                known = (file.view.identity, unit.start, True) in self._chunks
            if not known:
                if not self._budget.try_take(unit.length):
                    return position
                self._start(file, unit, True, urgency, hold=False)
            position = unit.end
        return position

    def _find(self, file: OpenFile, position: int) -> Chunk | None:
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
                    self._chunks.move_to_end(key)
                    if chunk.urgency is not None and chunk.urgency > Urgency.DEMAND:
                        self._queue(file, chunk, Urgency.DEMAND)
                    return chunk
        return None

    def _start(
        self, file: OpenFile, span: Span, is_unit: bool, urgency: Urgency, *, hold: bool
    ) -> Chunk:
        """Queue the fetch of `span`, whose memory is already taken, unless somebody just has."""
        key = (file.view.identity, span.start, is_unit)
        with self._lock:
            chunk = self._chunks.get(key)
            is_new = chunk is None
            if chunk is None:
                chunk = self._chunks[key] = Chunk(key, span)
                self._queue(file, chunk, urgency)
            if hold:
                chunk.waiters += 1
        if not is_new:
            self._budget.give(span.length)
        return chunk

    def _queue(self, file: OpenFile, chunk: Chunk, urgency: Urgency) -> None:
        chunk.urgency = urgency
        self._pool.submit(urgency, lambda: self._work(file, chunk))

    # ---- fetching (on the pool's threads) -------------------------------------------------

    def _work(self, file: OpenFile, chunk: Chunk) -> None:
        with self._lock:
            # A chunk that became urgent is queued twice: only the first to come does the work.
            if chunk.urgency is None or self._chunks.get(chunk.key) is not chunk:
                return
            chunk.urgency = None
        try:
            data = self._fetcher.fetch(file, chunk.span)
        except BaseException as error:
            # hdfs-native panics with exceptions that are no `Exception`; a waiter must get them.
            with self._lock:
                chunk.error = error
                self._forget(chunk)
        else:
            with self._lock:
                chunk.data = data
                self.fetched_bytes += len(data)
        chunk.ready.set()

    # ---- waiting --------------------------------------------------------------------------

    def _collect(
        self,
        file: OpenFile,
        chunks: list[Chunk],
        offset: int,
        end: int,
        sequential: bool,
        cancelled: Callable[[], bool],
    ) -> list[memoryview]:
        result: list[memoryview] = []
        position = offset
        try:
            for chunk in chunks:
                self._await(file, chunk, cancelled)
                if chunk.data is None:
                    raise as_raisable(chunk.error, file.view.path)
                stop = min(end, chunk.span.end)
                result.append(chunk.data[position - chunk.span.start : stop - chunk.span.start])
                position = stop
        finally:
            self._let_go(chunks)
        if sequential:
            # What a sequential reader has behind it goes first when memory is needed.
            with self._lock:
                for chunk in chunks:
                    if chunk.span.end <= end and chunk.key in self._chunks:
                        self._chunks.move_to_end(chunk.key, last=False)
        return result

    def _await(self, file: OpenFile, chunk: Chunk, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not chunk.ready.wait(min(_POLL_S, self._deadline_s)):
            if cancelled():
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            if time.monotonic() >= deadline:
                with self._lock:
                    was_working = chunk.urgency is None
                    self._forget(chunk)
                if was_working:
                    self._pool.replace_stuck()
                raise DeadlineError(
                    f"cannot read {file.view.path} at {chunk.span.start}: no answer from "
                    f"{self._backend.url} within {self._deadline_s:.0f} s"
                )

    def _await_cached(
        self, file: OpenFile, start: int, end: int, cancelled: Callable[[], bool]
    ) -> None:
        position = start
        while position < end:
            unit = file.view.unit_at(position)
            with self._lock:
                chunk = self._chunks.get((file.view.identity, unit.start, True))
            if chunk is not None:
                self._await(file, chunk, cancelled)
                if chunk.error is not None:
                    raise as_raisable(chunk.error, file.view.path)
            position = unit.end

    # ---- giving up memory -----------------------------------------------------------------

    def _let_go(self, chunks: list[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                chunk.waiters -= 1

    def _forget(self, chunk: Chunk) -> None:
        """Drop a chunk, failed or given up; the lock is held."""
        if self._chunks.get(chunk.key) is chunk:
            del self._chunks[chunk.key]
            self._budget.give(chunk.span.length)

    def _reclaim(self, count: int) -> None:
        with self._lock:
            for chunk in list(self._chunks.values()):
                if count <= 0:
                    return
                if chunk.data is not None and not chunk.waiters:
                    count -= chunk.span.length
                    self._forget(chunk)
