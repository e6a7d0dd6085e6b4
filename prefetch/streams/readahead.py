"""Which frames to fetch behind the frames that a fault needs, when the faults of a file follow on.

Alone decides how far. Pure but for the memory of how far each reader is. Thread-safe.
"""

import threading
from collections import OrderedDict

from msgspec import Struct

_FRAMES_MAX = 16
"""2 MiB of a file that is read from start to end: hides 10 ms of latency at 200 MB/s."""
_READERS_MAX = 1024


class _Reader(Struct):
    """How far one file has been fetched by reads that followed each other."""

    next_frame: int
    window: int


class ReadAhead:
    """Remembers the latest readers."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    def behind(self, reader: int, first: int, after: int, last: int) -> range:
        """Frames to fetch now. `reader` has a fault on the frames from `first` up to `after`;
        `last` ends what it may read."""
        with self._lock:
            state = self._readers.pop(reader, None)
            if state is None or not state.next_frame - state.window <= first <= state.next_frame:
                state = _Reader(after, 0)
            else:
                state.window = min(max(2 * state.window, 1), _FRAMES_MAX)
            self._readers[reader] = state
            while len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
            start = max(after, state.next_frame)
            stop = min(after + state.window, last) if state.window else start
            state.next_frame = max(state.next_frame, start, stop)
            return range(start, stop)
