"""Publication of an image that this node pulled, from the node's cache or containerd's store.

The objects in the store are those that `bootseer image index` would publish, byte for byte. Every
step can be repeated by this node or another: layers that the store has by now are not packed again,
and the image's record comes last. One process per node publishes an image, one node per store packs
a layer.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from bootseer.base.content_digest import ContentHasher
from bootseer.blob.pack.packing import pack_tar
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache, hold_lock_file
from bootseer.prefetch.index.catalogue import load_tree, registry_name
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.node_catalogue import NodeCatalogue, NodeLayer
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.prefetch.sources.files import open_content
from bootseer.prefetch.sources.layer_tar import pack_layer
from bootseer.prefetch.sources.model import ImageSource, Layer, Sink
from bootseer.prefetch.sources.stream import ReadAhead
from bootseer.settings.config import Settings
from bootseer.store import open_own_store

_log = logging.getLogger(__name__)

_PIECE_BYTES = 2**20
_WAIT_S = 3600.0
"""Wait for another process of this node that publishes the image. A dead one holds no lock."""


def is_unpublished(settings: Settings, index_digest: str) -> bool:
    """Return whether, as far as this node knows, it alone has the image with this index."""
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    return (
        catalogue.find_unpublished(index_digest) is not None
        and catalogue.find_published(index_digest) is None
    )


def publish_node_image(settings: Settings, index_digest: str) -> str:
    """Publish the image with this index, unless it is published already.

    Returns: The digest of the image's index in the store, which differs from that of an unpublished
    image. The node's cache has that index as well.
    Raises: NotFoundError if the node has lost a layer; BootseerError.
    """
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    image = catalogue.find_unpublished(index_digest)
    if image is None:
        return index_digest
    lock = settings.cache_dir / "catalogue" / f"{index_digest.partition(':')[2]}.lock"
    with hold_lock_file(lock, _WAIT_S, f"publishing {index_digest}"):
        with open_own_store(settings) as store:
            record = catalogue.find_published(index_digest)
            if record is None:
                with _uncopied_layers(settings, image.record) as in_registry:
                    cache = NodeCache(settings.cache_dir)
                    layers = [
                        _CachedLayer(
                            cache,
                            digest,
                            catalogue.find_layer(digest),
                            digest if digest in image.record.config.diff_ids else None,
                            in_registry.get(digest),
                        )
                        for digest in image.layer_digests
                    ]
                    source = ImageSource(
                        image.record.reference,
                        image.record.identity,
                        image.record.config,
                        layers,
                        manifest_digest=image.record.manifest_digest or None,
                    )
                    record = index_image(
                        source,
                        store,
                        settings.cache_dir / "work",
                        lessee=settings.node,
                        created_ns=image.record.created_ns,
                    )
                _log.info("published the image %s", record.reference)
            load_tree(store, record, settings.cache_dir, run_dir=settings.run_dir)
        catalogue.keep_published(index_digest, record)
    return record.index_digest


def publish_unpacked_image(settings: Settings, content: Path, chain_id: str) -> ImageRecord:
    """Index the image that containerd has unpacked to this chain, from its content store.

    Raises: NotFoundError if both the store and containerd lack a layer; BootseerError.
    """
    with (
        open_content(content, chain_id) as source,
        open_own_store(settings) as store,
    ):
        work_dir = settings.cache_dir / "work"
        record = index_image(source, store, work_dir, lessee=settings.node)
    _log.info("indexed the image %s", record.reference)
    return record


@contextlib.contextmanager
def _uncopied_layers(settings: Settings, record: ImageRecord) -> Iterator[Mapping[str, Layer]]:
    """Open the image's layers in its registry, by digest, if the settings say not to copy them.

    The mapping is empty if they are to be copied, or if the registry no longer has this image.
    """
    name = registry_name(record.reference)
    if settings.copy_layers or name is None:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        found: dict[str, Layer] = {}
        try:
            source = stack.enter_context(
                open_source(
                    name,
                    settings.cache_dir / "work",
                    registry_hosts_dir=settings.registry_hosts_dir,
                    deadline_s=settings.deadline_s,
                    copies=False,
                )
            )
            if source.identity == record.identity:
                found = {layer.digest: layer for layer in source.layers if layer.digest}
        except BootseerError as error:
            _log.warning("the layers of %s are copied: %s", record.reference, error)
        yield found


class _CachedLayer(Struct, frozen=True):
    """Layer in the node's cache, or missing there. Implements `Layer`."""

    cache: NodeCache
    name: str
    known: NodeLayer | None
    """The node's record of the layer, or None if it is lost."""
    digest: str | None
    in_registry: Layer | None = None
    """The same layer in its registry, if nodes shall read it there instead of from a copy."""

    @property
    def registry_digest(self) -> str | None:
        """See `Layer.registry_digest`."""
        return None if self.in_registry is None else self.in_registry.registry_digest

    @property
    def size_bytes(self) -> int | None:
        """Return the size of the stream, or None if the layer is lost."""
        return None if self.known is None else self.known.blob.stream_length

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`. Verify the stream again, since all nodes will get it from the store."""
        if self.in_registry is not None:
            return self.in_registry.pack(sink, on_progress)
        known, stream = self._open()
        with (
            contextlib.closing(stream),
            ReadAhead(_verified(known, stream, on_progress), "layer-reader") as content,
        ):
            if known.tree.is_changeset:
                # Given no SHA-256 of the stream, the packer computes one.
                digest = known.blob.stream_digest
                layer = pack_layer(
                    content, sink, diff_id=digest if digest.startswith("sha256:") else None
                )
            else:
                layer = LayerTree(pack_tar(content, sink), is_changeset=False)
            content.finish()
            return layer

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        raise InvalidInputError(f"the layer {self.name} is on this node already")

    def _open(self) -> tuple[NodeLayer, CachedStream]:
        known = self.known
        stream = None if known is None else self.cache.open_whole(known.blob.stream_digest)
        if known is None or stream is None:
            raise NotFoundError(
                f"the layer {self.name} is neither in the store nor on this node any more; start "
                "the image from its source again"
            )
        return known, stream


def _verified(
    known: NodeLayer, stream: CachedStream, on_progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the stream in pieces. Raises: CorruptError at its end if its content is wrong."""
    content = ContentHasher()
    length = known.blob.stream_length
    for offset in range(0, length, _PIECE_BYTES):
        piece = stream.read(offset, min(_PIECE_BYTES, length - offset))
        content.update(piece)
        on_progress(len(piece))
        yield piece
    found = f"blake3:{content.hexdigest()}"
    if found != known.content_digest:
        raise CorruptError(
            f"the cached stream {known.blob.stream_digest} has the content {found}, not "
            f"{known.content_digest} as when it came: the disk has damaged it"
        )
