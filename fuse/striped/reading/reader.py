"""Parallel, verified reads through one window of memory for a whole mount.

Owns which files are open, and decides what each read fetches: for it and ahead of it. Thread-safe.
The memory, what is in flight and every wait are the `window`'s, the attempts the `fetching`'s.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.reading.buffers import BufferPool
from bootseer.fuse.striped.reading.chunks import Chunk, OpenFile
from bootseer.fuse.striped.reading.direct import DirectReads
from bootseer.fuse.striped.reading.fetching import Fetcher, as_raisable
from bootseer.fuse.striped.reading.pool import FetchPool, Urgency
from bootseer.fuse.striped.reading.window import Window
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import FileView
from bootseer.store.backend import Backend, HasDescriptor

_WARM_STEP_BYTES = 32 * 2**20
_ACTIVE_S = 10.0


def _never() -> bool:
    return False


class StripedReader:
    """All reads of one mount."""

    def __init__(
        self,
        backend: Backend,
        budget: MemoryBudget,
        pool: FetchPool,
        patience_s: float,
        counters: Counters | None = None,
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._counters = counters or Counters()
        buffers = BufferPool(budget)
        self._fetcher = fetcher = Fetcher(backend, buffers, pool, self._counters, patience_s)
        self._window = Window(fetcher, buffers, pool, patience_s, backend.url)
        self._direct = DirectReads(fetcher, pool, patience_s, backend.url)
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}
        budget.add_reclaimer(self._window.reclaim)

    @property
    def fetched_bytes(self) -> int:
        """Read from the storage so far."""
        return self._counters.look().fetched_bytes

    def end_reads(self) -> None:
        """Tell those who wait for a read that there will be none."""
        self._fetcher.close()

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

    def descriptor(self, file: OpenFile) -> HasDescriptor | None:
        """What the kernel can read `file` from without us: an ordinary file of this node that is
        still the one that was opened. None for all others."""
        view = file.view
        if view.layout is not None or file.pinned is not None or not view.size_bytes:
            return None
        try:
            reader = file.sources.source(self._backend, view.path).descriptor()
            return reader if reader is not None and view.is_in(reader.current()) else None
        except (BootseerError, OSError):
            return None  # the reads will tell

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
            reached = self._window.read_ahead(
                file, advice.ahead_start, advice.ahead_end, Urgency.READAHEAD
            )
            if reached < min(advice.ahead_end, file.view.size_bytes):
                with self._lock:
                    file.streams.fell_short(advice.ahead_end, reached)
        return self._collect(file, wanted, offset, end, advice.whole_units, cancelled)

    def read_bytes(self, file: OpenFile, offset: int, length: int) -> bytes:
        """Reads like `read`, and returns the bytes in one piece."""
        return b"".join(self.read(file, offset, length))

    def read_into(
        self,
        file: OpenFile,
        offset: int,
        buffer: memoryview,
        cancelled: Callable[[], bool] = _never,
    ) -> int:
        """Fill `buffer` from `offset`; returns the count, short only at the end of the file.

        Whole stripe units are fetched straight into it, all in parallel; only the ends, and what is
        in the window already, are copied. When this has raised, nothing more is written into
        `buffer`. Raises as `read`.
        """
        if file.pinned is not None:
            piece = memoryview(file.pinned)[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            return len(piece)
        end = min(offset + len(buffer), file.view.size_bytes)
        with self._direct.reading(file, cancelled) as direct:
            copied: deque[tuple[int, int]] = deque()
            position = offset
            while position < end:
                unit = file.view.unit_at(position)
                stop = min(unit.end, end)
                is_whole = position == unit.start and stop == unit.end
                if is_whole and not self._window.has(file, unit):
                    direct.fetch(unit, buffer[position - offset : stop - offset])
                else:
                    copied.append((position, stop))
                position = stop
            # While those are on their way.
            for start, stop in copied:
                at = start - offset
                chunks = self._demand(file, start, stop, False, cancelled)
                for piece in self._collect(file, chunks, start, stop, False, cancelled):
                    buffer[at : at + len(piece)] = piece
                    at += len(piece)
        return max(0, end - offset)

    def warm(self, file: OpenFile, budget_bytes: int, cancelled: Callable[[], bool]) -> int:
        """Fetch the start of a file, at most `budget_bytes`, below every other urgency.

        Waits for it; returns how many bytes are here.
        """
        end = min(budget_bytes, file.view.size_bytes)
        position = 0
        while position < end and not cancelled():
            step_end = min(position + _WARM_STEP_BYTES, end)
            reached = self._window.read_ahead(file, position, step_end, Urgency.WARM)
            error = self._window.wait_for_units(file, position, min(reached, step_end), cancelled)
            if error is not None:
                raise as_raisable(error, file.view.path)
            if reached < step_end:
                return reached
            position = reached
        return position

    # ---- the steps of a read --------------------------------------------------------------

    def _window_max_bytes(self, now_s: float) -> int:
        """Returns the share of one stream: the mount's memory is divided among active streams."""
        active = sum(f.streams.active_count(now_s - _ACTIVE_S) for f in self._files.values())
        return self._budget.limit_bytes * 3 // 4 // max(1, active)

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
                chunk = self._window.demand(file, position, end, whole_units, cancelled)
                chunks.append(chunk)
                position = chunk.span.end
        except BaseException:
            self._window.let_go(chunks)
            raise
        return chunks

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
                if sequential and self._window.starves_others(file, chunk):
                    with self._lock:
                        file.streams.held_up(end)
                self._window.wait(file, chunk, cancelled)
                if chunk.data is None:
                    raise as_raisable(chunk.error, file.view.path)
                stop = min(end, chunk.span.end)
                result.append(chunk.data[position - chunk.span.start : stop - chunk.span.start])
                position = stop
        finally:
            self._window.let_go(chunks)
        # Who follows on another descriptor (ranks of a node) needs what this one leaves behind.
        if sequential and file.open_count < 2:
            with self._lock:
                is_only = file.streams.active_count(time.monotonic() - _ACTIVE_S) == 1
            self._window.passed(file, chunks, end, is_only=is_only)
        self._counters.add(served_bytes=end - offset)
        return result
