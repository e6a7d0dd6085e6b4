"""The images that a store knows: where their records lie, how one is found, and its tree.

Alone owns the keys of images, layers, blobs and indexes in a store (docs/format/image.md). The
index digest in a record pins all of an image's bytes; the index is verified at every use.

Thread-safe: functions and frozen objects only.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from bootseer.blob.index.codec import decode
from bootseer.blob.index.codec import digest as digest_of
from bootseer.blob.keys import POINTS, blob_key, index_key
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, InvalidInputError, NotFoundError
from bootseer.prefetch.cache.indexes import keep_index, read_index
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import (
    IMAGE_FORM,
    INDEX_BYTES_MAX,
    LAYER_FORM,
    REFERENCE,
    ImageRecord,
    LayerRecord,
)
from bootseer.store import Store

_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")
_KEY_NAME_BYTES_MAX = 240
"""Quoted; file names end at 255 bytes."""
_QUESTIONS_MAX = 16
"""Questions of one start that a store has at once."""


def check_reference(reference: str) -> str:
    """`reference` if it can name an image. Raises: InvalidInputError."""
    if not REFERENCE.fullmatch(reference) or len(quote(reference, "")) > _KEY_NAME_BYTES_MAX:
        raise InvalidInputError(
            f"{reference[:80]!r} cannot name an image; use up to 200 letters, digits and ._:/@+-"
        )
    return reference


def image_key(reference: str) -> str:
    """Where the record of an image lies."""
    return f"images/{quote(check_reference(reference), safe='')}.json"


def layer_key(digest: str) -> str:
    """Where the record of a layer lies."""
    return f"layers/{quote(digest, safe='')}.json"


def list_images(store: Store) -> Iterator[ImageRecord]:
    """All images, sorted by key. Raises: CorruptError, UnknownFormatError at the first record
    that cannot be read."""
    for info in store.list("images/"):
        if info.path.endswith(".json"):
            with contextlib.suppress(NotFoundError):
                yield _read_image(store, info.path)


def find_image(store: Store, reference: str) -> ImageRecord:
    """The image called `reference` (or `reference`:latest), or the one whose index digest starts
    with `reference`.

    Raises: NotFoundError, InvalidInputError where several fit, CorruptError, UnknownFormatError.
    """
    check_reference(reference)
    tagged = ":" in reference.rpartition("/")[2] or "@" in reference
    for name in (reference,) if tagged else (reference, f"{reference}:latest"):
        try:
            return _read_image(store, image_key(name))
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
    """Look whether the store has the blobs of all layers, without reading them.

    Asks for several at once: every start waits for this, and an object store takes tens of
    milliseconds for each. Raises: CorruptError for one that is missing or of another size;
    UnavailableError.
    """

    def size_of(key: str) -> int:
        try:
            return store.size(key)
        except NotFoundError:
            return -1

    keys = [blob_key(layer.blob_digest) for layer in record.layers]
    if len(keys) > 1:
        # Imported late: not every start comes here.
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(min(len(keys), _QUESTIONS_MAX), thread_name_prefix="blob-size")
        try:
            sizes = list(pool.map(size_of, keys))
        finally:
            # After a failure no further question is asked; those that were have their deadlines.
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
    """Look whether a tree is of these layers and no others, as far as it says itself: a record may
    name the index of another image. Raises: CorruptError."""
    for blob in tree.blobs:
        # A stream has another digest than its layer where that is not a SHA-256.
        if blob.stream_digest.startswith("sha256:") and blob.stream_digest not in diff_ids:
            raise CorruptError(
                f"{where} names an index of the layer {blob.stream_digest}, which is not its own"
            )


def publish_image(store: Store, record: ImageRecord) -> None:
    """Catalogue `record`, whose objects are all in the store; replaces the image of that name.

    Raises: CorruptError for a record that no reader would accept.
    """
    data = IMAGE_FORM.encode(record)
    IMAGE_FORM.decode(data, f"the image {record.reference}")
    store.publish(image_key(record.reference), data, replace=True)


def publish_index(store: Store, digest: str, data: bytes) -> None:
    """Have an index, which has `digest`, in the store; replaces one that is damaged."""
    if not store.publish(index_key(digest), data):
        try:
            read_tree(store, digest)
        except CorruptError:
            store.publish(index_key(digest), data, replace=True)


def publish_layer(store: Store, record: LayerRecord) -> None:
    """Make a layer, whose objects are all in the store, known by its digest; replaces an older
    record, which names what is gone or damaged or is equal.

    Raises: CorruptError for a record that no reader would accept.
    """
    data = LAYER_FORM.encode(record)
    LAYER_FORM.decode(data, f"the layer {record.digest}")
    store.publish(layer_key(record.digest), data, replace=True)


def check_replaceable(store: Store, reference: str) -> None:
    """Raises UnknownFormatError where `reference` is an image that a later release wrote;
    InvalidInputError where it cannot name one."""
    with contextlib.suppress(NotFoundError, CorruptError):
        _read_image(store, image_key(reference))


def _read_image(store: Store, key: str) -> ImageRecord:
    record = IMAGE_FORM.read(store, key)
    if image_key(record.reference) != key:
        name = unquote(key.rpartition("/")[2].removesuffix(".json"))
        raise CorruptError(
            f"{store.url}/{key} is the record of {record.reference!r}, not of {name!r}"
        )
    return record


def read_layer(store: Store, digest: str) -> LayerRecord | None:
    """The record of a layer; None where the store has none. Raises: as `LAYER_FORM.decode`."""
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
    """Return the record of a layer whose blob the store has; None where it has no record, or only
    seek points of another file than the image's registry has, `registry_digest`.

    Raises: NotFoundError without the blob; CorruptError where its size is another; as `read_layer`.
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
            # Imported late: it loads what decompresses, which few starts need.
            from bootseer.blob.seek_points import HEAD_BYTES, layer_digest_of

            head = store.read(blob_key(record.blob_digest), 0, HEAD_BYTES)
            if layer_digest_of(head) != registry_digest:
                return None
    return record


def layer_tree(record: LayerRecord, tree: Tree) -> LayerTree:
    """Return the layer whose index was decoded to `tree`. Raises: CorruptError where the tree is
    another layer's."""
    check_streams(tree, (record.digest,), f"the record of the layer {record.digest}")
    return LayerTree(tree, frozenset(record.implied), record.links)


def read_tree(store: Store, digest: str, *, bytes_max: int = INDEX_BYTES_MAX) -> Tree:
    """Return the tree whose index has `digest`.

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
    """Return the image's tree. Raises: as `have_index`; UnknownFormatError."""
    name = f"image {record.reference}"
    return decode(have_index(store, record.index_digest, name, cache_dir, run_dir=run_dir))


def have_index(
    store: Store, digest: str, name: str, cache_dir: Path, *, run_dir: Path | None = None
) -> bytes:
    """Return the index of `name` that has `digest`. It is kept in `cache_dir`, or for a while in
    `run_dir` (`keep_index`), and verified at every use; a copy that is damaged is fetched again.

    Raises: CorruptError, also where the store has no index; NotFoundError where the cache cannot be
    made; UnavailableError, NoSpaceError.
    """
    with contextlib.suppress(BootseerError):
        return read_index(cache_dir, digest, run_dir=run_dir)
    try:
        data = _fetch_index(store, digest, INDEX_BYTES_MAX)
    except NotFoundError as error:
        raise CorruptError(
            f"the index of {name} is missing in {store.url}; index it again"
        ) from error
    keep_index(cache_dir, digest, data, run_dir=run_dir)
    return data
