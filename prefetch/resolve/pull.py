"""Pulls the layers of an image that no store serves into the node cache.

The bytes go from the source through `sources.stream`, which verifies them, into a new stream of the
node cache and through the parser that makes the layer's tree; nothing is compressed. A layer
counts as here only when all of it had the right digests: a stream becomes visible after that, and
its record in the node's catalogue after the stream. So a kill leaves nothing but what the next
pull removes.

Threading: one call is one pull, of several layers at once. Several processes may pull one layer:
one does, the others wait for it and share it.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from bootseer.base.content_digest import ContentHasher
from bootseer.base.parallel import Stoppable, each_at_once
from bootseer.errors import DeadlineError, NoSpaceError
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache
from bootseer.prefetch.cache.whole_stream import ROOM_BYTES
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.node_catalogue import NodeCatalogue
from bootseer.prefetch.index.records import LayerRecord
from bootseer.prefetch.sources.model import Layer

WORKERS = 3
"""Layers pulled at once: while one is inflated and hashed, which takes two CPUs, others come over
the network. Each holds at most some 30 MiB of pieces on their way."""
_WAIT_S = 3600.0
"""For another process that pulls the same layer. A dead one lets go at once, and a source has
deadlines of its own; this ends the wait for one that is neither dead nor alive."""
_POLL_S = 0.5

OnProgress = Callable[[int], None]
FindStored = Callable[[Layer], tuple[LayerRecord, LayerTree] | None]
"""What a store has of the layer, if it has all of it."""


class HadLayer(Struct, frozen=True):
    """A layer that can be served now."""

    digest: str
    """The layer's own where it has one, else its stream's."""
    tree: LayerTree
    record: LayerRecord | None
    """The store's record of the layer; None: this node alone has the layer."""
    stream: CachedStream | None
    """The whole stream of a layer that this node alone has. While open, the cache keeps it; close
    it."""


def have_layers(
    layers: Sequence[Layer],
    cache: NodeCache,
    catalogue: NodeCatalogue,
    find_stored: FindStored,
    *,
    name: str,
    on_pull: Callable[[], None] | None = None,
    on_progress: OnProgress | None = None,
) -> list[HadLayer]:
    """Each layer, served by the store, or else whole on this node: pulled, unless it was before.

    `name` stands for layers without a digest when others pull them at once. `on_pull` is
    called once, before the first layer is pulled; `on_progress` gets counts of the bytes that
    were, from several threads.

    Raises: CorruptError, NotFoundError, NoSpaceError, UnavailableError, DeadlineError.
    """
    progress = Stoppable(on_progress)
    puller = _Puller(cache, catalogue, on_pull, progress)

    def have(key: str, layer: Layer) -> HadLayer:
        stored = find_stored(layer)
        if stored is not None:
            record, tree = stored
            return HadLayer(record.digest, tree, record, None)
        return puller.have(key, layer)

    # An image may hold one layer several times (empty ones, mostly).
    keys = [layer.digest or f"{name} {number}" for number, layer in enumerate(layers)]
    unique = dict(zip(keys, layers, strict=True))
    done = each_at_once(
        unique,
        have,
        progress,
        thread_count=WORKERS,
        thread_name="pull-layer",
        size_of=lambda layer: layer.size_bytes,
        drop=lambda layer: release([layer]),
    )
    return [done[key] for key in keys]


def release(layers: Sequence[HadLayer]) -> None:
    """Close the layers' streams: from now on the cache may remove them."""
    for layer in layers:
        if layer.stream is not None:
            layer.stream.close()


class _Puller:
    def __init__(
        self,
        cache: NodeCache,
        catalogue: NodeCatalogue,
        on_pull: Callable[[], None] | None,
        advance: OnProgress,
    ) -> None:
        self._cache = cache
        self._catalogue = catalogue
        self._on_pull = on_pull
        self._advance = advance
        self._lock = threading.Lock()

    def have(self, key: str, layer: Layer) -> HadLayer:
        """The layer, whole on this node."""
        if layer.digest is not None and (found := self._find(layer.digest)):
            return found
        with self._alone(key):
            # The process that was at it has finished.
            if layer.digest is not None and (found := self._find(layer.digest)):
                return found
            self._announce()
            return self._pull(layer)

    def _announce(self) -> None:
        with self._lock:
            on_pull, self._on_pull = self._on_pull, None
        if on_pull is not None:
            on_pull()

    def _find(self, digest: str) -> HadLayer | None:
        """The layer, if it was pulled before and is here still."""
        known = self._catalogue.find_layer(digest)
        if known is None:
            return None
        stream = self._cache.open_whole(known.blob.stream_digest)
        return None if stream is None else HadLayer(digest, known.tree, None, stream)

    def _pull(self, layer: Layer) -> HadLayer:
        try:
            content = ContentHasher()
            with self._cache.new_stream() as new:

                def keep(data: bytes) -> None:
                    content.update(data)
                    new.append(data)

                tree = layer.pull(keep, self._advance)
                (blob,) = tree.tree.blobs
                stream = new.commit(blob.stream_digest)
            try:
                digest = layer.digest or blob.stream_digest
                name = f"blake3:{content.hexdigest()}"
                try:
                    self._catalogue.keep_layer(digest, tree, name)
                except NoSpaceError:
                    if not self._cache.make_room(ROOM_BYTES):
                        raise
                    self._catalogue.keep_layer(digest, tree, name)
                return HadLayer(digest, tree, None, stream)
            except BaseException:
                stream.close()
                raise
        except NoSpaceError as error:
            raise NoSpaceError(
                f"cannot pull the layer {layer.digest or 'of the directory'} whole: {error}; free "
                "space or set BOOTSEER_CACHE_DIR to a larger disk"
            ) from error

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """While no other process pulls what is called `key`."""
        hashed = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
        # By its own digest where it can be: a server that lacks the stream may be pulling it, too.
        lock = key if key.startswith("sha256:") else hashed
        deadline_s = time.monotonic() + _WAIT_S
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._cache.pulling(lock, _POLL_S))
                except DeadlineError:
                    if time.monotonic() > deadline_s:
                        raise
                    self._advance(0)
                    continue
                yield
                return
