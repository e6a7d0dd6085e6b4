"""What is being read: the files that are open, and the runs of bytes that are here or on their way.

Plain records. The lock of their `reader` guards chunks, streams and counts; a file's `view` and
`pinned` are replaced as a whole by whoever changes its name.
"""

import threading

from bootseer.fuse.striped.pool import Urgency
from bootseer.fuse.striped.streams import StreamTracker
from bootseer.fuse.striped.view import FileView, Span

Key = tuple[str, int, bool]
"""Identity of the file, where the chunk begins, and whether it is a whole stripe unit."""


class Chunk:
    """A run of bytes that is here, or on its way."""

    __slots__ = ("data", "error", "key", "ready", "span", "urgency", "waiters")

    def __init__(self, key: Key, span: Span) -> None:
        self.key = key
        self.span = span
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.urgency: Urgency | None = None
        """How urgently it is queued; None once a thread works on it."""
        self.waiters = 0


class OpenFile:
    """One generation of a file that somebody has open (or warms), and who reads where in it."""

    __slots__ = ("open_count", "pinned", "streams", "view")

    def __init__(self, view: FileView) -> None:
        self.view = view
        self.streams = StreamTracker()
        self.open_count = 0
        self.pinned: bytes | None = None
        """The whole content, once the stored file is about to go away under its readers."""
