"""Publishes an image that a node pulled, from the node's cache: what `bootseer image index` would
have put into the store, byte for byte.

Alone turns an unpublished image (`node_catalogue`) into a published one. Every step can be repeated
by this node or another: layers that the store has by now are not packed, and the image's record,
which comes last, says nothing that is not there. One process per node and image, one node per
layer.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bootseer.blob.pack import pack_tar
from bootseer.blob.tree import Blob
from bootseer.config import Settings
from bootseer.errors import (
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    from_oserror,
)
from bootseer.ordered_hash import OrderedHash
from bootseer.prefetch.cache import NodeCache, StreamCache
from bootseer.prefetch.cache_files import lock_file
from bootseer.prefetch.catalogue import load_tree
from bootseer.prefetch.indexing import index_image
from bootseer.prefetch.merge import LayerTree
from bootseer.prefetch.node_catalogue import NodeCatalogue, stream_of
from bootseer.prefetch.sources.layer_tar import pack_layer
from bootseer.prefetch.sources.model import ImageSource, Sink
from bootseer.prefetch.sources.read_ahead import ReadAhead
from bootseer.store import open_store

_log = logging.getLogger(__name__)

_SHA256 = "sha256:"
_PIECE_BYTES = 2**20
_WAIT_S = 3600.0
"""For another process of this node that publishes the image. A dead one lets go at once."""


def publish_node_image(settings: Settings, index_digest: str) -> str:
    """Have the image whose index this is in the store; the digest of its index there, which is
    another if the image was unpublished. That index lies in the node's cache, too.

    Raises: NotFoundError where the node has lost a layer; BootseerError.
    """
    catalogue = NodeCatalogue(settings.cache_dir)
    image = catalogue.find_unpublished(index_digest)
    if image is None:
        return index_digest
    with _alone(settings, index_digest):
        with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
            record = catalogue.find_published(index_digest)
            if record is None:
                cache = NodeCache(settings.cache_dir)
                layers = [
                    _node_layer(catalogue, cache, digest, image.record.config.diff_ids)
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
            load_tree(store, record, settings.cache_dir)
        catalogue.keep_published(index_digest, record)
    return record.index_digest


@contextlib.contextmanager
def _alone(settings: Settings, index_digest: str) -> Iterator[None]:
    """While no other process of this node publishes the image."""
    path = settings.cache_dir / "catalogue" / f"{index_digest.partition(':')[2]}.lock"
    try:
        fd = lock_file(path, _WAIT_S)
    except TimeoutError as error:
        raise DeadlineError(
            f"another process was still publishing {index_digest} after {_WAIT_S:.0f} s"
        ) from error
    except OSError as error:
        raise from_oserror(error, f"lock {path}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _node_layer(
    catalogue: NodeCatalogue, cache: NodeCache, digest: str, diff_ids: tuple[str, ...]
) -> "_NodeLayer":
    tree = catalogue.find_layer(digest)
    blob = None if tree is None else stream_of(tree)
    return _NodeLayer(
        cache,
        digest,
        blob,
        digest if digest in diff_ids else None,
        is_changeset=tree is None or tree.is_changeset,
    )


@dataclass(frozen=True, slots=True)
class _NodeLayer:
    """A layer in the node's cache, if it is there. Implements `Layer`."""

    cache: NodeCache
    name: str
    blob: Blob | None
    digest: str | None
    is_changeset: bool

    @property
    def size_bytes(self) -> int | None:
        """Of the stream."""
        return None if self.blob is None else self.blob.stream_length

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`. What was verified when it came is verified again: from the store every
        node will have it."""
        blob, stream = self._open()
        try:
            ahead = ReadAhead(_verified(blob, stream, on_progress), "layer-reader")
            try:
                if self.is_changeset:
                    known = blob.stream_digest if blob.stream_digest.startswith(_SHA256) else None
                    layer = pack_layer(ahead, sink, diff_id=known)
                else:
                    layer = LayerTree(pack_tar(ahead, sink), is_changeset=False)
                # The digest is compared at the very end, which is reached only by asking for more.
                while ahead.read(_PIECE_BYTES):
                    pass
            finally:
                ahead.close()
        finally:
            stream.close()
        found = stream_of(layer).stream_digest
        if found != blob.stream_digest:
            raise _damaged(blob, found)
        return layer

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        raise InvalidInputError(f"the layer {self.name} is on this node already")

    def _open(self) -> tuple[Blob, StreamCache]:
        stream = None if self.blob is None else self.cache.open_whole(self.blob.stream_digest)
        if self.blob is None or stream is None:
            raise NotFoundError(
                f"the layer {self.name} is neither in the store nor on this node any more; start "
                "the image from its source again"
            )
        return self.blob, stream


def _verified(
    blob: Blob, stream: StreamCache, on_progress: Callable[[int], None]
) -> Iterator[bytes]:
    """The stream in pieces. Raises: CorruptError at its end."""
    # A digest of ours is computed by the packer, which is then compared with.
    sha = OrderedHash("sha256") if blob.stream_digest.startswith(_SHA256) else None
    try:
        for offset in range(0, blob.stream_length, _PIECE_BYTES):
            piece = stream.read(offset, min(_PIECE_BYTES, blob.stream_length - offset))
            if sha is not None:
                sha.update(piece)
            on_progress(len(piece))
            yield piece
        if sha is not None and (found := sha.finish()) != blob.stream_digest:
            raise _damaged(blob, found)
    finally:
        if sha is not None:
            sha.close()


def _damaged(blob: Blob, found: str) -> CorruptError:
    return CorruptError(
        f"the cached stream {blob.stream_digest} has the digest {found}: the disk has damaged it"
    )
