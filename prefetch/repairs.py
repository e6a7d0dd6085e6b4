"""When a frame cannot be had: bring the whole stream from a second source, once for all readers.

Thread-safe. Readers that need the same blob wait for the one that has it brought, whose deadlines
are the second source's own.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError
from bootseer.prefetch.cache import StreamCache

_log = logging.getLogger(__name__)

Repair: TypeAlias = Callable[[Blob], None]
"""Bring all of a blob's stream into the node cache from elsewhere. Raises: BootseerError."""

_PAUSE_S = 60.0
"""After a failed one; until then, readers get their errors at once."""


class Repairs:
    """What is asked when the store has failed."""

    def __init__(self, repair: Repair | None) -> None:
        """`repair` is None where there is no second source."""
        self._repair = repair
        self._lock = threading.Lock()
        self._again_s: dict[str, float] = {}

    def bring(self, blob: Blob, cache: StreamCache, error: BootseerError) -> None:
        """Have all of the blob's stream in `cache`. Raises: `error`, the store's, if it cannot be
        had from elsewhere either."""
        if self._repair is None:
            raise error
        stream = blob.stream_digest
        with self._lock:
            if cache.has(0, blob.stream_length):
                return  # Another reader had it brought.
            if time.monotonic() < self._again_s.get(stream, 0):
                raise error
            _log.warning("fetching the whole stream %s from elsewhere: %s", stream, error)
            try:
                self._repair(blob)
            except BootseerError as second:
                self._again_s[stream] = time.monotonic() + _PAUSE_S
                _log.warning("%s cannot be had from elsewhere either: %s", stream, second)
                raise error from second
