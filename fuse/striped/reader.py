"""Parallel, verified reads through one window of memory for a whole mount.

Owns the cache of fetched chunks (whole stripe units for sequential readers, single blocks for
random ones), what is in flight, and the rule which chunk is given up first. Thread-safe. A chunk is
handed out only after its checksums matched; nothing is fetched twice at the same time; every wait
ends by the deadline or when the asking process is interrupted.
"""

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.pool import FetchPool, Urgency
from bootseer.fuse.striped.streams import StreamTracker
from bootseer.fuse.striped.view import FileView, Span
from bootseer.store.backend import Backend

_log = logging.getLogger(__name__)

# Enough that every part of a default file (8 units of 4 MiB) is fetched while another such round
# is being read.
MAX_WINDOW_BYTES = 64 * 2**20
_ACTIVE_S = 10.0
_POLL_S = 0.25
_RETRY_PAUSES_S = (0.1, 0.5)

_Key = tuple[str, int, bool]


def _never() -> bool:
    return False


class _Chunk:
    """A run of bytes that is here, or on its way."""

    __slots__ = ("data", "error", "key", "ready", "span", "urgency", "waiters")

    def __init__(self, key: _Key, span: Span) -> None:
        self.key = key
        self.span = span
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.urgency: Urgency | None = None
        """How urgently it is queued; None once a thread works on it."""
        self.waiters = 0


class OpenFile:
    """One generation of a file that somebody has open (or warms), and who reads where in it."""

    __slots__ = ("open_count", "pinned", "streams", "view")

    def __init__(self, view: FileView) -> None:
        self.view = view
        self.streams = StreamTracker()
        self.open_count = 0
        self.pinned: bytes | None = None
        """The whole content, once the stored file is about to go away under its readers."""


class StripedReader:
    """All reads of one mount."""

    def __init__(
        self, backend: Backend, budget: MemoryBudget, pool: FetchPool, deadline_s: float
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._pool = pool
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        self.fetched_bytes = 0
        budget.set_reclaimer(self._reclaim)

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
    ) -> list[_Chunk]:
        """The chunks that cover the range, each here or on its way; the caller owns a waiter's
        share in each until `_collect` is done with it."""
        chunks: list[_Chunk] = []
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

    def _find(self, file: OpenFile, position: int) -> _Chunk | None:
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
    ) -> _Chunk:
        """Queue the fetch of `span`, whose memory is already taken, unless somebody just has."""
        key = (file.view.identity, span.start, is_unit)
        with self._lock:
            chunk = self._chunks.get(key)
            is_new = chunk is None
            if chunk is None:
                chunk = self._chunks[key] = _Chunk(key, span)
                self._queue(file, chunk, urgency)
            if hold:
                chunk.waiters += 1
        if not is_new:
            self._budget.give(span.length)
        return chunk

    def _queue(self, file: OpenFile, chunk: _Chunk, urgency: Urgency) -> None:
        chunk.urgency = urgency
        self._pool.submit(urgency, lambda: self._work(file, chunk))

    # ---- fetching (on the pool's threads) -------------------------------------------------

    def _work(self, file: OpenFile, chunk: _Chunk) -> None:
        with self._lock:
            # A chunk that became urgent is queued twice: only the first to come does the work.
            if chunk.urgency is None or self._chunks.get(chunk.key) is not chunk:
                return
            chunk.urgency = None
        try:
            data = self._fetch(file, chunk.span)
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

    def _fetch(self, file: OpenFile, span: Span) -> memoryview:
        """The verified bytes of `span`; a mismatch is asked for once more, an outage twice."""
        stop_s = time.monotonic() + self._deadline_s
        pauses = iter(_RETRY_PAUSES_S)
        may_refetch = True
        while True:
            view = file.view
            try:
                return self._fetch_once(view, span)
            except CorruptError as error:
                if not may_refetch:
                    raise
                may_refetch = False
                _log.warning("%s; asking once more", error)
            except (UnavailableError, NotFoundError) as error:
                pause_s = next(pauses, None)
                if pause_s is None or time.monotonic() + pause_s >= stop_s:
                    if isinstance(error, NotFoundError):
                        raise UnavailableError(
                            f"{view.path} cannot be read on: what it was stored in is gone; it was "
                            "replaced or removed elsewhere while open here"
                        ) from error
                    raise
                _log.warning("%s; trying again", error)
                time.sleep(pause_s)

    def _fetch_once(self, view: FileView, span: Span) -> memoryview:
        path, stored_offset = view.source(span)
        buffer = memoryview(bytearray(span.length))
        count = self._backend.read_into(path, stored_offset, buffer)
        view.verify(span, buffer[:count])
        if view.layout is None:
            # An ordinary file has no checksums of ours and may have been replaced under its name:
            # what was read belongs to this generation only if the file is still the same one now.
            info = self._backend.stat(path)
            if (info.size_bytes, info.modified_ns) != (view.size_bytes, view.modified_ns):
                raise UnavailableError(
                    f"{path} was changed elsewhere while open here; open it again"
                )
        return buffer

    # ---- waiting --------------------------------------------------------------------------

    def _collect(
        self,
        file: OpenFile,
        chunks: list[_Chunk],
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
                    raise _as_raisable(chunk.error, file.view.path)
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

    def _await(self, file: OpenFile, chunk: _Chunk, cancelled: Callable[[], bool]) -> None:
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
                    raise _as_raisable(chunk.error, file.view.path)
            position = unit.end

    # ---- giving up memory -----------------------------------------------------------------

    def _let_go(self, chunks: list[_Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                chunk.waiters -= 1

    def _forget(self, chunk: _Chunk) -> None:
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


def _as_raisable(error: BaseException | None, path: str) -> BaseException:
    """What a reader is told. One error may be raised to several readers: each gets its own."""
    if isinstance(error, BootseerError):
        return type(error)(*error.args)
    if isinstance(error, OSError):
        return OSError(error.errno, os.strerror(error.errno or errno.EIO), path)
    return UnavailableError(f"cannot read {path}: {type(error).__name__}: {error}")
