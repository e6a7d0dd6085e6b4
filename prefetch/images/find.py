"""Lookup of images that can be mounted.

An image is given by its name or by its source. A name is looked up in the store, and in the node's
catalogue while the store cannot be used or this node has not published yet what it pulled. Sources
are handled by `images.pull`, which is loaded only then. Thread-safe: functions and frozen values.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.fanout.whole_reads import StartDocuments
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache, is_stored
from bootseer.prefetch.index.catalogue import (
    check_blobs,
    check_reference,
    find_image,
    is_source,
    load_start_index,
)
from bootseer.prefetch.index.node_catalogue import FoundImage, NodeCatalogue, vouched_streams
from bootseer.prefetch.publish.publishing import start_image_publisher
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store

if TYPE_CHECKING:
    from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Shows one sentence to the user; warnings begin with "warning:"."""


def resolve_image(
    settings: Settings,
    image: str,
    *,
    say: Say = _log.warning,
    timeline: "Timeline | None" = None,
) -> FoundImage:
    """Find an image by its name or source, and pull the layers that neither store nor node have.

    Only images that are given by their source are pulled. `timeline` gets a span for the pull.

    Raises: BootseerError if the image is found nowhere.
    """
    if not is_source(image):
        return image_by_name(settings, image, say)
    from bootseer.prefetch.images.pull import resolve_from_source

    return resolve_from_source(settings, image, say, timeline)


def image_by_name(settings: Settings, name: str, say: Say) -> FoundImage:
    """Find the image called `name` in the store, or on this node if the store fails.

    If only the store can have the image, a start waits for the store's first answer as long as for
    any other.

    Raises: NotFoundError, InvalidInputError; the store's error if this node does not know the image
    either.
    """
    check_reference(name)
    catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
    while True:
        try:
            with open_own_store(settings) as store:
                return _image_in_store(settings, catalogue, store, name, say)
        except InvalidInputError:
            raise
        except (BootseerError, OSError) as error:
            found = _known_image(settings, catalogue, name, error)
            if found is None:
                if not WAIT_BUDGET.wait_longer():
                    raise
                say(f"waiting for the store, since nothing else has image {name}: {error}")
                continue
            if not isinstance(error, NotFoundError):
                warning = WAIT_BUDGET.warning(error)
                say(f"{warning}starting image {name} with what this node has of it: {error}")
            return found


def _known_image(
    settings: Settings, catalogue: NodeCatalogue, name: str, error: Exception
) -> FoundImage | None:
    """Return the image called `name` from this node, for which the store failed with `error`."""
    known = catalogue.find_image(name)
    # The store lacks an image that this node pulled and has not published yet.
    if known is None or (isinstance(error, NotFoundError) and known.is_published):
        return None
    return image_on_node(settings, known, whole=False)


def _image_in_store(
    settings: Settings, catalogue: NodeCatalogue, store: Store, name: str, say: Say
) -> FoundImage:
    documents = StartDocuments(settings, store)
    record = find_image(store, name, documents)
    # The server reads the index from the node's cache.
    load_start_index(settings, store, record)
    try:
        if documents.reads_store:
            check_blobs(store, record)
    except CorruptError as error:
        # This node's cache may have the blobs that the store lacks.
        say(f"warning: {error}")
    image = FoundImage(record)
    remember(lambda: catalogue.keep_image(image))
    return image


def remember(keep: Callable[[], None]) -> None:
    """Write to the node's catalogue by calling `keep`. Log a warning if it fails.

    A later start needs the store or the source then, which is no reason to fail this one.
    """
    try:
        keep()
    except (BootseerError, OSError) as error:
        _log.warning(
            "cannot write to this node's catalogue, so that the next start needs the store: %s",
            error,
        )


def image_on_node(
    settings: Settings, known: FoundImage, *, whole: bool = True
) -> FoundImage | None:
    """Return a known image with its streams opened (`held`); None if this node lacks one of them.

    Without `whole`, only the streams that the store does not have must be on this node.
    """
    cache, index_digest = NodeCache(settings.cache_dir), known.record.index_digest
    streams: list[CachedStream] = []
    try:
        blobs = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir).blobs
        vouched = vouched_streams(settings, index_digest, blobs, is_local=not known.is_published)
        for blob in blobs:
            if blob.frames and not whole:
                continue
            if not is_stored(blob) and known.is_published:
                raise CorruptError(f"the stream {blob.stream_digest} is stored nowhere")
            stream = cache.open_blob(blob, vouched=vouched)
            streams.append(stream)
            if not stream.holds(0, stream.count):
                raise NotFoundError(f"this node has lost {blob.stream_digest}")
    except (BootseerError, OSError) as error:
        _log.info("image %s is not whole on this node: %s", known.record.reference, error)
        for stream in streams:
            stream.close()
        return None
    return replace(known, held=tuple(streams))


def publish_later(settings: Settings, resolved: FoundImage) -> None:
    """Start publishing an image that only this node has, in the background, if the settings say so.

    Never raises: a later start tries again.
    """
    if resolved.is_published or not settings.auto_index:
        return
    try:
        start_image_publisher(settings, resolved.record.index_digest)
    except (BootseerError, OSError) as error:
        _log.warning("image %s is not published: %s", resolved.record.reference, error)
