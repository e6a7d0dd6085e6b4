"""Indexing of an image: each layer becomes a blob in the store once, and all layers one tree.

A layer is taken from the store if the store has it; else one node packs it, under a lease, while
other nodes wait. Objects appear in this order: of each layer its blob, its index and its record,
then the image's index, then the image's record. So no object ever names a missing one, whenever a
process is killed.

Thread-safe. One call is one indexing; several may run at once, also in several processes.
"""

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from bootseer.base.content_digest import new_hasher
from bootseer.base.parallel import StoppableProgress, map_in_threads
from bootseer.blob.index import digest as digest_of
from bootseer.blob.index import encode
from bootseer.blob.keys import POINTS, blob_key
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.index.catalogue import (
    check_replaceable,
    find_image,
    find_whole_layer,
    layer_tree,
    publish_image,
    publish_index,
    publish_layer,
    read_tree,
)
from bootseer.prefetch.index.chains import publish_chain_index, publish_chains
from bootseer.prefetch.index.merge import LayerTree, merge_layers
from bootseer.prefetch.index.records import ImageLayer, ImageRecord, LayerRecord
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.store import Lease, Store
from bootseer.transfer.ranges import digests_of

_log = logging.getLogger(__name__)

WORKERS = 2
"""Layers packed at once. Each packer compresses in threads of its own; two of them overlap one
layer's parsing and publishing with the other's compression."""

_CLOCK_REALTIME_COARSE = 5
"""Clock id of clock_gettime(2), for which Python has no name."""
_LEASE_S = 120.0
"""Life of a lease, which is renewed while a layer is packed. After a crash it expires."""
OTHER_NODE_S = 3600.0
"""The longest wait for another node that renews its lease."""
OTHER_NODE_POLL_S = 1.0
_PIECE_BYTES = 2**20
"""Small enough for an interrupt to take effect soon on a slow network."""
_READ_BYTES = 8 * 2**20

OnProgress = Callable[[int], None]
OnLayer = Callable[[LayerRecord, bool], None]


# ---- images ---------------------------------------------------------------------------------


def index_image(
    source: ImageSource,
    store: Store,
    work_dir: Path,
    *,
    reference: str | None = None,
    on_progress: OnProgress | None = None,
    on_layer: OnLayer | None = None,
    lessee: str | None = None,
    created_ns: int | None = None,
    verify: bool = False,
) -> ImageRecord:
    """Make the image mountable from `store`, replacing any image of the same name.

    Layers that the store has are not read.

    Args:
        source: The image.
        store: The store.
        work_dir: Folder for `WORKERS` blobs at a time, in files without names.
        reference: Name of the image; by default the source's own.
        on_progress: Gets counts of bytes done, which add up to the layers' sizes; any thread.
        on_layer: Gets the record of each finished layer, and whether the store had the layer
            already; any thread.
        lessee: This node's name. Of all nodes that give one, a single node packs a layer, and the
            others wait for it.
        created_ns: Time at which the image was read, by default now. A younger record of the same
            name is not replaced.
        verify: Compare layers that the store has with their digests, and pack damaged ones anew.

    Raises: CorruptError, NotFoundError, NoSpaceError, UnavailableError, PermissionDeniedError;
    UnknownFormatError if a newer release wrote the image in the store.
    """
    name = reference or source.reference
    check_replaceable(store, name)
    # Taken before the source is read: a directory that changes meanwhile must count as changed.
    read_ns = created_ns or change_time_ns()
    progress = StoppableProgress(on_progress)

    def store_layer(key: str, layer: Layer) -> tuple[LayerRecord, LayerTree]:
        record, tree, is_new = _ensure_stored(
            store, layer, work_dir, lessee, progress, verify=verify
        )
        if layer.size_bytes and not is_new:
            progress(layer.size_bytes)
        if on_layer:
            on_layer(record, not is_new)
        return record, tree

    # An image may contain a layer several times, mostly an empty one.
    keys = [layer.digest or str(number) for number, layer in enumerate(source.layers)]
    done = map_in_threads(
        dict(zip(keys, source.layers, strict=True)),
        store_layer,
        progress,
        thread_count=WORKERS,
        thread_name="index-layer",
        size_of=lambda layer: layer.size_bytes,
    )
    layers = [done[key] for key in keys]
    diff_ids = [layer.digest for layer in source.layers if layer.digest is not None]
    # Seek points need the image's registry, which containerd does not tell for a chain.
    has_chains = len(diff_ids) == len(source.layers) > 0 and not any(
        record.blob_digest.startswith(POINTS) for record, _ in layers
    )
    if has_chains:
        publish_chains(store, diff_ids)
    tree = merge_layers([layer_tree for _, layer_tree in layers])
    data = encode(tree)
    listed = [
        ImageLayer(layer.digest, layer.blob_digest, layer.blob_size_bytes) for layer, _ in layers
    ]
    record = describe_image(source, name, tree, data, listed, read_ns)
    publish_index(store, record.index_digest, data)
    if has_chains:
        publish_chain_index(store, diff_ids, record.index_digest)
    if created_ns is None or not _has_younger(store, record):
        publish_image(store, record)
    return record


def change_time_ns() -> int:
    """Return the time that a file changed now gets as its change time.

    Change times come from the kernel's coarse clock, which is some milliseconds behind
    `time.time_ns`.
    """
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
    """Return the record of an image whose merged tree is `tree`, encoded as `index`."""
    return ImageRecord(
        reference=name,
        # A directory has no configuration; its tree has a single stream.
        identity=source.identity or tree.blobs[0].stream_digest,
        index_digest=digest_of(index),
        index_size_bytes=len(index),
        config=source.config,
        layers=tuple(layers),
        size_bytes=_content_bytes(tree),
        file_count=tree.name_count,
        created_ns=created_ns,
        manifest_digest=source.manifest_digest or "",
        index_chunks=digests_of(index),
    )


def _content_bytes(tree: Tree) -> int:
    modes, sizes = tree.columns.mode, tree.columns.size_bytes
    return sum(size for mode, size in zip(modes, sizes, strict=True) if stat.S_ISREG(mode))


# ---- layers ---------------------------------------------------------------------------------


def stored_layer(
    store: Store, layer: Layer, *, verify: bool = False
) -> tuple[LayerRecord, LayerTree] | None:
    """Return the layer's record and tree if the store has all of the layer, else None.

    The size of the blob and the digest of the index are checked; with `verify`, the whole blob is
    read and compared with its digest.

    Raises: UnknownFormatError if a later release wrote the record; UnavailableError, DeadlineError
    and other errors of the store.
    """
    if layer.digest is None:
        return None
    try:
        record = find_whole_layer(store, layer.digest, layer.registry_digest)
        if record is None:
            return None
        tree = layer_tree(record, read_tree(store, record.index_digest))
        if verify:
            _check_blob(store, record)
    except (NotFoundError, CorruptError) as error:
        _log.info("the store lacks the layer %s: %s", layer.digest, error)
        return None
    return record, tree


def _check_blob(store: Store, record: LayerRecord) -> None:
    """Read a blob and compare it with its digest. Raises: CorruptError."""
    key = blob_key(record.blob_digest)
    hasher = new_hasher(record.blob_digest)
    for offset in range(0, record.blob_size_bytes, _READ_BYTES):
        hasher.update(store.read(key, offset, min(_READ_BYTES, record.blob_size_bytes - offset)))
    if hasher.hexdigest() != record.blob_digest.partition(":")[2]:
        raise CorruptError(f"{store.url}/{key} does not have the digest that names it")


def _ensure_stored(
    store: Store,
    layer: Layer,
    work_dir: Path,
    lessee: str | None,
    advance: OnProgress,
    *,
    verify: bool,
) -> tuple[LayerRecord, LayerTree, bool]:
    """Return the layer's record and tree in the store, and whether this call packed the layer."""
    if found := stored_layer(store, layer, verify=verify):
        return *found, False
    if lessee is None or layer.digest is None:
        return *_pack_layer(store, layer, work_dir, advance), True
    # A node renews its lease with its progress, so a node that hangs loses the lease.
    deadline_s = time.monotonic() + OTHER_NODE_S
    while (lease := _layer_lease(store, layer.digest, lessee)) is None:
        if time.monotonic() > deadline_s:
            _log.warning(
                "another node has been packing the layer %s for %.0f s: it is packed here",
                layer.digest,
                OTHER_NODE_S,
            )
            return *_pack_layer(store, layer, work_dir, advance), True
        advance(0)
        time.sleep(OTHER_NODE_POLL_S)
        if found := stored_layer(store, layer):
            return *found, False
    with lease:
        if found := stored_layer(store, layer):
            return *found, False

        def advance_and_renew(count_bytes: int) -> None:
            if 0 < lease.remaining_s < _LEASE_S / 2:
                # Without the lease, another node does the same work: no reason to fail.
                with contextlib.suppress(BootseerError):
                    lease.renew()
            advance(count_bytes)

        return *_pack_layer(store, layer, work_dir, advance_and_renew), True


def _layer_lease(store: Store, digest: str, lessee: str) -> Lease | None:
    key = f"leases/layers/{digest.partition(':')[2]}"
    return store.lease(key, ttl_s=_LEASE_S, owner=f"{lessee}:{os.getpid()}")


def _pack_layer(
    store: Store, layer: Layer, work_dir: Path, advance: OnProgress
) -> tuple[LayerRecord, LayerTree]:
    try:
        make_private_directory(work_dir)
        # The file has no name, so its space is free again even if this process is killed.
        with tempfile.TemporaryFile(dir=work_dir) as file:
            layer_tree = layer.pack(file, advance)
            (blob,) = layer_tree.tree.blobs
            # Not `blob.size_bytes`: for a layer that stays in its registry, the file holds seek
            # points.
            size_bytes = file.seek(0, os.SEEK_END)
            # A blob of that digest without a usable record may be damaged.
            store.publish(blob_key(blob.digest), _pieces(file, advance), replace=True)
    except BootseerError:
        raise
    except OSError as error:
        raise from_oserror(error, f"pack a layer in {work_dir}") from error
    data = encode(layer_tree.tree)
    record = LayerRecord(
        layer.digest or blob.digest,
        blob.digest,
        size_bytes,
        digest_of(data),
        tuple(sorted(layer_tree.implied)),
        layer_tree.links,
    )
    if layer.digest is not None:
        publish_index(store, record.index_digest, data)
        publish_layer(store, record)
    return record, layer_tree


def _pieces(file: IO[bytes], advance: OnProgress) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        advance(0)
        yield piece
