"""Repairs of an image whose store has lost or damaged a blob: the registry sends the whole stream.

`Repairs` has a stream brought once for all readers. They wait for what is left of their own
deadline, and several times that while bytes come, since a layer may be large. The second source
goes on without them, in a thread of its own, within its own deadlines: who comes later finds the
stream. `second_source` is the registry, for images that are called as in one (`HOST/NAME:TAG`): a
name of the user's own says nothing about where the image is. Thread-safe.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, DeadlineError, NotFoundError
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.cache.stream_keys import is_stored, own_key
from bootseer.prefetch.index.source_names import registry_name
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

Came: TypeAlias = Callable[[int], None]
"""Told how many bytes have come, by any thread."""
Repair: TypeAlias = Callable[[Blob, Came], None]
"""Bring all of a blob's stream into the node cache from elsewhere. Raises: BootseerError."""

_PAUSE_S = 60.0
"""After a failed one; until then, readers get their errors at once."""
_COMING_S_MAX = 300.0
"""A reader waits no longer, although bytes come: half of what the kernel waits for at the least."""
_WAIT_S = 600.0
"""How long to wait for another server of this node that fetches the same layer."""


class _Bringing:
    """Progress of a stream on its way from the second source."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BootseerError | None = None
        self.came_count = 0

    def came(self, count: int) -> None:
        """Note that it goes on."""
        self.came_count += 1


class Repairs:
    """Streams brought from a second source after the store has failed."""

    def __init__(self, repair: Repair | None) -> None:
        """`repair` is None where there is no second source."""
        self._repair = repair
        self._lock = threading.Lock()
        self._again_s: dict[str, float] = {}
        self._under_way: dict[str, _Bringing] = {}

    def bring(
        self, blob: Blob, use: Callable[[], bool], error: BootseerError, limit_s: float
    ) -> None:
        """Bring all of the blob's stream into the node cache, unless it is there.

        `use` switches readers to that stream, and returns whether it could.

        Raises: `error`, the store's, if the stream cannot be had from elsewhere either;
        DeadlineError after `limit_s` without progress.
        """
        if self._repair is None:
            raise error
        stream = blob.stream_digest
        with self._lock:
            if use():
                return  # Another reader had it brought.
            if time.monotonic() < self._again_s.get(stream, 0):
                raise error
            bringing = self._under_way.get(stream)
            if bringing is None:
                _log.warning("fetching the whole stream %s from elsewhere: %s", stream, error)
                bringing = self._under_way[stream] = _Bringing()
                threading.Thread(
                    target=self._run,
                    args=(self._repair, blob, bringing),
                    name="repair",
                    daemon=True,
                ).start()
        self._await(bringing, limit_s, stream, error)
        if bringing.error is not None:
            raise error from bringing.error
        use()

    def _run(self, repair: Repair, blob: Blob, bringing: _Bringing) -> None:
        stream = blob.stream_digest
        try:
            repair(blob, bringing.came)
        except BootseerError as second:
            bringing.error = second
            _log.warning("%s cannot be had from elsewhere either: %s", stream, second)
        except Exception as second:
            bringing.error = BootseerError(str(second))
            _log.exception("bringing %s from elsewhere failed", stream)
        with self._lock:
            if bringing.error is not None:
                self._again_s[stream] = time.monotonic() + _PAUSE_S
            del self._under_way[stream]
        bringing.ended.set()

    def _await(
        self, bringing: _Bringing, limit_s: float, stream: str, error: BootseerError
    ) -> None:
        ends_s = time.monotonic() + _COMING_S_MAX
        while True:
            before = bringing.came_count
            if bringing.ended.wait(min(limit_s, ends_s - time.monotonic())):
                return
            if bringing.came_count == before or time.monotonic() >= ends_s:
                raise DeadlineError(
                    f"{stream} is still to come from elsewhere; read again later. {error}"
                ) from error


def second_source(settings: Settings, reference: str, owner: str) -> Repair | None:
    """Return a function that brings streams of the image `reference` whole into the node cache, for
    the image `owner` alone (`stream_keys.owner_of`); None if the image is in no known registry."""
    name = registry_name(reference)
    if name is None:
        return None

    def repair(blob: Blob, came: Came) -> None:
        """Raises: BootseerError."""
        # Most servers never need what speaks to registries.
        from bootseer.prefetch.sources import open_source

        digest = blob.stream_digest
        # What the node has under the digest alone is left aside: the index may name a stream that
        # whoever wrote it never had. Only what the registry sends now, it can have. This node's own
        # index is believed.
        cache = NodeCache(settings.cache_dir)
        key = own_key(blob, owner) if is_stored(blob) else digest
        with cache.pulling(key, _WAIT_S):
            whole = cache.open_whole(key)
            if whole is not None:
                whole.close()
                return
            with open_source(
                name,
                settings.cache_dir / "work",
                registry_hosts_dir=settings.registry_hosts_dir,
                deadline_s=settings.deadline_s,
            ) as source:
                layer = next((one for one in source.layers if one.digest == digest), None)
                if layer is None:
                    raise NotFoundError(f"{reference} has no layer {digest} any more")
                with cache.new_stream() as new:
                    # Verifies the stream against its digest before it returns.
                    layer.pull(new.append, came)
                    new.commit(key).close()

    return repair
