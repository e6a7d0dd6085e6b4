"""Turns an image into blobs and one tree in the store, once per layer.

Alone owns the order in which things appear there: all of its layers (`layer_packing`), the image's
index, then its record. So nothing ever names what is absent, whenever this is killed, and two
indexers of one image only do the same work twice.

Threading: one call is one indexing; several may run at once, also in several processes.
"""

import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.base.parallel import StoppableProgress, map_in_threads
from bootseer.blob.index.codec import digest as digest_of
from bootseer.blob.index.codec import encode
from bootseer.blob.keys import POINTS
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, NotFoundError
from bootseer.prefetch.index.catalogue import (
    check_replaceable,
    find_image,
    publish_image,
    publish_index,
)
from bootseer.prefetch.index.chains import publish_chain_index, publish_chains
from bootseer.prefetch.index.merge import LayerTree, merge
from bootseer.prefetch.index.records import ImageLayer, ImageRecord, LayerRecord
from bootseer.prefetch.publish.layer_packing import LayerPacker, OnProgress
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.store import Store

WORKERS = 2
"""Layers packed at once. Each packer compresses in threads of its own; two of them overlap one
layer's parsing and publishing with the other's compression."""

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2); Python has no name for it."""

OnLayer = Callable[[LayerRecord, bool], None]


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
    verify: bool = False,
) -> ImageRecord:
    """Make the image mountable from `store` under `reference` (default: the source's own name);
    an image of that name is replaced. Layers that the store has are not read.

    `work_dir` holds `workers` blobs at a time, in files without names. `on_progress` gets counts
    of bytes done, which add up to the layers' sizes; `on_layer` each layer done and whether the
    store had it already. Both are called from several threads. With a `lessee`, this node's name,
    one of all nodes that give theirs packs a layer, and the others wait for it. `created_ns`: when
    the image was read, unless that is now; a record of the name that is younger stays. `verify`:
    layers that the store has are compared with their digests, and damaged ones packed anew.

    Raises: CorruptError, NotFoundError, NoSpaceError, UnavailableError, PermissionDeniedError,
    UnknownFormatError (the store was written by a newer release).
    """
    name = reference or source.reference
    check_replaceable(store, name)
    # Before anything is read: what changes meanwhile has changed.
    read_ns = created_ns or change_time_ns()
    packer = LayerPacker(store, work_dir, lessee, verify=verify)
    layers = _index_layers(source.layers, packer, workers, on_progress, on_layer)
    diff_ids = [layer.digest for layer in source.layers if layer.digest is not None]
    # Containerd does not say which registry a chain is from, so none is read by seek points.
    has_chains = len(diff_ids) == len(source.layers) > 0 and not any(
        record.blob_digest.startswith(POINTS) for record, _ in layers
    )
    if has_chains:
        publish_chains(store, diff_ids)
    tree = merge([layer_tree for _, layer_tree in layers])
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
    packer: LayerPacker,
    workers: int,
    on_progress: OnProgress | None,
    on_layer: OnLayer | None,
) -> list[tuple[LayerRecord, LayerTree]]:
    progress = StoppableProgress(on_progress)

    def finish(key: str, layer: Layer) -> tuple[LayerRecord, LayerTree]:
        record, tree, is_new = packer.have(layer, progress)
        if layer.size_bytes and not is_new:
            progress(layer.size_bytes)
        if on_layer:
            on_layer(record, not is_new)
        return record, tree

    # An image may hold one layer several times (empty ones, mostly).
    keys = [layer.digest or str(number) for number, layer in enumerate(layers)]
    unique = dict(zip(keys, layers, strict=True))
    done = map_in_threads(
        unique,
        finish,
        progress,
        thread_count=workers,
        thread_name="index-layer",
        size_of=lambda layer: layer.size_bytes,
    )
    return [done[key] for key in keys]
