"""A digest of a stream, computed beside whatever else is done with its pieces.

SHA-256 takes longer than most of what happens to a layer's bytes, so each digest has a thread. At
most `_AHEAD_COUNT` pieces wait for it. One caller; its own thread, which `close` ends.
"""

import hashlib
import queue
import threading

_AHEAD_COUNT = 8


class OrderedHash:
    """Like an object of `hashlib`, but `update` returns before the piece is hashed."""

    def __init__(self, algorithm: str) -> None:
        """Raises: ValueError where there is no such algorithm."""
        self.name = algorithm
        self._hash = hashlib.new(algorithm)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD_COUNT)
        self._thread: threading.Thread | None = None

    def update(self, data: bytes) -> None:
        """Take the next piece, which must not change any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hash", daemon=True)
            self._thread.start()
        self._room.acquire()
        self._queue.put(data)

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            self._hash.update(data)
            self._room.release()

    def finish(self) -> str:
        """`ALGORITHM:HEX` of all pieces. Nothing may be added after this."""
        self.close()
        return f"{self.name}:{self._hash.hexdigest()}"

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
