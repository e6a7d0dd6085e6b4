"""What is being read: the files that are open, and the runs of bytes that are here or on their way.

Plain records. The lock of the `window` guards chunks, that of the `reader` streams and counts; a
file's `view` and `pinned` are replaced as a whole by the thread that changes its name.
"""

import threading
from collections import deque
from typing import TYPE_CHECKING

from bootseer.fuse.striped.reading.pool import Urgency
from bootseer.fuse.striped.reading.sources import Sources
from bootseer.fuse.striped.reading.streams import START_WINDOW_BYTES, StreamTracker
from bootseer.fuse.striped.view import FileView, Span

if TYPE_CHECKING:
    from bootseer.fuse.striped.reading.fetch import Fetch

_BLOCKS_AHEAD = 4

Key = tuple[str, int, bool]
"""Identity of the file, where the chunk begins, and whether it is a whole stripe unit."""


class Chunk:
    """A run of bytes that is here, or on its way."""

    __slots__ = ("data", "error", "fetch", "key", "ready", "span", "urgency", "waiters")

    def __init__(self, key: Key, span: Span) -> None:
        self.key = key
        self.span = span
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.fetch: Fetch | None = None
        """What brings it; None once it is here."""
        self.urgency: Urgency | None = None
        """How urgently it is queued; None once a thread works on it."""
        self.waiters = 0


class OpenFile:
    """One generation of a file that is open or read ahead, and its streams of reads."""

    __slots__ = ("open_count", "passed", "pinned", "sources", "streams", "view")

    def __init__(self, view: FileView) -> None:
        self.view = view
        # Of an ordinary file only the blocks that the window spans are read at once.
        self.streams = StreamTracker(max(START_WINDOW_BYTES, _BLOCKS_AHEAD * view.block_bytes))
        self.sources = Sources(are_checked=view.layout is not None)
        self.open_count = 0
        self.passed: deque[Key] = deque()
        """The chunks that its only reader left behind last."""
        self.pinned: bytes | None = None
        """The whole content, once the stored file is about to go away under its readers."""
