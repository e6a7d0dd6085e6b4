"""Streams a blob's frames out of the store ahead of the extraction that consumes them.

Alone owns the window of frames in memory. Frames are fetched in the order in which they will be
wanted, in parallel and many at once, and each is verified as it arrives. What an extraction needs
and is not here yet becomes a demand; so does, alone, a frame that arrived damaged. Thread-safe.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bootseer.blob.extract_plan import PART_BYTES
from bootseer.blob.frames import frames_for
from bootseer.blob.tree import Frame, Tree
from bootseer.content_digest import content_digest
from bootseer.errors import CorruptError
from bootseer.store import Store
from bootseer.transfer.executor import Executor
from bootseer.transfer.plan import Chunk, Priority, covering

# Enough to keep eight streams busy while a thread is held up by a large file.
_WINDOW_BYTES = 64 * 1024 * 1024
# Small, so that the first bytes are here soon although all fetches share the network; large enough
# that a server's latency of some milliseconds does not count.
_FETCH_BYTES = 1024 * 1024
# Consumed frames kept for the neighbour that shares them.
_KEPT_BYTES = 16 * 1024 * 1024


def _extraction_order(tree: Tree) -> list[int]:
    """Frame numbers in the order in which `blob.extract` wants them: large files first."""
    blob = tree.blobs[0]
    columns = tree.columns
    large: dict[int, None] = {}
    for offset, length in zip(columns.extent_blob_offset, columns.extent_length, strict=True):
        if length > PART_BYTES:
            large.update(dict.fromkeys(frames_for(blob, offset, length)))
    return [*large, *(number for number in range(len(blob.frames)) if number not in large)]


class FrameSource:
    """The `read` callable of `blob.extract` for one blob of the store."""

    def __init__(
        self,
        store: Store,
        key: str,
        tree: Tree,
        *,
        deadline_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`key`: of the tree's only blob. `on_progress` gets counts of bytes that arrived."""
        self._frames = tree.blobs[0].frames
        self._starts = [frame.offset for frame in self._frames]
        self._key = key
        self._lock = threading.Lock()
        self._here: dict[int, memoryview] = {}
        self._used: OrderedDict[int, memoryview] = OrderedDict()
        self._used_bytes = 0
        # By frame: what it will come with.
        self._coming: dict[int, Chunk] = {}
        self._ahead: set[int] = set()
        self._ahead_bytes = 0
        self._order = _extraction_order(tree)
        self._next = 0
        self._executor = Executor(store.read, deadline_s=deadline_s, on_progress=on_progress)
        self._advance()

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Stored bytes `[offset, offset + length)` of the blob, from verified frames.

        Raises: CorruptError, DeadlineError, UnavailableError, NotFoundError.
        """
        if blob != 0 or length <= 0 or not self._starts:
            raise CorruptError(f"there is no blob {blob} in this snapshot")
        pieces: list[memoryview] = []
        position, end = offset, offset + length
        number = bisect_right(self._starts, offset) - 1
        while position < end and number < len(self._starts):
            frame = self._frames[number]
            data = self._frame(number, frame)
            if frame.offset == position and frame.length <= end - position:
                pieces.append(data)
            else:
                pieces.append(data[position - frame.offset : end - frame.offset])
            position = frame.offset + frame.length
            number += 1
        return b"".join(pieces)

    def _frame(self, number: int, frame: Frame) -> memoryview:
        data = self._taken(number, frame)
        if data is None:
            with self._lock:
                coming = self._coming.get(number)
            if coming is not None:
                self._executor.demand(coming, self._deliver)
                data = self._taken(number, frame)
        while data is None:
            # Damaged on the way, or let go of already: alone, and tried again by the executor.
            chunk = Chunk(self._key, frame.offset, frame.length, frame.digest)
            self._executor.demand(chunk, self._deliver_verified)
            data = self._taken(number, frame)
        self._advance()
        return data

    def _taken(self, number: int, frame: Frame) -> memoryview | None:
        with self._lock:
            data = self._here.pop(number, None)
            if data is None:
                return self._used.get(number)
            if number in self._ahead:
                self._ahead.remove(number)
                self._ahead_bytes -= frame.length
            self._used[number] = data
            self._used_bytes += len(data)
            while self._used_bytes > _KEPT_BYTES and len(self._used) > 1:
                _, dropped = self._used.popitem(last=False)
                self._used_bytes -= len(dropped)
            return data

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        """Of several frames those that are right."""
        copy = memoryview(bytes(data))
        first = bisect_right(self._starts, chunk.offset) - 1
        numbers = range(first, bisect_right(self._starts, chunk.end - 1))
        found = {}
        for number in numbers:
            frame = self._frames[number]
            start = frame.offset - chunk.offset
            view = copy[start : start + frame.length]
            if content_digest(view) == frame.digest:
                found[number] = view
        with self._lock:
            for number in numbers:
                # Else it came twice, and has been used.
                if self._coming.pop(number, None) is not None and number in found:
                    self._here[number] = found[number]

    def _deliver_verified(self, chunk: Chunk, data: memoryview) -> None:
        number = bisect_right(self._starts, chunk.offset) - 1
        with self._lock:
            self._here[number] = memoryview(bytes(data))

    def _advance(self) -> None:
        """Submit what the window has room for, in pieces large enough to be worth a request."""
        with self._lock:
            room = _WINDOW_BYTES - self._ahead_bytes
            if self._next >= len(self._order) or room < _WINDOW_BYTES // 8:
                return
            runs: list[list[int]] = []
            run_bytes = 0
            while self._next < len(self._order) and room > 0:
                number = self._order[self._next]
                self._next += 1
                if number in self._here or number in self._used:
                    continue
                length = self._frames[number].length
                if not runs or runs[-1][-1] + 1 != number or run_bytes + length > _FETCH_BYTES:
                    runs.append([])
                    run_bytes = 0
                runs[-1].append(number)
                run_bytes += length
                self._ahead.add(number)
                self._ahead_bytes += length
                room -= length
            wanted = [self._run(run) for run in runs]
            for run, chunk in zip(runs, wanted, strict=True):
                self._coming.update(dict.fromkeys(run, chunk))
        if wanted:
            fetches = [covering((chunk,), Priority.PREFETCH) for chunk in wanted]
            self._executor.submit(fetches, self._deliver)

    def _run(self, numbers: list[int]) -> Chunk:
        """Neighbouring frames as one. Its frames' digests are looked at when it is here."""
        first, last = self._frames[numbers[0]], self._frames[numbers[-1]]
        return Chunk(self._key, first.offset, last.offset + last.length - first.offset)

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
