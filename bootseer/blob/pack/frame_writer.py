"""Writer of seekable zstd files: cuts a stream into frames, and compresses them in threads.

The output depends on the stream, the level and the cuts, never on the number of threads. One
caller; worker threads of its own. At most a few batches of frames per thread are in memory.
"""

import os
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, Protocol, Self

import zstandard

from bootseer.base.content_digest import ContentHasher, content_digest
from bootseer.blob.frames import FRAME_STREAM_BYTES_MAX, FrameTable
from bootseer.blob.tree import Blob
from bootseer.errors import InvalidInputError, UnsupportedError

# https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md
SKIPPABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1
SEEK_TABLE_FRAMES_MAX = 2**27
"""Largest number of frames that readers of the seekable format accept (ZSTD_SEEKABLE_MAXFRAMES)."""

FRAME_BYTES = 128 * 1024
_BATCH_BYTES = 1024 * 1024
"""Bytes of the stream passed to a thread at once: passing a batch costs as much as compressing a
small frame."""
_BATCHES_IN_FLIGHT_PER_THREAD = 2

_Frame = list[bytes | memoryview]
"""Pieces of one frame."""


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class TarWriter(Protocol):
    """Destination of a tar stream that is copied: see `FrameWriter`."""

    frame_bytes: int
    position: int

    def reserve(self, length: int) -> None: ...

    def write(self, *pieces: bytes | memoryview) -> None: ...

    def cut(self) -> None: ...


class StreamWriter(TarWriter, Protocol):
    """Destination of a tar stream that becomes a blob: `FrameWriter` or `PlainWriter`."""

    def finish(self) -> Blob: ...


class _FrameBatch(NamedTuple):
    """Frames that threads are compressing."""

    stream_lengths: list[int]
    compressed: Future[list[tuple[bytes, bytes]]]
    hashed: Future[None] | None


class FrameWriter:
    """Context manager that writes a blob to a sink; `finish` returns the blob.

    After an exception the sink contains an unfinished file, which the caller must discard.
    """

    def __init__(
        self,
        sink: BinaryIO,
        *,
        level: int,
        frame_bytes: int,
        threads: int | None,
        on_progress: Callable[[int], None] | None = None,
        stream_digest: str | None = None,
    ) -> None:
        """Start the worker threads.

        `on_progress` is called with counts of stream bytes written. `stream_digest` is the digest
        of the whole stream if the caller verifies it; otherwise the digest is computed.
        """
        if not 4096 <= frame_bytes <= FRAME_STREAM_BYTES_MAX // 2:
            raise InvalidInputError(f"frame_bytes is {frame_bytes}, not 4096 to 32 MiB")
        if not 1 <= level <= zstandard.MAX_COMPRESSION_LEVEL:
            raise InvalidInputError(f"the zstd level is {level}, not 1 to 22")
        if threads is not None and threads < 1:
            raise InvalidInputError(f"threads is {threads}, not 1 or more")
        self.frame_bytes = frame_bytes
        self.position = 0
        """Offset of the next byte in the stream."""
        threads = threads or min(usable_cpus(), 16)
        self._sink = sink
        self._level = level
        self._on_progress = on_progress
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blob-compress")
        self._in_flight_max = threads * _BATCHES_IN_FLIGHT_PER_THREAD
        self._in_flight: deque[_FrameBatch] = deque()
        self._stream_digest = stream_digest
        self._stream_hash = ContentHasher()
        # One thread: pieces must be hashed in order.
        self._hash_pool = ThreadPoolExecutor(1, thread_name_prefix="blob-hash")
        self._local = threading.local()
        self._pieces: _Frame = []
        self._pieces_bytes = 0
        self._batch: list[_Frame] = []
        self._batch_lengths: list[int] = []
        self._lengths = array("I")
        self._stream_lengths = array("I")
        self._digests = bytearray()
        self._hash = ContentHasher()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._hash_pool.shutdown(wait=True, cancel_futures=True)

    def reserve(self, length: int) -> None:
        """Start a new frame unless `length` more bytes fit into the current one."""
        if self._pieces_bytes and self._pieces_bytes + length > self.frame_bytes:
            self.cut()

    def write(self, *pieces: bytes | memoryview) -> None:
        """Append to the current frame without splitting the pieces; end the frame if it is full."""
        self._pieces += pieces
        length = sum(map(len, pieces))
        self._pieces_bytes += length
        self.position += length
        if self._pieces_bytes >= self.frame_bytes:
            self.cut()

    def cut(self) -> None:
        """End the current frame if it is not empty."""
        if not self._pieces_bytes:
            return
        self._batch.append(self._pieces)
        self._batch_lengths.append(self._pieces_bytes)
        self._pieces = []
        self._pieces_bytes = 0
        if sum(self._batch_lengths) >= _BATCH_BYTES:
            self._submit()

    def _submit(self) -> None:
        while len(self._in_flight) >= self._in_flight_max:
            self._drain_one()
        batch, lengths = self._batch, self._batch_lengths
        self._batch, self._batch_lengths = [], []
        hashed = None
        if self._stream_digest is None:
            hashed = self._hash_pool.submit(self._hash_stream, batch)
        compressed = self._pool.submit(self._compress, batch)
        self._in_flight.append(_FrameBatch(lengths, compressed, hashed))

    def finish(self) -> Blob:
        """Write the last frames and the seek table, and return the blob. Raises: OSError."""
        self.cut()
        if self._batch:
            self._submit()
        while self._in_flight:
            self._drain_one()
        self._put(_seek_table(self._lengths, self._stream_lengths))
        frames = FrameTable(self._lengths, self._stream_lengths, bytes(self._digests))
        stream_digest = self._stream_digest or f"blake3:{self._stream_hash.hexdigest()}"
        digest = f"blake3:{self._hash.hexdigest()}"
        return Blob(digest, self._size, frames, stream_digest, self.position)

    def _hash_stream(self, batch: list[_Frame]) -> None:
        for pieces in batch:
            for piece in pieces:
                self._stream_hash.update(piece)

    def _compress(self, batch: list[_Frame]) -> list[tuple[bytes, bytes]]:
        """Return the compressed bytes and the digest of each frame."""
        compressor: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if compressor is None:
            # With the content checksum, `zstd -d` can detect damage without our digests.
            compressor = self._local.compressor = zstandard.ZstdCompressor(
                level=self._level, write_checksum=True, write_content_size=True
            )
        joined = (pieces[0] if len(pieces) == 1 else b"".join(pieces) for pieces in batch)
        frames = [compressor.compress(content) for content in joined]
        return [(frame, content_digest(frame)) for frame in frames]

    def _drain_one(self) -> None:
        batch = self._in_flight.popleft()
        frames = batch.compressed.result()
        if batch.hashed is not None:
            batch.hashed.result()
        if len(self._lengths) + len(frames) > SEEK_TABLE_FRAMES_MAX:
            raise UnsupportedError(
                f"a blob holds at most {SEEK_TABLE_FRAMES_MAX} frames: use larger ones"
            )
        for compressed, digest in frames:
            self._lengths.append(len(compressed))
            self._digests += digest
        self._stream_lengths.extend(batch.stream_lengths)
        self._put(b"".join(compressed for compressed, _ in frames))
        if self._on_progress:
            self._on_progress(sum(batch.stream_lengths))

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._size += len(data)
        self._sink.write(data)


def _seek_table(lengths: "array[int]", stream_lengths: "array[int]") -> bytes:
    entries = b"".join(map(struct.Struct("<II").pack, lengths, stream_lengths))
    footer = struct.pack("<IBI", len(lengths), 0, SEEKABLE_MAGIC)
    return struct.pack("<II", SKIPPABLE_MAGIC, len(entries) + len(footer)) + entries + footer


class PlainWriter:
    """Stream writer that passes each piece to `sink`. The blob of `finish` has no frames."""

    def __init__(
        self,
        sink: Callable[[bytes], object],
        on_progress: Callable[[int], None] | None = None,
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

    def write(self, *pieces: bytes | memoryview) -> None:
        """Append the pieces."""
        for piece in pieces:
            self._hash.update(piece)
            self._sink(bytes(piece))
            self.position += len(piece)
            if self._on_progress:
                self._on_progress(len(piece))

    def finish(self) -> Blob:
        """Return the blob of the stream, which is stored nowhere yet."""
        return local_blob(f"blake3:{self._hash.hexdigest()}", self.position)


def local_blob(stream_digest: str, stream_length: int) -> Blob:
    """Return the blob of a stream that only this node has."""
    return Blob(stream_digest, 0, (), stream_digest, stream_length)
