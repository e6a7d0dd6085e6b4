"""Which bundle a start uses: the one that the node has all of, its image's own, or a relative's.

Edge: reads the store. Functions only; safe from any thread.
"""

from collections.abc import Sequence

from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.bundle_reuse import borrow
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.bundle.kept_bundle import is_refused, keep_bundle, kept_bundle
from bootseer.prefetch.cache.image_stream import ImageStream
from bootseer.prefetch.mounts.mount_state import MountState
from bootseer.settings.config import Settings
from bootseer.store import Store


def find_bundle(
    settings: Settings, store: Store, state: MountState, tree: Tree, caches: Sequence[ImageStream]
) -> tuple[HotPointer, Bundle] | None:
    """The bundle for this image and workload, and the pointer to it; None where there is none.
    One that was refused before raises CorruptError.

    A bundle of which every byte is on this node is taken without asking the store, which may be
    down, for a newer one: nothing is left to fetch. Raises: BootseerError.
    """
    lengths = [blob.stream_length for blob in tree.blobs]
    kept = kept_bundle(settings, state.index_digest, state.workload, lengths)
    if kept is not None and _is_all_here(kept[1], caches):
        return kept
    pointer = hot_store.read_pointer(store, state.index_digest, state.workload)
    if pointer is None:
        found = borrow(settings, store, state.index_digest, state.reference, state.workload, tree)
        if found is not None:
            _check_refused(settings, state.workload, found[0])
        return found
    _check_refused(settings, state.workload, pointer)
    header = hot_store.read_header(store, pointer)
    bundle = hot_store.decode_bundle(header, pointer, lengths, store.url)
    keep_bundle(settings, state.workload, pointer, header)
    return pointer, bundle


def _check_refused(settings: Settings, workload: str, pointer: HotPointer) -> None:
    if is_refused(settings, workload, pointer):
        raise CorruptError(
            f"the bundle {pointer.bundle_digest} brought bytes that are not those of the image, "
            "and is not used again"
        )


def _is_all_here(bundle: Bundle, caches: Sequence[ImageStream]) -> bool:
    return all(
        caches[extent.blob].holds(extent.offset, extent.length)
        for frame in bundle.frames
        for extent in frame.extents
    )
