"""Chains that the store can serve, and their trees.

The only module of the snapshotter that reads the store. `can_serve` never fails and never waits
long: a store that does not answer is not asked again for a while, and containerd pulls images.
Thread-safe.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bootseer.blob.index import decode, encode
from bootseer.blob.index import digest as digest_of
from bootseer.blob.keys import index_key
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.cache.indexes import index_path, keep_index
from bootseer.prefetch.index.catalogue import (
    check_streams,
    find_whole_layer,
    layer_tree,
    load_index,
)
from bootseer.prefetch.index.chains import Chain, publish_chain_index, read_chain
from bootseer.prefetch.index.merge import LayerTree, merge_layers
from bootseer.prefetch.index.records import LayerRecord
from bootseer.prefetch.snapshotter.metadata import SnapshotDatabase
from bootseer.settings.config import Settings
from bootseer.store import Store, open_store

_log = logging.getLogger(__name__)

_STORE_S = 5.0
"""Delay of a pull by a store that does not answer."""
_PAUSE_S = 30.0
"""A store that failed is not asked again for this time."""
_LAYER_S = 60.0
"""Time for which a layer's record and the presence of its objects are remembered: about a pull."""
_LAYERS_MAX = 4096


class ChainTrees:
    """Chains of one store."""

    def __init__(self, settings: Settings, database: SnapshotDatabase) -> None:
        self._settings = settings
        self._database = database
        self._lock = threading.Lock()
        self._chain_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        # Deadline of its calls -> store.
        self._stores: dict[float, Store] = {}
        self._paused_until_s = 0.0
        # diff_id -> time at which all its objects were seen, and its record.
        self._layers: dict[str, tuple[float, LayerRecord]] = {}
        # Digest of an index -> inode and size of its verified file.
        self._intact: dict[str, tuple[int, int]] = {}

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close()

    def can_serve(self, chain_id: str) -> bool:
        """Return whether the store has all objects of the chain's tree. Never raises."""
        with self._lock:
            if time.monotonic() < self._paused_until_s:
                return False
        try:
            store = self._open(min(self._settings.deadline_s, _STORE_S))
            chain = read_chain(store, chain_id)
            if chain is None:
                return False
            return all(self._layer(store, diff_id) is not None for diff_id in chain.diff_ids)
        except (CorruptError, UnknownFormatError) as error:
            _log.warning("the chain %s is pulled by containerd: %s", chain_id, error)
        except (BootseerError, OSError) as error:
            with self._lock:
                self._paused_until_s = time.monotonic() + _PAUSE_S
            _log.warning(
                "for %.0f s images are pulled by containerd, since the store fails: %s",
                _PAUSE_S,
                error,
            )
        return False

    def index_digest(self, chain_id: str) -> str:
        """Return the digest of the index of the chain's tree; the node's cache has that index.

        Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError, DeadlineError,
        NoSpaceError.
        """
        with self._lock:
            chain_lock = self._chain_locks[chain_id]
        # Merging the layers of a large image takes seconds of a core: one thread does it for all.
        with chain_lock:
            known = self._database.tree_of(chain_id)
            if known is not None and self._is_kept(known):
                return known
            store = self._open(self._settings.deadline_s)
            chain = read_chain(store, chain_id)
            if chain is None:
                raise NotFoundError(f"the store {store.url} does not know the chain {chain_id} now")
            digest = self._fetch(store, chain) or self._merge(store, chain.diff_ids)
            self._database.note_tree(chain_id, digest)
            return digest

    # ---- inside -------------------------------------------------------------------------------

    def _open(self, deadline_s: float) -> Store:
        with self._lock:
            store = self._stores.get(deadline_s)
            if store is None:
                store = open_store(self._settings.store_url, deadline_s=deadline_s)
                self._stores[deadline_s] = store
            return store

    def _layer(self, store: Store, diff_id: str) -> LayerRecord | None:
        """Return the record of a layer, or None unless the store has its blob and index."""
        with self._lock:
            found = self._layers.get(diff_id)
        if found is not None and time.monotonic() - found[0] < _LAYER_S:
            return found[1]
        try:
            record = find_whole_layer(store, diff_id)
            if record is None:
                return None
            store.size(index_key(record.index_digest))
        except NotFoundError as error:
            _log.warning("the layer %s cannot be served, index it again: %s", diff_id, error)
            return None
        with self._lock:
            if len(self._layers) >= _LAYERS_MAX:
                self._layers.clear()
            self._layers[diff_id] = (time.monotonic(), record)
        return record

    def _fetch(self, store: Store, chain: Chain) -> str:
        """Fetch the merged tree that a node has published. Return its digest; "" without one."""
        digest = chain.index_digest
        if not digest:
            return ""
        try:
            tree = self._index(store, digest, f"the chain of {chain.diff_ids[-1]}")
            check_streams(tree, chain.diff_ids, f"the record of the chain with the tree {digest}")
        except CorruptError as error:
            _log.warning("the layers of an image are merged anew: %s", error)
            return ""
        return digest

    def _merge(self, store: Store, diff_ids: Sequence[str]) -> str:
        """Merge the layers' trees and publish the result. Return its digest."""
        data = encode(merge_layers(self._layer_trees(store, diff_ids)))
        digest = digest_of(data)
        keep_index(self._settings.cache_dir, digest, data, run_dir=self._settings.run_dir)
        try:
            store.publish(index_key(digest), data)
            publish_chain_index(store, diff_ids, digest)
        except BootseerError as error:
            _log.info("the merged tree of %d layers is not published: %s", len(diff_ids), error)
        return digest

    def _layer_trees(self, store: Store, diff_ids: Sequence[str]) -> list[LayerTree]:
        trees = []
        for diff_id in diff_ids:
            record = self._layer(store, diff_id)
            if record is None:
                raise NotFoundError(f"the store {store.url} has no layer {diff_id} now")
            tree = self._index(store, record.index_digest, f"the layer {diff_id}")
            trees.append(layer_tree(record, tree))
        return trees

    def _index(self, store: Store, digest: str, name: str) -> Tree:
        """Return the tree of an index, which stays in the node's cache. `name`: for messages."""
        settings = self._settings
        return decode(load_index(store, digest, name, settings.cache_dir, run_dir=settings.run_dir))

    def _is_kept(self, digest: str) -> bool:
        """Return whether the node's cache has this index undamaged: a crash may have torn it."""
        places = self._settings.cache_dir, self._settings.run_dir
        return any(self._is_intact(index_path(place, digest), digest) for place in places)

    def _is_intact(self, path: Path, digest: str) -> bool:
        try:
            status = path.stat()
            # A file is only ever replaced as a whole, so each is read and compared once.
            file = (status.st_ino, status.st_size)
            if file != self._intact.get(digest):
                if digest_of(path.read_bytes()) != digest:
                    return False
                self._intact[digest] = file
        except OSError:
            return False
        return True
