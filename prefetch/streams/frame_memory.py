"""The last decoded frames, in memory, for a node whose disk takes no more. Thread-safe."""

import threading
from collections import OrderedDict

from bootseer.blob.frames import frames_for
from bootseer.blob.tree import Blob
from bootseer.errors import CorruptError
from bootseer.prefetch.cache.image_stream import ImageStream


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

    def assemble(
        self, number: int, blob: Blob, stream: ImageStream, offset: int, length: int
    ) -> bytes:
        """Bytes of the blob with this number, from its stream and from here, where the stream's
        cache could not keep all of them. Raises: CorruptError where some are at neither place."""
        pieces: list[bytes | memoryview] = []
        position = offset
        for frame_number in frames_for(blob, offset, length):
            frame = blob.frames[frame_number]
            stop = min(offset + length, frame.stream_offset + frame.stream_length)
            content = self.get(number, frame_number)
            if content is not None:
                start = position - frame.stream_offset
                pieces.append(content[start : stop - frame.stream_offset])
            elif (kept := stream.get(position, stop - position)) is not None:
                pieces.append(kept)
            else:
                break
            position = stop
        if position < offset + length:
            raise CorruptError(
                f"bytes {position} to {offset + length} of the stream {blob.stream_digest} came "
                "and were lost; read them again"
            )
        return b"".join(pieces)
