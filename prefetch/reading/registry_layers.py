"""Layers that lie in their image's registry, read by seek points: their bytes, and their frames.

Alone decides, for each blob of an image, whether its bytes come from the store or from the
registry, and how a frame of them becomes content. `ImageBytes` knows neither. Seek points are kept
in the node's cache as indexes are, and fetched and verified when a layer is first read.

Only for images that are called as in a registry (`HOST/NAME:TAG`); others have no such layers.
Thread-safe; every wait is bounded by the deadlines of the store and of the registry's client.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootseer.blob.frames import decode_frame
from bootseer.blob.keys import POINTS, blob_key
from bootseer.blob.tree import Blob
from bootseer.errors import CorruptError, NotFoundError
from bootseer.prefetch.index.catalogue import have_index
from bootseer.prefetch.index.source_names import REGISTRY, registry_name
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.attempt import Attempt

if TYPE_CHECKING:
    from bootseer.blob.seek_points import SeekPoints
    from bootseer.http.ranges import RangedFile
    from bootseer.registry.client import RegistryClient


class LayerReader:
    """Reads and decodes the blobs of one image. Close it."""

    def __init__(
        self, settings: Settings, store: Store, reference: str, blobs: Sequence[Blob]
    ) -> None:
        """Make a reader; no server is asked. `reference`: name of the image in `store`."""
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

    def read_into(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` with stored bytes of the blob at `key`, as `Store.read_verified`.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError, CorruptError.
        """
        number = self._in_registry.get(key)
        if number is None:
            return self._store.read_verified(key, offset, buffer, attempt)
        return self._open(number)[1].read_into(offset, buffer, attempt)

    def decode(self, blob: int, number: int, data: bytes | memoryview) -> bytes:
        """Return the content of frame `number` of a blob. Raises: as `blob.frames.decode_frame`."""
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
                found = self._opened[number] = self._have(self._blobs[number])
        return found

    def _have(self, blob: Blob) -> "tuple[SeekPoints, RangedFile]":
        # Imported late: most servers read no registry.
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
        data = have_index(
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
