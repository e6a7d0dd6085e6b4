"""Replay of a bundle: its frames are fetched into the node cache in the order of use.

A start never depends on its bundle: the first error ends the replay with one warning, and faults
read the blobs. Of several servers of a node that replay the same bundle at once, one fetches it and
the others follow: they wait for the frames of the first.

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
"""(number of frames, largest request in bytes), in the order of use; a request has one frame at
least. Parallel requests share the network, so that large ones would all end at the same time, and
the first page would come with the last. Small ones waste time by their latency. So the requests are
small while a start waits for its first pages, and large later."""

_SHARED_FETCH_BYTES = ((None, 1),)
"""Fetches of frames that a fan-out brings, one frame each: a frame costs no request, and would have
to wait for others that are fetched with it."""

_FOLLOW_S = 120.0
"""Longest time for which a server follows another one."""
_FOLLOWED_WAITS_S = 0.5
"""Limit of all waits for frames of the followed server together: the loss if that server is slow.
At 1 Gbit/s it fetches 60 MB in this time."""
_POLL_S = 0.002
_LEAD_CHECK_S = 0.02
"""Pause between two checks whether the followed server has ended."""
_WINDOW_FRAMES = 16
"""Frames (8 MiB) within which read-ahead from the disk is sorted by offset."""
_GAP_BYTES = 32 * 1024
"""Gaps between two extents up to this size are read from the disk, too: a seek takes longer."""


def chunks_of(bundle: Bundle, digest: str) -> list[Chunk]:
    """Return the frames of the bundle `digest` as chunks of the fetcher. Pure."""
    return [
        Chunk(part_key(digest, frame.part), frame.offset, frame.length, frame.digest)
        for frame in bundle.frames
    ]


def plan_replay(
    chunks: Sequence[Chunk], is_cached: Callable[[Chunk], bool], *, is_shared: bool = False
) -> list[Fetch]:
    """Return the fetches of the frames that are not cached yet, in the order of use. Pure.

    `is_shared`: whether a fan-out brings the frames.
    """
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


class ReplayState(enum.Enum):
    """State of the bundle of one start. A `BundleReplay` begins with FOLLOWING or FETCHING."""

    NONE = "none"
    """The start uses no bundle, or there is none."""
    LOOKING = "looking"
    """The bundle is looked up."""
    REFUSED = "refused"
    """The bundle was found wrong by this start or an earlier one."""
    FOLLOWING = "following"
    """Another server of the node fetches the bundle."""
    FETCHING = "fetching"
    COMPLETE = "complete"
    GIVEN_UP = "given up"
    """The bundle could not be fetched."""
    REFUTED = "refuted"
    """The bundle has bytes that are not those of the image. Entered from any state."""
    NO_ROOM = "no room"
    """The disk takes no more; the bundle is not to blame."""


_UNDER_WAY = frozenset((ReplayState.FOLLOWING, ReplayState.FETCHING))


class BundleReplay:
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
        """Prepare the transfer of the bundle with `digest` in the store.

        Frames that the image's `streams` hold are not fetched. The server that holds the lock file
        `lock` fetches, and the others follow. `reads` are the shared reads of `fetcher`, if a
        fan-out may bring the frames that are in the store `url`.
        """
        self.bundle = file.bundle
        self.state = ReplayState.FETCHING
        self.fetched_bytes = 0
        """Uncompressed bytes that this replay fetched."""
        self.finished_after_ns: int | None = None
        """Time from `start` to the last frame; None unless the replay is complete."""
        self.error: str | None = None
        """Reason why the replay was given up."""
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
        self._waits_left_s = _FOLLOWED_WAITS_S
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to fetch, or to follow the server that fetches. Returns at once."""
        started_ns = time.monotonic_ns()
        if self._takes_lead():
            self._submit()
        else:
            self.state = ReplayState.FOLLOWING
            self._find_pending()
        here = [n for n, is_pending in enumerate(self._pending) if not is_pending]
        if here:
            threading.Thread(target=self._warm, args=(here,), name="warm-disk", daemon=True).start()
        threading.Thread(target=self._watch, args=(started_ns,), name="replay", daemon=True).start()

    def _warm(self, numbers: Sequence[int]) -> None:
        """Read frames that are present from the disk into memory ahead of the start."""
        proven = []
        for number in numbers:
            if self._stopping.is_set():
                return
            if self._file.is_known_present(number):
                self._file.read_ahead(number)
            else:
                proven.append(self.bundle.frames[number])
        for run in disk_runs(proven):
            if self._stopping.is_set():
                return
            self._streams[run.blob].read_ahead(run.offset, run.length)

    def _takes_lead(self) -> bool:
        """Return whether this server now holds the lock for fetching the bundle."""
        if self._lock_path is None:
            return True
        try:
            self._lock_fd = lock_file(self._lock_path, 0)
        except TimeoutError:
            return False
        except OSError as error:
            _log.debug("replaying without regard to others: %s", error)
        return True

    def _find_pending(self) -> None:
        self._pending[:] = bytes(not self._is_here(n) for n in range(len(self._pending)))

    def _submit(self) -> None:
        """Begin to fetch the frames that are not present."""
        if self.has_ended:
            return
        self._find_pending()
        if self._file.is_refuted:
            self.refute(CorruptError("its bytes are not those of the image"))
        elif self._file.is_full and any(self._pending):
            self._give_up_for_room()
        if self.has_ended:
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
        if self.has_ended and self._batch is not None:
            # Another thread has given up the replay before it could see the batch.
            self._batch.cancel()

    def _shares(self) -> bool:
        """Return whether a fan-out brings the frames.

        The node does not take part in the fan-out of a bundle that it has for the most part.
        """
        if self._reads is None:
            return False
        if 2 * self.remaining_count > len(self._chunks):
            return self._reads.share(self._url, self._chunks)
        self._reads.decline(self._url, self._chunks)
        return False

    def _watch(self, started_ns: int) -> None:
        until_s = time.monotonic() + _FOLLOW_S
        while self.state is ReplayState.FOLLOWING:
            if self._stopping.wait(_LEAD_CHECK_S):
                return
            if self._takes_lead() or time.monotonic() > until_s:
                # The followed server has ended or is too slow: this one fetches the rest.
                self._enter(ReplayState.FETCHING)
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
        if self._enter(ReplayState.COMPLETE):
            self.finished_after_ns = finished_ns

    def _enter(self, state: ReplayState) -> bool:
        """Enter `state`, unless the replay has ended. Return whether the state changed."""
        with self._lock:
            if self.has_ended and (state is not ReplayState.REFUTED or self.state is state):
                return False
            self.state = state
            if self.has_ended:
                # Some frames may be pending although another server has fetched them.
                self._pending[:] = bytes(len(self._pending))
            return True

    def give_up(self, error: BaseException, state: ReplayState = ReplayState.GIVEN_UP) -> None:
        """End the replay because of `error`, with one warning. Idempotent."""
        if not self._enter(state):
            return
        self.error = str(error)
        if self._batch is not None:
            self._batch.cancel()
        if self._stopping.is_set():
            return
        _log.warning("the bundle is given up, and the image is read without it: %s", error)

    def refute(self, error: CorruptError) -> None:
        """End the replay because the bundle has wrong bytes. Idempotent."""
        self.give_up(error, ReplayState.REFUTED)

    def _give_up_for_room(self) -> None:
        # Further frames could not be kept, and their bytes would be fetched again by faults.
        self.give_up(NoSpaceError("the cache's disk takes no more"), ReplayState.NO_ROOM)

    def stop(self) -> None:
        """Stop using the cache, which is about to be closed. Idempotent."""
        self._stopping.set()

    @property
    def has_ended(self) -> bool:
        """Whether the replay has ended: all frames were fetched, or it was given up."""
        return self.state not in _UNDER_WAY

    @property
    def remaining_count(self) -> int:
        return self._pending.count(1)

    def _is_here(self, number: int) -> bool:
        return self._file.is_available(number, self._streams)

    def is_cached(self, chunk: Chunk) -> bool:
        """Return whether a frame need not be fetched. Reads nothing."""
        number = self._numbers.get(chunk)
        return number is not None and (
            not self._pending[number] or self._file.is_known_present(number)
        )

    def demand(self, blob: int, offset: int, length: int, deadline_s: float) -> bool:
        """Fetch the pending frames that hold any of a range with priority, and wait for them.

        Return False if no such frame is pending. If no bytes arrive for `deadline_s`, the replay is
        given up. Never raises: the caller reads the cache again.
        """
        waited = False
        for number in self._file.frames_for(blob, offset, length):
            if not self._pending[number]:
                continue
            waited = True
            if self.state is ReplayState.FOLLOWING and self._await_followed(number):
                continue
            try:
                self._fetcher.demand(self._chunks[number], self._deliver, deadline_s=deadline_s)
            except (BootseerError, OSError) as error:
                self.give_up(error)
        return waited

    def _await_followed(self, number: int) -> bool:
        """Wait a short time for a frame of the followed server. Return whether it has come."""
        while not self._is_here(number):
            if self.state is not ReplayState.FOLLOWING or self._waits_left_s <= 0:
                return False
            time.sleep(_POLL_S)
            self._waits_left_s -= _POLL_S
        self._pending[number] = 0
        return True

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        number = self._numbers[chunk]
        # On a full disk, frames that were under way are kept in memory: they cost their transfer.
        if not self._pending[number] and self.state is not ReplayState.NO_ROOM:
            return
        frame = self.bundle.frames[number]
        if not self._file.is_known_present(number) and not self._file.put(
            number, decode_frame(frame, data)
        ):
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
    """Yield the extents of `frames`, merged to few long ones, roughly in the order of use. Pure.

    After a reboot, or after other programs have used the memory, an image that is complete on the
    node is read from a cold disk, in small pieces at scattered offsets. The caller reads these
    extents ahead (`CachedStream.read_ahead`).
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
