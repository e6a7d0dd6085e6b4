"""The fill of an image: all of it brought into the node's cache, in the background or at once.

The background fill (`Fill`) begins when the start is over and its bundle is here, pauses
while there are faults or the cache has no room, and ends when the image is complete. A complete
image starts without store or registry. What was brought stays: the next start's fill goes on there.

Of the servers of an image on a node one fills, the one that holds a lock file; when it ends another
one takes over. The others touch that file when they have had faults, and then the fill pauses, too.

A `Fill` has one thread of its own; `state` and `stop` from any thread. `fetch_tree` returns when
all is here.
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.base.progress import Progress
from bootseer.errors import BootseerError, CorruptError, NoSpaceError
from bootseer.linux.locks import lock_file
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.registry_layers import LayerReader
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.policy import Policy, dice

_log = logging.getLogger(__name__)

QUIET_S = 5.0
"""A job that has had no fault for so long computes and does not load."""
_TURN_S = 1.0
"""Seconds between two checks whether it is this server's turn."""
_PAUSES = Policy(base_s=5.0, cap_s=300.0)
"""The pauses after failures: no reader waits for a fill."""
WINDOW_BYTES = 64 * 2**20
"""Planned at a time: an image may have millions of frames."""
_NO_ROOM_S = 60.0
"""Seconds between two looks whether room was made."""
_ROOM_BYTES = 64 * 2**20
"""Bytes between two checks whether the disk has room."""


class Fill:
    """The background fill of one image."""

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
        """`make_room(count)` says whether the cache may take so many bytes more. `pauses`: after
        each failure in a row. `no_room_s`: seconds between two looks whether room was made.
        `lock`: the server that holds this file fills for all servers of the image on this node."""
        self.state = "waiting"
        """"waiting" for the start's end, for its turn or for quiet, "filling", "complete",
        "no room", "failing" (it tries again), "stopped"."""
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
        """Begin to wait for the start's end."""
        self._thread.start()

    def stop(self) -> None:
        """End soon. Reads under way end with the fetcher of the image's bytes. Idempotent."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end that `stop` asked for."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        noted_faults = 0
        while not (self._may_begin() and self._is_our_turn()):
            if self._streams.faults.fault_count != noted_faults:
                noted_faults = self._streams.faults.fault_count
                self._tell_filler()
            if self._stopping.wait(min(_TURN_S, self._quiet_s)):
                self.state = "stopped"
                return
        try:
            while self._pass():
                pass
        finally:
            self._end_turn()
        _log.info("the background fill ends: %s", self.state)

    # ---- one server of several ----------------------------------------------------------------

    def _is_our_turn(self) -> bool:
        if self._lock_path is not None:
            try:
                self._lock_fd = lock_file(self._lock_path, 0)
            except TimeoutError:
                return False
            except OSError as error:
                _log.debug("filling without regard to others: %s", error)
        return True

    def _end_turn(self) -> None:
        if self._lock_fd >= 0 and self._lock_path is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)

    def _tell_filler(self) -> None:
        if self._lock_path is not None:
            # No thread fills: then there is none to tell.
            with contextlib.suppress(OSError):
                os.utime(self._lock_path)

    def _others_are_quiet(self) -> bool:
        if self._lock_fd < 0:
            return True
        age_s = time.time() - os.fstat(self._lock_fd).st_mtime
        return not 0 <= age_s < self._quiet_s

    # ---- filling ------------------------------------------------------------------------------

    def _pass(self) -> bool:
        """Fetch the missing frames once. Return whether to look once more."""
        # What a bundle brought comes first, to be compared.
        claimed = self._streams.unproven()
        windows = [
            (blob, start, min(WINDOW_BYTES, stream.stream_length - start))
            for blob, stream in enumerate(self._streams.blobs)
            for start in range(0, stream.stream_length, WINDOW_BYTES)
        ]
        # Nodes that were started together ask different servers of the store.
        first = random.randrange(len(windows)) if windows else 0
        is_complete = True
        for window in (*claimed, *windows[first:], *windows[:first]):
            for fetch in self._streams.fill_fetches((window,)):
                is_complete = False
                if not self.is_quiet() or not self._has_room(fetch.length):
                    return False
                self.state = "filling"
                try:
                    self._streams.fill((fetch,))
                except BootseerError as error:
                    if isinstance(error, CorruptError):
                        self._streams.on_damage(fetch.chunks)
                    if not self._rest(error):
                        return False
                else:
                    self._failures = 0
        if is_complete:
            # What is stored nowhere is not missing from anywhere.
            self.state = "complete"
        elif self._streams.is_full:
            return self._rest_without_room()
        return not is_complete

    def is_quiet(self) -> bool:
        """Wait until there is no fault for a while; False: stop."""
        faults = self._streams.faults
        while self._seen_faults != faults.fault_count or not self._others_are_quiet():
            self.state = "waiting"
            self._seen_faults = faults.fault_count
            if self._stopping.wait(self._quiet_s):
                break
        if self._stopping.is_set():
            self.state = "stopped"
            return False
        return True

    def _has_room(self, count: int) -> bool:
        """Wait until the cache has room; False: stop."""
        # A frame may unpack to a multiple of its stored length; the limit is not that exact.
        self._room_bytes -= count
        if self._streams.is_full and not self._rest_without_room():
            return False
        while self._room_bytes < 0 and not self._make_room(_ROOM_BYTES):
            if not self._rest_without_room():
                return False
        if self._room_bytes < 0:
            self._room_bytes = _ROOM_BYTES
        return True

    def _rest_without_room(self) -> bool:
        """Wait before the next look whether there is room; False: stop."""
        if self.state != "no room":
            _log.info("the background fill waits for room in the cache")
        self.state = "no room"
        if self._stopping.wait(self._no_room_s):
            self.state = "stopped"
            return False
        self._room_bytes = -1
        return True

    def _rest(self, error: BootseerError) -> bool:
        """Wait before the next try; False: stop."""
        if self._stopping.is_set():
            self.state = "stopped"
            return False
        self.state = "failing"
        if self._failures == 0:
            _log.warning("the background fill will try again later: %s", error)
        self._failures += 1
        if self._stopping.wait(self._pauses.delay_s(self._failures, dice())):
            self.state = "stopped"
            return False
        return True


def fetch_tree(
    settings: Settings, store: Store, index_digest: str, name: str, *, is_local: bool = False
) -> int:
    """Bring all blobs of a tree, whose index is on this node, into the node's cache.

    Only bytes that the node lacks are moved. Return the stored size of all blobs.

    `is_local`: whether this node made the index, of streams that it pulled. Raises: NoSpaceError,
    CorruptError, NotFoundError, BootseerError.
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
        with Progress(f"fetching {name}", sum(fetch.length for fetch in fetches)) as progress:
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
