"""The node's catalogue: images that this node started, and layers that it pulled.

Records lie in `cache_dir/catalogue` (docs/format/cache.md, "The node's catalogue"). They replace
the store's records while the store or the registry cannot be reached, and they are the only records
of a layer until it is published. They name indexes in `cache_dir/indexes` and streams in the node
cache. Every record is checked like one from the network, and an invalid record counts as missing:
the image is then pulled again.

Files are not synced; after a crash, images with torn records are pulled again. Thread-safe; several
processes of the user may use one catalogue at once.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from msgspec import Meta, Struct

from bootseer.base.documents import AnyDigest, DocumentFormat, Sha256
from bootseer.blob.index import digest as digest_of
from bootseer.blob.index import encode
from bootseer.blob.tree import Blob
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.linux.private_files import write_private_file
from bootseer.prefetch.cache.indexes import keep_index, read_kept_tree
from bootseer.prefetch.cache.node_cache import CachedStream, store_hex
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import (
    IMAGE_FORM,
    RECORD_BYTES_MAX,
    ImageRecord,
    ImpliedPaths,
    LinkPaths,
)
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)
_Record = TypeVar("_Record")


class FoundImage(Struct, frozen=True):
    """Image that can be mounted, or a node's record of one.

    Call `release` once a server has opened the image.
    """

    record: ImageRecord
    """The record: with the layers' blobs if the image is published, else without layers."""
    layer_digests: tuple[str, ...] = ()
    """Keys of an unpublished image's layers, from the lowest up: the layers' diff_ids, or for a
    directory the digest of its stream. Empty for a published image."""
    held: tuple[CachedStream, ...] = ()
    """Streams that only this node has; the cache does not remove them while they are open."""

    @property
    def is_published(self) -> bool:
        """Whether the store has the image, or had it once."""
        return not self.layer_digests

    def release(self) -> None:
        """Close the held streams, so that the cache may remove them. Idempotent."""
        for stream in self.held:
            stream.close()


class NodeLayer(Struct, frozen=True):
    """Layer that this node pulled."""

    tree: LayerTree
    """Tree whose only blob is the stream in the node cache."""
    content_digest: str
    """BLAKE3 digest of the stream: a second check takes a tenth of the time of SHA-256."""

    @property
    def blob(self) -> Blob:
        """Return the blob that stands for the stream."""
        return self.tree.tree.blobs[0]


class _LayerFile(Struct, frozen=True):
    digest: AnyDigest
    index_digest: Sha256
    content_digest: AnyDigest
    is_changeset: bool = True
    implied: ImpliedPaths = ()
    links: LinkPaths = ()


class _ImageFile(Struct, frozen=True):
    store: str
    record: dict[str, Any]
    """The `ImageRecord` as a document."""
    layers: Annotated[tuple[AnyDigest, ...], Meta(max_length=10_000)] = ()


_LAYER_FORM: DocumentFormat[_LayerFile] = DocumentFormat(
    type=_LayerFile,
    what="the record of a layer on this node",
    kind="bootseer-node-layer",
    version=1,
    size_max=RECORD_BYTES_MAX,
)
_IMAGE_FORM: DocumentFormat[_ImageFile] = DocumentFormat(
    type=_ImageFile,
    what="the record of an image on this node",
    kind="bootseer-node-image",
    version=1,
    size_max=RECORD_BYTES_MAX,
)


class NodeCatalogue:
    """Catalogue in one cache folder, for starts that use one store.

    Images that were started with another store are not found: their bytes were chosen by whoever
    may write to that store.
    """

    def __init__(self, cache_dir: Path, store_url: str = "") -> None:
        self._cache_dir = cache_dir
        self._store = store_hex(store_url)
        self._directory = cache_dir / "catalogue"

    # ---- images -------------------------------------------------------------------------------

    def find_image(self, reference: str) -> FoundImage | None:
        """Return the image that was last started as `reference` or `reference`:latest, or None."""
        tagged = ":" in reference.rpartition("/")[2] or "@" in reference
        for name in (reference,) if tagged else (reference, f"{reference}:latest"):
            image = self._read_image(self._path("images", name))
            if image is not None and image.record.reference == name:
                return image
        return None

    def keep_image(self, image: FoundImage) -> None:
        """Record the image under its name, and an unpublished image also under its index digest.

        Raises: NoSpaceError, BootseerError.
        """
        data = _encode_node_image(image, self._store)
        if not image.is_published:
            self._write(self._path("unpublished", image.record.index_digest), data)
        self._write(self._path("images", image.record.reference), data)

    def find_source(self, source: str) -> FoundImage | None:
        """Return the image that was last started from `source`, or None."""
        return self._read_image(self._source_path(source))

    def keep_source(self, source: str, image: FoundImage) -> None:
        """Record the image that `source` held. Raises: NoSpaceError, BootseerError."""
        self._write(self._source_path(source), _encode_node_image(image, self._store))

    def _source_path(self, source: str) -> Path:
        # Hashed: a URL may hold credentials, and be longer than any file name.
        return self._path("sources", hashlib.sha256(os.fsencode(source)).hexdigest())

    def find_unpublished(self, index_digest: str) -> FoundImage | None:
        """Return the unpublished image with this index, or None."""
        image = self._read_image(self._path("unpublished", index_digest))
        if image is None or image.is_published or image.record.index_digest != index_digest:
            return None
        return image

    def find_published(self, index_digest: str) -> ImageRecord | None:
        """Return the store's record of an image whose index was this one before publication."""
        image = self._read_image(self._path("published", index_digest))
        return image.record if image is not None and image.is_published else None

    def keep_published(self, index_digest: str, record: ImageRecord) -> None:
        """Record that the unpublished image with this index is now in the store as `record`.

        Raises: NoSpaceError, BootseerError.
        """
        data = _encode_node_image(FoundImage(record), self._store)
        pulled = self.find_unpublished(index_digest)
        if pulled is not None:
            vouched = _encode_node_image(FoundImage(record, pulled.layer_digests), self._store)
            self._write(self._path("vouched", record.index_digest), vouched)
        self._write(self._path("published", index_digest), data)
        known = self.find_image(record.reference)
        # Another image may have taken the name since.
        if known is not None and known.record.index_digest == index_digest:
            self._write(self._path("images", record.reference), data)

    def keep_vouched(self, record: ImageRecord) -> None:
        """Record that the image's source has named the layers of `record`.

        Does nothing if this node has pulled none of them. Raises: NoSpaceError, BootseerError.
        """
        if any(self._path("layers", digest).exists() for digest in record.config.diff_ids):
            data = _encode_node_image(FoundImage(record), self._store)
            self._write(self._path("vouched", record.index_digest), data)

    def vouched_layers(self, index_digest: str) -> frozenset[str]:
        """Return the digests of the layers of the image with this index that can be trusted.

        The image's source named these layers, or this node published them for the image.
        """
        image = self._read_image(self._path("vouched", index_digest))
        if image is None or image.record.index_digest != index_digest:
            return frozenset()
        diff_ids = image.record.config.diff_ids
        return frozenset((*diff_ids, *image.layer_digests))

    # ---- layers -------------------------------------------------------------------------------

    def find_layer(self, digest: str) -> NodeLayer | None:
        """Return a layer that this node pulled, or None. The node may have lost its stream."""
        path = self._path("layers", digest)
        try:
            found = self._read(path, _LAYER_FORM)
            if found is None:
                return None
            if found.digest != digest:
                raise CorruptError(f"{path} is the record of another layer")
            tree = read_kept_tree(self._cache_dir, found.index_digest)
        except NotFoundError:
            return None
        except BootseerError as error:
            _log.warning("the layer %s is pulled again: %s", digest, error)
            return None
        if len(tree.blobs) != 1 or tree.blobs[0].frames:
            return None
        implied = frozenset(found.implied)
        return NodeLayer(
            LayerTree(tree, implied, found.links, is_changeset=found.is_changeset),
            found.content_digest,
        )

    def keep_layer(self, digest: str, layer: LayerTree, content_digest: str) -> None:
        """Record a pulled layer, whose stream the node cache has whole and verified.

        Raises: NoSpaceError, BootseerError.
        """
        data = encode(layer.tree)
        index_digest = digest_of(data)
        keep_index(self._cache_dir, index_digest, data)
        record = _LayerFile(
            digest,
            index_digest,
            content_digest,
            layer.is_changeset,
            tuple(sorted(layer.implied)),
            tuple(layer.links),
        )
        self._write(self._path("layers", digest), _LAYER_FORM.encode(record))

    # ---- files --------------------------------------------------------------------------------

    def _path(self, kind: str, name: str) -> Path:
        return self._directory / kind / f"{quote(name, safe='')}.json"

    def _read(self, path: Path, form: DocumentFormat[_Record]) -> _Record | None:
        """Return a record; None if it is missing or of another version. Raises: CorruptError."""
        try:
            with path.open("rb") as file:
                data = file.read(form.size_max + 1)
            # `cache.limit` removes records by the time of their last use.
            os.utime(path)
        except OSError:
            return None
        with contextlib.suppress(UnknownFormatError):
            return form.decode(data, str(path))
        return None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_private_file(path, data)
        except OSError as error:
            raise from_oserror(error, f"write {path}") from error

    def _read_image(self, path: Path) -> FoundImage | None:
        try:
            found = self._read(path, _IMAGE_FORM)
            if found is None or found.store != self._store:
                return None
            return FoundImage(IMAGE_FORM.convert(found.record, str(path)), found.layers)
        except (CorruptError, UnknownFormatError) as error:
            _log.warning("the record of an image is not used: %s", error)
            return None


def vouched_streams(
    settings: Settings, index_digest: str, blobs: Sequence[Blob] = (), *, is_local: bool = False
) -> frozenset[str]:
    """Return the digests of the pulled streams from which the image with this index may be read.

    If this node made the index itself (`is_local`), these are the streams of all `blobs`; else the
    streams of the layers that the image's source named.
    """
    if is_local:
        return frozenset(blob.stream_digest for blob in blobs)
    return NodeCatalogue(settings.cache_dir, settings.store_url).vouched_layers(index_digest)


def _encode_node_image(image: FoundImage, store: str) -> bytes:
    record = IMAGE_FORM.to_document(image.record)
    return _IMAGE_FORM.encode(_ImageFile(store, record, image.layer_digests))
