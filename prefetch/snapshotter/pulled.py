"""Images that containerd had to pull, which are indexed for later starts.

Alone knows which those are, and has them indexed one after the other, from what containerd keeps
of them: nothing is pulled again, and no login is needed. What is lost when this process ends is
indexed by the next node that pulls it. Thread-safe.
"""

import logging
import threading
import time
from pathlib import Path

from bootseer.prefetch.publish.publishing import start_chain_publisher
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

CONTENT_FOLDER = "io.containerd.content.v1.content"
"""What containerd calls its content store's folder, beside those of its snapshotters."""

_CALM_S = 2.0
"""No further layer for so long: that was the image's last one."""
_BUSY_S = 5.0
"""How long to leave alone what has to wait for another image."""
_CHAINS_MAX = 1000
"""A node that pulls more at once leaves the rest to others."""


class PulledImages:
    """The images that one containerd has pulled; `content` is its content store."""

    def __init__(self, settings: Settings, content: Path) -> None:
        self._settings = settings
        self._content = content
        self._is_warned = False
        self._lock = threading.Lock()
        # chain id -> when it is to be indexed.
        self._due: dict[str, float] = {}

    def goes_on(self, parent: str) -> None:
        """Another layer is being unpacked on the chain `parent`: that is not all of the image."""
        with self._lock:
            self._due.pop(parent, None)

    def unpacked(self, chain_id: str, parent: str) -> None:
        """The uppermost layer of this chain has been unpacked, on the chain `parent`."""
        with self._lock:
            self._due.pop(parent, None)
            if self._settings.auto_index and len(self._due) < _CHAINS_MAX:
                self._due[chain_id] = time.monotonic() + _CALM_S

    def due_s(self) -> float:
        """When `index_next` has something to do."""
        with self._lock:
            return min(self._due.values(), default=float("inf"))

    def index_next(self) -> None:
        """Begin to index the image that was pulled first, unless another one is being indexed.

        Raises: OSError.
        """
        now_s = time.monotonic()
        with self._lock:
            chain_id = min(self._due, key=self._due.__getitem__, default="")
            if not chain_id or self._due[chain_id] > now_s:
                return
            # First: what cannot be begun is left out.
            del self._due[chain_id]
        # It comes with containerd, which starts later than we do.
        if not self._content.is_dir():
            if not self._is_warned:
                _log.warning("what containerd pulls is not indexed: there is no %s", self._content)
            self._is_warned = True
            return
        if start_chain_publisher(self._settings, self._content, chain_id):
            _log.info("indexing %s, which containerd has pulled", chain_id)
            return
        with self._lock:
            self._due[chain_id] = now_s + _BUSY_S
