"""Makes a workload's hot set and bundle from its traces, and publishes them.

Alone owns what is merged and the order in which things appear in the store: a bundle's parts, its
header, then the pointer to it, so that nothing ever names what is absent. Whoever calls holds the
workload's lease. Edge; one call at a time per workload.
"""

import contextlib
import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

from bootseer.blob.tree import Tree
from bootseer.config import Settings
from bootseer.errors import BootseerError, from_oserror
from bootseer.prefetch import hot_store, hotset, relatives
from bootseer.prefetch.bundle import PART_COUNT, plan_frames, write_bundle
from bootseer.prefetch.cache import NodeCache
from bootseer.prefetch.hot_store import HotPointer
from bootseer.prefetch.mount_state import make_private
from bootseer.prefetch.streams import BlobStreams
from bootseer.store import Store

_log = logging.getLogger(__name__)

_PIECE_BYTES = 4 * 2**20


def build_bundle(
    settings: Settings, store: Store, tree: Tree, index_digest: str, reference: str, workload: str
) -> HotPointer | None:
    """Merge the workload's traces and publish hot set, bundle and pointer, and let other builds of
    the image, which is called `reference`, find them.

    None when there is nothing hot. Raises: BootseerError.
    """
    traces = []
    for key in hot_store.trace_keys(store, index_digest, workload):
        try:
            traces.append(hot_store.read_trace(store, key))
        except BootseerError as error:
            _log.warning("the trace %s is left out: %s", key, error)
    hot = hotset.merge(index_digest, workload, traces)
    lengths = [blob.stream_length for blob in tree.blobs]
    frames = plan_frames(hotset.stream_ranges(hot, tree), lengths)
    if not frames:
        return None
    hot_data = hotset.encode(hot)
    hot_digest = f"sha256:{hashlib.sha256(hot_data).hexdigest()}"
    store.publish(hot_store.hotset_key(hot_digest), hot_data)
    streams = BlobStreams(
        tree.blobs,
        store.read,
        NodeCache(settings.cache_dir),
        deadline_s=settings.deadline_s,
        workers=2,
    )
    try:
        with contextlib.ExitStack() as stack:
            folder = make_private(settings.cache_dir / "tmp")
            parts = [
                stack.enter_context(tempfile.TemporaryFile(dir=folder))
                for _ in range(min(PART_COUNT, len(frames)))
            ]
            header = write_bundle(
                index_digest, frames, lambda *piece: bytes(streams.read(*piece)), parts
            )
            size_bytes = len(header) + sum(part.tell() for part in parts)
            digest = f"sha256:{hashlib.sha256(header).hexdigest()}"
            for number, part in enumerate(parts):
                store.publish(hot_store.part_key(digest, number), _pieces(part))
            # The header after what it names, the pointer after the header.
            store.publish(hot_store.header_key(digest), header)
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, "build the bundle") from error
    finally:
        streams.close()
    pointer = HotPointer(
        index_digest,
        digest,
        size_bytes,
        len(header),
        hot_digest,
        len(traces),
        time.time_ns(),
    )
    store.publish(
        hot_store.pointer_key(index_digest, workload),
        hot_store.encode_pointer(pointer),
        replace=True,
    )
    relatives.publish(store, pointer, reference, workload, tree)
    _log.info("published a bundle of %d bytes from %d traces", size_bytes, len(traces))
    return pointer


def _pieces(spool: BinaryIO) -> Iterator[bytes]:
    spool.seek(0)
    while piece := spool.read(_PIECE_BYTES):
        yield piece
