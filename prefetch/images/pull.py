"""Images given by their source: found in the store or on this node, or else pulled.

The source says which image it holds. The image comes from the first place that has all of it: the
store, this node, or the source, from which the missing layers are pulled. Each place that fails
costs one warning. A pulled image is served at once and published later (`publish_image`).

Pulled layers are verified and written to new streams of the node cache as they are, without
compression, while their trees are read. A stream becomes visible when all of it had the right
digest, and its record in the node's catalogue is written after that, so that the next pull can
remove what a killed one leaves.

Threading: one call resolves one image and pulls several layers at once. Of several processes that
pull a layer, one does, and the others wait for it and share its stream.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.content_digest import ContentHasher
from bootseer.base.parallel import StoppableProgress, map_in_threads
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.blob.index import decode, encode
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from bootseer.fanout.whole_reads import StartDocuments
from bootseer.prefetch.cache.indexes import keep_index
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache
from bootseer.prefetch.images.find import Say, image_by_name, image_on_node, remember
from bootseer.prefetch.index.catalogue import (
    REGISTRY,
    check_blobs,
    check_streams,
    find_image,
    load_start_index,
)
from bootseer.prefetch.index.merge import LayerTree, merge_layers
from bootseer.prefetch.index.node_catalogue import FoundImage, NodeCatalogue
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import change_time_ns, describe_image, stored_layer
from bootseer.prefetch.sources import open_source
from bootseer.prefetch.sources.model import ImageSource, Layer
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store
from bootseer.timeline.recorder import Span, Timeline

_log = logging.getLogger(__name__)

_THREADS = 3
"""Layers pulled at once: while one is inflated and hashed, which takes two CPUs, the others use the
network. Each holds up to 30 MiB in buffers."""
_OTHER_PROCESS_S = 3600.0
"""Deadline of a wait for another process that pulls the same layer. The lock of a dead process is
released at once, and a source has deadlines of its own; this one ends the wait for a process that
hangs."""
_POLL_S = 0.5


class _LocalLayer(Struct, frozen=True):
    """Layer of the image that can be served: by the store, or from a stream of this node."""

    digest: str
    """Digest of the layer; of a directory, the digest of its stream."""
    tree: LayerTree
    stream: CachedStream | None = None
    """Stream of a layer that only this node has. The cache keeps it while it is open."""

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def resolve_from_source(
    settings: Settings, image: str, say: Say, timeline: Timeline | None
) -> FoundImage:
    """Return the image that the source `image` holds. See `find.resolve_image`, the caller."""
    return _SourceResolver(settings, image, say, timeline).resolve()


class _SourceResolver:
    """Resolution of one image that is given by its source."""

    def __init__(self, settings: Settings, image: str, say: Say, timeline: Timeline | None) -> None:
        self._settings = settings
        self._image = image
        self._say = say
        self._timeline = timeline
        self._cache = NodeCache(settings.cache_dir)
        self._catalogue = NodeCatalogue(settings.cache_dir, settings.store_url)
        self._store: Store | None = None
        # Sentence for the user, once something must be pulled.
        self._announcement = ""
        self._span: Span | None = None
        self._pulled_bytes = 0
        self._progress = StoppableProgress(self._count)
        self._lock = threading.Lock()

    def resolve(self) -> FoundImage:
        settings = self._settings
        with contextlib.ExitStack() as stack:
            try:
                self._store = stack.enter_context(open_own_store(settings))
            except InvalidInputError:
                raise  # The start cannot go on with a wrong URL; say so before anything is pulled.
            except (BootseerError, OSError) as error:
                self._warn_of_store(error)
            try:
                source = open_source(
                    self._image,
                    settings.cache_dir / "work",
                    registry_hosts_dir=settings.registry_hosts_dir,
                    deadline_s=settings.deadline_s,
                )
            except (UnavailableError, DeadlineError) as error:
                return self._find_without_source(error)
            stack.enter_context(source)
            found = self._find(source) or self._pull(source)
        remember(lambda: self._catalogue.keep_source(self._image, found))
        return found

    def _give_up_store(self, error: Exception) -> None:
        with self._lock:
            if self._store is None:
                return
            self._store = None
        self._warn_of_store(error)

    def _warn_of_store(self, error: Exception) -> None:
        self._say(f"{WAIT_BUDGET.warning(error)}starting without the shared store: {error}")

    # ---- images that need not be pulled -------------------------------------------------------

    def _find(self, source: ImageSource) -> FoundImage | None:
        """Return the image that the source holds now, if the store or this node has all of it."""
        name = self._name(source)
        if self._store is not None:
            try:
                documents = StartDocuments(self._settings, self._store)
                record = find_image(self._store, name, documents)
                if self._is_same(source, record):
                    tree = decode(load_start_index(self._settings, self._store, record))
                    if source.identity is not None:
                        check_streams(tree, source.config.diff_ids, f"the record of {name}")
                    if documents.reads_store:
                        check_blobs(self._store, record)
                    # The source decides how the container is started.
                    image = FoundImage(replace(record, config=source.config))
                    remember(lambda: self._catalogue.keep_image(image))
                    remember(lambda: self._catalogue.keep_vouched(image.record))
                    return image
                self._announcement = f"image {name} has changed: pulling what is new"
            except (NotFoundError, InvalidInputError):
                pass
            except CorruptError as error:
                self._announcement = (
                    f"warning: pulling what the store lacks of image {name}: {error}"
                )
            except (BootseerError, OSError) as error:
                self._give_up_store(error)
        known = self._catalogue.find_image(name)
        if known is None or not self._is_same(source, known.record):
            return None
        # A published image that the store lacks now is pulled; an unpublished one may be here.
        if known.is_published and self._store is not None:
            return None
        return image_on_node(self._settings, known)

    def _is_same(self, source: ImageSource, record: ImageRecord) -> bool:
        # A tag can move, so images are compared by the digest of their configuration. A directory
        # has none.
        if source.identity is not None:
            return source.identity == record.identity
        return not _changed_since(Path(self._image), record.created_ns)

    def _name(self, source: ImageSource) -> str:
        if source.identity is not None:
            return source.reference
        # A source directory is named by its last component, which other directories may share, and
        # other nodes may have another directory at the same path. Path and inode tell them apart;
        # on shared storage both are the same on all nodes. The change time is the version.
        path = Path(self._image).resolve()
        status = path.stat()
        version = f"{status.st_ino} {status.st_ctime_ns}"
        return f"{source.reference}-{_short(os.fsencode(path))}:{_short(version.encode())}"

    def _find_without_source(self, error: BootseerError) -> FoundImage:
        """Return the image that the source held when it was last read. Raises: `error` if none."""
        name = _registry_name_in_store(self._image)
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

    def _pull(self, source: ImageSource) -> FoundImage:
        name = self._name(source)
        if not self._announcement:
            state = "not on this node" if self._store is None else "not indexed yet"
            self._announcement = f"image {name} is {state}: pulling it whole, this once"
        # Taken before the first read: a directory that changes meanwhile counts as changed.
        created_ns = change_time_ns()
        # An image may hold one layer several times (empty ones, mostly).
        keys = [layer.digest or f"{name} {number}" for number, layer in enumerate(source.layers)]
        try:
            unique = map_in_threads(
                dict(zip(keys, source.layers, strict=True)),
                self._layer,
                self._progress,
                thread_count=_THREADS,
                thread_name="pull-layer",
                size_of=lambda layer: layer.size_bytes,
                drop=_LocalLayer.close,
            )
        except BaseException as error:
            if self._span is not None:
                self._span.end(error=error)
            raise
        layers = [unique[key] for key in keys]
        streams = tuple(layer.stream for layer in layers if layer.stream is not None)
        try:
            tree = merge_layers([layer.tree for layer in layers])
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

    def _layer(self, key: str, layer: Layer) -> _LocalLayer:
        """Return a layer that the store or this node has; else pull it."""
        found = self._find_layer(layer)
        if found is not None:
            return found
        with self._pulling(key):
            # Another process may have pulled the layer while this one waited for the lock.
            found = self._find_pulled(layer)
            if found is not None:
                return found
            self._report_pull()
            return self._pull_layer(layer)

    def _find_layer(self, layer: Layer) -> _LocalLayer | None:
        with self._lock:
            store = self._store
        try:
            stored = None if store is None else stored_layer(store, layer)
        except (BootseerError, OSError) as error:
            stored = None
            self._give_up_store(error)
        if stored is not None:
            record, tree = stored
            return _LocalLayer(record.digest, tree)
        return self._find_pulled(layer)

    def _find_pulled(self, layer: Layer) -> _LocalLayer | None:
        known = None if layer.digest is None else self._catalogue.find_layer(layer.digest)
        if layer.digest is None or known is None:
            return None
        stream = self._cache.open_whole(known.blob.stream_digest)
        return None if stream is None else _LocalLayer(layer.digest, known.tree, stream)

    @contextlib.contextmanager
    def _pulling(self, key: str) -> Iterator[None]:
        """Hold the node's lock for pulling a layer. The wait ends if another layer has failed."""
        # The layer's own digest where it has one: servers that repair a lost stream lock that, too.
        if not key.startswith("sha256:"):
            key = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
        deadline_s = time.monotonic() + _OTHER_PROCESS_S
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._cache.pulling(key, _POLL_S))
                except DeadlineError:
                    if time.monotonic() > deadline_s:
                        raise
                    # Raises if another layer has failed.
                    self._progress(0)
                    continue
                yield
                return

    def _pull_layer(self, layer: Layer) -> _LocalLayer:
        try:
            content = ContentHasher()
            with self._cache.new_stream() as new:

                def keep(data: bytes) -> None:
                    content.update(data)
                    new.append(data)

                tree = layer.pull(keep, self._progress)
                (blob,) = tree.tree.blobs
                stream = new.commit(blob.stream_digest)
            try:
                digest = layer.digest or blob.stream_digest
                name = f"blake3:{content.hexdigest()}"
                try:
                    self._catalogue.keep_layer(digest, tree, name)
                except NoSpaceError:
                    if not self._cache.make_room():
                        raise
                    self._catalogue.keep_layer(digest, tree, name)
                return _LocalLayer(digest, tree, stream)
            except BaseException:
                stream.close()
                raise
        except NoSpaceError as error:
            raise NoSpaceError(
                f"cannot pull the layer {layer.digest or 'of the directory'} whole: {error}; free "
                "space or set BOOTSEER_CACHE_DIR to a larger disk"
            ) from error

    def _report_pull(self) -> None:
        """Tell the user and the timeline that the first layer is pulled. Idempotent."""
        with self._lock:
            announcement, self._announcement = self._announcement, ""
            if announcement and self._timeline is not None:
                self._span = self._timeline.span("image pull")
        if announcement:
            self._say(announcement)

    def _count(self, count_bytes: int) -> None:
        with self._lock:
            self._pulled_bytes += count_bytes


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _changed_since(directory: Path, when_ns: int) -> bool:
    """Return whether anything below a directory has changed since `when_ns`.

    Never raises: the pull reports files that vanish meanwhile or cannot be read.
    """
    try:
        return any(status.st_ctime_ns >= when_ns for status in _statuses(directory))
    except OSError:
        return True


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of a directory and of all files below it on its file system.

    Other file systems that are mounted below it are no part of the image. Raises: OSError.
    """
    # The caller compares change times, which programs cannot set. Removing a file changes its
    # directory.
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


def _registry_name_in_store(source: str) -> str | None:
    """Return the name in a store of an image in a registry. Raises: InvalidInputError."""
    if not source.startswith(REGISTRY):
        return None
    from bootseer.prefetch.sources.registry import store_name
    from bootseer.registry.reference import parse_reference

    return store_name(parse_reference(source.removeprefix(REGISTRY)))
