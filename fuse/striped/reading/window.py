"""The units of file contents that a mount holds in memory, and those on their way.

The window knows the reads under way and the bytes that are here, and decides which ones are given
up first. Nothing is fetched twice at the same time. Bytes are handed out only after their checksums
matched. A wait ends when nothing came for the deadline, or when the asking process is interrupted.

Thread safety: any thread may call any method, without the engine's lock, which guards the window.
"""

import errno
import os
from collections import OrderedDict
from collections.abc import Callable

from bootseer.fuse.striped.reading.buffers import BufferPool
from bootseer.fuse.striped.reading.unit_read import Key, OpenFile, UnitRead
from bootseer.fuse.striped.view import Span
from bootseer.store.backend import Backend
from bootseer.transfer.engine import FetchEngine
from bootseer.transfer.ranges import Priority

# A large file is read through few buffers, used again and again: to touch new memory costs more
# than any other step of a read (0.6 to 0.9 CPU s/GiB). The last few units stay for requests that
# were overtaken by later ones.
_PASSED_MAX = 4


class Window:
    """All units of one mount."""

    def __init__(
        self, backend: Backend, engine: FetchEngine, buffers: BufferPool, patience_s: float
    ) -> None:
        self._backend = backend
        self._engine = engine
        self._buffers = buffers
        self._patience_s = patience_s
        self._lock = engine.lock
        self._reads: OrderedDict[Key, UnitRead] = OrderedDict()
        """In the order in which they are given up."""

    # ---- finding and fetching -----------------------------------------------------------------

    def demand(
        self,
        file: OpenFile,
        position: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> UnitRead:
        """Return the read that holds `position` of a request up to `end`, here or on its way.

        It is held for the caller until `let_go`. Raises as taking memory does.
        """
        view = file.view
        unit, block = view.unit_at(position), view.block_at(position)
        with self._lock:
            for key in ((view.identity, unit.start, True), (view.identity, block.start, False)):
                found = self._reads.get(key)
                if found is not None:
                    found.waiters += 1
                    # Units stay in the order in which they were fetched: a unit that was read ahead
                    # and is still to come must not go before one that has just been read.
                    if not key[2]:
                        self._reads.move_to_end(key)
                    self._engine.hasten(found, Priority.DEMAND)
                    return found
        covered = min(end, unit.end) - position
        is_unit = whole_units or covered * 2 >= unit.length
        span = unit if is_unit else block
        buffer = self._buffers.take(span.length, self._patience_s, cancelled)
        return self._start(file, span, is_unit, Priority.DEMAND, buffer, hold=True)

    def read_ahead(self, file: OpenFile, start: int, end: int, priority: Priority) -> int:
        """Start fetching whole units from `start` while memory lasts; return how far it came."""
        position = start
        end = min(end, file.view.size_bytes)
        while position < end:
            unit = file.view.unit_at(position)
            if not self.has(file, unit):
                buffer = self._buffers.try_take(unit.length)
                if buffer is None:
                    return position
                self._start(file, unit, True, priority, buffer, hold=False)
            position = unit.end
        return position

    def has(self, file: OpenFile, unit: Span) -> bool:
        """Whether a whole unit is here or on its way."""
        with self._lock:
            return (file.view.identity, unit.start, True) in self._reads

    def _start(
        self,
        file: OpenFile,
        span: Span,
        is_unit: bool,
        priority: Priority,
        buffer: memoryview,
        *,
        hold: bool,
    ) -> UnitRead:
        """Queue the read of `span` into `buffer`, unless another thread just has."""
        key = (file.view.identity, span.start, is_unit)
        with self._lock:
            read = self._reads.get(key)
            if read is None:
                read = UnitRead(
                    self._backend,
                    self._buffers,
                    file,
                    span,
                    patience_s=self._patience_s,
                    buffer=buffer,
                    on_end=lambda read: self._forget(key, read) if read.error else None,
                )
                self._engine.add(read, priority)
                self._reads[key] = read
            read.waiters += hold
            return read

    def starves_others(self, file: OpenFile, read: UnitRead) -> bool:
        """Whether a stored file has brought all units that it was asked for behind `read`, which is
        not here yet, and so has nothing to do."""
        if read.data is not None:
            return False
        identity, start = file.view.identity, read.span.start
        with self._lock:
            later = [r for key, r in self._reads.items() if key[0] == identity and key[1] > start]
        busy = {each.place for each in (read, *later) if each.data is None}
        return any(each.data is not None and each.place not in busy for each in later)

    # ---- waiting ------------------------------------------------------------------------------

    def wait(self, read: UnitRead, cancelled: Callable[[], bool]) -> None:
        """Return when the bytes are here. Raises: as `wait_for`."""
        wait_for(self._engine, read, cancelled)

    def wait_for_units(
        self, file: OpenFile, start: int, end: int, cancelled: Callable[[], bool]
    ) -> None:
        """Wait for those units that are here or on their way. Raises: as `wait_for`."""
        position = start
        while position < end:
            unit = file.view.unit_at(position)
            with self._lock:
                read = self._reads.get((file.view.identity, unit.start, True))
            if read is not None:
                self.wait(read, cancelled)
            position = unit.end

    # ---- giving up memory ---------------------------------------------------------------------

    def let_go(self, reads: list[UnitRead]) -> None:
        """Note that the caller needs the reads that it holds no more."""
        with self._lock:
            for read in reads:
                read.waiters -= 1

    def passed(self, file: OpenFile, reads: list[UnitRead], end: int, *, is_only: bool) -> None:
        """Note that a sequential reader has come to `end`.

        The units that it leaves behind go first when memory is needed; at once where it is the
        only reader of a file that is too large to stay anyway.
        """
        is_large = file.view.size_bytes > self._buffers.limit_bytes
        with self._lock:
            for read in reads:
                key = self._key_of(file, read)
                if key is not None and read.span.end <= end:
                    self._reads.move_to_end(key, last=False)
                    if is_only and is_large:
                        file.passed.append(key)
            while len(file.passed) > _PASSED_MAX:
                key = file.passed.popleft()
                oldest = self._reads.get(key)
                if oldest is not None and oldest.data is not None and not oldest.waiters:
                    self._forget(key, oldest)

    def _key_of(self, file: OpenFile, read: UnitRead) -> Key | None:
        for is_unit in (True, False):
            key = (file.view.identity, read.span.start, is_unit)
            if self._reads.get(key) is read:
                return key
        return None

    def reclaim(self, count: int) -> None:
        """Give up about `count` bytes that no reader waits for."""
        with self._lock:
            for key, read in list(self._reads.items()):
                if count <= 0:
                    return
                if read.data is not None and not read.waiters:
                    count -= read.span.length
                    self._forget(key, read)

    def _forget(self, key: Key, read: UnitRead) -> None:
        """Drop a read that failed or is given up; the lock is held.

        Its memory is free when nobody looks at it any more.
        """
        if self._reads.get(key) is read:
            del self._reads[key]
            if read.data is not None:
                self._buffers.give_up(read.data)


def wait_for(engine: FetchEngine, read: UnitRead, cancelled: Callable[[], bool]) -> None:
    """Return when the bytes of `read` are here.

    Raises: the error of the read; DeadlineError where nothing came for the engine's deadline;
    InterruptedError where `cancelled` says so.
    """
    try:
        engine.wait(read, cancelled)
    except InterruptedError:
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR)) from None
    read.raise_error()
