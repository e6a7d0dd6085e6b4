"""Turns an image into blobs and one tree in the store, once per layer.

Alone owns the order in which things appear there: a layer's blob, its index, its record; then the
image's index, then its record. So nothing ever names what is absent, whenever this is killed, and
two indexers of one image only do the same work twice.

Threading: one call is one indexing; several may run at once, also in several processes.
"""

import concurrent.futures
import logging
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from bootseer.blob.index import digest as digest_of
from bootseer.blob.index import encode
from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.prefetch.catalogue import (
    check_replaceable,
    publish_image,
    publish_layer,
    read_layer,
    read_tree,
)
from bootseer.prefetch.chains import publish_chains
from bootseer.prefetch.merge import LayerTree, merge
from bootseer.prefetch.records import ImageLayer, ImageRecord, LayerRecord
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.private import make_private_directory
from bootseer.store import Store

logger = logging.getLogger(__name__)

WORKERS = 2
"""Layers packed at once. Each packer compresses in threads of its own; two of them overlap one
layer's parsing and publishing with the other's compression."""
_PIECE_BYTES = 2**20
"""Small enough for an interrupt to take effect soon on a slow network."""

OnProgress = Callable[[int], None]
OnLayer = Callable[[LayerRecord, bool], None]


class _StoppedError(Exception):
    """Another layer failed, or the user interrupted: this one need not be finished."""


def index_image(
    source: ImageSource,
    store: Store,
    work_dir: Path,
    *,
    reference: str | None = None,
    workers: int = WORKERS,
    on_progress: OnProgress | None = None,
    on_layer: OnLayer | None = None,
) -> ImageRecord:
    """Make the image mountable from `store` under `reference` (default: the source's own name);
    an image of that name is replaced. Layers that the store has are not read.

    `work_dir` holds `workers` blobs at a time, in files without names. `on_progress` gets counts
    of bytes done, which add up to the layers' sizes; `on_layer` each layer done and whether the
    store had it already. Both are called from several threads.

    Raises: CorruptError, NotFoundError, NoSpaceError, UnavailableError, PermissionDeniedError,
    UnknownFormatError (the store was written by a newer release).
    """
    name = reference or source.reference
    check_replaceable(store, name)
    layers = _index_layers(source.layers, store, work_dir, workers, on_progress, on_layer)
    diff_ids = [layer.digest for layer in source.layers if layer.digest is not None]
    if len(diff_ids) == len(source.layers):
        publish_chains(store, diff_ids)
    tree = merge([layer_tree for _, layer_tree in layers])
    data = encode(tree)
    digest = digest_of(data)
    store.publish(index_key(digest), data)
    record = ImageRecord(
        reference=name,
        identity=source.identity or digest,
        index_digest=digest,
        index_size_bytes=len(data),
        config=source.config,
        layers=tuple(
            ImageLayer(layer.digest, layer.blob_digest, layer.blob_size_bytes)
            for layer, _ in layers
        ),
        size_bytes=_content_bytes(tree),
        file_count=tree.name_count,
        created_ns=time.time_ns(),
    )
    publish_image(store, record)
    return record


def _content_bytes(tree: Tree) -> int:
    inodes = (tree.inode(number) for number in range(tree.inode_count))
    return sum(inode.size_bytes for inode in inodes if stat.S_ISREG(inode.mode))


def _index_layers(
    layers: Sequence[Layer],
    store: Store,
    work_dir: Path,
    workers: int,
    on_progress: OnProgress | None,
    on_layer: OnLayer | None,
) -> list[tuple[LayerRecord, LayerTree]]:
    stop = threading.Event()

    def advance(count_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        if on_progress:
            on_progress(count_bytes)

    def finish(layer: Layer) -> tuple[LayerRecord, LayerTree]:
        found = _stored_layer(store, layer)
        if found and layer.size_bytes:
            advance(layer.size_bytes)
        record, tree = found or _pack_layer(store, layer, work_dir, advance)
        if on_layer:
            on_layer(record, found is not None)
        return record, tree

    # An image may hold one layer several times (empty ones, mostly).
    keys = [layer.digest or str(number) for number, layer in enumerate(layers)]
    unique = dict(zip(keys, layers, strict=True))
    with ThreadPoolExecutor(workers, thread_name_prefix="index-layer") as pool:
        futures = {key: pool.submit(finish, layer) for key, layer in unique.items()}
        try:
            concurrent.futures.wait(
                futures.values(), return_when=concurrent.futures.FIRST_EXCEPTION
            )
            _raise_first_error(futures.values())
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return [futures[key].result() for key in keys]


def _raise_first_error(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        if future.done() and (error := future.exception()) is not None:
            raise error


def _stored_layer(store: Store, layer: Layer) -> tuple[LayerRecord, LayerTree] | None:
    """What the store has of the layer, if it has all of it."""
    if layer.digest is None:
        return None
    record = read_layer(store, layer.digest)
    if record is None:
        return None
    try:
        size_bytes = store.size(blob_key(record.blob_digest))
        if size_bytes != record.blob_size_bytes:
            raise CorruptError(f"the blob {record.blob_digest} has {size_bytes} bytes")
        tree = read_tree(store, record.index_digest)
    except (NotFoundError, CorruptError) as error:
        logger.warning("the layer %s is packed again: %s", layer.digest, error)
        return None
    return record, LayerTree(tree, frozenset(record.implied), record.links)


def _pack_layer(
    store: Store, layer: Layer, work_dir: Path, advance: OnProgress
) -> tuple[LayerRecord, LayerTree]:
    try:
        make_private_directory(work_dir)
        # Without a name: whatever becomes of this process, the space is free again.
        with tempfile.TemporaryFile(dir=work_dir) as file:
            layer_tree = layer.pack(file, advance)
            (blob,) = layer_tree.tree.blobs
            # What is there under this digest is right, unless it is not even of the right size.
            key = blob_key(blob.digest)
            replace = _has_other_size(store, key, blob.size_bytes)
            store.publish(key, _pieces(file, advance), replace=replace)
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"pack a layer in {work_dir}") from error
    data = encode(layer_tree.tree)
    record = LayerRecord(
        layer.digest or blob.digest,
        blob.digest,
        blob.size_bytes,
        digest_of(data),
        tuple(sorted(layer_tree.implied)),
        layer_tree.links,
    )
    if layer.digest is not None:
        _publish_index(store, record.index_digest, data)
        publish_layer(store, record)
    return record, layer_tree


def _has_other_size(store: Store, key: str, size_bytes: int) -> bool:
    try:
        return store.size(key) != size_bytes
    except NotFoundError:
        return False


def _publish_index(store: Store, digest: str, data: bytes) -> None:
    if not store.publish(index_key(digest), data):
        try:
            read_tree(store, digest)
        except CorruptError:
            store.publish(index_key(digest), data, replace=True)


def _pieces(file: IO[bytes], advance: OnProgress) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        advance(0)
        yield piece
