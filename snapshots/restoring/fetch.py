"""Streams the frames of a tree's blobs out of the store ahead of the extraction that consumes them.

Frames are fetched in the order in which they will be wanted, in parallel and in runs of neighbours,
and each is verified before its run is delivered. `FrameSource` holds the window of runs in memory,
and that memory, which is used again and again. A run that an extraction needs and that is not here
yet becomes a demand. The extraction's thread reads; runs are delivered by the fetcher's threads.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from msgspec import Struct

from bootseer.base.closing import Closing
from bootseer.base.content_digest import content_digest
from bootseer.blob.extract.plan import PART_BYTES
from bootseer.blob.frames import frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Frame, Tree
from bootseer.errors import CorruptError
from bootseer.store import Store
from bootseer.transfer.chunks import ChunkFetcher, matches_digest
from bootseer.transfer.ranges import Chunk, Priority, covering

# Enough to keep eight streams busy while a thread is held up by a large file.
WINDOW_BYTES = 64 * 1024 * 1024
# Small, so that the first bytes are here soon although all fetches share the network; large enough
# that a server's latency of some milliseconds does not count.
_FETCH_BYTES = 1024 * 1024
# Consumed runs kept for the neighbour that shares their frames.
KEPT_BYTES = 16 * 1024 * 1024


class Run(Struct, frozen=True):
    """Neighbouring frames of a blob, fetched by one read: those from `first` to before `behind`."""

    blob: int
    chunk: Chunk
    first: int
    behind: int


class FramePlan(Struct, frozen=True):
    """Which frames an extraction wants."""

    keys: list[str]
    """The keys of the blobs in the store."""
    blobs: list[Sequence[Frame]]
    runs: list[Run]
    """Large files first, as `blob.extract` wants them. What only other trees have in a blob that
    several share is left out."""
    wanted_bytes: int


def plan_frames(tree: Tree) -> FramePlan:
    """Pure."""
    # Frames are numbered through all blobs.
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
    keys = [blob_key(blob.digest) for blob in tree.blobs]
    blobs = [blob.frames for blob in tree.blobs]
    runs = _runs(keys, blobs, firsts, [*large, *sorted(small - large.keys())])
    return FramePlan(keys, blobs, runs, sum(run.chunk.length for run in runs))


def _runs(
    keys: list[str], blobs: list[Sequence[Frame]], firsts: list[int], order: list[int]
) -> list[Run]:
    """The frames of these numbers, cut into runs."""
    runs = []
    for _, group in groupby(enumerate(order), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        first, end = numbers[0], numbers[-1] + 1
        while first < end:
            blob = bisect_right(firsts, first) - 1
            frames, base = blobs[blob], firsts[blob]
            at, last = first - base, min(end, firsts[blob + 1]) - base
            start = frames[at].offset
            behind = max(at + 1, bisect_right(frames, start + _FETCH_BYTES, at, last, key=_end))
            chunk = Chunk(keys[blob], start, _end(frames[behind - 1]) - start)
            runs.append(Run(blob, chunk, at, behind))
            first = base + behind
    return runs


def _end(frame: Frame) -> int:
    return frame.offset + frame.length


class FrameSource(Closing):
    """The `read` callable of `blob.extract` for blobs of the store.

    One for each extraction."""

    def __init__(
        self,
        store: Store,
        plan: FramePlan,
        *,
        deadline_s: float,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`on_progress` gets counts of bytes that arrived."""
        self._plan = plan
        self._numbers = {run.chunk: number for number, run in enumerate(plan.runs)}
        placed = sorted((run.blob, run.chunk.offset, n) for n, run in enumerate(plan.runs))
        self._places = [(blob, offset) for blob, offset, _ in placed]
        self._placed = [number for _, _, number in placed]
        self._lock = threading.Lock()
        # By run: what is here and verified, and not consumed yet.
        self._here: dict[int, memoryview] = {}
        self._used: OrderedDict[int, memoryview] = OrderedDict()
        self._used_bytes = 0
        self._spare: list[bytearray] = []
        self._next = 0
        self._ahead: set[int] = set()
        self._ahead_bytes = 0
        self._fetcher = ChunkFetcher(
            store.read_verified,
            deadline_s=deadline_s,
            take_buffer=self._take_buffer,
            is_cached=self._has,
            verify=self._is_right,
            on_progress=on_progress,
        )
        self._advance()

    def read(self, blob: int, offset: int, length: int) -> memoryview:
        """Stored bytes of a blob from `offset` on, at most `length` and at least one, of verified
        frames. They hold until the next call.

        Raises: CorruptError, DeadlineError, UnavailableError, NotFoundError.
        """
        self._let_go()
        start, data = self._covering(blob, offset)
        return data[offset - start : offset + length - start].toreadonly()

    def _covering(self, blob: int, offset: int) -> tuple[int, memoryview]:
        """Verified bytes around a byte of a blob, and where they begin."""
        place = bisect_right(self._places, (blob, offset)) - 1
        if place >= 0 and self._places[place][0] == blob:
            number = self._placed[place]
            run = self._plan.runs[number]
            if offset < run.chunk.end:
                return run.chunk.offset, self._run(number, run)
        # Between others that are wanted.
        frames = self._plan.blobs[blob] if 0 <= blob < len(self._plan.blobs) else ()
        at = bisect_right(frames, offset, key=_end)
        if at == len(frames):
            raise CorruptError(f"there is no byte {offset} of a blob {blob} in this snapshot")
        return frames[at].offset, self._alone(blob, frames[at])

    def _run(self, number: int, run: Run) -> memoryview:
        data = self._taken(number, run)
        if data is None:
            self._fetcher.demand(run.chunk, self._deliver)
            data = self._taken(number, run)
        assert data is not None
        self._advance()
        return data

    def _alone(self, blob: int, frame: Frame) -> memoryview:
        """Return a frame that is in no run."""
        found: list[bytes] = []
        chunk = Chunk(self._plan.keys[blob], frame.offset, frame.length, frame.digest)
        self._fetcher.demand(chunk, lambda _, data: found.append(bytes(data)))
        return memoryview(found[0])

    def _taken(self, number: int, run: Run) -> memoryview | None:
        with self._lock:
            data = self._here.pop(number, None)
            if number in self._ahead:
                self._ahead.remove(number)
                self._ahead_bytes -= run.chunk.length
            if data is None:
                if number in self._used:
                    # Of a snapshot on top of another some are wanted again and again.
                    self._used.move_to_end(number)
                return self._used.get(number)
            self._used[number] = data
            self._used_bytes += len(data)
            return data

    def _let_go(self) -> None:
        """The memory of what was consumed longest ago is for others."""
        with self._lock:
            while self._used_bytes > KEPT_BYTES and len(self._used) > 1:
                _, dropped = self._used.popitem(last=False)
                self._used_bytes -= len(dropped)
                if isinstance(dropped.obj, bytearray) and len(dropped.obj) == _FETCH_BYTES:
                    self._spare.append(dropped.obj)

    def _has(self, chunk: Chunk) -> bool:
        return self._numbers.get(chunk, -1) in self._here

    def _is_right(self, chunk: Chunk, data: memoryview) -> bool:
        """Whether each frame of a run has its digest."""
        number = self._numbers.get(chunk)
        if number is None:
            return matches_digest(chunk, data)
        run = self._plan.runs[number]
        return all(
            content_digest(data[frame.offset - chunk.offset : _end(frame) - chunk.offset])
            == frame.digest
            for frame in self._plan.blobs[run.blob][run.first : run.behind]
        )

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        with self._lock:
            self._here[self._numbers[chunk]] = data

    def _take_buffer(self, length: int) -> memoryview:
        """Memory for one of the fetcher's reads, which no other thread writes to."""
        buffer = None
        with self._lock:
            if length <= _FETCH_BYTES and self._spare:
                buffer = self._spare.pop()
        return memoryview(buffer or bytearray(max(length, _FETCH_BYTES)))[:length]

    def _advance(self) -> None:
        """Submit what the window has room for."""
        wanted = []
        runs = self._plan.runs
        with self._lock:
            room = WINDOW_BYTES - self._ahead_bytes
            if room < WINDOW_BYTES // 8:
                return
            while self._next < len(runs) and room > 0:
                number, chunk = self._next, runs[self._next].chunk
                self._next += 1
                if number not in self._here and number not in self._used:
                    wanted.append(covering((chunk,), Priority.PREFETCH))
                    self._ahead.add(number)
                    self._ahead_bytes += chunk.length
                    room -= chunk.length
        if wanted:
            self._fetcher.submit(wanted, self._deliver)

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._fetcher.close()
