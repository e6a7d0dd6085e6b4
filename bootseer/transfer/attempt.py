"""Attempt to fill a buffer with stored bytes: its progress, and whether it goes on.

The reader records its progress, so that the attempt's owner can tell whether the reader is late,
and where the next attempt has to continue. Thread-safe.
"""

import threading


class Attempt:
    """Attempt to fill a buffer, which its owner may give up at any moment."""

    __slots__ = (
        "asks_elsewhere",
        "done_bytes",
        "follows_damage",
        "is_checked",
        "is_given_up",
        "lock",
        "server",
        "waits",
    )

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the reader while it writes into the buffer."""
        self.is_given_up = False
        self.done_bytes = 0
        """Bytes in the buffer so far."""
        self.is_checked = False
        """Whether the owner checks the bytes and asks again for wrong ones, so that the reader may
        skip checks of its own."""
        self.asks_elsewhere = False
        """Whether an earlier attempt at the same bytes failed or is late, so that the reader should
        ask another server, if there is one."""
        self.follows_damage = False
        """Whether an earlier attempt at the same bytes brought wrong ones."""
        self.waits = False
        """Whether the reader waits for its turn at a source that is alive, and so is not late."""
        self.server = ""
        """HOST:PORT of the server that the bytes come from; "" if the reader does not know it."""

    def put(self, done: int, buffer: memoryview, data: bytes | memoryview) -> bool:
        """Write `data` at byte `done` of the buffer. Return False if the attempt was given up."""
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
        """Give up, and return when a reader that uses `put` writes no more."""
        self.is_given_up = True
        with self.lock:
            pass
