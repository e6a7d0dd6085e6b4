"""Finds what a start needs of an image that is given by its source: a record and an index.

Alone decides where the bytes of such an image come from. In this order: the store, if it
has the image whole; this node, if it has what the store lacks; the source, from which the lacking
layers are pulled. The trouble of one place costs one warning as long as another has the image. What
was pulled is served at once, and published later (`publish_image`).

Threading: one call is one start; several may run at once, also in several processes.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from bootseer.blob.index.codec import encode
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from bootseer.prefetch.cache.kept_indexes import keep_index
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.catalogue import (
    check_blobs,
    check_streams,
    find_image,
    load_tree,
)
from bootseer.prefetch.index.merge import LayerTree, merge
from bootseer.prefetch.index.node_catalogue import FoundImage, NodeCatalogue
from bootseer.prefetch.index.records import ImageRecord, LayerRecord
from bootseer.prefetch.index.source_names import REGISTRY
from bootseer.prefetch.publish.indexing import change_time_ns, describe_image
from bootseer.prefetch.publish.layer_packing import stored_layer
from bootseer.prefetch.resolve.find import (
    Say,
    image_by_name,
    image_on_node,
    remember,
)
from bootseer.prefetch.resolve.pull import have_layers
from bootseer.prefetch.sources import open_source
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store
from bootseer.timeline.recorder import Span, Timeline

_log = logging.getLogger(__name__)


def resolve_from_source(
    settings: Settings, image: str, say: Say, timeline: Timeline | None
) -> FoundImage:
    """The image that the source `image` holds. As `find.resolve_image`, which calls this."""
    return _Start(settings, image, say, timeline).obtain()


class _Start:
    """One start of an image that is named by its source."""

    def __init__(self, settings: Settings, image: str, say: Say, timeline: Timeline | None) -> None:
        self._settings = settings
        self._image = image
        self._say = say
        self._timeline = timeline
        self._catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
        self._store: Store | None = None
        self._news = ""
        self._span: Span | None = None
        self._pulled_bytes = 0
        self._lock = threading.Lock()

    def obtain(self) -> FoundImage:
        settings = self._settings
        try:
            source = open_source(
                self._image,
                settings.cache_dir / "work",
                registry_hosts_dir=settings.registry_hosts_dir,
                deadline_s=settings.deadline_s,
            )
        except (UnavailableError, DeadlineError) as error:
            return self._without_source(error)
        with source, contextlib.ExitStack() as stack:
            try:
                store = open_own_store(settings)
                self._store = stack.enter_context(store)
            except (BootseerError, OSError) as error:
                self._give_up_store(error)
            found = self._known(source) or self._pulled(source)
        remember(lambda: self._catalogue.keep_source(self._image, found))
        return found

    def _give_up_store(self, error: Exception) -> None:
        with self._lock:
            if self._store is None:
                return
            self._store = None
        self._say(f"warning: starting without the shared store: {error}")

    # ---- what is known ------------------------------------------------------------------------

    def _known(self, source: ImageSource) -> FoundImage | None:
        """The image, if the store or this node has it as it is now."""
        name = self._name(source)
        if self._store is not None:
            try:
                record = find_image(self._store, name)
                if self._is_same(source, record):
                    tree = load_tree(
                        self._store,
                        record,
                        self._settings.cache_dir,
                        run_dir=self._settings.run_dir,
                    )
                    if source.identity is not None:
                        check_streams(tree, source.config.diff_ids, f"the record of {name}")
                    check_blobs(self._store, record)
                    # What starts and how is for the source to say.
                    image = FoundImage(replace(record, config=source.config))
                    remember(lambda: self._catalogue.keep_image(image))
                    remember(lambda: self._catalogue.keep_vouched(image.record))
                    return image
                self._news = f"image {name} has changed: pulling what is new"
            except (NotFoundError, InvalidInputError):
                pass
            except CorruptError as error:
                self._news = f"warning: pulling what the store lacks of image {name}: {error}"
            except (BootseerError, OSError) as error:
                self._give_up_store(error)
        known = self._catalogue.find_image(name)
        if known is None or not self._is_same(source, known.record):
            return None
        # What the store has, but lacks now, is pulled; what it never had may all be here.
        if known.is_published and self._store is not None:
            return None
        return image_on_node(self._settings, known)

    def _is_same(self, source: ImageSource, record: ImageRecord) -> bool:
        # A tag moves; the digest of the configuration is the image. A directory has none.
        if source.identity is not None:
            return source.identity == record.identity
        return not _changed_since(Path(self._image), record.created_ns)

    def _name(self, source: ImageSource) -> str:
        if source.identity is not None:
            return source.reference
        # A directory, which is called only by its last name: others may be called so, too. And
        # other nodes may have another one at this path, unless it is on shared storage, where its
        # inode is the same; those are taken for versions of one image.
        path = Path(self._image).resolve()
        status = path.stat()
        version = f"{status.st_ino} {status.st_ctime_ns}"
        return f"{source.reference}-{_short(os.fsencode(path))}:{_short(version.encode())}"

    def _without_source(self, error: BootseerError) -> FoundImage:
        """The image as it was when its source could be reached. Raises: `error` without one."""
        name = _name_of_source(self._image)
        found: FoundImage | None = None
        if name is not None:
            with contextlib.suppress(BootseerError, OSError):
                found = image_by_name(self._settings, name, _log.info)
        if found is None:
            known = self._catalogue.find_source(self._image)
            found = None if known is None else image_on_node(self._settings, known, whole=False)
        if found is None:
            raise error
        self._say(
            f"warning: starting image {found.record.reference} as it was when its source could "
            f"be reached: {error}"
        )
        return found

    # ---- pulling ------------------------------------------------------------------------------

    def _pulled(self, source: ImageSource) -> FoundImage:
        name = self._name(source)
        news = self._news or f"image {name} is not indexed yet: pulling it whole, this once"
        # Before anything is read: a directory that changes meanwhile has changed.
        created_ns = change_time_ns()
        try:
            layers = have_layers(
                source.layers,
                NodeCache(self._settings.cache_dir),
                self._catalogue,
                self._find_stored,
                name=name,
                on_pull=lambda: self._begin(news),
                on_progress=self._count,
            )
        except BaseException as error:
            if self._span is not None:
                self._span.end(error=error)
            raise
        streams = tuple(layer.stream for layer in layers if layer.stream is not None)
        try:
            tree = merge([layer.tree for layer in layers])
            index = encode(tree)
            record = describe_image(source, name, tree, index, (), created_ns)
            keep_index(
                self._settings.cache_dir, record.index_digest, index, run_dir=self._settings.run_dir
            )
            image = FoundImage(record, tuple(layer.digest for layer in layers))
            remember(lambda: self._catalogue.keep_image(image))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        if self._span is not None:
            self._span.set("bootseer.bytes", self._pulled_bytes)
            self._span.set("bootseer.from", "source")
            self._span.end()
        return replace(image, held=streams)

    def _begin(self, news: str) -> None:
        """Something must be pulled: only now is this known."""
        with self._lock:
            if self._timeline is not None and self._span is None:
                self._span = self._timeline.span("image pull")
        self._say(news)

    def _count(self, count_bytes: int) -> None:
        with self._lock:
            self._pulled_bytes += count_bytes

    def _find_stored(self, layer: Layer) -> tuple[LayerRecord, LayerTree] | None:
        with self._lock:
            store = self._store
        if store is None:
            return None
        try:
            return stored_layer(store, layer)
        except (BootseerError, OSError) as error:
            self._give_up_store(error)
            return None


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _changed_since(directory: Path, when_ns: int) -> bool:
    """Whether anything below a directory has changed: it has no digest to compare. Never raises:
    what vanishes meanwhile, or cannot be looked at, is for the pull to report."""
    try:
        return any(status.st_ctime_ns >= when_ns for status in _statuses(directory))
    except OSError:
        return True


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    """The statuses of a directory and everything in it, but for what is mounted there: that is not
    part of the image. Raises: OSError."""
    # Change times, which nothing but the clock sets. A removed name changes its directory.
    top = directory.stat()
    yield top
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if status.st_dev == top.st_dev:
                    yield status
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))


def _name_of_source(source: str) -> str | None:
    """What the image in `source` is called in a store, where that can be told without asking the
    source: for a registry. Raises: InvalidInputError."""
    if not source.startswith(REGISTRY):
        return None
    from bootseer.prefetch.sources.registry import store_name
    from bootseer.registry.reference import parse_reference

    return store_name(parse_reference(source.removeprefix(REGISTRY)))
