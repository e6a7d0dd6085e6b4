"""Streams the frames of a tree's blobs out of the store ahead of the extraction that consumes them.

Alone owns the window of frames in memory. Frames are fetched in the order in which they will be
wanted, in parallel and many at once, and each is verified as it arrives. What an extraction needs
and is not here yet becomes a demand; so does, alone, a frame that arrived damaged. Thread-safe.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate

from msgspec import Struct

from bootseer.blob.extract_plan import PART_BYTES
from bootseer.blob.frames import frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Frame, Tree
from bootseer.closing import Closing
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


class FramePlan(Struct, frozen=True):
    """Which frames an extraction wants. Frames are numbered through all of the tree's blobs."""

    keys: list[str]
    """Of the blobs in the store."""
    firsts: list[int]
    """The number of each blob's first frame, and the one behind the last."""
    frames: list[Frame]
    order: list[int]
    """Large files first, as `blob.extract` wants them. What only other trees have in a blob that
    several share is left out."""
    wanted_bytes: int


def plan_frames(tree: Tree) -> FramePlan:
    """Pure."""
    firsts = [0, *accumulate(len(blob.frames) for blob in tree.blobs)]
    c = tree.columns
    large: dict[int, None] = {}
    # Of a blob of its own a tree wants every frame that is not a large file's.
    is_alone = len(tree.blobs) == 1
    small: set[int] = set(range(firsts[1])) if is_alone else set()
    # By blob, the part of its stream that was asked for last: many files share a frame.
    known = [(0, 0)] * len(tree.blobs)
    for number, offset, length in zip(
        c.extent_blob, c.extent_blob_offset, c.extent_length, strict=True
    ):
        start, end = known[number]
        if length <= PART_BYTES and (is_alone or (start <= offset and offset + length <= end)):
            continue
        found = frames_for(tree.blobs[number], offset, length)
        numbers = range(firsts[number] + found.start, firsts[number] + found.stop)
        if length > PART_BYTES:
            large.update(dict.fromkeys(numbers))
        else:
            small.update(numbers)
            frames = tree.blobs[number].frames
            last = frames[found[-1]]
            known[number] = frames[found[0]].stream_offset, last.stream_offset + last.stream_length
    order = [*large, *sorted(small - large.keys())]
    listed = [frame for blob in tree.blobs for frame in blob.frames]
    wanted_bytes = sum(listed[number].length for number in order)
    return FramePlan(
        [blob_key(blob.digest) for blob in tree.blobs], firsts, listed, order, wanted_bytes
    )


class FrameSource(Closing):
    """The `read` callable of `blob.extract` for blobs of the store.

    One for each extraction."""

    def __init__(
        self,
        store: Store,
        plan: FramePlan,
        *,
        deadline_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`on_progress` gets counts of bytes that arrived."""
        self._keys = plan.keys
        self._blobs = {key: number for number, key in enumerate(self._keys)}
        self._firsts = plan.firsts
        self._frames = plan.frames
        self._starts = [frame.offset for frame in self._frames]
        self._lock = threading.Lock()
        self._here: dict[int, memoryview] = {}
        self._used: OrderedDict[int, memoryview] = OrderedDict()
        self._used_bytes = 0
        # By frame: what it will come with.
        self._coming: dict[int, Chunk] = {}
        self._ahead: set[int] = set()
        self._ahead_bytes = 0
        self._order = plan.order
        self._next = 0
        self._executor = Executor(store.read, deadline_s=deadline_s, on_progress=on_progress)
        self._advance()

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Stored bytes `[offset, offset + length)` of a blob, from verified frames.

        Raises: CorruptError, DeadlineError, UnavailableError, NotFoundError.
        """
        if not 0 <= blob < len(self._keys) or length <= 0:
            raise CorruptError(f"there is no blob {blob} in this snapshot")
        pieces: list[memoryview] = []
        position, end = offset, offset + length
        number = self._number(blob, offset)
        while position < end and self._firsts[blob] <= number < self._firsts[blob + 1]:
            frame = self._frames[number]
            data = self._frame(number, frame)
            if frame.offset == position and frame.length <= end - position:
                pieces.append(data)
            else:
                pieces.append(data[position - frame.offset : end - frame.offset])
            position = frame.offset + frame.length
            number += 1
        return b"".join(pieces)

    def _number(self, blob: int, offset: int) -> int:
        """Of the frame with the blob's byte at `offset`."""
        return bisect_right(self._starts, offset, *self._firsts[blob : blob + 2]) - 1

    def _numbers(self, chunk: Chunk) -> range:
        """Of the frames that a chunk consists of."""
        blob = self._blobs[chunk.key]
        return range(self._number(blob, chunk.offset), 1 + self._number(blob, chunk.end - 1))

    def _key(self, number: int) -> str:
        """Of the blob with a frame."""
        return self._keys[bisect_right(self._firsts, number) - 1]

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
            chunk = Chunk(self._key(number), frame.offset, frame.length, frame.digest)
            self._executor.demand(chunk, self._deliver_verified)
            data = self._taken(number, frame)
        self._advance()
        return data

    def _taken(self, number: int, frame: Frame) -> memoryview | None:
        with self._lock:
            data = self._here.pop(number, None)
            if data is None:
                if number in self._used:
                    # Of a snapshot on top of another some are wanted again and again.
                    self._used.move_to_end(number)
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
        numbers = self._numbers(chunk)
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
        number = self._numbers(chunk).start
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
                if (
                    not runs
                    or runs[-1][-1] + 1 != number
                    or run_bytes + length > _FETCH_BYTES
                    or number in self._firsts
                ):
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
        return Chunk(self._key(numbers[0]), first.offset, last.offset + last.length - first.offset)

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._executor.close()
