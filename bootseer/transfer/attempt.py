"""Attempt to fill a buffer with stored bytes: its progress, and whether it goes on.

The reader writes the progress, so that its owner can tell whether it is late, and where another
attempt goes on. Thread-safe.
"""

import threading


class Attempt:
    """Attempt to fill a buffer, which its owner may give up at any moment."""

    __slots__ = (
        "done_bytes",
        "follows_damage",
        "is_checked",
        "is_given_up",
        "is_second",
        "lock",
        "server",
        "waits",
    )

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the reader while it writes into the buffer."""
        self.is_given_up = False
        self.done_bytes = 0
        """How much is in the buffer; grows while the reader is at work."""
        self.is_checked = False
        """Whether its owner checks the bytes, and asks again where they are wrong: a reader may
        leave out checks of its own."""
        self.is_second = False
        """Whether an earlier one at the same bytes failed, or is late: another server may do
        better, where there is one."""
        self.follows_damage = False
        """Whether an earlier one at the same bytes brought wrong ones."""
        self.waits = False
        """Whether its reader waits for its turn at a source that lives: silence is no lateness."""
        self.server = ""
        """Where the bytes come from, as HOST:PORT; as far as the reader knows."""

    def put(self, done: int, buffer: memoryview, data: bytes | memoryview) -> bool:
        """Write `data` behind the `done` bytes of its owner's buffer; False: it was given up."""
        with self.lock:
            if self.is_given_up:
                return False
            buffer[done : done + len(data)] = data
        self.done_bytes = done + len(data)
        return True

    def give_up(self) -> None:
        """Ask the reader to stop as soon as it can."""
        self.is_given_up = True

    def stop(self) -> None:
        """Give up, and return when a reader that can stop writes no more."""
        self.is_given_up = True
        with self.lock:
            pass
