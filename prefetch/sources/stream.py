"""A layer's tar stream: decompressed ahead of its reader, bounded, and verified to the last byte.

Alone owns decompression of layers. A thread reads, hashes and decompresses (all in libraries that
release the GIL) a few MiB ahead of the packer, so the two overlap. Memory is bounded by
`_QUEUE_COUNT` pieces; nothing seeks. Neither the declared size nor the stored bytes are believed:
a layer that goes on past its size, expands beyond `Limits`, or has another digest is refused.

Threading: a stream belongs to one reader; close it from that thread.
"""

import hashlib
import io
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self, cast

import zstandard

from bootseer.errors import CorruptError, DeadlineError, UnsupportedError, from_oserror

_PIECE_BYTES = 2**20
_QUEUE_COUNT = 8
_WAIT_S = 300.0
"""A source has its own, shorter deadlines; this ends the wait for one that forgot."""
_WINDOW_BYTES_MAX = 2**27
"""`zstd --long=27`, what the zstd command itself decompresses without being told."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_MAGIC_BYTES = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What one layer may expand to; a decompression bomb ends there."""

    layer_bytes_max: int = 2**40
    ratio_max: int = 1100
    """Deflate cannot exceed 1032, so only a zstd layer of almost nothing but zeros meets this."""
    free_bytes: int = 2**30
    """The ratio is not applied below this."""

    def allowed_bytes(self, stored_bytes: int) -> int:
        """How much `stored_bytes` may become."""
        return min(self.layer_bytes_max, max(self.free_bytes, self.ratio_max * stored_bytes))


@dataclass(frozen=True, slots=True)
class Expected:
    """What the image's documents say of a layer."""

    diff_id: str
    """Digest of the uncompressed tar."""
    size_bytes: int
    """Of the stored bytes."""
    stored_digest: str | None
    """Of the stored bytes; None: unknown, and `diff_id` has to do."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"layer {self.stored_digest or self.diff_id}"


class _Stored(io.RawIOBase):
    """The stored bytes as they pass: counted, hashed, never more than declared."""

    def __init__(
        self, source: BinaryIO, expected: Expected, on_progress: Callable[[int], None]
    ) -> None:
        self._source = source
        self._expected = expected
        # Bytes that are stored as they are would only be hashed twice.
        digest = expected.stored_digest if expected.stored_digest != expected.diff_id else None
        self._hash = hashlib.new(digest.partition(":")[0]) if digest else None
        self._on_progress = on_progress
        self.count_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._source.read(size if size >= 0 else _PIECE_BYTES)
        except OSError as error:
            raise from_oserror(error, f"read the {self._expected.name}") from error
        if self._hash:
            self._hash.update(data)
        self.count_bytes += len(data)
        if self.count_bytes > self._expected.size_bytes:
            raise CorruptError(
                f"the {self._expected.name} is longer than the "
                f"{self._expected.size_bytes} bytes declared"
            )
        self._on_progress(len(data))
        return data

    def finish(self) -> None:
        """Read what is left and check size and digest. Raises: CorruptError."""
        while self.read(_PIECE_BYTES):
            pass
        expected = self._expected
        if self.count_bytes != expected.size_bytes:
            raise CorruptError(
                f"the {expected.name} ends after {self.count_bytes} of {expected.size_bytes} bytes"
            )
        if self._hash is None:
            return
        found = f"{self._hash.name}:{self._hash.hexdigest()}"
        if found != expected.stored_digest:
            raise CorruptError(f"the {expected.name} has the digest {found}")


def _gunzip(head: bytes, stored: _Stored) -> Iterator[bytes]:
    """Members one after another, as pigz and eStargz write them; zeros may follow."""
    data = head
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(data, _PIECE_BYTES)
            data = member.unconsumed_tail
            if piece:
                yield piece
            elif not data and not member.eof:
                data = stored.read(_PIECE_BYTES)
                if not data:
                    raise CorruptError("the gzip stream is cut off")
        data = member.unused_data
        padding = not data.startswith(_GZIP[:1])
        while padding and not data.strip(b"\0"):
            data = stored.read(_PIECE_BYTES)
            if not data:
                return
        data = data.lstrip(b"\0") if padding else data


def _unzstd(head: bytes, stored: _Stored) -> Iterator[bytes]:
    class _Whole(io.RawIOBase):
        """`head`, then the rest: what a stream_reader reads from."""

        def __init__(self) -> None:
            self.head = head

        def read(self, size: int = -1, /) -> bytes:
            data, self.head = self.head, b""
            return data or stored.read(size)

    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    with decompressor.stream_reader(
        cast(BinaryIO, _Whole()), read_size=_PIECE_BYTES, read_across_frames=True
    ) as reader:
        while piece := reader.read(_PIECE_BYTES):
            yield piece


def _plain(head: bytes, stored: _Stored) -> Iterator[bytes]:
    piece = head
    while piece:
        yield piece
        piece = stored.read(_PIECE_BYTES)


def decompressed(
    source: BinaryIO, expected: Expected, limits: Limits, on_progress: Callable[[int], None]
) -> Iterator[bytes]:
    """The uncompressed tar in pieces; closes `source`. Its format is told by its first bytes, as
    engines do, not by the media type.

    Raises: CorruptError, at the end at the latest; UnsupportedError for other compressions.
    """
    with source:
        stored = _Stored(source, expected, on_progress)
        sha = hashlib.new(expected.diff_id.partition(":")[0])
        count_bytes = 0
        try:
            for piece in _pieces(stored, expected):
                count_bytes += len(piece)
                if count_bytes > limits.allowed_bytes(stored.count_bytes):
                    raise CorruptError(
                        f"the {expected.name} expands from {stored.count_bytes} to more than "
                        f"{count_bytes} bytes: a decompression bomb"
                    )
                sha.update(piece)
                yield piece
        except (zlib.error, zstandard.ZstdError) as error:
            raise CorruptError(f"the {expected.name} cannot be decompressed: {error}") from error
        stored.finish()
        found = f"{sha.name}:{sha.hexdigest()}"
        if found != expected.diff_id:
            raise CorruptError(
                f"the {expected.name} contains {found}, but the image's configuration says "
                f"{expected.diff_id}"
            )


def _pieces(stored: _Stored, expected: Expected) -> Iterator[bytes]:
    head = stored.read(_PIECE_BYTES)
    # A socket may give fewer bytes than it takes to tell.
    while len(head) < _MAGIC_BYTES and (more := stored.read(_PIECE_BYTES)):
        head += more
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise UnsupportedError(
                f"the {expected.name} is compressed with {name}; only gzip, zstd and none are read"
            )
    if head.startswith(_GZIP):
        return _gunzip(head, stored)
    # Skippable frames come first in some seekable and chunked zstd files.
    skippable = head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    if head.startswith(_ZSTD) or skippable:
        return _unzstd(head, stored)
    return _plain(head, stored)


class _ReadAhead(io.RawIOBase):
    """`pieces`, produced in a thread up to `_QUEUE_COUNT` ahead, as a readable raw file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUE_COUNT)
        self._stopped = threading.Event()
        self._current = memoryview(b"")
        self._ended = False
        self._thread = threading.Thread(target=self._produce, name="layer-reader", daemon=True)
        self._thread.start()

    def _put(self, item: bytes | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def _produce(self) -> None:
        try:
            for piece in self._pieces:
                if not self._put(piece):
                    return
            self._put(None)
        except BaseException as error:
            # Whatever it is belongs to the reader: it is raised there.
            self._put(error)
        finally:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        if not self._current and not self._ended:
            try:
                item = self._queue.get(timeout=_WAIT_S)
            except queue.Empty:
                raise DeadlineError(f"a layer's source sent nothing for {_WAIT_S:.0f} s") from None
            if item is None or isinstance(item, BaseException):
                self._ended = True
                if item is not None:
                    raise item
            else:
                self._current = memoryview(item)
        count = min(len(buffer), len(self._current))
        buffer[:count] = self._current[:count]
        self._current = self._current[count:]
        return count

    def close(self) -> None:
        """Stops the thread, which ends after the piece it is working on."""
        if not self.closed:
            self._stopped.set()
            self._thread.join(_WAIT_S)
        super().close()


class TarStream:
    """`file` reads the tar; `finish` reads the rest, so that all digests have been checked."""

    def __init__(
        self,
        source: BinaryIO,
        expected: Expected,
        limits: Limits,
        on_progress: Callable[[int], None],
    ) -> None:
        """Takes `source`, the stored bytes, over."""
        pieces = decompressed(source, expected, limits, on_progress)
        self.file: BinaryIO = io.BufferedReader(_ReadAhead(pieces), _PIECE_BYTES)

    def finish(self) -> None:
        """Raises: CorruptError unless every byte was as the image's documents say."""
        while self.file.read(_PIECE_BYTES):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()
