"""Extraction of a snapshot's tree from the store.

`plan_frames` lists the frames of the blobs in the order in which an extraction wants them.
`FrameSource` fetches them ahead, in runs of neighbours and within a window of memory, verifies
each, and turns a run that is wanted now into a demand. Blobs that are files on this node's own disk
are read directly instead.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from msgspec import Struct

from bootseer.base.closing import Closing
from bootseer.base.content_digest import content_digest
from bootseer.blob.extract.plan import PART_BYTES
from bootseer.blob.frames import frames_for
from bootseer.blob.keys import blob_key
from bootseer.blob.pack.stat_record import Records
from bootseer.blob.tree import Frame, Tree
from bootseer.errors import CorruptError
from bootseer.fanout.local import SharedReads, decline
from bootseer.linux import mount_table
from bootseer.settings.config import Settings
from bootseer.snapshots.manifest import Target
from bootseer.snapshots.scan import text_of
from bootseer.store import Store
from bootseer.store.backend import HasDescriptor, IsFolder
from bootseer.transfer.attempt import Attempt
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
    """Frames that an extraction wants."""

    keys: list[str]
    """The keys of the blobs in the store."""
    blobs: list[Sequence[Frame]]
    runs: list[Run]
    """Large files first, as `blob.extract` wants them. What only other trees have in a blob that
    several share is left out."""
    wanted_bytes: int

    def chunks(self) -> list[Chunk]:
        """Return the frames of all runs, in order."""
        return [
            Chunk(self.keys[run.blob], frame.offset, frame.length, frame.digest)
            for run in self.runs
            for frame in self.blobs[run.blob][run.first : run.behind]
        ]


def plan_frames(tree: Tree) -> FramePlan:
    """Return the plan of an extraction of all of `tree`. Pure."""
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
    """The `read` callable of `blob.extract` for blobs of a store; one for each extraction.

    Thread safety: one thread calls `read`. The lock guards the fields that the fetcher's threads
    change: `_came` and `_spare`.
    """

    def __init__(
        self,
        store: Store,
        plan: FramePlan,
        *,
        deadline_s: float,
        on_progress: Callable[[int], None] = lambda count: None,
        start: Settings | None = None,
    ) -> None:
        """Begin to fetch; `on_progress` gets counts of bytes that arrived. `start`: settings of a
        start, whose nodes may feed each other."""
        self._plan = plan
        self._numbers = {run.chunk: number for number, run in enumerate(plan.runs)}
        placed = sorted((run.blob, run.chunk.offset, n) for n, run in enumerate(plan.runs))
        self._places = [(blob, offset) for blob, offset, _ in placed]
        self._placed = [number for _, _, number in placed]
        self._lock = threading.Lock()
        self._came: dict[int, memoryview] = {}
        """Bytes of runs that are here, verified, and not consumed."""
        self._consumed: OrderedDict[int, memoryview] = OrderedDict()
        """Bytes of consumed runs, the longest unused first."""
        self._consumed_bytes = 0
        self._spare: list[bytearray] = []
        self._next = 0
        """The first run that was not fetched ahead."""
        self._ahead: set[int] = set()
        """Runs in the window: fetched ahead, and not consumed."""
        self._room_bytes = WINDOW_BYTES
        self._reads = None if start is None else SharedReads(start, store.read_verified)
        if start is not None and self._reads is not None:
            self._reads.share(start.store_url, plan.chunks())
        self._fetcher = ChunkFetcher(
            store.read_verified if self._reads is None else self._reads.read,
            deadline_s=deadline_s,
            take_buffer=self._take_buffer,
            is_cached=lambda chunk: self._numbers.get(chunk, -1) in self._came,
            verify=self._is_right,
            on_progress=on_progress,
        )
        self._fetch_ahead()

    def read(self, blob: int, offset: int, length: int) -> memoryview:
        """Return at most `length` stored bytes of a blob from `offset` on, and at least one.

        They are of verified frames, and hold until the next call. Raises: CorruptError,
        DeadlineError, UnavailableError, NotFoundError.
        """
        self._reuse_memory()
        start, data = self._covering(blob, offset)
        return data[offset - start : offset + length - start].toreadonly()

    def _covering(self, blob: int, offset: int) -> tuple[int, memoryview]:
        """Return verified bytes around a byte of a blob, and the offset at which they begin."""
        place = bisect_right(self._places, (blob, offset)) - 1
        if place >= 0 and self._places[place][0] == blob:
            number = self._placed[place]
            chunk = self._plan.runs[number].chunk
            if offset < chunk.end:
                return chunk.offset, self._run(number, chunk)
        # Between runs.
        frames = self._plan.blobs[blob] if 0 <= blob < len(self._plan.blobs) else ()
        at = bisect_right(frames, offset, key=_end)
        if at == len(frames):
            raise CorruptError(f"there is no byte {offset} of a blob {blob} in this snapshot")
        frame, found = frames[at], list[bytes]()
        chunk = Chunk(self._plan.keys[blob], frame.offset, frame.length, frame.digest)
        self._fetcher.demand(chunk, lambda _, data: found.append(bytes(data)))
        return frame.offset, memoryview(found[0])

    def _run(self, number: int, chunk: Chunk) -> memoryview:
        data = self._consumed.get(number)
        if data is not None:
            # Of a snapshot on top of another some are wanted again and again.
            self._consumed.move_to_end(number)
            return data
        # Returns at once where the run has come.
        self._fetcher.demand(chunk, self._deliver)
        with self._lock:
            data = self._consumed[number] = self._came.pop(number)
        self._consumed_bytes += len(data)
        if number in self._ahead:
            self._ahead.remove(number)
            self._room_bytes += chunk.length
            self._fetch_ahead()
        return data

    def _fetch_ahead(self) -> None:
        """Submit the runs that the window has room for."""
        if self._room_bytes < WINDOW_BYTES // 8:
            return
        wanted = []
        while self._next < len(self._plan.runs) and self._room_bytes > 0:
            chunk = self._plan.runs[self._next].chunk
            if self._next not in self._consumed:
                wanted.append(covering((chunk,), Priority.PREFETCH))
                self._ahead.add(self._next)
                self._room_bytes -= chunk.length
            self._next += 1
        if wanted:
            self._fetcher.submit(wanted, self._deliver)

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
            self._came[self._numbers[chunk]] = data

    def _reuse_memory(self) -> None:
        while self._consumed_bytes > KEPT_BYTES and len(self._consumed) > 1:
            _, dropped = self._consumed.popitem(last=False)
            self._consumed_bytes -= len(dropped)
            if isinstance(dropped.obj, bytearray) and len(dropped.obj) == _FETCH_BYTES:
                with self._lock:
                    self._spare.append(dropped.obj)

    def _take_buffer(self, length: int) -> memoryview:
        """Return memory for a read, which no other thread writes to."""
        buffer = None
        with self._lock:
            if length <= _FETCH_BYTES and self._spare:
                buffer = self._spare.pop()
        return memoryview(buffer or bytearray(max(length, _FETCH_BYTES)))[:length]

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._fetcher.close()


# File systems of one disk, whose device numbers files show; any other is taken for a remote one.
LOCAL_KINDS = frozenset({b"ext2", b"ext3", b"ext4", b"f2fs", b"ramfs", b"tmpfs", b"xfs"})


class Fetched(Struct, frozen=True):
    """Result of `fetch_tree`."""

    moved_bytes: int
    """Bytes of blobs that came from the store."""
    records: Records


def fetch_tree(
    store: Store,
    target: Target,
    tree: Tree,
    directory: Path,
    deadline_s: float,
    *,
    recorded: bytes = b"",
    start: Settings | None = None,
) -> Fetched:
    """Extract a target's tree to `directory`, whole or not at all. `recorded`: see
    `blob.extract`; `start`: see `FrameSource`. Raises: as `restore`."""
    # Here: a mount, which should be there at once, needs none of it.
    from bootseer.base.progress import Progress
    from bootseer.blob.extract.extraction import extract

    label = f"restoring {text_of(target.path)}"
    local = find_local_blobs(store, tree)
    if local is not None:
        with Progress(label, sum(tree.columns.extent_length)) as progress:
            result = extract(
                tree,
                local.read,
                directory,
                files=local.files,
                recorded=recorded,
                on_progress=progress.advance,
            )
        if len(tree.blobs) == 1:
            return Fetched(tree.blobs[0].size_bytes, result.records)
        return Fetched(plan_frames(tree).wanted_bytes, result.records)
    plan = plan_frames(tree)
    with (
        Progress(label, plan.wanted_bytes) as progress,
        FrameSource(
            store, plan, deadline_s=deadline_s, on_progress=progress.advance, start=start
        ) as source,
    ):
        result = extract(tree, source.read, directory, is_verified=True, recorded=recorded)
    return Fetched(plan.wanted_bytes, result.records)


def decline_tree(settings: Settings, tree: Tree) -> None:
    """Have the other nodes of the start told that this one has a tree already: they do not wait
    for this node to get it."""
    decline(settings, settings.store_url, plan_frames(tree).chunks())


class LocalBlobs:
    """Open files, one for each of a tree's blobs. Closed when it is dropped."""

    def __init__(self, readers: list[HasDescriptor]) -> None:
        self._readers = readers

    @property
    def files(self) -> list[int]:
        """Their descriptors."""
        return [reader.fileno() for reader in self._readers]

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Stored bytes of a blob; fewer at its end. Raises: UnavailableError."""
        buffer = bytearray(length)
        count = self._readers[blob].read_into(offset, memoryview(buffer), Attempt())
        return bytes(memoryview(buffer)[:count])


def find_local_blobs(store: Store, tree: Tree) -> LocalBlobs | None:
    """The tree's blobs, if all of them are files on disks or in the memory of this node, because
    the store is a folder there; else None, and the store is asked, in parallel and with deadlines.
    Raises: NotFoundError, UnavailableError."""
    if not isinstance(store.backend, IsFolder):
        return None
    readers: list[HasDescriptor] = []
    devices = {one.device for one in mount_table.mount_points() if one.kind in LOCAL_KINDS}
    for blob in tree.blobs:
        reader = store.backend.open_reader(blob_key(blob.digest))
        if not isinstance(reader, HasDescriptor):
            return None
        if os.fstat(reader.fileno()).st_dev not in devices:
            return None
        readers.append(reader)
    return LocalBlobs(readers)
