"""Bytes of an image that come from its registry: layers read by seek points, and lost blobs.

`LayerReader` decides for each blob whether its bytes come from the store or, for layers that are
indexed by seek points, from the registry, and decodes their frames. Seek points are kept in the
node's cache as indexes are; they are fetched and verified when a layer is first read.

`Repairs` fetches the whole stream of a blob that the store has lost or damaged, once for all
readers. A reader waits for the rest of its own deadline, or several times that while bytes arrive,
since a layer may be large. The transfer goes on in a thread of its own, for later readers.

Only images that are named after a registry (`HOST/NAME:TAG`) have one. Thread-safe; every wait has
a deadline.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from bootseer.blob.frames import decode_frame
from bootseer.blob.keys import POINTS, blob_key
from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, DeadlineError, NotFoundError
from bootseer.prefetch.cache.node_cache import NodeCache, is_stored, replacement_key
from bootseer.prefetch.index.catalogue import REGISTRY, load_index, registry_name
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.attempt import Attempt

if TYPE_CHECKING:
    from bootseer.blob.seek_points import SeekPoints
    from bootseer.http.ranges import RangedFile
    from bootseer.registry.client import RegistryClient

_log = logging.getLogger(__name__)

OnReceived: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that have arrived, by any thread."""
Repair: TypeAlias = Callable[[Blob, OnReceived], None]
"""Fetches a blob's whole stream into the node cache. Raises: BootseerError."""

_PAUSE_S = 60.0
"""Pause after a failed repair. Until its end, readers get their errors at once."""
_WAIT_S_MAX = 300.0
"""Longest wait of a reader for a stream that keeps arriving: half of the time that the kernel waits
for a server at least."""
_OTHER_SERVER_S = 600.0
"""Longest wait for another server of this node that fetches the same layer."""


class LayerReader:
    """Reader and decoder of the blobs of one image. `close` it at the end."""

    def __init__(
        self, settings: Settings, store: Store, reference: str, blobs: Sequence[Blob]
    ) -> None:
        """Make a reader; no request is sent. `reference`: name of the image in `store`."""
        self._settings = settings
        self._store = store
        self._reference = reference
        self._blobs = blobs
        self._in_registry = {
            blob_key(blob.digest): number
            for number, blob in enumerate(blobs)
            if blob.digest.startswith(POINTS)
        }
        self._lock = threading.Lock()
        self._client: RegistryClient | None = None
        self._opened: dict[int, tuple[SeekPoints, RangedFile]] = {}

    @property
    def is_needed(self) -> bool:
        """Whether the image has layers that are read from the registry."""
        return bool(self._in_registry)

    def read_into(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` with stored bytes of the blob at `key`. See `Store.read_verified`.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError, CorruptError.
        """
        number = self._in_registry.get(key)
        if number is None:
            return self._store.read_verified(key, offset, buffer, attempt)
        return self._open(number)[1].read_into(offset, buffer, attempt)

    def decode(self, blob: int, number: int, data: bytes | memoryview) -> bytes:
        """Return the content of frame `number` of a blob. See `blob.frames.decode_frame`."""
        stored = self._blobs[blob]
        frame = stored.frames[number]
        if not stored.digest.startswith(POINTS):
            return decode_frame(frame, data)
        return self._open(blob)[0].decode_frame(number, frame, data)

    def _open(self, number: int) -> "tuple[SeekPoints, RangedFile]":
        found = self._opened.get(number)
        if found is not None:
            return found
        with self._lock:
            found = self._opened.get(number)
            if found is None:
                found = self._opened[number] = self._open_layer(self._blobs[number])
        return found

    def _open_layer(self, blob: Blob) -> "tuple[SeekPoints, RangedFile]":
        # Imported here, since most servers read nothing from a registry.
        from bootseer.blob.seek_points import decode
        from bootseer.registry.client import open_registry_client
        from bootseer.registry.reference import parse_reference

        settings = self._settings
        name = registry_name(self._reference)
        if name is None:
            raise NotFoundError(
                f"layers of image {self._reference} are in a registry, but its name does not say "
                "in which; index the image again"
            )
        digest = f"sha256:{blob.digest.removeprefix(POINTS)}"
        data = load_index(
            self._store,
            digest,
            f"image {self._reference}",
            settings.cache_dir,
            run_dir=settings.run_dir,
        )
        points = decode(data)
        if len(points.points) != len(blob.frames) or points.layer_bytes != blob.size_bytes:
            raise CorruptError(f"the seek points {digest} are those of another layer")
        if self._client is None:
            self._client = open_registry_client(
                parse_reference(name.removeprefix(REGISTRY)),
                hosts_dir=settings.registry_hosts_dir,
                deadline_s=settings.deadline_s,
            )
        return points, self._client.file(points.layer_digest, points.layer_bytes)

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _StreamTransfer:
    """Progress of the transfer of one stream."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BootseerError | None = None
        self.progress_count = 0

    def received(self, count: int) -> None:
        self.progress_count += 1


class Repairs:
    """Transfers of whole streams after the store has failed."""

    def __init__(self, repair: Repair | None) -> None:
        """`repair` is None if there is no second source."""
        self._repair = repair
        self._lock = threading.Lock()
        self._next_try_s: dict[str, float] = {}
        self._transfers: dict[str, _StreamTransfer] = {}

    def fetch(
        self, blob: Blob, use: Callable[[], bool], error: BootseerError, limit_s: float
    ) -> None:
        """Fetch the blob's whole stream into the node cache, unless it is present.

        `use` switches readers to that stream, and returns whether the stream is present.

        Raises: `error`, which the store has raised, if the stream cannot be fetched;
        DeadlineError after `limit_s` without progress.
        """
        if self._repair is None:
            raise error
        stream = blob.stream_digest
        with self._lock:
            if use():
                return  # Another reader has fetched it.
            if time.monotonic() < self._next_try_s.get(stream, 0):
                raise error
            transfer = self._transfers.get(stream)
            if transfer is None:
                _log.warning("fetching the whole stream %s from the registry: %s", stream, error)
                transfer = self._transfers[stream] = _StreamTransfer()
                threading.Thread(
                    target=self._run,
                    args=(self._repair, blob, transfer),
                    name="repair",
                    daemon=True,
                ).start()
        self._await(transfer, limit_s, stream, error)
        if transfer.error is not None:
            raise error from transfer.error
        use()

    def _run(self, repair: Repair, blob: Blob, transfer: _StreamTransfer) -> None:
        stream = blob.stream_digest
        try:
            repair(blob, transfer.received)
        except BootseerError as second:
            transfer.error = second
            _log.warning("the registry cannot send %s either: %s", stream, second)
        except Exception as second:
            transfer.error = BootseerError(str(second))
            _log.exception("fetching %s from the registry failed", stream)
        with self._lock:
            if transfer.error is not None:
                self._next_try_s[stream] = time.monotonic() + _PAUSE_S
            del self._transfers[stream]
        transfer.ended.set()

    def _await(
        self, transfer: _StreamTransfer, limit_s: float, stream: str, error: BootseerError
    ) -> None:
        ends_s = time.monotonic() + _WAIT_S_MAX
        while True:
            before = transfer.progress_count
            if transfer.ended.wait(min(limit_s, ends_s - time.monotonic())):
                return
            if transfer.progress_count == before or time.monotonic() >= ends_s:
                raise DeadlineError(
                    f"{stream} is still on its way from the registry; read again later. {error}"
                ) from error


def second_source(settings: Settings, reference: str, image_key: str) -> Repair | None:
    """Return a function that fetches whole streams of an image from its registry.

    The streams serve the image with `image_key` (`node_cache.image_key_of`) only. Return None if
    the name `reference` does not say in which registry the image is.
    """
    name = registry_name(reference)
    if name is None:
        return None

    def repair(blob: Blob, received: OnReceived) -> None:
        # Imported here, since most servers never need a registry.
        from bootseer.prefetch.sources import open_source

        digest = blob.stream_digest
        # A stream that the node has under the digest alone is not used: the author of the index may
        # never have had it. The registry sends only streams of this image. A blob without frames
        # is of an index that this node made, which is trusted.
        cache = NodeCache(settings.cache_dir)
        key = replacement_key(blob, image_key) if is_stored(blob) else digest
        with cache.pulling(key, _OTHER_SERVER_S):
            whole = cache.open_whole(key)
            if whole is not None:
                whole.close()
                return
            with open_source(
                name,
                settings.cache_dir / "work",
                registry_hosts_dir=settings.registry_hosts_dir,
                deadline_s=settings.deadline_s,
            ) as source:
                layer = next((one for one in source.layers if one.digest == digest), None)
                if layer is None:
                    raise NotFoundError(f"{reference} has no layer {digest} any more")
                with cache.new_stream() as new:
                    # Verifies the stream against its digest before it returns.
                    layer.pull(new.append, received)
                    new.commit(key).close()

    return repair
