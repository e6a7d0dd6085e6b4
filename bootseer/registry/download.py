"""A blob as a file: resumed where it broke, and read in several ranges at once when it is large.

Alone owns what happens when a body ends early, stalls or trickles. Sizes are checked here; the
digest is checked by who reads the blob to its end, who has to compute one anyway. A stream is for
one thread, but may be closed from another.
"""

import io
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.registry.http.retry import ATTEMPTS_MAX, FLOOR_BYTES_PER_S, STALL_S, Floor, backoff_s
from bootseer.registry.http.transport import Response

_PIECE_BYTES = 2**20
PART_BYTES = 8 * 2**20
"""Large enough that asking for a part costs little, small enough for five in memory."""
STREAMS_COUNT = 4
"""One TCP connection of a distant or throttled registry gives a fraction of the line; beyond four
little is gained, and registries begin to refuse."""
FIRST_BYTES = 2 * PART_BYTES
"""Read through one connection, to see how fast that is: past TCP's slow start."""
FAST_BYTES_PER_S = 100_000_000
"""What a connection that fills a 1 Gbit/s line exceeds; several cost twice the CPU time there."""
LARGE_BYTES = FIRST_BYTES + 2 * PART_BYTES


class OpenedRange(Struct, frozen=True):
    """An answer that has the bytes wanted, after `skip_bytes` others."""

    response: Response
    skip_bytes: int
    """Not 0 where the server ignores ranges and begins at the blob's start."""
    is_partial: bool
    """Whether the server understands ranges."""
    note_failure: Callable[[], None]
    """Has another server asked first the next time."""


OpenRange = Callable[[int, int], OpenedRange]
"""Opens the bytes [start, end) of one blob. Raises: as `BlobReader.open`."""


class BlobStream(io.RawIOBase):
    """The bytes [start, end) of a blob. Gives up after `ATTEMPTS_MAX` interruptions without
    progress in between."""

    def __init__(
        self, open_range: OpenRange, start: int, end: int, what: str, window_s: float = STALL_S
    ) -> None:
        super().__init__()
        self._open_range = open_range
        self._position = start
        self._end = end
        self._what = what
        self._window_s = window_s
        self._floor = Floor(window_s)
        self._opened: OpenedRange | None = None
        self._skip_bytes = 0
        self._failures_count = 0
        self._since_failure_bytes = 0

    def readable(self) -> bool:
        return True

    def extend(self, end: int) -> None:
        """Read on to `end`, from a server whose answer goes on."""
        self._end = end

    @property
    def is_ranged(self) -> bool:
        """Whether the server gives ranges; asks it. Raises: as `read`."""
        return self._body().is_partial

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, as they come; b"" only at the end.

        Raises: UnavailableError, DeadlineError, NotFoundError, PermissionDeniedError,
        CorruptError where the blob has another size.
        """
        if size < 0:
            return self.readall()
        while self._position < self._end and size:
            body = self._body()
            started = time.monotonic()
            wanted = self._skip_bytes or min(size, self._end - self._position)
            try:
                data = body.response.read(min(wanted, _PIECE_BYTES))
                if not data:
                    raise UnavailableError(f"{body.response.server} cut off {self._what}")
                if self._floor.is_dead(len(data), time.monotonic() - started):
                    raise DeadlineError(
                        f"{body.response.server} sends {self._what} slower than "
                        f"{FLOOR_BYTES_PER_S} bytes a second"
                    )
            except (UnavailableError, DeadlineError) as error:
                self._interrupted(error)
                continue
            if self._skip_bytes:
                self._skip_bytes -= len(data)
                continue
            self._position += len(data)
            self._note_progress(len(data))
            if self._position == self._end:
                self._finish(body)
            return data
        return b""

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """All that is left. Raises: as `read`."""
        # The inherited one takes pieces of 8 KiB, each of which costs what a large one does.
        return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))

    def _body(self) -> OpenedRange:
        if self._opened is None:
            self._opened = self._open_range(self._position, self._end)
            self._skip_bytes = self._opened.skip_bytes
            self._floor = Floor(self._window_s)
        return self._opened

    def _note_progress(self, count_bytes: int) -> None:
        self._since_failure_bytes += count_bytes
        # A trickle below the floor is not progress, or it would go on for ever.
        if self._since_failure_bytes >= FLOOR_BYTES_PER_S * self._window_s:
            self._failures_count = 0

    def _interrupted(self, error: Exception) -> None:
        self._drop()
        self._failures_count += 1
        self._since_failure_bytes = 0
        if self._failures_count >= ATTEMPTS_MAX:
            raise error
        # The first time at once: a connection that was cut says nothing about the next one.
        if self._failures_count > 1:
            time.sleep(backoff_s(self._failures_count - 1))

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.note_failure()
            opened.response.close()

    def _finish(self, body: OpenedRange) -> None:
        """Give the connection back, which a read of its end does."""
        self._opened = None
        if body.is_partial:
            try:
                body.response.read(1)
            except (UnavailableError, DeadlineError):
                pass
        body.response.close()

    def close(self) -> None:
        """Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.response.close()
        super().close()


class LargeBlob(io.RawIOBase):
    """A whole blob in order. Where one connection turns out to be slow, several parts are fetched
    at once, of which at most `STREAMS_COUNT` + 1 are in memory."""

    def __init__(
        self, first: BlobStream, open_part: Callable[[int, int], BlobStream], size_bytes: int
    ) -> None:
        """`first` is the stream of the first `FIRST_BYTES`."""
        super().__init__()
        self._open_part = open_part
        self._size_bytes = size_bytes
        self._single: BlobStream | None = first
        self._waited_s = 0.0
        self._next = FIRST_BYTES
        self._stopped = False
        self._pieces: deque[bytes] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._parts: deque[Future[deque[bytes]]] = deque()

    def readable(self) -> bool:
        return True

    def _go_on(self) -> None:
        """After the first part, by whose speed the way of reading the rest is chosen."""
        assert self._single is not None
        self._single.close()
        self._single = None
        if self._next >= self._size_bytes:
            return
        if FAST_BYTES_PER_S * self._waited_s < FIRST_BYTES:
            self._single = self._open_part(self._next, self._size_bytes)
            self._next = self._size_bytes
            return
        self._pool = ThreadPoolExecutor(STREAMS_COUNT, thread_name_prefix="blob-part")
        self._fill(self._pool)

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while self._next < self._size_bytes and len(self._parts) < STREAMS_COUNT:
            end = min(self._next + PART_BYTES, self._size_bytes)
            part = self._open_part(self._next, end)
            self._parts.append(pool.submit(self._fetch, part))
            self._next = end

    def _fetch(self, part: BlobStream) -> deque[bytes]:
        pieces: deque[bytes] = deque()
        with part:
            while not self._stopped and (data := part.read(_PIECE_BYTES)):
                pieces.append(data)
        return pieces

    def read(self, size: int = -1, /) -> bytes:
        """As `BlobStream.read`."""
        if size < 0:
            return self.readall()
        while self._single is not None and size:
            started = time.monotonic()
            if data := self._single.read(size):
                self._waited_s += time.monotonic() - started
                return data
            self._go_on()
        while not self._pieces and self._parts and self._pool:
            self._pieces = self._parts.popleft().result()
            self._fill(self._pool)
        if not self._pieces or not size:
            return b""
        data = self._pieces.popleft()
        if len(data) > size:
            self._pieces.appendleft(data[size:])
            data = data[:size]
        return data

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Idempotent; the threads end after the piece they wait for."""
        self._stopped = True
        if self._single is not None:
            self._single.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._parts.clear()
        super().close()
