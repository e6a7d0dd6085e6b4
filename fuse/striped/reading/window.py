"""Units of file contents that a mount has in memory or is fetching.

The window holds pending reads and fetched bytes, and decides which bytes are dropped first. No unit
is fetched twice at once, and bytes are returned only after their checksums matched. A wait ends
after a deadline without bytes, or when the requesting process is interrupted.

Thread-safe; callers must not hold the engine's lock, which guards the window.
"""

import errno
import os
from collections.abc import Callable, Sequence

from bootseer.fuse.striped.memory import Droppable, Memory, Tier
from bootseer.fuse.striped.reading.unit_read import Key, OpenFile, Sources, UnitRead
from bootseer.fuse.striped.view import ByteRange, FileView
from bootseer.transfer.engine import FetchEngine
from bootseer.transfer.ranges import Priority

# A large file is read through few buffers, which are reused: page faults of new memory cost more
# than any other step of a read (0.6 to 0.9 CPU s/GiB). The last few units stay for requests that
# later requests overtook.
_PASSED_MAX = 4


class CachedRead(UnitRead, Droppable):
    """Read whose bytes stay in memory for later readers, until the memory is needed."""

    def __init__(
        self, window: "Window", key: Key, file: OpenFile, span: ByteRange, buffer: memoryview
    ):
        super().__init__(
            window.sources,
            window.memory,
            file,
            span,
            patience_s=window.patience_s,
            buffer=buffer,
        )
        self.key = key
        self._window = window

    def ended(self) -> None:
        super().ended()
        self._window.ended(self)

    def drop(self) -> None:
        self._window.drop(self)


class Window:
    """Units of one mount in memory."""

    def __init__(
        self, sources: Sources, engine: FetchEngine, memory: Memory, patience_s: float
    ) -> None:
        self.sources = sources
        self.memory = memory
        self.patience_s = patience_s
        self._engine = engine
        self._lock = engine.lock
        self._reads: dict[Key, CachedRead] = {}

    # ---- finding and fetching -----------------------------------------------------------------

    def demand(
        self,
        file: OpenFile,
        position: int,
        end: int,
        whole_units: bool,
        cancelled: Callable[[], bool],
    ) -> CachedRead:
        """Return the read that holds `position` of a request up to `end`, here or on its way.

        It is held for the caller until `end_use`. Raises as taking memory does.
        """
        view = file.view
        unit, block = view.unit_at(position), view.block_at(position)
        with self._lock:
            for key in ((view.identity, unit.start, True), (view.identity, block.start, False)):
                found = self._reads.get(key)
                if found is not None and self.memory.use(found):
                    # Units stay in the order in which they were fetched: a unit that was read ahead
                    # and is still to come must not go before one that has just been read.
                    if not key[2]:
                        self.memory.offer(found, Tier.CACHED)
                    self._engine.hasten(found, Priority.DEMAND)
                    return found
        covered = min(end, unit.end) - position
        is_unit = whole_units or covered * 2 >= unit.length
        span = unit if is_unit else block
        buffer = self.memory.take(span.length, self.patience_s, cancelled)
        return self._start(file, span, is_unit, Priority.DEMAND, buffer, hold=True)

    def read_ahead(self, file: OpenFile, start: int, end: int, priority: Priority) -> int:
        """Start fetching whole units from `start` while memory lasts; return how far it came."""
        position = start
        end = min(end, file.view.size_bytes)
        while position < end:
            unit = file.view.unit_at(position)
            if not self.has(file.view, unit):
                buffer = self.memory.try_take(unit.length)
                if buffer is None:
                    return position
                self._start(file, unit, True, priority, buffer, hold=False)
            position = unit.end
        return position

    def has(self, view: FileView, unit: ByteRange) -> bool:
        """Return whether a whole unit is in memory or on its way."""
        with self._lock:
            return (view.identity, unit.start, True) in self._reads

    def _start(
        self,
        file: OpenFile,
        span: ByteRange,
        is_unit: bool,
        priority: Priority,
        buffer: memoryview,
        *,
        hold: bool,
    ) -> CachedRead:
        """Queue the read of `span` into `buffer`, unless another thread just has."""
        key = (file.view.identity, span.start, is_unit)
        with self._lock:
            read = self._reads.get(key)
            if read is not None and (not hold or self.memory.use(read)):
                return read
            read = CachedRead(self, key, file, span, buffer)
            self._engine.add(read, priority)
            # Offered now, and used until its bytes are here: what was asked for first goes first,
            # whichever place answers sooner.
            self.memory.offer(read, Tier.CACHED)
            self.memory.use(read)
            if hold:
                self.memory.use(read)
            self._reads[key] = read
            return read

    def starves_others(self, file: OpenFile, read: UnitRead) -> bool:
        """Return whether a stored file is idle while `read` is waited for.

        It is idle if all units after `read` that were requested from it are in memory.
        """
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

    def end_use(self, reads: Sequence[CachedRead]) -> None:
        """End the caller's use of the reads that `demand` returned."""
        for read in reads:
            self.memory.end_use(read)

    def passed(
        self, file: OpenFile, reads: Sequence[CachedRead], end: int, *, is_only: bool
    ) -> None:
        """Note that a sequential reader has come to `end`.

        The units that it leaves behind go first when memory is needed; at once where it is the
        only reader of a file that is too large to stay anyway.
        """
        is_large = file.view.size_bytes > self.memory.limit_bytes
        with self._lock:
            for read in reads:
                if self._reads.get(read.key) is read and read.span.end <= end:
                    self.memory.offer(read, Tier.PASSED)
                    if is_only and is_large:
                        file.passed.append(read.key)
            while len(file.passed) > _PASSED_MAX:
                oldest = self._reads.get(file.passed.popleft())
                if oldest is not None and oldest.data is not None and not oldest.users:
                    self._forget(oldest)

    def ended(self, read: CachedRead) -> None:
        """Note that a read has failed, or that its bytes are here; the lock is held."""
        self.memory.end_use(read)
        if read.error is not None:
            self._forget(read)

    def drop(self, read: CachedRead) -> None:
        """Give up the bytes of a read: see `Droppable`."""
        with self._lock:
            self._forget(read)

    def _forget(self, read: CachedRead) -> None:
        """Drop a read that failed or is given up; the lock is held.

        Its memory is free when nobody looks at it any more.
        """
        self.memory.withdraw(read)
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
        if read.data is not None:
            self.memory.give_up(read.data)


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
