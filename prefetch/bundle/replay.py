"""Replay of a bundle: its frames on their way into the node cache, in the order of use.

`plan_replay` is pure; the fetcher moves the bytes. A bundle is a help, never a condition: the first
thing wrong with it ends its use with one warning, and faults go to the blobs. Of several servers on
a node that replay one bundle at once, one fetches it and the others follow.

Thread-safe; `start` it once.
"""

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bootseer.errors import BootseerError, CorruptError, NoSpaceError
from bootseer.fanout.local import SharedReads
from bootseer.linux.locks import lock_file
from bootseer.prefetch.bundle.file import BundleFile
from bootseer.prefetch.bundle.format import Bundle, BundleExtent, BundleFrame, decode_frame
from bootseer.prefetch.bundle.hot_store import part_key
from bootseer.prefetch.cache.node_cache import CachedStream
from bootseer.transfer.chunks import Batch, ChunkFetcher
from bootseer.transfer.ranges import Chunk, Fetch, Priority, plan

_log = logging.getLogger(__name__)

_FETCH_BYTES = ((8, 1), (24, 2**19), (None, 2**21))
"""So many frames in requests of at most so many bytes (one frame at least). Requests run side by
side and share the line, so large ones would all end together, and the first page would come with
the last; small ones waste their latency. So: small while a start waits for its first pages, large
when it is under way."""

_SHARED_FETCH_BYTES = ((None, 1),)
"""A frame that a fan-out brings costs no request. One that is read with others waits for the last
of them."""

_FOLLOW_S = 120.0
_PATIENCE_S = 0.5
"""All waits for another server's fetches together: what is lost when it is slow. At 1 Gbit it
brings 60 MB meanwhile."""
_POLL_S = 0.002
_TURN_S = 0.02
"""How often a follower looks whether the other one has finished."""
_WINDOW_FRAMES = 16
"""8 MiB: sorted by place within so much, by use beyond."""
_GAP_BYTES = 32 * 1024
"""Less than this between two pieces is read along: a disk moves it in less than a seek takes."""


def chunks_of(bundle: Bundle, digest: str) -> list[Chunk]:
    """Return the frames of the bundle `digest` as chunks of the fetcher. Pure."""
    return [
        Chunk(part_key(digest, frame.part), frame.offset, frame.length, frame.digest)
        for frame in bundle.frames
    ]


def plan_replay(
    chunks: Sequence[Chunk], is_cached: Callable[[Chunk], bool], *, is_shared: bool = False
) -> list[Fetch]:
    """Return the fetches of the frames that are not here yet, in order of use. Pure (no I/O).
    `is_shared`: a fan-out brings them in that order."""
    fetches: list[Fetch] = []
    missing = [chunk for chunk in chunks if not is_cached(chunk)]
    for count, fetch_bytes in _SHARED_FETCH_BYTES if is_shared else _FETCH_BYTES:
        part, missing = missing[:count], missing[len(missing) if count is None else count :]
        fetches += plan(
            part,
            lambda chunk: False,
            priority=Priority.PREFETCH,
            max_gap_bytes=0,
            max_fetch_bytes=fetch_bytes,
        )
    return fetches


class Replaying(enum.Enum):
    """State of a bundle for one start. A `Replay` begins when one is found."""

    NONE = "none"
    """None is looked for, or there is none."""
    LOOKING = "looking"
    REFUSED = "refused"
    """What there is was found wrong, by this start or an earlier one."""
    FOLLOWING = "following"
    """Another server of the node fetches the bundle."""
    FETCHING = "fetching"
    COMPLETE = "complete"
    GIVEN_UP = "given up"
    """Something was wrong with the bundle or its store."""
    REFUTED = "refuted"
    """Its bytes are not those of the image. Entered from any state."""
    NO_ROOM = "no room"
    """The disk takes no more; nothing is wrong with the bundle."""


_UNDER_WAY = frozenset((Replaying.FOLLOWING, Replaying.FETCHING))


class Replay:
    """Transfer of one bundle into its file in the node cache."""

    def __init__(
        self,
        file: BundleFile,
        digest: str,
        streams: Sequence[CachedStream],
        fetcher: ChunkFetcher,
        *,
        lock: Path | None = None,
        reads: SharedReads | None = None,
        url: str = "",
    ) -> None:
        """`digest` is the bundle's in the store. `streams` are the image's: what they hold is not
        fetched. `lock`: the server that holds this file fetches the bundle for all on this node.
        `reads`: those of `fetcher`, if a fan-out may bring what is in the store `url`.
        """
        self.bundle = file.bundle
        self.state = Replaying.FETCHING
        self.fetched_bytes = 0
        """Uncompressed bytes that this replay brought."""
        self.finished_after_ns: int | None = None
        """Time from `start` to the last frame; None unless the replay is complete."""
        self.error: str | None = None
        """Reason why it was given up."""
        self._file = file
        self._streams = streams
        self._fetcher = fetcher
        self._chunks = chunks_of(file.bundle, digest)
        self._numbers = {chunk: number for number, chunk in enumerate(self._chunks)}
        self._pending = bytearray(b"\1" * len(self._chunks))
        self._lock = threading.Lock()
        self._batch: Batch | None = None
        self._lock_path = lock
        self._reads, self._url = reads, url
        self._lock_fd = -1
        self._patience_s = _PATIENCE_S
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to fetch, or to follow the server that does; returns at once."""
        started_ns = time.monotonic_ns()
        if self._takes_lead():
            self._submit()
        else:
            self.state = Replaying.FOLLOWING
            self._look_what_is_here()
        here = [n for n, is_pending in enumerate(self._pending) if not is_pending]
        if here:
            threading.Thread(target=self._warm, args=(here,), name="warm-disk", daemon=True).start()
        threading.Thread(target=self._watch, args=(started_ns,), name="replay", daemon=True).start()

    def _warm(self, numbers: Sequence[int]) -> None:
        proven = []
        for number in numbers:
            if self._stopping.is_set():
                return
            if self._file.has_now(number):
                self._file.read_ahead(number)
            else:
                proven.append(self.bundle.frames[number])
        for run in disk_runs(proven):
            if self._stopping.is_set():
                return
            self._streams[run.blob].read_ahead(run.offset, run.length)

    def _takes_lead(self) -> bool:
        if self._lock_path is None:
            return True
        try:
            self._lock_fd = lock_file(self._lock_path, 0)
        except TimeoutError:
            return False
        except OSError as error:
            _log.debug("replaying without regard to others: %s", error)
        return True

    def _look_what_is_here(self) -> None:
        self._pending[:] = bytes(not self._is_here(n) for n in range(len(self._pending)))

    def _submit(self) -> None:
        if self.is_over:
            return
        self._look_what_is_here()
        if self._file.is_refuted:
            self.refute(CorruptError("its bytes are not those of the image"))
        elif self._file.is_full and any(self._pending):
            self._give_up_for_room()
        if self.is_over:
            return
        fetches = plan_replay(
            self._chunks,
            lambda chunk: not self._pending[self._numbers[chunk]],
            is_shared=self._shares(),
        )
        try:
            self._batch = self._fetcher.submit(fetches, self._deliver)
        except BootseerError as error:
            self.give_up(error)
        if self.is_over and self._batch is not None:
            # Given up meanwhile, by another thread that saw no batch.
            self._batch.cancel()

    def _shares(self) -> bool:
        """Return whether a fan-out brings the frames. Of a bundle that is mostly here, the node
        takes no part."""
        if self._reads is None:
            return False
        if 2 * self.remaining_count > len(self._chunks):
            return self._reads.share(self._url, self._chunks)
        self._reads.decline(self._url, self._chunks)
        return False

    def _watch(self, started_ns: int) -> None:
        until_s = time.monotonic() + _FOLLOW_S
        while self.state is Replaying.FOLLOWING:
            if self._stopping.wait(_TURN_S):
                return
            if self._takes_lead() or time.monotonic() > until_s:
                # The other one has finished, has died, or is too slow: the rest is ours.
                self._enter(Replaying.FETCHING)
                self._submit()
        try:
            if self._batch is not None:
                self._batch.wait()
        except (BootseerError, OSError) as error:
            self.give_up(error)
        finally:
            if self._lock_fd >= 0 and self._lock_path is not None:
                self._lock_path.unlink(missing_ok=True)
                os.close(self._lock_fd)
        finished_ns = time.monotonic_ns() - started_ns
        if self._enter(Replaying.COMPLETE):
            self.finished_after_ns = finished_ns

    def _enter(self, state: Replaying) -> bool:
        """Enter `state`, unless the replay is over. Return whether the state changed."""
        with self._lock:
            if self.is_over and (state is not Replaying.REFUTED or self.state is state):
                return False
            self.state = state
            if self.is_over:
                # Also frames that another server brought before their turn came.
                self._pending[:] = bytes(len(self._pending))
            return True

    def give_up(self, error: BaseException, state: Replaying = Replaying.GIVEN_UP) -> None:
        """Use the bundle no further. Idempotent."""
        if not self._enter(state):
            return
        self.error = str(error)
        if self._batch is not None:
            self._batch.cancel()
        if self._stopping.is_set():
            return
        _log.warning("the bundle is not used any further, the image is read without it: %s", error)

    def refute(self, error: CorruptError) -> None:
        """Use the bundle no further: its bytes are wrong. Idempotent."""
        self.give_up(error, Replaying.REFUTED)

    def _give_up_for_room(self) -> None:
        # To go on would bring what is thrown away, and then comes from the blobs once more.
        self.give_up(NoSpaceError("the cache's disk takes no more"), Replaying.NO_ROOM)

    def stop(self) -> None:
        """Touch the cache no more: it is about to be closed. Idempotent."""
        self._stopping.set()

    @property
    def is_over(self) -> bool:
        """Whether the replay has brought everything, or was given up."""
        return self.state not in _UNDER_WAY

    @property
    def remaining_count(self) -> int:
        """Frames still to come."""
        return self._pending.count(1)

    def _is_here(self, number: int) -> bool:
        return self._file.is_here(number, self._streams)

    def is_cached(self, chunk: Chunk) -> bool:
        """Return whether a frame need not be fetched, as far as is known without reading."""
        number = self._numbers.get(chunk)
        return number is not None and (not self._pending[number] or self._file.has_now(number))

    def demand(self, blob: int, offset: int, length: int, deadline_s: float) -> bool:
        """Wait for the pending frames that hold any of this range, moving them to the front.

        Return False if there are none. The wait for a frame ends, and with it the use of the
        bundle, when nothing came for `deadline_s`. Never raises: the caller looks into the cache.
        """
        waited = False
        for number in self._file.frames_for(blob, offset, length):
            if not self._pending[number]:
                continue
            waited = True
            if self.state is Replaying.FOLLOWING and self._comes_from_elsewhere(number):
                continue
            try:
                self._fetcher.demand(self._chunks[number], self._deliver, deadline_s=deadline_s)
            except (BootseerError, OSError) as error:
                self.give_up(error)
        return waited

    def _comes_from_elsewhere(self, number: int) -> bool:
        """Wait a little for a frame that another server is about to bring."""
        while not self._is_here(number):
            if self.state is not Replaying.FOLLOWING or self._patience_s <= 0:
                return False
            time.sleep(_POLL_S)
            self._patience_s -= _POLL_S
        self._pending[number] = 0
        return True

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        number = self._numbers[chunk]
        # On a full disk what was under way is kept in memory: it has been moved.
        if not self._pending[number] and self.state is not Replaying.NO_ROOM:
            return
        frame = self.bundle.frames[number]
        if not self._file.has_now(number) and not self._file.put(number, decode_frame(frame, data)):
            self._give_up_for_room()
            return
        if self._file.is_refuted:
            self.refute(CorruptError("another server found that its bytes are not the image's"))
            return
        with self._lock:
            if self._pending[number]:
                self._pending[number] = 0
                self.fetched_bytes += frame.stream_length


def disk_runs(frames: Sequence[BundleFrame]) -> Iterator[BundleExtent]:
    """The bytes of `frames` as few long pieces, roughly in the frames' order. Pure.

    After a reboot, or when the page cache has been needed for something else, a complete image
    starts from a cold disk, and its first reads come in small pieces all over the cache. The bundle
    knows which will be wanted; `CachedStream.read_ahead` gives the kernel the hint.
    """
    for first in range(0, len(frames), _WINDOW_FRAMES):
        window = frames[first : first + _WINDOW_FRAMES]
        run: BundleExtent | None = None
        for extent in sorted(extent for frame in window for extent in frame.extents):
            end = extent.offset + extent.length
            if (
                run is not None
                and run.blob == extent.blob
                and extent.offset <= run.offset + run.length + _GAP_BYTES
            ):
                run = run._replace(length=max(run.length, end - run.offset))
                continue
            if run is not None:
                yield run
            run = extent
        if run is not None:
            yield run
