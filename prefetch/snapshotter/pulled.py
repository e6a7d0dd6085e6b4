"""Indexing of images that containerd had to pull, one after the other.

The layers come from containerd's content store: nothing is pulled again, and no login is needed.
The list of images lies in memory only; an image that is lost with this process is indexed by the
next node that pulls it. Thread-safe.
"""

import logging
import threading
import time
from pathlib import Path

from bootseer.prefetch.publish.publishing import start_chain_publisher
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

CONTENT_FOLDER = "io.containerd.content.v1.content"
"""Name of the folder of containerd's content store, beside those of its snapshotters."""

_QUIET_S = 2.0
"""If no further layer is unpacked for this time, the last one was the image's uppermost."""
_BUSY_S = 5.0
"""Pause of an image that has to wait for another one."""
_CHAINS_MAX = 1000
"""Images that wait at once; other nodes index the rest."""


class DueChains:
    """Chain ids, each with the time at which work on it is due. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, chain_id: str, delay_s: float) -> None:
        """Make a chain due in `delay_s` seconds."""
        with self._lock:
            self._due_s[chain_id] = time.monotonic() + delay_s

    def discard(self, chain_id: str) -> None:
        """Remove a chain if it is there."""
        with self._lock:
            self._due_s.pop(chain_id, None)

    def next_s(self) -> float:
        """Return the monotonic time at which a chain is due next; infinity if there is none."""
        with self._lock:
            return min(self._due_s.values(), default=float("inf"))

    def take(self, count: int | None = None) -> list[str]:
        """Remove and return at most `count` chains that are due, the earliest first."""
        now_s = time.monotonic()
        with self._lock:
            due = [chain_id for chain_id, due_s in self._due_s.items() if due_s <= now_s]
            due = sorted(due, key=self._due_s.__getitem__)[:count]
            for chain_id in due:
                del self._due_s[chain_id]
        return due


class PulledImages:
    """Images that one containerd has pulled and that wait for being indexed."""

    def __init__(self, settings: Settings, content: Path) -> None:
        """`content`: folder of containerd's content store."""
        self._settings = settings
        self._content = content
        self._is_warned = False
        self._due = DueChains()

    def layer_begun(self, parent: str) -> None:
        """Note that a layer is unpacked on the chain `parent`, so that this is no whole image."""
        self._due.discard(parent)

    def layer_unpacked(self, chain_id: str, parent: str) -> None:
        """Note that the uppermost layer of `chain_id` was unpacked, on the chain `parent`."""
        self._due.discard(parent)
        if self._settings.auto_index and len(self._due) < _CHAINS_MAX:
            self._due.add(chain_id, _QUIET_S)

    def next_s(self) -> float:
        """Return the monotonic time at which `index_next` has work."""
        return self._due.next_s()

    def index_next(self) -> None:
        """Start to index the image that is due first, unless another one is being indexed.

        Raises: OSError.
        """
        for chain_id in self._due.take(1):
            # containerd makes the folder, and starts after this process.
            if not self._content.is_dir():
                if not self._is_warned:
                    _log.warning(
                        "images that containerd pulls are not indexed: there is no folder %s",
                        self._content,
                    )
                self._is_warned = True
            elif start_chain_publisher(self._settings, self._content, chain_id):
                _log.info("indexing %s, which containerd has pulled", chain_id)
            else:
                self._due.add(chain_id, _BUSY_S)
