"""A layer's tar stream: decompressed ahead of its reader, bounded, and verified to the last byte.

Three threads besides the reader's: one reads the source, one decompresses, one hashes the
decompressed bytes, each a few MiB ahead of the next. All three do their work in libraries that
release the GIL, so they overlap. Their queues bound the memory, and nothing seeks. A layer that
is longer than its documents say, expands beyond `ExpansionLimits`, or has another content is
refused.

The manifest's digest of the compressed bytes is not computed: the configuration, which the manifest
names by digest, has the digest of the content. On processors without SHA instructions the second
digest would add a twelfth to the time of a layer.

A stream and a `ReadAhead` belong to one reader each, which closes them.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Self

from msgspec import Struct

from bootseer.blob.tar.inflate import ERRORS, PIECE_BYTES, ExpansionLimits, decompress
from bootseer.errors import BootseerError, CorruptError, DeadlineError, from_oserror

_QUEUED_PIECES_MAX = 8
WAIT_S = 300.0
"""Longest wait for a piece, for sources without a shorter deadline of their own."""
_POLL_S = 0.2
_JOIN_S = 5.0
"""Longest wait for a thread to end after its current piece; a thread that hangs is left behind."""


class ReadAhead:
    """Pieces of a stream made in a thread of their own, a bounded number ahead of their reader."""

    def __init__(
        self, pieces: Iterator[bytes], name: str, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Start the thread `name`, which iterates over `pieces`.

        The reader calls `on_wait` a few times per second while it waits; an exception from
        `on_wait` ends the wait.
        """
        self._pieces = pieces
        self._on_wait = on_wait
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUED_PIECES_MAX)
        self._stopped = threading.Event()
        self._rest = b""
        self._ended = False
        self._thread = threading.Thread(target=self._produce, name=name, daemon=True)
        self._thread.start()

    def _put(self, item: bytes | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def _produce(self) -> None:
        try:
            for piece in self._pieces:
                if piece and not self._put(piece):
                    return
            self._put(None)
        except BaseException as error:
            # The reader raises it.
            self._put(error)
        finally:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, a whole piece if it is not longer; b"" at the end.

        A negative size returns all remaining bytes. Raises: DeadlineError, and any error of the
        pieces or of `on_wait`.
        """
        if size < 0:
            return b"".join(iter(lambda: self.read(2**62), b""))
        piece = self._rest or self._next()
        if len(piece) <= size:
            self._rest = b""
            return piece
        self._rest = piece[size:]
        return piece[:size]

    def _next(self) -> bytes:
        deadline_s = time.monotonic() + WAIT_S
        while not self._ended:
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if self._on_wait:
                    self._on_wait()
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"the source of an image sent nothing, or too little, for {WAIT_S:.0f} s"
                    ) from None
                continue
            if isinstance(item, bytes):
                return item
            self._ended = True
            if item is not None:
                raise item
        return b""

    def finish(self) -> None:
        """Read and drop the remaining bytes, so that checks at the end of the pieces are made."""
        while self.read(PIECE_BYTES):
            pass

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stopped.set()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ExpectedLayer(Struct, frozen=True):
    """Digests and size of a layer, as the image's documents state them."""

    diff_id: str
    """Digest of the uncompressed tar."""
    size_bytes: int
    """Size of the stored bytes."""
    stored_digest: str | None
    """Digest of the stored bytes, or None if the source has none."""

    @property
    def name(self) -> str:
        """Return the name of the layer for messages."""
        return f"layer {self.stored_digest or self.diff_id}"


class _StoredBytes:
    """The stored bytes of a layer: counted, and never more of them than expected."""

    def __init__(
        self, source: BinaryIO, expected: ExpectedLayer, on_progress: Callable[[int], None]
    ) -> None:
        self._expected = expected
        self._on_progress = on_progress
        self.count_bytes = 0
        self._ahead = ReadAhead(
            _source_pieces(source, expected), "layer-source", on_wait=lambda: on_progress(0)
        )

    def read(self, size: int) -> bytes:
        data = self._ahead.read(size)
        self.count_bytes += len(data)
        if self.count_bytes > self._expected.size_bytes:
            raise CorruptError(
                f"the {self._expected.name} is longer than the "
                f"{self._expected.size_bytes} bytes declared"
            )
        self._on_progress(len(data))
        return data

    def finish(self) -> None:
        """Read the remaining bytes and check the size. Raises: CorruptError."""
        while self.read(PIECE_BYTES):
            pass
        expected = self._expected
        if self.count_bytes != expected.size_bytes:
            raise CorruptError(
                f"the {expected.name} ends after {self.count_bytes} of {expected.size_bytes} bytes"
            )

    def close(self) -> None:
        self._ahead.close()


def _source_pieces(source: BinaryIO, expected: ExpectedLayer) -> Iterator[bytes]:
    with source:
        while True:
            try:
                data = source.read(PIECE_BYTES)
            except BootseerError:
                raise  # Most are OSErrors as well, and their message is complete.
            except OSError as error:
                raise from_oserror(error, f"read the {expected.name}") from error
            if not data:
                return
            yield data


def _decompressed(
    source: BinaryIO,
    expected: ExpectedLayer,
    limits: ExpansionLimits,
    on_progress: Callable[[int], None],
) -> Iterator[bytes]:
    """Yield the uncompressed tar in pieces; close `source`. Raises: as `tar_stream`."""
    stored = _StoredBytes(source, expected, on_progress)
    content = _BackgroundHash(expected.diff_id.partition(":")[0])
    try:
        count_bytes = 0
        try:
            for piece in decompress(stored.read, expected.name):
                count_bytes += len(piece)
                limits.check(stored.count_bytes, count_bytes, expected.name)
                content.update(piece)
                yield piece
        except ERRORS as error:
            raise CorruptError(f"the {expected.name} cannot be decompressed: {error}") from error
        stored.finish()
        found = content.finish()
        if found != expected.diff_id:
            raise CorruptError(
                f"the {expected.name} contains {found}, but the image's configuration says "
                f"{expected.diff_id}"
            )
    finally:
        stored.close()
        content.close()


def tar_stream(
    source: BinaryIO,
    expected: ExpectedLayer,
    limits: ExpansionLimits,
    on_progress: Callable[[int], None],
) -> ReadAhead:
    """Return a reader of the uncompressed tar of a layer; it takes over `source`, the stored bytes.

    The content is verified once the reader's `finish` has returned. `on_progress` gets counts of
    stored bytes, 0 while none come, and may raise to end the reading.

    Reading raises: CorruptError, at the latest at the end; UnsupportedError for an unknown
    compression; any error of the source.
    """
    return ReadAhead(_decompressed(source, expected, limits, on_progress), "layer-reader")


class _BackgroundHash:
    """A `hashlib` object whose `update` returns before the piece is hashed.

    SHA-256 takes longer than most other work on a layer, so it has a thread of its own, which
    `close` ends. At most `_QUEUED_PIECES_MAX` pieces wait for it. One caller.
    """

    def __init__(self, algorithm: str) -> None:
        """Raise ValueError if the algorithm is unknown."""
        self._name = algorithm
        self._hash = hashlib.new(algorithm)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_QUEUED_PIECES_MAX)
        self._thread: threading.Thread | None = None

    def update(self, data: bytes) -> None:
        """Queue the next piece, which must not change any more."""
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
        """Return `ALGORITHM:HEX` of all pieces; `update` must not be called after this."""
        self.close()
        return f"{self._name}:{self._hash.hexdigest()}"

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
