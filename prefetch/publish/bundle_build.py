"""Building of a workload's hot set and bundle from its traces, and their publication.

Objects appear in the order: parts of the bundle, its header, the pointer to the bundle. So no
object ever names a missing one. Any thread, any node: a lease in the store lets one node at a time
build a workload's bundle.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from bootseer.base.display import quoted
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.linux.private_files import private_directory
from bootseer.prefetch.bundle import hot_store, similar
from bootseer.prefetch.bundle.accuracy import accuracy_of, is_worthwhile, scattered_inodes
from bootseer.prefetch.bundle.format import PART_COUNT, BundleExtent, plan_frames, write_bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.registry import LayerReader
from bootseer.prefetch.record import hotset
from bootseer.prefetch.record.trace import Trace
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.store.objects.lease import LeaseRenewal
from bootseer.transfer.ranges import digests_of

_log = logging.getLogger(__name__)

LEASE_S = 600.0
_PIECE_BYTES = 4 * 2**20


def add_trace(
    settings: Settings,
    store: Store,
    tree: Tree,
    trace: Trace,
    reference: str,
    *,
    renew: bool = False,
) -> HotPointer | None:
    """Publish a trace, and a new bundle of the image called `reference`, if the trace is news.

    Nodes that start together record the same, so one of them publishes. Nothing is published while
    another node holds the workload's lease, or if the newest bundle has most of the trace's pages.
    Pages that only this node reads are published by the next start that misses them.

    `renew`: replace the bundle that existed when the trace began, whatever it holds.
    Returns: The pointer to the new bundle, or None without one. Raises: BootseerError.
    """
    index_digest, workload = trace.index_digest, trace.workload
    owner = f"{settings.node}:{os.getpid()}"
    lease = store.lease(hot_store.lease_key(index_digest, workload), ttl_s=LEASE_S, owner=owner)
    if lease is None:
        _log.info("another node publishes the trace and the bundle of %s", workload)
        return None
    # Building a large bundle takes longer than the lease lasts.
    with LeaseRenewal(lease, LEASE_S):
        if not _is_news(store, tree, trace, renew):
            _log.info("the bundle of %s has most pages of this trace", workload)
            return None
        key = hot_store.publish_trace(store, trace)
        _log.info("published the trace %s with %d accesses", key, len(trace.accesses))
        dropped = hot_store.drop_old_traces(store, index_digest, workload)
        if dropped:
            _log.info("deleted %d old traces", dropped)
        return build_bundle(settings, store, tree, index_digest, reference, workload)


def _is_news(store: Store, tree: Tree, trace: Trace, renew: bool) -> bool:
    lengths = [blob.stream_length for blob in tree.blobs]
    try:
        pointer = hot_store.read_pointer(store, trace.index_digest, trace.workload)
        if pointer is None or (renew and pointer.created_ns < trace.started_ns):
            return True
        bundle = hot_store.read_bundle(store, pointer, lengths)
    except (CorruptError, NotFoundError, UnknownFormatError) as error:
        _log.warning("the bundle is made anew: %s", error)
        return True
    scattered = scattered_inodes(tree, pointer.scattered)
    numbers = [tree.resolve(file.path) for file in trace.files]
    accesses = (
        (number, access.offset, access.length, access.time_ns)
        for access in trace.accesses
        if (number := numbers[access.file]) is not None and number not in scattered
    )
    accuracy = accuracy_of(bundle, lengths, accesses, lambda number: tree.inode(number).extents)
    return is_worthwhile(accuracy, pointer.trace_count, trace.ended)


def build_bundle(
    settings: Settings, store: Store, tree: Tree, index_digest: str, reference: str, workload: str
) -> HotPointer | None:
    """Merge the workload's traces; publish hot set, bundle and pointer of the image `reference`.

    Other builds of the image find the bundle as one of a similar image.

    Returns: The pointer, or None if no page is hot. Raises: BootseerError.
    """
    traces = []
    for key in hot_store.trace_keys(store, index_digest, workload):
        try:
            traces.append(hot_store.read_trace(store, key))
        except BootseerError as error:
            _log.warning("the trace %s is left out: %s", key, error)
    hot = hotset.merge_traces(index_digest, workload, traces)
    if hot.scattered:
        _log.info(
            "each start reads other bytes of %s, which therefore are fetched when they are read; "
            "copying what a start reads of them into files of their own would be faster",
            ", ".join(map(quoted, hot.scattered)),
        )
    lengths = [blob.stream_length for blob in tree.blobs]
    frames = plan_frames(hotset.stream_ranges(hot, tree), lengths)
    if not frames:
        return None
    hot_data = hotset.encode(hot)
    hot_digest = _digest(hot_data)
    # Replaces objects of the same names, which may be damaged.
    store.publish(hot_store.hotset_key(hot_digest), hot_data, replace=True)
    header, size_bytes = _publish_bundle(settings, store, tree, index_digest, reference, frames)
    pointer = HotPointer(
        index_digest,
        _digest(header),
        size_bytes,
        len(header),
        hot_digest,
        len(traces),
        time.time_ns(),
        hot.scattered,
        digests_of(header),
    )
    store.publish(
        hot_store.pointer_key(index_digest, workload),
        hot_store.POINTER_FORM.encode(pointer),
        replace=True,
    )
    similar.publish_similar(store, pointer, reference, workload, tree)
    _log.info("published a bundle of %d bytes from %d traces", size_bytes, len(traces))
    return pointer


def _publish_bundle(
    settings: Settings,
    store: Store,
    tree: Tree,
    index_digest: str,
    reference: str,
    frames: Sequence[tuple[BundleExtent, ...]],
) -> tuple[bytes, int]:
    """Publish a bundle. Return its header and its size.

    Raises: BootseerError.
    """
    layers = LayerReader(settings, store, reference, tree.blobs)
    streams = ImageBytes(
        tree.blobs,
        layers.read_into,
        NodeCache(settings.cache_dir),
        deadline_s=settings.deadline_s,
        workers=2,
        vouched=vouched_streams(settings, index_digest),
        decode=layers.decode,
    )
    try:
        with contextlib.ExitStack() as stack:
            folder = private_directory(settings.cache_dir / "tmp")
            parts = [
                stack.enter_context(tempfile.TemporaryFile(dir=folder))
                for _ in range(min(PART_COUNT, len(frames)))
            ]
            header = write_bundle(
                index_digest, frames, lambda *piece: bytes(streams.read(*piece)), parts
            )
            size_bytes = len(header) + sum(part.tell() for part in parts)
            digest = _digest(header)
            for number, part in enumerate(parts):
                store.publish(hot_store.part_key(digest, number), _pieces(part), replace=True)
            # After the parts that the header names.
            store.publish(hot_store.header_key(digest), header, replace=True)
    except OSError as error:
        raise from_oserror(error, "build the bundle") from error
    finally:
        streams.close()
        layers.close()
    return header, size_bytes


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _pieces(spool: BinaryIO) -> Iterator[bytes]:
    spool.seek(0)
    while piece := spool.read(_PIECE_BYTES):
        yield piece
