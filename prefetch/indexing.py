"""Turns an image into blobs and one tree in the store, once per layer.

Alone owns the order in which things appear there: a layer's blob, its index, its record; then the
image's index, then its record. So nothing ever names what is absent, whenever this is killed, and
two indexers of one image only do the same work twice.

Threading: one call is one indexing; several may run at once, also in several processes.
"""

import concurrent.futures
import contextlib
import logging
import os
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
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    from_oserror,
)
from bootseer.prefetch.catalogue import (
    check_replaceable,
    check_streams,
    find_image,
    publish_image,
    publish_layer,
    read_layer,
    read_tree,
)
from bootseer.prefetch.chains import publish_chain_index, publish_chains
from bootseer.prefetch.merge import LayerTree, merge
from bootseer.prefetch.records import ImageLayer, ImageRecord, LayerRecord
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.private import make_private_directory
from bootseer.store import Lease, Store

logger = logging.getLogger(__name__)

WORKERS = 2
"""Layers packed at once. Each packer compresses in threads of its own; two of them overlap one
layer's parsing and publishing with the other's compression."""
_LEASE_S = 120.0
"""Renewed while a layer is packed; after a crash others begin anew when it is over."""
_OTHER_NODE_S = 3600.0
_OTHER_NODE_POLL_S = 1.0
_PIECE_BYTES = 2**20
"""Small enough for an interrupt to take effect soon on a slow network."""

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2); Python has no name for it."""

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
    lessee: str | None = None,
    created_ns: int | None = None,
) -> ImageRecord:
    """Make the image mountable from `store` under `reference` (default: the source's own name);
    an image of that name is replaced. Layers that the store has are not read.

    `work_dir` holds `workers` blobs at a time, in files without names. `on_progress` gets counts
    of bytes done, which add up to the layers' sizes; `on_layer` each layer done and whether the
    store had it already. Both are called from several threads. With a `lessee`, this node's name,
    one of all nodes that give theirs packs a layer, and the others wait for it. `created_ns`: when
    the image was read, unless that is now; a record of the name that is younger stays.

    Raises: CorruptError, NotFoundError, NoSpaceError, UnavailableError, PermissionDeniedError,
    UnknownFormatError (the store was written by a newer release).
    """
    name = reference or source.reference
    check_replaceable(store, name)
    # Before anything is read: what changes meanwhile has changed.
    read_ns = created_ns or change_time_ns()
    packer = _Packer(store, work_dir, lessee)
    layers = _index_layers(source.layers, packer, workers, on_progress, on_layer)
    diff_ids = [layer.digest for layer in source.layers if layer.digest is not None]
    has_chains = len(diff_ids) == len(source.layers) > 0
    if has_chains:
        publish_chains(store, diff_ids)
    tree = merge([layer_tree for _, layer_tree in layers])
    data = encode(tree)
    listed = [
        ImageLayer(layer.digest, layer.blob_digest, layer.blob_size_bytes) for layer, _ in layers
    ]
    record = describe_image(source, name, tree, data, listed, read_ns)
    _publish_index(store, record.index_digest, data)
    if has_chains:
        publish_chain_index(store, diff_ids, record.index_digest)
    if created_ns is None or not _has_younger(store, record):
        publish_image(store, record)
    return record


def change_time_ns() -> int:
    """Now, as files' change times have it: what changes from now on has none before. The system's
    clock proper is some milliseconds ahead of those."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def _has_younger(store: Store, record: ImageRecord) -> bool:
    try:
        return find_image(store, record.reference).created_ns > record.created_ns
    except (NotFoundError, CorruptError):
        return False


def describe_image(
    source: ImageSource,
    name: str,
    tree: Tree,
    index: bytes,
    layers: Sequence[ImageLayer],
    created_ns: int,
) -> ImageRecord:
    """The record of an image that was read at `created_ns`; its merged tree is `tree`, encoded
    `index`."""
    return ImageRecord(
        reference=name,
        # A directory has no configuration, and is one stream.
        identity=source.identity or tree.blobs[0].stream_digest,
        index_digest=digest_of(index),
        index_size_bytes=len(index),
        config=source.config,
        layers=tuple(layers),
        size_bytes=_content_bytes(tree),
        file_count=tree.name_count,
        created_ns=created_ns,
        manifest_digest=source.manifest_digest or "",
    )


def _content_bytes(tree: Tree) -> int:
    modes, sizes = tree.columns.mode, tree.columns.size_bytes
    return sum(size for mode, size in zip(modes, sizes, strict=True) if stat.S_ISREG(mode))


def _index_layers(
    layers: Sequence[Layer],
    packer: "_Packer",
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
        record, tree, is_new = packer.have(layer, advance)
        if layer.size_bytes and not is_new:
            advance(layer.size_bytes)
        if on_layer:
            on_layer(record, not is_new)
        return record, tree

    # An image may hold one layer several times (empty ones, mostly).
    keys = [layer.digest or str(number) for number, layer in enumerate(layers)]
    unique = dict(zip(keys, layers, strict=True))
    with ThreadPoolExecutor(workers, thread_name_prefix="index-layer") as pool:
        # The largest first: it takes longest, and may be most of the image.
        ordered = sorted(unique.items(), key=lambda item: -(item[1].size_bytes or 0))
        futures = {key: pool.submit(finish, layer) for key, layer in ordered}
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


def stored_layer(store: Store, layer: Layer) -> tuple[LayerRecord, LayerTree] | None:
    """What the store has of the layer, if it has all of it.

    Raises: UnavailableError, DeadlineError, UnknownFormatError and others of the store.
    """
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
        check_streams(tree, (layer.digest,), f"the record of the layer {layer.digest}")
    except (NotFoundError, CorruptError) as error:
        logger.info("the store lacks the layer %s: %s", layer.digest, error)
        return None
    return record, LayerTree(tree, frozenset(record.implied), record.links)


class _Packer:
    """Puts layers into the store that it lacks. Thread-safe."""

    def __init__(self, store: Store, work_dir: Path, lessee: str | None) -> None:
        self._store = store
        self._work_dir = work_dir
        self._lessee = lessee

    def have(self, layer: Layer, advance: OnProgress) -> tuple[LayerRecord, LayerTree, bool]:
        """The layer as the store has it, and whether this call put it there."""
        if found := stored_layer(self._store, layer):
            return *found, False
        if self._lessee is None or layer.digest is None:
            return *_pack_layer(self._store, layer, self._work_dir, advance), True
        deadline_s = time.monotonic() + _OTHER_NODE_S
        while (lease := self._lease(layer.digest)) is None:
            advance(0)
            time.sleep(_OTHER_NODE_POLL_S)
            if found := stored_layer(self._store, layer):
                return *found, False
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"another node has been packing the layer {layer.digest} for "
                    f"{_OTHER_NODE_S:.0f} s"
                )
        with lease:
            if found := stored_layer(self._store, layer):
                return *found, False

            def advance_and_renew(count_bytes: int) -> None:
                if 0 < lease.remaining_s < _LEASE_S / 2:
                    # Losing it means that another node does the same work.
                    with contextlib.suppress(BootseerError):
                        lease.renew()
                advance(count_bytes)

            return *_pack_layer(self._store, layer, self._work_dir, advance_and_renew), True

    def _lease(self, digest: str) -> Lease | None:
        key = f"leases/layers/{digest.partition(':')[2]}"
        return self._store.lease(key, ttl_s=_LEASE_S, owner=f"{self._lessee}:{os.getpid()}")


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
