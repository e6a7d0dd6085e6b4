"""Fetching one run of bytes of a file, verified; what is tried again, where, and what a reader is
told when that fails.

Owns the attempts at each fetch. The first one whose bytes match their checksum decides it. A fetch
that falls behind its peers is asked for a second time, on another connection and from another
replica where there is one. Thread-safe; an attempt waits at most for the backend's own deadline.
"""

import errno
import logging
import os
import threading
import time
from functools import partial
from weakref import WeakSet

from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnavailableError
from bootseer.fuse.striped.reading.buffers import BufferPool
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.reading.fetch import Fetch, Run
from bootseer.fuse.striped.reading.late import LateWatch
from bootseer.fuse.striped.reading.pool import FetchPool, Urgency
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import Span
from bootseer.store.backend import Backend, Reader
from bootseer.transfer.pace import Progress
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

# What is missing may be seen a moment later, where several servers answer for the storage.
_MISSING_ATTEMPTS = 3


class Fetcher:
    """Reads of one mount's storage."""

    def __init__(
        self,
        backend: Backend,
        buffers: BufferPool,
        pool: FetchPool,
        counters: Counters,
        patience_s: float,
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._pool = pool
        self._counters = counters
        self._patience_s = patience_s
        self._wanted: WeakSet[Fetch] = WeakSet()
        """Fetches that may not have ended."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._late: LateWatch[Fetch] = LateWatch(self._ask_again)

    def source_of(self, file: OpenFile, span: Span) -> str:
        """What a fetch competes for with others: the stored file, and the block in it."""
        path, offset = file.view.source(span)
        block_bytes = file.view.block_bytes
        return f"{path}:{offset // block_bytes}" if block_bytes else path

    def want(self, fetch: Fetch) -> Fetch:
        """Note a new fetch, whose reader `close` must not leave waiting; returns it."""
        with self._lock:
            self._wanted.add(fetch)
            is_closed = self._is_closed
        if is_closed:
            self._end_unread(fetch)
        return fetch

    def silence(self) -> "Silence":
        """A measure of how long one wait for a fetch has brought nothing."""
        return Silence(self._counters)

    def close(self) -> None:
        """End all fetches: who waits for one is told."""
        with self._lock:
            self._is_closed = True
            wanted = list(self._wanted)
        for fetch in wanted:
            self._end_unread(fetch)

    def _end_unread(self, fetch: Fetch) -> None:
        url = self._backend.url
        if fetch.fail(UnavailableError(f"cannot read {fetch.file.view.path}: {url} was closed")):
            fetch.on_done(fetch)

    def run(
        self, fetch: Fetch, *, is_second: bool = False, attempts: Attempts | None = None
    ) -> None:
        """Carry out `fetch`, and try again what may pass: a mismatch elsewhere, an outage later.
        Never raises. `attempts`: those that were made before."""
        attempts = attempts or Attempts(UNTIL_DEADLINE, self._patience_s)
        error: BaseException
        brought_bytes = 0
        while not fetch.is_decided:
            try:
                self._try(fetch, is_second, is_first=not attempts.failures_count)
                return
            except BaseException as failure:
                # hdfs-native panics with exceptions that are no `Exception`; a waiter gets them.
                error = failure
            if fetch.done_bytes > brought_bytes:
                brought_bytes = fetch.done_bytes
                attempts.progressed()
            self._counters.add(corrupt_count=isinstance(error, CorruptError))
            is_missing = isinstance(error, NotFoundError)
            may_appear = is_missing and attempts.failures_count + 1 < _MISSING_ATTEMPTS
            pause_s = attempts.pause_s(UnavailableError(str(error)) if may_appear else error)
            if pause_s is None:
                self._fail(fetch, error)
                return
            fetch.outage = error
            _log.warning("%s; trying again", error)
            self._counters.add(read_retry_count=1)
            if pause_s:
                # Without this thread, which others need.
                self._pool.submit_later(
                    pause_s,
                    partial(self.run, fetch, is_second=is_second, attempts=attempts),
                    self.source_of(fetch.file, fetch.span),
                )
                return

    def _try(self, fetch: Fetch, is_second: bool, *, is_first: bool) -> None:
        """One attempt; `is_first` of those that are made one after another."""
        view = fetch.file.view
        path, offset = view.source(fetch.span)
        source = fetch.file.sources.source(self._backend, path)
        number, reader = source.pick(offset, fetch.tried)
        run = self._begin(fetch, number, reader, is_second, is_first)
        if run is None:
            return
        try:
            count = start = run.start_bytes
            if start < len(run.buffer):
                with self._late.watching(run):
                    count += reader.read_into(offset + start, run.buffer[start:], run.attempt)
            if run.attempt.is_given_up:
                self._end(fetch, run)
                return
            view.verify(fetch.span, run.buffer[:count])
            is_same = view.layout is not None or all(
                view.is_in(each.current()) for each in run.readers
            )
        except BaseException as failure:
            self._end(fetch, run, failure=failure)
            if fetch.is_decided:
                return  # it was only cut off
            source.drop(number)
            raise
        if not run.was_late:
            source.was_good(number, offset)
        if is_same:
            self._win(fetch, run)
        self._end(fetch, run)
        if not is_same:
            error = f"{path} was changed elsewhere while open here; open it again"
            self._fail(fetch, UnavailableError(error))

    def _begin(
        self, fetch: Fetch, number: int, reader: Reader, is_second: bool, is_first: bool
    ) -> Run | None:
        """The attempt, with memory to read into; None if it is not needed any more."""
        with fetch.lock:
            buffer, fetch.buffer = fetch.buffer, None
            earlier, fetch.earlier = fetch.earlier, None
            may_use_target = (
                fetch.target is not None
                and reader.can_stop
                and not any(run.buffer is fetch.target for run in fetch.runs)
            )
        if may_use_target and buffer is None:
            buffer = fetch.target
        if buffer is None:
            buffer = self._buffers.take(
                fetch.span.length, self._patience_s, lambda: fetch.is_decided
            )
        run = Run(fetch, buffer, number, reader, is_second=is_second, earlier=earlier)
        # What failed needs the storage's own checks, which find a replica that is well. What is
        # late is read in the same way from another one; where there is none, another way may help.
        run.attempt.is_checked = (
            fetch.file.view.layout is not None
            and is_first
            and (reader.has_replicas or not fetch.tried)
        )
        with fetch.lock:
            if fetch.is_decided:
                return None
            fetch.runs.append(run)
            fetch.tried.add(number)
        return run

    def _end(self, fetch: Fetch, run: Run, *, failure: BaseException | None = None) -> None:
        with fetch.lock:
            fetch.runs.remove(run)
            if failure is not None and not fetch.is_decided:
                if run.buffer is not fetch.target:
                    fetch.buffer = fetch.buffer or run.buffer  # for the next attempt
                if not isinstance(failure, CorruptError):
                    fetch.earlier = run
        if run.was_late:
            self._pool.give_back()

    def _win(self, fetch: Fetch, run: Run) -> None:
        if not fetch.decide(run.buffer):
            return
        seconds = self._late.won(run)
        self._counters.add(
            fetched_bytes=fetch.span.length,
            fetch_count=1,
            fetch_busy_ns=int(seconds * 1e9),
            late_won_count=1 if run.is_second else 0,
        )
        self._counters.add_for(
            _place(run),
            read_bytes=fetch.span.length,
            read_count=1,
            read_busy_ns=int(seconds * 1e9),
        )
        fetch.on_done(fetch)

    def _fail(self, fetch: Fetch, error: BaseException) -> None:
        if isinstance(error, NotFoundError):
            error = UnavailableError(
                f"{fetch.file.view.path} cannot be read on: what it was stored in is gone; it was "
                "replaced or removed elsewhere while open here"
            )
        with fetch.lock:
            if fetch.is_decided or fetch.runs:
                return  # another attempt is under way, and decides
            fetch.is_decided = True
            fetch.buffer = None
        fetch.error = error
        fetch.on_done(fetch)

    def abandon(self, fetch: Fetch) -> None:
        """Give up a fetch that is held up; its threads are made up for until they come back."""
        fetch.give_up()
        with fetch.lock:
            for run in fetch.runs:
                if not run.was_late and self._pool.lend():
                    run.was_late = True
                    self._counters.add(stuck_count=1)

    def _ask_again(self, run: Run) -> None:
        """`run` is late: have the same bytes read by another thread, too."""
        fetch = run.fetch
        with fetch.lock:
            if fetch.is_decided or len(fetch.tried) >= REQUEST.attempts:
                return
        view = fetch.file.view
        path, offset = view.source(fetch.span)
        fetch.file.sources.source(self._backend, path).was_late(run.number, offset)
        buffer = self._buffers.try_take(fetch.span.length)
        # Spent last: what cannot be asked for now is looked at again ten times a second.
        if buffer is None or not self._late.has_credit or not self._pool.lend():
            return
        self._late.spend()
        with fetch.lock:
            is_needed = run in fetch.runs
            if is_needed:
                late = [other for other in fetch.runs if other.was_late]
                if late:
                    # Two that are late share what one slow DataNode has: the better one stays.
                    min((*late, run), key=lambda one: one.done_bytes).attempt.give_up()
                run.was_late = True
                fetch.buffer, fetch.earlier = buffer, run
        if is_needed:
            self._counters.add(late_count=1)
            self._counters.add_for(_place(run), late_count=1)
            self._pool.submit(Urgency.DEMAND, lambda: self.run(fetch, is_second=True))
        else:
            self._pool.give_back()


class Silence:
    """How long a reader has waited for a fetch and nothing came. For one thread and one wait.

    A fetch that is still in the queue waits for others, and those bring bytes, too.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        now_s = time.monotonic()
        self._own, self._others = Progress(now_s), Progress(now_s)

    def of(self, fetch: Fetch | None) -> float:
        """Returns how long it is, in seconds."""
        now_s = time.monotonic()
        silent_s = self._own.silent_s(fetch.done_bytes if fetch is not None else 0, now_s)
        others_s = self._others.silent_s(self._counters.look().fetched_bytes, now_s)
        return min(silent_s, others_s) if fetch is not None and not fetch.is_begun else silent_s


def _place(run: Run) -> str:
    """Where the bytes of an attempt come from: the DataNode, else the part."""
    return run.attempt.server or run.fetch.file.view.source_name(run.fetch.span)


def as_raisable(error: BaseException | None, path: str) -> BaseException:
    """What a reader is told. One error may be raised to several readers: each gets its own."""
    if isinstance(error, BootseerError):
        return type(error)(*error.args)
    if isinstance(error, OSError):
        return OSError(error.errno, os.strerror(error.errno or errno.EIO), path)
    return UnavailableError(f"cannot read {path}: {type(error).__name__}: {error}")
