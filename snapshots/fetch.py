"""Streams a blob's frames out of the store ahead of the extraction that consumes them.

Alone owns the window of frames in memory. Frames are fetched in the order of the stream, in
parallel, verified by the executor (so that a damaged transfer is tried again); what an extracting
thread needs and is not here yet becomes a demand. Thread-safe.
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
from bootseer.errors import CorruptError
from bootseer.store import Store
from bootseer.transfer.executor import Executor
from bootseer.transfer.plan import Chunk, Priority, plan

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
        self._here: dict[int, bytes] = {}
        self._used: OrderedDict[int, bytes] = OrderedDict()
        self._used_bytes = 0
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
        pieces: list[bytes | memoryview] = []
        position, end = offset, offset + length
        number = bisect_right(self._starts, offset) - 1
        while position < end and number < len(self._starts):
            frame = self._frames[number]
            data = self._frame(number, frame)
            if frame.offset == position and frame.length <= end - position:
                pieces.append(data)
            else:
                pieces.append(memoryview(data)[position - frame.offset : end - frame.offset])
            position = frame.offset + frame.length
            number += 1
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def _frame(self, number: int, frame: Frame) -> bytes:
        while True:
            with self._lock:
                data = self._here.pop(number, None)
                if data is not None:
                    if number in self._ahead:
                        self._ahead.remove(number)
                        self._ahead_bytes -= frame.length
                    self._keep(number, data)
                else:
                    data = self._used.get(number)
            if data is not None:
                self._advance()
                return data
            chunk = Chunk(self._key, frame.offset, frame.length, frame.digest)
            self._executor.demand(chunk, self._deliver)

    def _keep(self, number: int, data: bytes) -> None:
        self._used[number] = data
        self._used_bytes += len(data)
        while self._used_bytes > _KEPT_BYTES and len(self._used) > 1:
            _, dropped = self._used.popitem(last=False)
            self._used_bytes -= len(dropped)

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        number = bisect_right(self._starts, chunk.offset) - 1
        with self._lock:
            self._here[number] = bytes(data)

    def _advance(self) -> None:
        """Submit what the window has room for, in pieces large enough to be worth a request."""
        with self._lock:
            room = _WINDOW_BYTES - self._ahead_bytes
            if self._next >= len(self._order) or room < _WINDOW_BYTES // 8:
                return
            wanted = []
            while self._next < len(self._order) and room > 0:
                number = self._order[self._next]
                self._next += 1
                if number not in self._here and number not in self._used:
                    frame = self._frames[number]
                    wanted.append(Chunk(self._key, frame.offset, frame.length, frame.digest))
                    self._ahead.add(number)
                    self._ahead_bytes += frame.length
                    room -= frame.length
        if wanted:
            fetches = plan(
                wanted,
                lambda chunk: False,
                priority=Priority.PREFETCH,
                max_fetch_bytes=_FETCH_BYTES,
            )
            self._executor.submit(fetches, self._deliver)

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
