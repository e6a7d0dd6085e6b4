"""The catalogue of a store: the names, keys, records and trees of its images and layers.

docs/format/image.md describes the objects. The index digest in a record determines all bytes of the
image; an index is compared with its digest at every use. Thread-safe: functions and frozen objects
only.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from bootseer.base.documents import ReadableStore
from bootseer.blob.index import decode
from bootseer.blob.index import digest as digest_of
from bootseer.blob.keys import POINTS, blob_key, index_key
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, InvalidInputError, NotFoundError
from bootseer.fanout.whole_reads import decline_whole, read_whole
from bootseer.prefetch.cache.indexes import read_or_fetch_index
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import (
    IMAGE_FORM,
    INDEX_BYTES_MAX,
    LAYER_FORM,
    REFERENCE,
    ImageRecord,
    LayerRecord,
)
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.ranges import even_chunks

_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")
_QUOTED_BYTES_MAX = 240
"""Longest quoted reference: a file name has at most 255 bytes."""
_SIZE_REQUESTS_MAX = 16
"""Requests for blob sizes that one start sends to a store at once."""


def check_reference(reference: str) -> str:
    """Return `reference` if it can name an image. Raises: InvalidInputError."""
    if not REFERENCE.fullmatch(reference) or len(quote(reference, "")) > _QUOTED_BYTES_MAX:
        raise InvalidInputError(
            f"{reference[:80]!r} cannot name an image; use up to 200 letters, digits and ._:/@+-"
        )
    return reference


def image_key(reference: str) -> str:
    """Return the key of an image's record. Raises: InvalidInputError."""
    return f"images/{quote(check_reference(reference), safe='')}.json"


def layer_key(digest: str) -> str:
    """Return the key of a layer's record."""
    return f"layers/{quote(digest, safe='')}.json"


def list_images(store: Store) -> Iterator[ImageRecord]:
    """Yield all images, sorted by key. Raises: CorruptError, UnknownFormatError."""
    for info in store.list("images/"):
        if info.path.endswith(".json"):
            with contextlib.suppress(NotFoundError):
                yield _read_image(store, info.path)


def find_image(store: Store, reference: str, documents: ReadableStore | None = None) -> ImageRecord:
    """Return the image called `reference` or `reference`:latest.

    `reference` may also be the beginning of an index digest. Records are read from `documents`, by
    default from the store. Raises: NotFoundError; InvalidInputError if several digests begin so;
    CorruptError, UnknownFormatError.
    """
    check_reference(reference)
    tagged = ":" in reference.rpartition("/")[2] or "@" in reference
    for name in (reference,) if tagged else (reference, f"{reference}:latest"):
        try:
            return _read_image(documents or store, image_key(name))
        except NotFoundError:
            continue
    prefix = _PREFIX.fullmatch(reference)
    if prefix:
        fitting = {
            record.index_digest: record
            for record in list_images(store)
            if record.index_digest.partition(":")[2].startswith(prefix[1])
        }
        if len(fitting) == 1:
            return fitting.popitem()[1]
        if fitting:
            raise InvalidInputError(
                f"{reference} fits several images: {', '.join(sorted(fitting)[:10])}"
            )
    raise NotFoundError(
        f"the store {store.url} has no image {reference!r}; `bootseer image list` shows what it "
        f"has, `bootseer image index` adds one; one of a registry is called registry://{reference}"
    )


def check_blobs(store: Store, record: ImageRecord) -> None:
    """Check that the store has the blobs of all layers with the right sizes; read none of them.

    Sends several requests at once: every start waits for the answers, and an object store takes
    tens of milliseconds for each. Raises: CorruptError, UnavailableError.
    """

    def size_of(key: str) -> int:
        try:
            return store.size(key)
        except NotFoundError:
            return -1

    keys = [blob_key(layer.blob_digest) for layer in record.layers]
    if len(keys) > 1:
        # Imported late: a start of an image with one layer needs no threads.
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(
            min(len(keys), _SIZE_REQUESTS_MAX), thread_name_prefix="blob-size"
        )
        try:
            sizes = list(pool.map(size_of, keys))
        finally:
            # After a failure no further request is sent; requests under way have deadlines.
            pool.shutdown(wait=True, cancel_futures=True)
    else:
        sizes = [size_of(key) for key in keys]
    for layer, key, size_bytes in zip(record.layers, keys, sizes, strict=True):
        if size_bytes != layer.blob_size_bytes:
            state = "is missing" if size_bytes < 0 else f"has {size_bytes} bytes"
            raise CorruptError(
                f"a layer of image {record.reference} cannot be read: {key} {state} in "
                f"{store.url}; index the image again"
            )


def check_streams(tree: Tree, diff_ids: Collection[str], where: str) -> None:
    """Check that the streams of a tree are those of these layers: a record may name a wrong index.

    Raises: CorruptError.
    """
    for blob in tree.blobs:
        # A layer whose diff_id is not a SHA-256 has a stream digest of another kind.
        if blob.stream_digest.startswith("sha256:") and blob.stream_digest not in diff_ids:
            raise CorruptError(
                f"{where} names an index of the layer {blob.stream_digest}, which is not its own"
            )


def publish_image(store: Store, record: ImageRecord) -> None:
    """Publish an image's record, replacing any image of that name. All its objects are stored.

    Raises: CorruptError for a record that readers would refuse; BootseerError.
    """
    data = IMAGE_FORM.encode(record)
    IMAGE_FORM.decode(data, f"the image {record.reference}")
    store.publish(image_key(record.reference), data, replace=True)


def publish_index(store: Store, digest: str, data: bytes) -> None:
    """Publish an index unless the store has it undamaged. Raises: BootseerError."""
    if not store.publish(index_key(digest), data):
        try:
            read_tree(store, digest)
        except CorruptError:
            store.publish(index_key(digest), data, replace=True)


def publish_layer(store: Store, record: LayerRecord) -> None:
    """Publish a layer's record, replacing an older one. The layer's objects are all stored.

    Raises: CorruptError for a record that readers would refuse; BootseerError.
    """
    data = LAYER_FORM.encode(record)
    LAYER_FORM.decode(data, f"the layer {record.digest}")
    store.publish(layer_key(record.digest), data, replace=True)


def check_replaceable(store: Store, reference: str) -> None:
    """Check that a new image may take the name `reference`.

    Raises: UnknownFormatError if a later release wrote the image of that name; InvalidInputError
    if `reference` cannot name an image.
    """
    with contextlib.suppress(NotFoundError, CorruptError):
        _read_image(store, image_key(reference))


def _read_image(store: ReadableStore, key: str) -> ImageRecord:
    record = IMAGE_FORM.read(store, key)
    if image_key(record.reference) != key:
        name = unquote(key.rpartition("/")[2].removesuffix(".json"))
        raise CorruptError(
            f"{store.url}/{key} is the record of {record.reference!r}, not of {name!r}"
        )
    return record


def read_layer(store: Store, digest: str) -> LayerRecord | None:
    """Return the record of a layer, or None. Raises: CorruptError, UnknownFormatError."""
    key = layer_key(digest)
    try:
        record = LAYER_FORM.read(store, key)
    except NotFoundError:
        return None
    if record.digest != digest:
        raise CorruptError(f"{store.url}/{key} is the record of the layer {record.digest}")
    return record


def find_whole_layer(
    store: Store, digest: str, registry_digest: str | None = None
) -> LayerRecord | None:
    """Return the record of a layer whose blob the store has with the right size.

    `registry_digest`: digest of the layer's file in the image's registry. None is returned if there
    is no record, or if the blob is seek points of another file.
    Raises: NotFoundError if the blob is missing; CorruptError, UnknownFormatError.
    """
    record = read_layer(store, digest)
    if record is not None:
        size_bytes = store.size(blob_key(record.blob_digest))
        if size_bytes != record.blob_size_bytes:
            raise CorruptError(
                f"the blob {record.blob_digest} has {size_bytes} bytes instead of "
                f"{record.blob_size_bytes}; index the layer {digest} again"
            )
        if record.blob_digest.startswith(POINTS):
            # Imported late: it loads decompressors, which few starts need.
            from bootseer.blob.seek_points import HEAD_BYTES, layer_digest_of

            head = store.read(blob_key(record.blob_digest), 0, HEAD_BYTES)
            if layer_digest_of(head) != registry_digest:
                return None
    return record


def layer_tree(record: LayerRecord, tree: Tree) -> LayerTree:
    """Return the layer of `record` with its decoded index. Raises: CorruptError for a wrong one."""
    check_streams(tree, (record.digest,), f"the record of the layer {record.digest}")
    return LayerTree(tree, frozenset(record.implied), record.links)


def read_tree(store: Store, digest: str, *, bytes_max: int = INDEX_BYTES_MAX) -> Tree:
    """Read an index from the store, and decode it to a tree.

    Raises: NotFoundError; CorruptError, also for an index of more than `bytes_max`;
    UnknownFormatError, UnavailableError.
    """
    return decode(_fetch_index(store, digest, bytes_max))


def _fetch_index(store: Store, digest: str, bytes_max: int) -> bytes:
    key = index_key(digest)
    data = store.read(key, 0, bytes_max + 1)
    if len(data) > bytes_max or digest_of(data) != digest:
        raise CorruptError(
            f"{store.url}/{key} does not have the digest that names it, or is too large"
        )
    return data


def load_tree(
    store: Store, record: ImageRecord, cache_dir: Path, *, run_dir: Path | None = None
) -> Tree:
    """Return the image's tree, from the node's cache or the store.

    Raises: as `load_index`; UnknownFormatError.
    """
    name = f"image {record.reference}"
    return decode(load_index(store, record.index_digest, name, cache_dir, run_dir=run_dir))


def load_start_index(settings: Settings, store: Store, record: ImageRecord) -> bytes:
    """Return the index of the image of a start: from the node's cache, other nodes or the store.

    Raises: as `load_index`.
    """
    digest, name = record.index_digest, f"image {record.reference}"
    chunks = even_chunks(index_key(digest), record.index_size_bytes, record.index_chunks)

    def fetch() -> bytes:
        data = read_whole(settings, chunks)
        if data is not None and digest_of(data) == digest:
            return data
        return _stored_index(store, digest, name)

    data, is_fetched = read_or_fetch_index(
        settings.cache_dir, digest, fetch, run_dir=settings.run_dir
    )
    if not is_fetched:
        decline_whole(settings, chunks)
    return data


def load_index(
    store: Store, digest: str, name: str, cache_dir: Path, *, run_dir: Path | None = None
) -> bytes:
    """Return an index from the node's cache, else from the store; it stays in the cache.

    The index is compared with its digest in either case; a damaged copy is fetched again. `name` is
    the owner of the index in messages, such as "image python:3.12"; `run_dir`: see `keep_index`.

    Raises: CorruptError, also if the store has no such index; NotFoundError if the cache cannot be
    made; UnavailableError, NoSpaceError.
    """

    def fetch() -> bytes:
        return _stored_index(store, digest, name)

    return read_or_fetch_index(cache_dir, digest, fetch, run_dir=run_dir)[0]


def _stored_index(store: Store, digest: str, name: str) -> bytes:
    try:
        return _fetch_index(store, digest, INDEX_BYTES_MAX)
    except NotFoundError as error:
        raise CorruptError(
            f"the index of {name} is missing in {store.url}; index it again"
        ) from error


# ---- names of sources ----------------------------------------------------------------------------

# Prefixes, and functions that tell sources from names in the store. They are here and not in
# `sources`, which most starts do not load, because they name an image of the store.


REGISTRY = "registry://"
DOCKER = "docker://"
OCI_LAYOUT = "oci:"
ARCHIVES = ("docker-archive:", "oci-archive:")

_IN_REGISTRY = re.compile(r"(?:[^/]*[.:][^/]*|localhost)/.+")
"""The first part of the name can only be a host, by Docker's rule."""


def registry_name(reference: str) -> str | None:
    """Return the source `registry://...` of an image named `HOST/NAME:TAG`.

    Return None for a name without a host, from which no registry can be told.
    """
    return f"{REGISTRY}{reference}" if _IN_REGISTRY.fullmatch(reference) else None


def is_source(text: str) -> bool:
    """Return whether `text` names a source instead of an image in the store."""
    prefixes = (DOCKER, REGISTRY, OCI_LAYOUT, *ARCHIVES)
    return text.startswith(prefixes) or ("/" in text and Path(text).exists())
