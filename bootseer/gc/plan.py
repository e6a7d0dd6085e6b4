"""Inventory and rules -> what to delete. Pure (no I/O): the plan is what `collect` executes.

Mark and sweep. Marked is what a record that stays needs, what is noted as in use, and what is
younger than the grace time. Everything is deleted in the reverse order of its publishing, so that
at no moment a record names what is gone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from msgspec import Struct

from bootseer.blob.keys import blob_key, index_key
from bootseer.gc.inventory import Inventory
from bootseer.gc.retention import (
    IN_USE_S,
    Rules,
    Verdict,
    judge_images,
    judge_snapshots,
    last_used_ns,
    old_starts,
)
from bootseer.launch.preloading import FOLDER as PRELOAD
from bootseer.prefetch.bundle.bundle_reuse import name_of
from bootseer.prefetch.bundle.hot_store import header_key, hotset_key, name_key
from bootseer.prefetch.index.chains import chain_ids, chain_key
from bootseer.profile.stored import FOLDER as STARTS
from bootseer.snapshots.catalogue.catalogue import manifest_key

# What may be deleted, each before all that it may name. Other folders are no garbage.
_ORDER = (
    "snapshots/names/",
    "snapshots/",
    "images/",
    "chains/",
    "layers/",
    "hot/names/",
    "hot/streams/",
    "hot/",
    "traces/",
    STARTS,
    PRELOAD,
    "used/",
    "bundles/",
    "hotsets/",
    "indexes/",
    "blobs/",
)
CONTENT = ("bundles/", "hotsets/", "indexes/", "blobs/")
"""Named by digest: what several records may name."""


class Plan(Struct, frozen=True):
    """What would be deleted, and why."""

    snapshots: Mapping[str, Verdict]
    """Verdicts on snapshots by the key of the manifest."""
    images: Mapping[str, Verdict]
    """Verdicts on images by the key of the record."""
    deletions: tuple[str, ...]
    """Keys, in the order in which they are to be deleted."""
    freed_bytes: int


def make_plan(inventory: Inventory, rules: Rules) -> Plan:
    """Raises: NotFoundError, InvalidInputError where the rules name what is not there."""
    snapshots = judge_snapshots(inventory, rules)
    images = judge_images(inventory, rules)
    doomed = {key for key, verdict in (*snapshots.items(), *images.items()) if not verdict.is_kept}
    marked = _Marks(inventory, rules, doomed).marked
    ranks = {folder: rank for rank, folder in enumerate(_ORDER)}
    deletions = sorted(
        (key for key in inventory.objects if key not in marked),
        key=lambda key: (ranks[_folder(key)], _is_part(key), key),
    )
    freed = sum(inventory.objects[key].size_bytes for key in deletions)
    return Plan(snapshots, images, tuple(deletions), freed)


def _folder(key: str) -> str:
    """The entry of `_ORDER` that a key belongs to, or ""."""
    return next((folder for folder in _ORDER if key.startswith(folder)), "")


def _is_part(key: str) -> bool:
    """Return whether an object is a part of a bundle: the headers, which name them, go first."""
    return key.startswith("bundles/") and not key.endswith("/header")


def stages(deletions: Iterable[str]) -> Iterator[list[str]]:
    """Yield the keys that may be deleted at once, in no order: none of them names another one of
    its stage. `deletions` is in the order of a plan."""
    for _, keys in groupby(deletions, key=lambda key: (_folder(key), _is_part(key))):
        yield list(keys)


class _Marks:
    """Marks, from the records that stay down to the blobs that they need."""

    def __init__(self, inventory: Inventory, rules: Rules, doomed: Iterable[str]) -> None:
        self._inventory = inventory
        self._limit_ns = inventory.now_ns - int(rules.grace_s * 1e9)
        self._doomed = set(doomed)
        self._indexes: set[str] = set()
        """Digests of the trees that are needed."""
        self.marked: set[str] = {
            key
            for key, one in inventory.objects.items()
            if not _folder(key) or (one.modified_ns > self._limit_ns and key not in self._doomed)
        }
        old = old_starts(inventory, rules)
        self.marked.update(
            key for key in inventory.objects if key.startswith((STARTS, PRELOAD)) and key not in old
        )
        self._mark_uses()
        self._mark_snapshots()
        self._mark_images()
        self._mark_hot()
        # When a tree that stays was last used is worth knowing.
        self.marked.update(
            key for key, use in inventory.uses.items() if use.index_digest in self._indexes
        )

    def _need_tree(self, index_digest: str, blob_digests: Iterable[str]) -> None:
        self._indexes.add(index_digest)
        self.marked.add(index_key(index_digest))
        self.marked.update(map(blob_key, blob_digests))

    def _mark_uses(self) -> None:
        now_ns = self._inventory.now_ns
        for key, use in self._inventory.uses.items():
            if now_ns - last_used_ns(self._inventory, [use.index_digest]) < IN_USE_S * 10**9:
                self.marked.add(key)
                self._need_tree(use.index_digest, use.blob_digests)

    def _mark_snapshots(self) -> None:
        kept = set()
        for key, manifest in self._inventory.snapshots.items():
            if key not in self._doomed:
                self.marked.add(key)
                kept.add(key)
                for target in manifest.targets:
                    # Those of earlier snapshots as well, whether these stay or go.
                    self._need_tree(target.index.digest, [blob.digest for blob in target.blobs])
        for key, fingerprint in self._inventory.names.items():
            named = manifest_key(fingerprint)
            if named in kept:
                self.marked.add(key)
            elif named in self._doomed:
                # A young name of a snapshot that goes, goes with it.
                self.marked.discard(key)

    def _mark_images(self) -> None:
        layers: set[str] = set()
        for key, image in self._inventory.images.items():
            if key not in self._doomed:
                self.marked.add(key)
                self._need_tree(image.index_digest, (one.blob_digest for one in image.layers))
                layers.update(one.digest for one in image.layers)
                layers.update(image.config.diff_ids)
                self.marked.update(map(chain_key, chain_ids(image.config.diff_ids)))
        for key, chain in self._inventory.chains.items():
            if key in self.marked:
                layers.update(chain.diff_ids)
                if chain.index_digest:
                    # Their merged tree, which the layers' blobs are read by.
                    self._need_tree(chain.index_digest, ())
        for key, layer in self._inventory.layers.items():
            if layer.digest in layers or key in self.marked:
                self.marked.add(key)
                self._need_tree(layer.index_digest, [layer.blob_digest])

    def _mark_hot(self) -> None:
        inventory = self._inventory
        names = {
            name_of(image.reference)
            for key, image in inventory.images.items()
            if key not in self._doomed
        }
        # Builds of an image that stays lend their bundles to the next build, and for that their
        # trees are needed, but not their blobs.
        lent: set[str] = set()
        for key, indexes in inventory.similar_images.items():
            workload = key.rpartition("/")[2].removesuffix(".json")
            is_named = key in {name_key(name, workload) for name in names}
            if is_named or key in self.marked or not self._indexes.isdisjoint(indexes):
                self.marked.add(key)
                if is_named:
                    lent.update(indexes)
        self.marked.update(map(index_key, lent))
        hot = {digest.partition(":")[2] for digest in (*self._indexes, *lent)}
        bundles: defaultdict[str, list[str]] = defaultdict(list)
        for key in inventory.objects:
            folder, _, rest = key.partition("/")
            if folder == "bundles":
                bundles[key.rpartition("/")[0]].append(key)
            elif folder == "traces" and rest.partition("/")[0] in hot:
                self.marked.add(key)
        needed = set()
        for key, pointer in inventory.pointers.items():
            if pointer.index_digest.partition(":")[2] in hot or key in self.marked:
                self.marked.update((key, hotset_key(pointer.hotset_digest)))
                self.marked.add(index_key(pointer.index_digest))
                needed.add(header_key(pointer.bundle_digest).rpartition("/")[0])
        for bundle, keys in bundles.items():
            # Its parts come before its header, over a long time.
            if bundle in needed or not self.marked.isdisjoint(keys):
                self.marked.update(keys)
