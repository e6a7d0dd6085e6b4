"""The last decoded frames, in memory, for a node whose disk takes no more. Thread-safe."""

import threading
from collections import OrderedDict


class FrameMemory:
    """Frames by (number of the blob, number of the frame); forgets the oldest."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def put(self, blob: int, number: int, content: bytes) -> None:
        """Keep a frame's content, at the cost of older ones."""
        with self._lock:
            key = (blob, number)
            if key not in self._frames:
                self._frames[key] = content
                self._size_bytes += len(content)
            while self._size_bytes > self._limit_bytes and len(self._frames) > 1:
                _, dropped = self._frames.popitem(last=False)
                self._size_bytes -= len(dropped)

    def get(self, blob: int, number: int) -> bytes | None:
        """The content, if it is still kept."""
        with self._lock:
            return self._frames.get((blob, number))
