"""Files that are read by ranges over HTTP: into a buffer, or from start to end.

A `RangedFile` requests ranges with an `AskRange` function, which asks one URL, or the servers of a
registry in turn, each once. `RangedFile.read_into` makes a single attempt, for a fetch engine that
repeats it. `open` and `read` repeat attempts themselves, by the policy of attempts, until all bytes
have come.

Sizes are checked here, digests by the reader. A file is for any thread; a stream is for one thread,
but any thread may close it.
"""

import contextlib
import io
import re
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import BinaryIO, TypeAlias, cast

from bootseer.base.closing import Closing
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.http.transport import Response
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import Batch, ChunkFetcher
from bootseer.transfer.pace import STALL_S, ByteProgress, Pace, floor_bytes_per_s
from bootseer.transfer.policy import REQUEST, Attempts, Policy
from bootseer.transfer.ranges import Chunk, Priority, covering

_RANGE = re.compile("bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|[*])")
_NO_RANGE = re.compile("bytes [*]/([0-9]{1,19})")
_SIZE = re.compile("[0-9]{1,19}")
_PIECE_BYTES = 2**20
PART_BYTES = 8 * 2**20
"""Bytes of one request: large enough that requests cost little, small enough for five in memory."""
STREAMS_COUNT = 4
"""Connections at once. A single TCP connection to a distant or throttled server uses a fraction of
the bandwidth; more than four gain little, and registries begin to refuse them."""
FIRST_BYTES = 2 * PART_BYTES
"""Bytes read through one connection to measure its speed, beyond TCP's slow start."""
FAST_BYTES_PER_S = 100_000_000
"""Above this speed one connection is enough: it fills a line of 1 Gbit/s, and several connections
would take twice the CPU time."""
LARGE_BYTES = FIRST_BYTES + 2 * PART_BYTES


class RangeResponse(Closing):
    """Answer to a request for a range of a file. For one thread."""

    def __init__(
        self,
        response: Response,
        name: str,
        start: int,
        end: int | None,
        *,
        deadline_s: float,
        size_bytes: int | None = None,
        blame: Callable[[], None] = lambda: None,
    ) -> None:
        """Check the headers of an answer to a request for the bytes [start, end) of a file.

        A range behind the file's end (416) has no bytes.

        Args:
            response: The answer.
            name: Name of the file in messages.
            start: The first byte.
            end: End of the range, or None for the end of the file.
            deadline_s: Deadline of the reader, by which bytes count as silence (`pace`).
            size_bytes: Size of the file, if it is known.
            blame: Called if the server turns out to be late, or breaks off.

        Raises: CorruptError if the answer is for another range.
        """
        self._response = response
        self._name = name
        self.blame = blame
        self.is_partial = response.status == 206
        """Whether the server supports ranges; if not, the answer begins at the file's start."""
        is_behind = response.status == 416
        length = response.headers.get("Content-Length", "") if not is_behind else ""
        total = int(length) if _SIZE.fullmatch(length) else None
        is_right = True
        if self.is_partial:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            first, last = (int(found[1]), int(found[2])) if found else (-1, -1)
            total = int(found[3]) if found and found[3] != "*" else None
            is_right = first == start <= last and (end is None or last < end)
            end = last + 1 if size_bytes is None else end
        elif is_behind:
            found = _NO_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            total = int(found[1]) if found else None
            is_right, end = total is None or total <= start, start
        elif total is not None:
            end = total if end is None else min(end, total)
        self.total_bytes = total
        """Size of the file; None if the server does not tell."""
        if size_bytes is not None and total is not None:
            is_right = is_right and size_bytes == total
        if not is_right:
            response.close()
            size = "" if size_bytes is None else f", or it has not the {size_bytes} bytes declared"
            raise CorruptError(
                f"{response.server} sent another range of {name} than was asked for{size}"
            )
        self._skip_bytes = 0 if self.is_partial else start
        self.left_bytes: float = inf if end is None else max(0, end - start)
        """Bytes still to come; infinite if the server does not tell."""
        self.stall_s = min(STALL_S, deadline_s)
        """Silence after which the server is given up."""
        self.floor_bytes_per_s = floor_bytes_per_s(self.left_bytes + self._skip_bytes, deadline_s)
        """Rate below which bytes count as silence."""
        self._silence_s = 0.0
        self.begin_window()

    def begin_window(self) -> None:
        """Begin to measure the connection's speed anew."""
        self.began_s = time.monotonic()
        self.came_bytes = 0
        self.waited_s = 0.0
        """Time spent waiting for bytes, without the time that the reader takes between reads."""
        self.silent_s = 0.0
        """Last part of `waited_s`, in which almost nothing has come."""
        self._progress = ByteProgress(0.0, self.floor_bytes_per_s)

    def read(self, size: int, silence_s: float = inf) -> bytes:
        """Return the next bytes, at most `size`; b"" at the end.

        Raises: UnavailableError if the body is cut off; DeadlineError after `silence_s` without a
        byte, or after `self.stall_s` with almost none.
        """
        silence_s = min(silence_s, self.stall_s)
        if silence_s != self._silence_s:
            self._silence_s = silence_s
            self._response.wait_at_most(silence_s)
        while self.left_bytes and size:
            wanted = self._skip_bytes or min(size, self.left_bytes)
            began_s = time.monotonic()
            try:
                data = self._response.read(int(min(wanted, _PIECE_BYTES)))
            finally:
                self.waited_s += time.monotonic() - began_s
            if not data:
                if self.left_bytes < inf or self._skip_bytes:
                    raise UnavailableError(f"{self._response.server} cut off {self._name}")
                self.left_bytes = 0
                break
            self.came_bytes += len(data)
            self.silent_s = self._progress.silent_s(self.came_bytes, self.waited_s)
            if self.silent_s >= self.stall_s:
                raise DeadlineError(f"{self._response.server} sends {self._name} too slowly")
            if self._skip_bytes:
                self._skip_bytes -= len(data)
                continue
            self.left_bytes -= len(data)
            if not self.left_bytes:
                self._finish()
            return data
        return b""

    def read_into(self, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer`; return the count, short at the end of the range or of a given-up attempt.

        Raises: as `read`.
        """
        done = 0
        while data := self.read(len(buffer) - done):
            if not attempt.put(done, buffer, data):
                break
            done += len(data)
        return done

    def _finish(self) -> None:
        # Reading the end of the body makes the connection available for other requests.
        if self.is_partial:
            with contextlib.suppress(UnavailableError, DeadlineError):
                self._response.read(1)
        self._response.close()

    def close(self) -> None:
        """Close the connection unless the body was read to its end. Idempotent."""
        self._response.close()


AskRange: TypeAlias = Callable[[int, int, bool], RangeResponse]
"""Requests the bytes [start, end) of one file once. The third argument is True if another attempt
at the same bytes is late: another server should be asked. Raises: BootseerError."""


class RangedFile:
    """File of known size, read by ranges: a `Reader` of a store without `current`."""

    block_bytes = 0
    can_stop = True
    has_replicas = False

    def __init__(
        self,
        ask: AskRange,
        size_bytes: int,
        name: str,
        *,
        pace: Pace | None = None,
        policy: Policy = REQUEST,
        deadline_s: float = 60.0,
    ) -> None:
        """Make a file; no server is asked.

        Args:
            ask: Requests one range, once.
            size_bytes: Size of the file.
            name: Name of the file in messages.
            pace: Speeds of reads of the same storage, which tell whether a read is late.
            policy: Attempts of `open` and `read`.
            deadline_s: Seconds after the last bytes within which another attempt may begin.
        """
        self.ask = ask
        self.size_bytes = size_bytes
        self.name = name
        self.pace = pace or Pace()
        self.policy = policy
        self.deadline_s = deadline_s

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Make one attempt to fill `buffer` from `offset`.

        The owner of `attempt` notices if the read is late. Returns: The count, short only at the
        end of the file or if the attempt was given up.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError, CorruptError.
        """
        end = min(offset + len(buffer), self.size_bytes)
        if offset >= end:
            return 0
        with self.ask(offset, end, attempt.asks_elsewhere) as part:
            return part.read_into(buffer[: end - offset], attempt)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end. Raises: as `read_into`."""
        with RangedStream(self, offset, min(offset + length, self.size_bytes)) as stream:
            return stream.readall()

    def open(self) -> BinaryIO:
        """Open the file for reading from start to end. `read` raises as `read_into`."""
        return cast(BinaryIO, RangedStream(self, 0, self.size_bytes))


class RangedStream(io.RawIOBase):
    """Stream of a file's bytes, in pieces of any size.

    One connection brings them; another connection replaces it if it breaks, or if it is late while
    the file's `pace` has credit. If the file is large and the first bytes come slowly, the rest is
    fetched in parts, several at once; at most `STREAMS_COUNT` + 1 parts are in memory.
    """

    def __init__(self, file: RangedFile, start: int, end: int) -> None:
        super().__init__()
        self._file = file
        self._position = start
        self._end = end
        self._trial_end = start + FIRST_BYTES if end - start >= LARGE_BYTES else end
        """Position up to which the speed of one connection is measured."""
        self._trial_s = 0.0
        self._attempts = Attempts(file.policy, file.deadline_s)
        self._range: RangeResponse | None = None
        self._is_ranged = False
        self._asks_elsewhere = False
        self._new_bytes = 0
        self._fetcher: ChunkFetcher | None = None
        self._parts: deque[tuple[Chunk, Batch]] = deque()
        self._came: dict[Chunk, memoryview] = {}
        self._part = memoryview(b"")
        self._next = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Fill the front of `buffer` and return the count. Raises: as `read`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """Return the remaining bytes. Raises: as `read`."""
        # The inherited method reads pieces of 8 KiB, each of which costs as much as a large one.
        return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, maybe fewer; b"" only at the end.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError; CorruptError
        if the file has another size.
        """
        if size < 0:
            return self.readall()
        data = b""
        while self._position < self._end and size and not data:
            if self._position == self._trial_end:
                self._choose_connections()
            if self._fetcher is not None:
                data = self._read_part(self._fetcher, size)
            else:
                began_s = time.monotonic()
                try:
                    data = self._read_connection(min(size, self._trial_end - self._position))
                except BootseerError as error:
                    self._await_next_attempt(error)
                self._trial_s += time.monotonic() - began_s
            self._position += len(data)
        return data

    def _choose_connections(self) -> None:
        """Read the rest through several connections if the first bytes came slowly."""
        self._trial_end = self._end
        if self._is_ranged and FAST_BYTES_PER_S * self._trial_s >= FIRST_BYTES:
            self._drop_range()
            self._next = self._position
            self._fetcher = ChunkFetcher(
                lambda _, *part: self._file.read_into(*part),
                threads=STREAMS_COUNT,
                # A part may take any time as long as bytes come.
                deadline_s=inf,
                stall_s=min(STALL_S, self._file.deadline_s),
                policy=self._file.policy,
            )

    # ---- one connection -----------------------------------------------------------------------

    def _read_connection(self, size: int) -> bytes:
        """Return the next bytes. Raises: BootseerError; DeadlineError also if they are late."""
        pace = self._file.pace
        part = self._range
        if part is None:
            part = self._range = self._file.ask(self._position, self._end, self._asks_elsewhere)
            self._is_ranged, self._asks_elsewhere = part.is_partial, False
        length = min(PART_BYTES, self._end - self._position)
        data = part.read(size, pace.silent_limit_s(length) if pace.has_credit else inf)
        if not data:
            raise UnavailableError(f"{self._file.name} ended early")
        came_bytes = part.came_bytes
        late = pace.is_late(
            length + came_bytes, came_bytes, part.waited_s, part.silent_s, has_replicas=False
        )
        if late and pace.has_credit:
            raise DeadlineError(f"{self._file.name} comes too slowly")
        if part.came_bytes >= PART_BYTES:
            pace.note(part.came_bytes, time.monotonic() - part.began_s)
            part.begin_window()
        self._new_bytes += len(data)
        # A trickle does not count as progress; it would go on for ever.
        if self._new_bytes >= part.floor_bytes_per_s * part.stall_s:
            self._attempts.progressed()
        return data

    def _await_next_attempt(self, error: BootseerError) -> None:
        """Wait until the next attempt may begin. Raises: `error` if there is none."""
        self._new_bytes = 0
        part = self._drop_range()
        if isinstance(error, DeadlineError) and part and part.waited_s < part.stall_s:
            # Being late is no failure: another connection to the server may be faster.
            self._asks_elsewhere = self._file.pace.spend()
        if not self._asks_elsewhere:
            if part is not None:
                part.blame()
            self._attempts.wait(error)

    def _drop_range(self) -> RangeResponse | None:
        part, self._range = self._range, None
        if part is not None:
            part.close()
        return part

    # ---- several connections ------------------------------------------------------------------

    def _read_part(self, fetcher: ChunkFetcher, size: int) -> bytes:
        """Return the next bytes of the current part. Raises: BootseerError."""
        if not self._part:
            self._submit(fetcher)
            part, batch = self._parts.popleft()
            batch.wait()
            self._part = self._came.pop(part)
            self._submit(fetcher)
        data = bytes(self._part[: min(size, _PIECE_BYTES)])
        self._part = self._part[len(data) :]
        return data

    def _submit(self, fetcher: ChunkFetcher) -> None:
        """Request parts until `STREAMS_COUNT` of them are under way."""
        while self._next < self._end and len(self._parts) < STREAMS_COUNT:
            part = Chunk(self._file.name, self._next, min(PART_BYTES, self._end - self._next))
            fetch = covering((part,), Priority.PREFETCH)
            self._parts.append((part, fetcher.submit([fetch], self._came.__setitem__)))
            self._next = part.end

    def close(self) -> None:
        """Close all connections. Idempotent. Threads end after the piece that they wait for."""
        self._drop_range()
        if self._fetcher is not None:
            self._fetcher.close()
        self._parts.clear()
        super().close()
