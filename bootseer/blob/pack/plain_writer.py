"""Writer of an uncompressed tar stream, for callers that keep the stream instead of a blob.

Not thread-safe: one caller.
"""

from collections.abc import Callable
from typing import Protocol

from bootseer.base.content_digest import ContentHasher
from bootseer.blob.pack.frame_writer import FRAME_BYTES
from bootseer.blob.tree import Blob


class StreamWriter(Protocol):
    """Destination of a tar stream: `FrameWriter` or `PlainWriter`; see the former."""

    frame_bytes: int
    position: int

    def reserve(self, length: int) -> None: ...

    def write(self, data: bytes) -> None: ...

    def cut(self) -> None: ...

    def finish(self) -> Blob: ...


class PlainWriter:
    """Stream writer that passes each piece to `sink`. The blob of `finish` has no frames."""

    def __init__(
        self, sink: Callable[[bytes], object], on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Start the stream; `on_progress` is called with counts of bytes."""
        self.frame_bytes = FRAME_BYTES
        self.position = 0
        self._sink = sink
        self._on_progress = on_progress
        self._hash = ContentHasher()

    def reserve(self, length: int) -> None:
        """Do nothing: there are no frames."""

    def cut(self) -> None:
        """Do nothing: there are no frames."""

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._hash.update(data)
        self._sink(data)
        self.position += len(data)
        if self._on_progress:
            self._on_progress(len(data))

    def finish(self) -> Blob:
        """Return the blob of the stream, which is stored nowhere yet."""
        return local_blob(f"blake3:{self._hash.hexdigest()}", self.position)


def local_blob(stream_digest: str, stream_length: int) -> Blob:
    """Return the blob of a stream that only this node has."""
    return Blob(stream_digest, 0, (), stream_digest, stream_length)
