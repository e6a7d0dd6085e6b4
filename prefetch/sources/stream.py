"""A layer's tar stream: decompressed ahead of its reader, bounded, and verified to the last byte.

Three threads besides the reader's: one reads the source, one decompresses, one hashes what that
gives, each a few MiB ahead of the next. Memory is bounded by these; nothing seeks. Neither the
declared size nor the stored bytes are believed: a layer that goes on past its size, expands beyond
`ExpansionLimits`, or contains something else is refused.

The manifest's digest of the stored bytes is not computed: what is used of a layer is its content,
the digest of which is in the image's configuration, which the manifest names by digest. Without
SHA instructions it would take a twelfth of the time that a layer takes in all.

Threading: a stream belongs to one reader; close it from that thread.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Self

from msgspec import Struct

from bootseer.blob.tar.inflate import ERRORS, PIECE_BYTES, ExpansionLimits, decompress
from bootseer.errors import BootseerError, CorruptError, from_oserror
from bootseer.prefetch.sources.read_ahead import ReadAhead

_HASHED_LATER_COUNT = 8


class Expected(Struct, frozen=True):
    """What the image's documents say of a layer."""

    diff_id: str
    """Digest of the uncompressed tar."""
    size_bytes: int
    """The size of the stored bytes."""
    stored_digest: str | None
    """What the source calls the stored bytes, for messages; None where it has no name for them."""

    @property
    def name(self) -> str:
        """Returns the name of the layer in messages."""
        return f"layer {self.stored_digest or self.diff_id}"


class _Stored:
    """The stored bytes as they pass: counted, never more than declared."""

    def __init__(
        self, source: BinaryIO, expected: Expected, on_progress: Callable[[int], None]
    ) -> None:
        self._expected = expected
        self._on_progress = on_progress
        self.count_bytes = 0
        self._ahead = ReadAhead(
            _pieces(source, expected), "layer-source", on_wait=lambda: on_progress(0)
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
        """Read what is left and check the size. Raises: CorruptError."""
        while self.read(PIECE_BYTES):
            pass
        expected = self._expected
        if self.count_bytes != expected.size_bytes:
            raise CorruptError(
                f"the {expected.name} ends after {self.count_bytes} of {expected.size_bytes} bytes"
            )

    def close(self) -> None:
        """End its thread."""
        self._ahead.close()


def _pieces(source: BinaryIO, expected: Expected) -> Iterator[bytes]:
    with source:
        while True:
            try:
                data = source.read(PIECE_BYTES)
            except BootseerError:
                raise  # most are OSErrors, too, and say already what failed
            except OSError as error:
                raise from_oserror(error, f"read the {expected.name}") from error
            if not data:
                return
            yield data


def decompressed(
    source: BinaryIO,
    expected: Expected,
    limits: ExpansionLimits,
    on_progress: Callable[[int], None],
) -> Iterator[bytes]:
    """The uncompressed tar in pieces; closes `source`. `on_progress` is called with counts of
    stored bytes, with 0 while none come, and may raise to end it.

    Raises: CorruptError, at the end at the latest; UnsupportedError for other compressions.
    """
    stored = _Stored(source, expected, on_progress)
    sha = _BackgroundHash(expected.diff_id.partition(":")[0])
    try:
        count_bytes = 0
        try:
            for piece in decompress(stored.read, expected.name):
                count_bytes += len(piece)
                limits.check(stored.count_bytes, count_bytes, expected.name)
                sha.update(piece)
                yield piece
        except ERRORS as error:
            raise CorruptError(f"the {expected.name} cannot be decompressed: {error}") from error
        stored.finish()
        found = sha.finish()
        if found != expected.diff_id:
            raise CorruptError(
                f"the {expected.name} contains {found}, but the image's configuration says "
                f"{expected.diff_id}"
            )
    finally:
        stored.close()
        sha.close()


class TarStream:
    """Reads the tar; `finish` reads the rest, so that all digests have been checked."""

    def __init__(
        self,
        source: BinaryIO,
        expected: Expected,
        limits: ExpansionLimits,
        on_progress: Callable[[int], None],
    ) -> None:
        """Takes `source`, the stored bytes, over."""
        self._ahead = ReadAhead(decompressed(source, expected, limits, on_progress), "layer-reader")

    def read(self, size: int = -1) -> bytes:
        """The next bytes, at most `size` and maybe fewer; b"" at the end.

        Raises: CorruptError and others of the source.
        """
        return self._ahead.read(size)

    def finish(self) -> None:
        """Raises: CorruptError unless every byte was as the image's documents say."""
        while self.read(PIECE_BYTES):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()


class _BackgroundHash:
    """Like an object of `hashlib`, but `update` returns before the piece is hashed.

    SHA-256 takes longer than most of what happens to a layer's bytes, so it has a thread of its
    own, which `close` ends. At most `_HASHED_LATER_COUNT` pieces wait for it. One caller.
    """

    def __init__(self, algorithm: str) -> None:
        """Raises: ValueError where there is no such algorithm."""
        self.name = algorithm
        self._hash = hashlib.new(algorithm)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_HASHED_LATER_COUNT)
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
