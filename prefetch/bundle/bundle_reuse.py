"""The bundle of another image, for one that has none of its own yet: found, verified, translated.

Edge: reads the store. All of it is bounded, since it happens in the process that serves a start.
Functions only; safe from any thread.
"""

import logging

from bootseer.blob.index.codec import decode as decode_index
from bootseer.blob.index.codec import digest as digest_of
from bootseer.blob.keys import index_key
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError
from bootseer.prefetch.bundle import hot_store, relatives
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.bundle.translation import translate
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.settings.config import Settings
from bootseer.store import Store

_log = logging.getLogger(__name__)

_HEADER_BYTES_MAX = 8 * 2**20
_INDEX_BYTES_MAX = 64 * 2**20


def borrow(
    settings: Settings, store: Store, index_digest: str, reference: str, workload: str, tree: Tree
) -> tuple[HotPointer, Bundle] | None:
    """The bundle of a relative, translated for the image with this tree, and the pointer to it.

    None where there is none, or none of it serves. Raises: BootseerError.
    """
    own = relatives.describe(index_digest, 0, tree.blobs)
    relative = relatives.find(store, own, reference, workload)
    if relative is None:
        return None
    pointer = hot_store.read_pointer(store, relative.index_digest, workload)
    if pointer is None:
        return None
    if pointer.header_bytes > _HEADER_BYTES_MAX:
        raise CorruptError(f"the bundle {pointer.bundle_digest} is too large to be translated")
    old = _old_tree(settings, store, relative.index_digest)
    lengths = [blob.stream_length for blob in old.blobs]
    bundle = hot_store.read_bundle(store, pointer, lengths)
    translated = translate(bundle, old, tree, index_digest)
    _log.info(
        "of the bundle of %s, an image like this one, %d of %d frames serve",
        relative.index_digest,
        len(translated.frames),
        len(bundle.frames),
    )
    return (pointer, translated) if translated.frames else None


def _old_tree(settings: Settings, store: Store, index_digest: str) -> Tree:
    """From the node's copy, else from the store; not kept, since it is needed once."""
    try:
        return read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    except BootseerError:
        key = index_key(index_digest)
        data = store.read(key, 0, _INDEX_BYTES_MAX + 1)
        if len(data) > _INDEX_BYTES_MAX or digest_of(data) != index_digest:
            raise CorruptError(
                f"{store.url}/{key} does not have the digest that names it, or is too large"
            ) from None
        return decode_index(data)
