"""A blob as a file: resumed where it broke, and read in several ranges at once when it is large.

Alone owns what happens when a body ends early, stalls or trickles. Sizes are checked here; the
digest is checked by who reads the blob to its end, who has to compute one anyway. A stream is for
one thread, but may be closed from another.
"""

import io
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf

from msgspec import Struct

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.registry.transport import Response
from bootseer.transfer.executor import Batch, Executor
from bootseer.transfer.pace import FLOOR_BYTES_PER_S, STALL_S, Pace, Progress
from bootseer.transfer.pending import Reader
from bootseer.transfer.plan import Chunk, Priority, covering
from bootseer.transfer.policy import REQUEST, Attempts, Policy

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


OpenRange = Callable[[int, int, bool], OpenedRange]
"""Opens the bytes [start, end) of one blob; True: the first server is late with them. Raises: as
`BlobReader.open`."""


class _Blob(io.RawIOBase):
    """What is read in order, in pieces of any size."""

    def readable(self) -> bool:
        return True

    @abstractmethod
    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, as they come; b"" only at the end."""

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """All that is left. Raises: as `read`."""
        # The inherited one takes pieces of 8 KiB, each of which costs what a large one does.
        return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))


class BlobStream(_Blob):
    """The bytes [start, end) of a blob through one connection; another one goes on where it breaks.

    One that is late (`pace`) is left for another one as well, while `pace` has credit for that.
    """

    def __init__(
        self,
        open_range: OpenRange,
        start: int,
        end: int,
        what: str,
        *,
        pace: Pace,
        policy: Policy = REQUEST,
        stall_s: float = STALL_S,
    ) -> None:
        super().__init__()
        self._open_range = open_range
        self._position = start
        self._end = end
        self.what = what
        """For messages."""
        self._pace = pace
        self._stall_s = stall_s
        self._attempts = Attempts(policy)
        self._opened: OpenedRange | None = None
        self._is_second = False
        self._skip_bytes = 0
        self._new_bytes = 0
        self._limit_s = 0.0
        self._begin_window()

    def _begin_window(self) -> None:
        """What comes from here on is judged by itself."""
        self._progress = Progress(0.0)
        self._done_bytes = 0
        self._began_s = time.monotonic()
        # Only time spent in waiting counts against a connection, not what its reader takes.
        self._waited_s = 0.0

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
            wanted = self._skip_bytes or min(size, self._end - self._position)
            try:
                data = self._piece(body, min(wanted, _PIECE_BYTES))
            except (UnavailableError, DeadlineError) as error:
                self._interrupted(error)
                continue
            if self._skip_bytes:
                self._skip_bytes -= len(data)
                continue
            self._position += len(data)
            self._new_bytes += len(data)
            # Neither a trickle nor what was here already is progress, or it would go on for ever.
            if self._new_bytes >= FLOOR_BYTES_PER_S * self._stall_s:
                self._attempts.progressed()
            if self._position == self._end:
                self._finish(body)
            return data
        return b""

    def _piece(self, body: OpenedRange, size: int) -> bytes:
        """What comes next. Raises: UnavailableError, DeadlineError where it is late."""
        response, length = body.response, min(PART_BYTES, self._end - self._position)
        limit_s = self._pace.silent_limit_s(length) if self._pace.has_credit else self._stall_s
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            response.wait_at_most(min(limit_s, self._stall_s))
        started_s = time.monotonic()
        try:
            data = response.read(size)
        finally:
            self._waited_s += time.monotonic() - started_s
        if not data:
            raise UnavailableError(f"{response.server} cut off {self.what}")
        self._done_bytes += len(data)
        silent_s = self._progress.silent_s(self._done_bytes, self._waited_s)
        length += self._done_bytes
        late = self._pace.is_late_alike(length, self._done_bytes, self._waited_s, silent_s)
        if silent_s >= self._stall_s or (late and self._pace.has_credit):
            raise DeadlineError(f"{response.server} sends {self.what} too slowly")
        if self._done_bytes >= PART_BYTES:
            self._pace.note(self._done_bytes, time.monotonic() - self._began_s)
            self._begin_window()
        return data

    def _body(self) -> OpenedRange:
        if self._opened is None:
            self._opened = self._open_range(self._position, self._end, self._is_second)
            self._is_second = False
            self._skip_bytes = self._opened.skip_bytes
            self._limit_s = 0.0
            self._begin_window()
        return self._opened

    def _interrupted(self, error: Exception) -> None:
        """Have another connection go on. Raises: `error` where it was the last attempt."""
        self._new_bytes = 0
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.response.close()
        if isinstance(error, DeadlineError) and self._waited_s < self._stall_s:
            # Late, which is no failure: others of the server's connections may do.
            self._is_second = self._pace.spend()
        if not self._is_second:
            if opened is not None:
                opened.note_failure()
            pause_s = self._attempts.pause_s(error)
            if pause_s is None:
                raise error
            time.sleep(pause_s)

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


class LargeBlob(_Blob):
    """A whole blob in order. Where one connection turns out to be slow, several parts are fetched
    at once, of which at most `STREAMS_COUNT` + 1 are in memory."""

    def __init__(
        self,
        first: BlobStream,
        open_rest: Callable[[int, int], BlobStream],
        read_part: Reader,
        size_bytes: int,
        *,
        policy: Policy,
        stall_s: float,
    ) -> None:
        """`first` is the stream of the first `FIRST_BYTES`, `open_rest` one of the bytes
        [start, end); `read_part` reads a part for an executor."""
        super().__init__()
        self._open_rest = open_rest
        self._size_bytes = size_bytes
        self._single: BlobStream | None = first
        self._waited_s = 0.0
        self._next = FIRST_BYTES
        self._what = first.what
        self._part = memoryview(b"")
        self._new_executor = partial(
            Executor,
            read_part,
            workers=STREAMS_COUNT,
            # As long as bytes come: how long a part may take nobody can say.
            deadline_s=inf,
            attempt_deadline_s=stall_s,
            policy=policy,
        )
        self._executor: Executor | None = None
        self._parts: deque[tuple[Chunk, Batch]] = deque()
        self._came: dict[Chunk, memoryview] = {}

    def _go_on(self) -> None:
        """After the first part, by whose speed the way of reading the rest is chosen."""
        assert self._single is not None
        self._single.close()
        self._single = None
        if self._next >= self._size_bytes:
            return
        if FAST_BYTES_PER_S * self._waited_s < FIRST_BYTES:
            self._single = self._open_rest(self._next, self._size_bytes)
            self._next = self._size_bytes
            return
        self._executor = self._new_executor()
        self._fill(self._executor)

    def _fill(self, executor: Executor) -> None:
        while self._next < self._size_bytes and len(self._parts) < STREAMS_COUNT:
            part = Chunk(self._what, self._next, min(PART_BYTES, self._size_bytes - self._next))
            fetch = covering((part,), Priority.PREFETCH)
            self._parts.append((part, executor.submit([fetch], self._keep)))
            self._next = part.end

    def _keep(self, part: Chunk, data: memoryview) -> None:
        self._came[part] = data

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
        if not self._part and self._parts and self._executor:
            part, batch = self._parts.popleft()
            batch.wait()
            self._part = self._came.pop(part)
            self._fill(self._executor)
        data = bytes(self._part[: min(size, _PIECE_BYTES)])
        self._part = self._part[len(data) :]
        return data

    def close(self) -> None:
        """Idempotent; the threads end after the piece they wait for."""
        if self._single is not None:
            self._single.close()
        if self._executor is not None:
            self._executor.close()
        self._parts.clear()
        super().close()
