"""Stored frames of a tree, fetched from the store ahead of an extraction.

`plan_stored_frames` lists the frames of the blobs in the order in which an extraction reads them.
`StoredFrames` fetches them ahead, in runs of neighbours and within a window of memory, verifies
each, and gives a run that the extraction waits for priority.
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
from bootseer.fanout.local import SharedReads
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.chunks import ChunkFetcher, matches_digest
from bootseer.transfer.ranges import Chunk, Priority, covering

WINDOW_BYTES = 64 * 1024 * 1024
"""Bytes fetched ahead: enough to keep eight connections busy while a large file is written."""
_FETCH_BYTES = 1024 * 1024
"""Size of a request: small, so that the first bytes arrive soon although all requests share the
network, and large enough to make a latency of some milliseconds negligible."""
KEPT_BYTES = 16 * 1024 * 1024
"""Bytes of runs that are kept after they were read: neighbouring files share frames."""


class Run(Struct, frozen=True):
    """Neighbouring frames of a blob, `[first, behind)`, which are fetched by one request."""

    blob: int
    chunk: Chunk
    first: int
    behind: int


class FramePlan(Struct, frozen=True):
    """Frames that an extraction reads."""

    keys: list[str]
    """Keys of the blobs in the store."""
    blobs: list[Sequence[Frame]]
    runs: list[Run]
    """Runs, those of large files first, as `blob.extract` reads them. Frames of a shared blob that
    only other trees use are left out."""
    wanted_bytes: int

    def chunks(self) -> list[Chunk]:
        """Return the frames of all runs, in order."""
        return [
            Chunk(self.keys[run.blob], frame.offset, frame.length, frame.digest)
            for run in self.runs
            for frame in self.blobs[run.blob][run.first : run.behind]
        ]


def plan_stored_frames(tree: Tree) -> FramePlan:
    """Return the frames that an extraction of all of `tree` reads. Pure."""
    # Frames are numbered through all blobs.
    firsts = [0, *accumulate(len(blob.frames) for blob in tree.blobs)]
    c = tree.columns
    large: dict[int, None] = {}
    # A blob of one tree only: all its frames are read.
    is_alone = len(tree.blobs) == 1
    small: set[int] = set(range(firsts[1])) if is_alone else set()
    # By blob, the part of its stream that was planned last: many files share a frame.
    known = [(0, 0)] * len(tree.blobs)
    for number, offset, length in zip(
        c.extent_blob, c.extent_blob_offset, c.extent_length, strict=True
    ):
        if not tree.blobs[number].frames:
            continue
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
    """Return the frames with these numbers, divided into runs."""
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


class StoredFrames(Closing):
    """Reader of stored frames for `blob.extract`. `read` is for one thread at a time."""

    def __init__(
        self,
        store: Store,
        plan: FramePlan,
        *,
        deadline_s: float,
        on_progress: Callable[[int], None] = lambda count: None,
        start: Settings | None = None,
    ) -> None:
        """Begin to fetch the frames of `plan`.

        `on_progress` is called with the number of bytes that have arrived. `start`: settings of a
        start whose nodes may feed each other.
        """
        self._plan = plan
        self._numbers = {run.chunk: number for number, run in enumerate(plan.runs)}
        placed = sorted((run.blob, run.chunk.offset, n) for n, run in enumerate(plan.runs))
        self._places = [(blob, offset) for blob, offset, _ in placed]
        self._placed = [number for _, _, number in placed]
        self._lock = threading.Lock()
        # Verified runs that were not read yet. The lock is for these and for `_spare`, which the
        # threads of the fetcher change.
        self._fetched: dict[int, memoryview] = {}
        # Runs that were read, the longest unused first.
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._spare: list[bytearray] = []
        # Number of the first run that was not fetched ahead.
        self._next = 0
        # Runs in the window: fetched ahead, and not read yet.
        self._ahead: set[int] = set()
        self._room_bytes = WINDOW_BYTES
        self._reads = None if start is None else SharedReads(start, store.read_verified)
        if start is not None and self._reads is not None:
            self._reads.share(start.store_url, plan.chunks())
        self._fetcher = ChunkFetcher(
            store.read_verified if self._reads is None else self._reads.read,
            deadline_s=deadline_s,
            take_buffer=self._take_buffer,
            is_cached=lambda chunk: self._numbers.get(chunk, -1) in self._fetched,
            verify=self._is_right,
            on_progress=on_progress,
        )
        self._fetch_ahead()

    def read(self, blob: int, offset: int, length: int) -> memoryview:
        """Return stored bytes of verified frames of a blob: at most `length`, and at least one.

        The memory is valid until the next call. Raises: CorruptError, DeadlineError,
        UnavailableError, NotFoundError.
        """
        self._reuse_memory()
        start, data = self._covering(blob, offset)
        return data[offset - start : offset + length - start].toreadonly()

    def _covering(self, blob: int, offset: int) -> tuple[int, memoryview]:
        """Return verified bytes that hold the byte at `offset`, and the offset of the first."""
        place = bisect_right(self._places, (blob, offset)) - 1
        if place >= 0 and self._places[place][0] == blob:
            number = self._placed[place]
            chunk = self._plan.runs[number].chunk
            if offset < chunk.end:
                return chunk.offset, self._run(number, chunk)
        # The frame is in no run.
        frames = self._plan.blobs[blob] if 0 <= blob < len(self._plan.blobs) else ()
        number = bisect_right(frames, offset, key=_end)
        if number == len(frames):
            raise CorruptError(f"there is no byte {offset} of a blob {blob} in this tree")
        frame, found = frames[number], list[bytes]()
        chunk = Chunk(self._plan.keys[blob], frame.offset, frame.length, frame.digest)
        self._fetcher.demand(chunk, lambda _, data: found.append(bytes(data)))
        return frame.offset, memoryview(found[0])

    def _run(self, number: int, chunk: Chunk) -> memoryview:
        data = self._kept.get(number)
        if data is not None:
            # Some runs are read many times, such as those of trees that share blobs.
            self._kept.move_to_end(number)
            return data
        # Returns at once if the run has been fetched.
        self._fetcher.demand(chunk, self._deliver)
        with self._lock:
            data = self._kept[number] = self._fetched.pop(number)
        self._kept_bytes += len(data)
        if number in self._ahead:
            self._ahead.remove(number)
            self._room_bytes += chunk.length
            self._fetch_ahead()
        return data

    def _fetch_ahead(self) -> None:
        """Fetch the runs for which the window has room."""
        if self._room_bytes < WINDOW_BYTES // 8:
            return
        wanted = []
        while self._next < len(self._plan.runs) and self._room_bytes > 0:
            chunk = self._plan.runs[self._next].chunk
            if self._next not in self._kept:
                wanted.append(covering((chunk,), Priority.PREFETCH))
                self._ahead.add(self._next)
                self._room_bytes -= chunk.length
            self._next += 1
        if wanted:
            self._fetcher.submit(wanted, self._deliver)

    def _is_right(self, chunk: Chunk, data: memoryview) -> bool:
        """Return whether each frame of a run has its digest."""
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
            self._fetched[self._numbers[chunk]] = data

    def _reuse_memory(self) -> None:
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)
            if isinstance(dropped.obj, bytearray) and len(dropped.obj) == _FETCH_BYTES:
                with self._lock:
                    self._spare.append(dropped.obj)

    def _take_buffer(self, length: int) -> memoryview:
        """Return memory for a request, which no other thread writes to."""
        buffer = None
        with self._lock:
            if length <= _FETCH_BYTES and self._spare:
                buffer = self._spare.pop()
        return memoryview(buffer or bytearray(max(length, _FETCH_BYTES)))[:length]

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._fetcher.close()
