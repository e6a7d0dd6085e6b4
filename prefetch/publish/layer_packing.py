"""Has a layer in the store: what is there already, what another node packs now, or packed here.

Alone owns the order in which a layer appears: its blob, its index, its record; and the lease by
which one node packs it while the others wait. `indexing` makes images of layers. Thread-safe.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from bootseer.base.content_digest import new_hasher
from bootseer.blob.index.codec import digest as digest_of
from bootseer.blob.index.codec import encode
from bootseer.blob.keys import blob_key
from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.index.catalogue import (
    find_whole_layer,
    layer_tree,
    publish_index,
    publish_layer,
    read_tree,
)
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import LayerRecord
from bootseer.prefetch.sources.model import Layer
from bootseer.store import Lease, Store

_log = logging.getLogger(__name__)

_LEASE_S = 120.0
"""Renewed while a layer is packed; after a crash others begin anew when it is over."""
OTHER_NODE_S = 3600.0
"""The longest wait for a node that goes on renewing its lease."""
OTHER_NODE_POLL_S = 1.0
_PIECE_BYTES = 2**20
"""Small enough for an interrupt to take effect soon on a slow network."""
_READ_BYTES = 8 * 2**20

OnProgress = Callable[[int], None]


def stored_layer(
    store: Store, layer: Layer, *, verify: bool = False
) -> tuple[LayerRecord, LayerTree] | None:
    """What the store has of the layer, if it has all of it, undamaged as far as its size and the
    digest of its index tell; with `verify`, all of the blob is read and compared with its digest.

    Raises: UnavailableError, DeadlineError, UnknownFormatError (a later release wrote the record)
    and others of the store.
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
    """Raises: CorruptError where the store's blob does not have its digest."""
    key = blob_key(record.blob_digest)
    hasher = new_hasher(record.blob_digest)  # of seek points, SHA-256, too
    for offset in range(0, record.blob_size_bytes, _READ_BYTES):
        hasher.update(store.read(key, offset, min(_READ_BYTES, record.blob_size_bytes - offset)))
    if hasher.hexdigest() != record.blob_digest.partition(":")[2]:
        raise CorruptError(f"{store.url}/{key} does not have the digest that names it")


class LayerPacker:
    """Puts layers into the store that it lacks. Thread-safe."""

    def __init__(
        self, store: Store, work_dir: Path, lessee: str | None, *, verify: bool = False
    ) -> None:
        """`lessee`, the name of this node: of all nodes that give theirs, one packs a layer.
        `verify`: as `stored_layer`."""
        self._verify = verify
        self._store = store
        self._work_dir = work_dir
        self._lessee = lessee

    def have(self, layer: Layer, advance: OnProgress) -> tuple[LayerRecord, LayerTree, bool]:
        """The layer as the store has it, and whether this call put it there."""
        if found := stored_layer(self._store, layer, verify=self._verify):
            return *found, False
        if self._lessee is None or layer.digest is None:
            return *_pack_layer(self._store, layer, self._work_dir, advance), True
        # A node that packs renews its lease as it gets on; one that hangs loses it.
        deadline_s = time.monotonic() + OTHER_NODE_S
        while (lease := self._lease(layer.digest)) is None:
            if time.monotonic() > deadline_s:
                _log.warning(
                    "another node has been packing the layer %s for %.0f s: it is packed here",
                    layer.digest,
                    OTHER_NODE_S,
                )
                return *_pack_layer(self._store, layer, self._work_dir, advance), True
            advance(0)
            time.sleep(OTHER_NODE_POLL_S)
            if found := stored_layer(self._store, layer):
                return *found, False
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
            # Of a layer that stays in its registry, the seek points.
            size_bytes = file.seek(0, os.SEEK_END)
            # What is there under this digest, without a record that can be used, may be damaged.
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
