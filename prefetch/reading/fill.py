"""Fill of an image: all of its bytes are fetched into the node's cache.

`Fill` does this in the background. It begins when the start has ended and the bundle is fetched,
pauses while there are faults or the cache has no room, and ends when the image is complete. Fetched
bytes stay in the cache, so that the fill of the next start continues. A complete image starts
without store or registry.

One server of an image on a node fills: the one that holds a lock file. When it ends, another one
takes over. The others touch the file when they have faults, upon which the fill pauses as well.

A `Fill` has one thread of its own; `state` and `stop` are thread-safe. `fetch_tree` fetches all of
an image at once.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.base.progress import ProgressBar
from bootseer.errors import BootseerError, CorruptError, NoSpaceError
from bootseer.linux.locks import lock_file
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.registry import LayerReader
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.policy import Policy, random_fraction

_log = logging.getLogger(__name__)

QUIET_S = 5.0
"""Time without faults after which a job counts as started, so that a fill does not disturb it."""
_LOCK_CHECK_S = 1.0
"""Pause between two attempts to take the lock."""
_PAUSES = Policy(base_s=5.0, cap_s=300.0)
"""Pauses after failures. They are long, since no reader waits for a fill."""
WINDOW_BYTES = 64 * 2**20
"""Bytes of a stream that are planned at a time: an image may have millions of frames."""
_NO_ROOM_S = 60.0
"""Pause between two attempts to make room."""
_ROOM_BYTES = 64 * 2**20
"""Bytes between two checks whether the disk has room."""


class Fill:
    """Background fill of one image."""

    def __init__(
        self,
        streams: ImageBytes,
        may_begin: Callable[[], bool],
        make_room: Callable[[int], bool],
        *,
        quiet_s: float = QUIET_S,
        pauses: Policy = _PAUSES,
        no_room_s: float = _NO_ROOM_S,
        lock: Path | None = None,
    ) -> None:
        """Prepare the fill.

        `may_begin` returns whether the start has ended. `make_room` returns whether the cache may
        take a number of bytes more. `lock` is the lock file of the server that fills for all
        servers of the image on this node.
        """
        self.state = "waiting"
        """"waiting" for the end of the start, for the lock, or for a time without faults;
        "filling"; "complete"; "no room"; "failing", to be tried again; or "stopped"."""
        self._streams = streams
        self._may_begin = may_begin
        self._make_room = make_room
        self._quiet_s = quiet_s
        self._pauses = pauses
        self._no_room_s = no_room_s
        self._lock_path = lock
        self._lock_fd = -1
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fill", daemon=True)
        self._seen_faults = -1
        self._room_bytes = 0
        self._failures = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end soon. Closing the image's fetcher ends its reads. Idempotent."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `stop`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        noted_faults = 0
        while not (self._may_begin() and self._take_lock()):
            if self._streams.faults.fault_count != noted_faults:
                noted_faults = self._streams.faults.fault_count
                self._note_fault()
            if self._stopping.wait(min(_LOCK_CHECK_S, self._quiet_s)):
                self.state = "stopped"
                return
        try:
            while self._fill_missing():
                pass
        finally:
            self._release_lock()
        _log.info("the background fill ends: %s", self.state)

    # ---- one server of several ----------------------------------------------------------------

    def _take_lock(self) -> bool:
        if self._lock_path is not None:
            try:
                self._lock_fd = lock_file(self._lock_path, 0)
            except TimeoutError:
                return False
            except OSError as error:
                _log.debug("filling without regard to others: %s", error)
        return True

    def _release_lock(self) -> None:
        if self._lock_fd >= 0 and self._lock_path is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)

    def _note_fault(self) -> None:
        """Make the server that fills pause."""
        if self._lock_path is not None:
            # There is no file if no server fills.
            with contextlib.suppress(OSError):
                os.utime(self._lock_path)

    def _others_are_quiet(self) -> bool:
        """Return whether the other servers had no fault for a while."""
        if self._lock_fd < 0:
            return True
        age_s = time.time() - os.fstat(self._lock_fd).st_mtime
        return not 0 <= age_s < self._quiet_s

    # ---- filling ------------------------------------------------------------------------------

    def _fill_missing(self) -> bool:
        """Fetch the frames that are missing now. Return whether to check for missing ones again."""
        # Frames of claimed bytes come first, so that these are compared soon.
        claimed = self._streams.unproven()
        windows = [
            (blob, start, min(WINDOW_BYTES, stream.stream_length - start))
            for blob, stream in enumerate(self._streams.blobs)
            for start in range(0, stream.stream_length, WINDOW_BYTES)
        ]
        # A random start, so that nodes that were started together read different objects.
        first = int(random_fraction() * len(windows))
        is_complete = True
        for window in (*claimed, *windows[first:], *windows[:first]):
            for fetch in self._streams.fill_fetches((window,)):
                is_complete = False
                if not self.await_quiet() or not self._await_room(fetch.length):
                    return False
                self.state = "filling"
                try:
                    self._streams.fill((fetch,))
                except BootseerError as error:
                    if isinstance(error, CorruptError):
                        self._streams.on_damage(fetch.chunks)
                    if not self._pause_after_error(error):
                        return False
                else:
                    self._failures = 0
        if is_complete:
            # Streams that are stored nowhere do not count.
            self.state = "complete"
        elif self._streams.is_full:
            return self._pause_without_room()
        return not is_complete

    def await_quiet(self) -> bool:
        """Wait until there was no fault for a while. Return False if the fill must stop."""
        faults = self._streams.faults
        while self._seen_faults != faults.fault_count or not self._others_are_quiet():
            self.state = "waiting"
            self._seen_faults = faults.fault_count
            if not self._pause(self._quiet_s):
                return False
        return self._pause(0)

    def _await_room(self, count: int) -> bool:
        """Wait until the cache has room. Return False if the fill must stop."""
        # Counted as stored, although a frame may decompress to a multiple: the limit is not exact.
        self._room_bytes -= count
        if self._streams.is_full and not self._pause_without_room():
            return False
        while self._room_bytes < 0 and not self._make_room(_ROOM_BYTES):
            if not self._pause_without_room():
                return False
        if self._room_bytes < 0:
            self._room_bytes = _ROOM_BYTES
        return True

    def _pause_without_room(self) -> bool:
        """Wait before the next attempt to make room. Return False if the fill must stop."""
        if self.state != "no room":
            _log.info("the background fill waits for room in the cache")
        self.state = "no room"
        self._room_bytes = -1
        return self._pause(self._no_room_s)

    def _pause_after_error(self, error: BootseerError) -> bool:
        """Wait before the next try after an error. Return False if the fill must stop."""
        if not self._pause(0):
            return False
        self.state = "failing"
        if self._failures == 0:
            _log.warning("the background fill will try again later: %s", error)
        self._failures += 1
        return self._pause(self._pauses.delay_s(self._failures, random_fraction()))

    def _pause(self, pause_s: float) -> bool:
        if self._stopping.wait(pause_s):
            self.state = "stopped"
            return False
        return True


def fetch_tree(
    settings: Settings, store: Store, index_digest: str, name: str, *, is_local: bool = False
) -> int:
    """Fetch the bytes of a tree that this node lacks. Return the stored size of all blobs.

    The tree's index must be in the node's cache. `is_local`: whether this node made the index, of
    streams that it pulled. Raises: NoSpaceError, CorruptError, NotFoundError, BootseerError.
    """
    tree = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    layers = LayerReader(settings, store, name, tree.blobs)
    streams = ImageBytes(
        tree.blobs,
        layers.read_into,
        NodeCache(settings.cache_dir),
        deadline_s=settings.deadline_s,
        on_progress=lambda count: progress.advance(count),
        vouched=vouched_streams(settings, index_digest, tree.blobs, is_local=is_local),
        decode=layers.decode,
    )
    try:
        fetches = streams.fill_fetches()
        with ProgressBar(f"fetching {name}", sum(fetch.length for fetch in fetches)) as progress:
            streams.fill(fetches)
        if streams.fill_fetches():
            raise NoSpaceError(
                f"cannot fetch all of {name}: {settings.cache_dir} is full; "
                "free space or set --cache-dir to a larger disk"
            )
    finally:
        streams.close()
        layers.close()
    return sum(blob.size_bytes for blob in tree.blobs)
