"""Writes a tar stream unchanged: what `frame_writer` is to a blob, for who keeps the stream itself.

Not thread-safe: one caller.
"""

from collections.abc import Callable
from typing import Protocol

from bootseer.base.content_digest import ContentHasher
from bootseer.blob.pack.frame_writer import FRAME_BYTES
from bootseer.blob.tree import Blob


class StreamWriter(Protocol):
    """What the makers of a tar stream write to; `FrameWriter` is one."""

    frame_bytes: int
    position: int

    def reserve(self, length: int) -> None:
        """Say that `length` bytes belong together."""

    def write(self, data: bytes) -> None:
        """Append."""

    def cut(self) -> None:
        """Say that what follows does not belong to what was written."""

    def finish(self) -> Blob:
        """The blob that tells of what was written."""


class PlainWriter:
    """Gives each piece to `sink`. The blob of `finish` has no frames."""

    def __init__(
        self, sink: Callable[[bytes], object], on_progress: Callable[[int], None] | None = None
    ) -> None:
        """`on_progress` is called with counts of bytes."""
        self.frame_bytes = FRAME_BYTES
        self.position = 0
        self._sink = sink
        self._on_progress = on_progress
        self._hash = ContentHasher()

    def reserve(self, length: int) -> None:
        """Nothing is cut."""

    def cut(self) -> None:
        """Nothing is cut."""

    def write(self, data: bytes) -> None:
        """Append."""
        self._hash.update(data)
        self._sink(data)
        self.position += len(data)
        if self._on_progress:
            self._on_progress(len(data))

    def finish(self) -> Blob:
        """A stream that is stored nowhere yet, by its digest."""
        return local_blob(f"blake3:{self._hash.hexdigest()}", self.position)


def local_blob(stream_digest: str, stream_length: int) -> Blob:
    """The blob of a stream that only this node has."""
    return Blob(stream_digest, 0, (), stream_digest, stream_length)
