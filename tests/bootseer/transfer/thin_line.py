"""Link of a known rate that many readers share."""

import threading
import time

from bootseer.transfer.attempt import Attempt
from testbed.waiting import pause

_PIECE_BYTES = 1024


class ThinLine:
    """Link that brings `bytes_per_s` to all readers together, a piece to each in turn.

    Thread-safe.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = self.began_s = time.monotonic()

    def bring(self, data: memoryview, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` with `data`; return the count."""
        done = 0
        while done < len(buffer):
            piece = data[done : done + _PIECE_BYTES]
            with self._lock:
                # Behind the pieces that other readers asked for before.
                self._free_s += len(piece) / self._bytes_per_s
                due_s = self._free_s
            pause(max(0.0, due_s - time.monotonic()))
            if not attempt.put(done, buffer, piece):
                break
            done += len(piece)
        return done
