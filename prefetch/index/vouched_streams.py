"""Streams of stored blobs that a node reads from what it has pulled itself.

After a first start the node has each layer whole, under its digest. The index that another node
published gives the layer's frames, and nothing proves that these hold the layer. A source whose
configuration names the layer vouches for it (docs/format/cache.md, "Vouched streams"): then the
image is read from the pulled stream, for as long as that is intact. No frame is ever written to it,
since other images read it, too.

Thread-safe, but `close`, which comes last.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError
from bootseer.prefetch.cache.claims_mark import ClaimsMark
from bootseer.prefetch.cache.image_stream import ImageStream
from bootseer.prefetch.cache.node_cache import NodeCache, StreamCache
from bootseer.prefetch.cache.stream_keys import is_stored
from bootseer.prefetch.index.node_catalogue import NodeCatalogue
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)


def cache_of_image(settings: Settings, index_digest: str) -> NodeCache:
    """Return the node's cache for reading the image whose index has `index_digest`."""
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    vouched = catalogue.vouched_layers(index_digest)
    if not vouched:
        return NodeCache(settings.cache_dir)
    return VouchedCache(settings.cache_dir, vouched)


class VouchedCache(NodeCache):
    """The node cache as one image sees it whose source names the layers `vouched`."""

    def __init__(self, cache_dir: Path, vouched: frozenset[str]) -> None:
        """`vouched` holds digests of uncompressed layers."""
        super().__init__(cache_dir)
        self._vouched = vouched

    def open_image(
        self, blobs: Sequence[Blob], *, mark: ClaimsMark | None = None, is_local: bool = False
    ) -> list[ImageStream]:
        """See `NodeCache.open_image`. Layers that this node has whole are read from there."""
        opened: list[ImageStream] = []
        try:
            for blob in blobs:
                pulled = self._open_pulled(blob)
                if pulled is None:
                    opened += super().open_image([blob], mark=mark, is_local=is_local)
                else:
                    open_stored = partial(super().open_image, [blob])
                    open_claimed = partial(self._claimed_stream, blob, mark)
                    opened.append(_PulledStream(pulled, open_stored, open_claimed))
        except BaseException:
            for stream in opened:
                stream.close()
            raise
        return opened

    def open_whole_blob(self, blob: Blob) -> StreamCache | None:
        """See `NodeCache.open_whole_blob`."""
        return self._open_pulled(blob) or super().open_whole_blob(blob)

    def make_durable(self, blobs: Sequence[Blob], claimant: str) -> None:
        """See `NodeCache.make_durable`."""
        super().make_durable(blobs, claimant)
        for blob in blobs:
            with contextlib.suppress(BootseerError):
                pulled = self._open_pulled(blob)
                if pulled is not None:
                    pulled.close()

    def _open_pulled(self, blob: Blob) -> StreamCache | None:
        if not is_stored(blob) or blob.stream_digest not in self._vouched:
            return None
        stream = self.open_whole(blob.stream_digest)
        if stream is not None and stream.stream_length != blob.stream_length:
            stream.close()
            return None
        return stream

    def _claimed_stream(
        self, blob: Blob, mark: ClaimsMark | None, make: bool
    ) -> StreamCache | None:
        if mark is None or not (make or self.details(mark.key(blob))):
            return None
        return self.open_stream(mark.key(blob), blob.stream_length)


class _PulledStream(ImageStream):
    """A blob's stream, read from a pulled one until that turns out to be damaged."""

    def __init__(
        self,
        pulled: StreamCache,
        open_stored: Callable[[], list[ImageStream]],
        open_claimed: Callable[[bool], StreamCache | None],
    ) -> None:
        super().__init__(pulled, open_claimed)
        self._pulled = pulled
        self._open_stored = open_stored
        self._leaving = threading.Lock()

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """See `ImageStream.missing`. Raises: BootseerError."""
        if self.proven is self._pulled and not self._pulled.holds(offset, length):
            self._leave()
        return super().missing(offset, length)

    def prove(self, offset: int, content: bytes) -> bool:
        """See `ImageStream.prove`."""
        self._leave()
        return super().prove(offset, content)

    def _leave(self) -> None:
        """Read the stream from the store from now on."""
        with self._leaving:
            if self.proven is self._pulled:
                (stored,) = self._open_stored()
                self.proven = stored.proven
                _log.warning(
                    "%s is damaged: the layer is read from the store", self._pulled.directory
                )

    def close(self, *, durable: bool = True) -> None:
        """See `ImageStream.close`."""
        super().close(durable=durable)
        self._pulled.close(durable=durable)
