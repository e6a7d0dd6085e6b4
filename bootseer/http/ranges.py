"""Files that are read by ranges over HTTP: into a buffer, or in order.

`RangedFile` is one file, given how one range of it is asked for (`AskRange`: of one URL, or of the
servers of a registry in turn). `RangedFile.read_into` makes one attempt, for a fetch engine that
makes others; `open` and `read` bring all of it, however often connections break, by the policy of
attempts. Nobody else tries again: `AskRange` asks each server once.

Sizes are checked here, digests by who reads the file to its end. A file is for any thread, a stream
for one, but it may be closed from another.
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
from bootseer.transfer.pace import FLOOR_BYTES_PER_S, STALL_S, Pace, Progress
from bootseer.transfer.policy import REQUEST, Attempts, Policy
from bootseer.transfer.ranges import Chunk, Priority, covering

_RANGE = re.compile("bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|[*])")
_NO_RANGE = re.compile("bytes [*]/([0-9]{1,19})")
_SIZE = re.compile("[0-9]{1,19}")
_PIECE_BYTES = 2**20
PART_BYTES = 8 * 2**20
"""Large enough that asking for a part costs little, small enough for five in memory."""
STREAMS_COUNT = 4
"""One TCP connection of a distant or throttled server gives a fraction of the line; beyond four
little is gained, and registries begin to refuse."""
FIRST_BYTES = 2 * PART_BYTES
"""Read through one connection, to see how fast that is: past TCP's slow start."""
FAST_BYTES_PER_S = 100_000_000
"""What a connection that fills a 1 Gbit/s line exceeds; several cost twice the CPU time there."""
LARGE_BYTES = FIRST_BYTES + 2 * PART_BYTES


class Range(Closing):
    """The bytes of a file from `start` on, as one answer brings them. For one thread."""

    def __init__(
        self,
        response: Response,
        name: str,
        start: int,
        end: int | None,
        *,
        size_bytes: int | None = None,
        blame: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the answer to a request for the bytes [start, end) of the file `name`, to its end
        where `end` is None. There are none where it begins behind the file's end (416).
        `size_bytes`: of the file, where that is known; `blame` is called when the server that
        answered turns out to be late, or to break off.

        Raises: CorruptError for the answer to another question.
        """
        self._response = response
        self._name = name
        self.blame = blame
        self.is_partial = response.status == 206
        """Whether the server understands ranges; else it begins at the file's start."""
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
        """How large the file is; None where the server does not say."""
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
        """How many bytes are still to come; infinite where the server does not say."""
        self._silence_s = 0.0
        self.begin_window()

    def begin_window(self) -> None:
        """Judge what comes from here on by itself."""
        self.began_s = time.monotonic()
        self.came_bytes = 0
        self.waited_s = 0.0
        """Only time spent in waiting counts against a connection, not what its reader takes."""
        self._progress = Progress(0.0)
        self.silent_s = 0.0
        """For how long of that only a trickle has come."""

    def read(self, size: int, *, silence_s: float, stall_s: float) -> bytes:
        """Return what comes next, at most `size` bytes; b"" at the end.

        Raises: UnavailableError where the body is cut off; DeadlineError after `silence_s` without
        a byte, and after `stall_s` of a trickle.
        """
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
            if self.silent_s >= stall_s:
                raise DeadlineError(f"{self._response.server} sends {self._name} too slowly")
            if self._skip_bytes:
                self._skip_bytes -= len(data)
                continue
            self.left_bytes -= len(data)
            if not self.left_bytes:
                self._finish()
            return data
        return b""

    def read_into(self, buffer: memoryview, attempt: Attempt, stall_s: float) -> int:
        """Fill `buffer`; return the count, short at the end of the range or when the attempt was
        given up. Raises: as `read`."""
        done = 0
        while data := self.read(len(buffer) - done, silence_s=stall_s, stall_s=stall_s):
            if not attempt.put(done, buffer, data):
                break
            done += len(data)
        return done

    def _finish(self) -> None:
        """Give the connection back, which a read of its end does."""
        if self.is_partial:
            with contextlib.suppress(UnavailableError, DeadlineError):
                self._response.read(1)
        self._response.close()

    def close(self) -> None:
        """Give the connection up. Idempotent."""
        self._response.close()


AskRange: TypeAlias = Callable[[int, int, bool], Range]
"""Asks once for the bytes [start, end) of one file; True: a server that another attempt is at is
late with them. Raises: BootseerError."""


class RangedFile:
    """File of known size that is read by byte ranges: a store's `Reader` without `current`."""

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
            pace: Speed of the reads of the same storage, by which a late one is told.
            policy: Attempts of `open` and `read`.
            deadline_s: Seconds after the last bytes within which another attempt may begin.
        """
        self.ask = ask
        self.size_bytes = size_bytes
        self.name = name
        self.pace = pace or Pace()
        self.policy = policy
        self.deadline_s = deadline_s
        self.stall_s = min(STALL_S, deadline_s)

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset`, once; return the count, short only at the end of the file
        or when the attempt was given up. Whether it is late is seen by who makes the attempt.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError, CorruptError.
        """
        end = min(offset + len(buffer), self.size_bytes)
        if offset >= end:
            return 0
        with self.ask(offset, end, attempt.is_second) as part:
            return part.read_into(buffer[: end - offset], attempt, self.stall_s)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end. Raises: as `read_into`."""
        with Stream(self, offset, min(offset + length, self.size_bytes)) as stream:
            return stream.readall()

    def open(self) -> BinaryIO:
        """Return all of the file in order. `read` raises as `read_into`."""
        return cast(BinaryIO, Stream(self, 0, self.size_bytes))


class Stream(io.RawIOBase):
    """Bytes of a file in order, in pieces of any size.

    They come through one connection; another one goes on where it breaks, or is late while the
    file's `pace` has credit. If there are many bytes, and the first come slowly, the rest is
    fetched in parts, several at once, of which at most `STREAMS_COUNT` + 1 are in memory.
    """

    def __init__(self, file: RangedFile, start: int, end: int) -> None:
        super().__init__()
        self._file = file
        self._position = start
        self._end = end
        self._trial_end = start + FIRST_BYTES if end - start >= LARGE_BYTES else end
        """Until there one connection is tried."""
        self._trial_s = 0.0
        self._attempts = Attempts(file.policy, file.deadline_s)
        self._range: Range | None = None
        self._is_ranged = False
        self._is_second = False
        self._new_bytes = 0
        self._fetcher: ChunkFetcher | None = None
        self._parts: deque[tuple[Chunk, Batch]] = deque()
        self._came: dict[Chunk, memoryview] = {}
        self._part = memoryview(b"")
        self._next = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Fill the front of `buffer` and return the count. Raises: as `read`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """Return all that is left. Raises: as `read`."""
        # The inherited one takes pieces of 8 KiB, each of which costs what a large one does.
        return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, as they come; b"" only at the end.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError, CorruptError
        where the file has another size.
        """
        if size < 0:
            return self.readall()
        data = b""
        while self._position < self._end and size and not data:
            if self._position == self._trial_end:
                self._choose()
            if self._fetcher is not None:
                data = self._of_part(self._fetcher, size)
            else:
                began_s = time.monotonic()
                try:
                    data = self._piece(min(size, self._trial_end - self._position))
                except BootseerError as error:
                    self._interrupted(error)
                self._trial_s += time.monotonic() - began_s
            self._position += len(data)
        return data

    def _choose(self) -> None:
        """Choose how the rest is read, by how fast the first bytes have come."""
        self._trial_end = self._end
        if self._is_ranged and FAST_BYTES_PER_S * self._trial_s >= FIRST_BYTES:
            self._drop_range()
            self._next = self._position
            self._fetcher = ChunkFetcher(
                lambda _, *part: self._file.read_into(*part),
                threads=STREAMS_COUNT,
                # As long as bytes come: how long a part may take nobody can say.
                deadline_s=inf,
                stall_s=self._file.stall_s,
                policy=self._file.policy,
            )

    # ---- one connection -----------------------------------------------------------------------

    def _piece(self, size: int) -> bytes:
        """Return what comes next. Raises: BootseerError; DeadlineError also where it is late."""
        pace, stall_s = self._file.pace, self._file.stall_s
        part = self._range
        if part is None:
            part = self._range = self._file.ask(self._position, self._end, self._is_second)
            self._is_ranged, self._is_second = part.is_partial, False
        length = min(PART_BYTES, self._end - self._position)
        silence_s = pace.silent_limit_s(length) if pace.has_credit else stall_s
        data = part.read(size, silence_s=min(silence_s, stall_s), stall_s=stall_s)
        if not data:
            raise UnavailableError(f"{self._file.name} ended early")
        late = pace.is_late_alike(
            length + part.came_bytes, part.came_bytes, part.waited_s, part.silent_s
        )
        if late and pace.has_credit:
            raise DeadlineError(f"{self._file.name} comes too slowly")
        if part.came_bytes >= PART_BYTES:
            pace.note(part.came_bytes, time.monotonic() - part.began_s)
            part.begin_window()
        self._new_bytes += len(data)
        # A trickle is no progress, or it would go on for ever.
        if self._new_bytes >= FLOOR_BYTES_PER_S * stall_s:
            self._attempts.progressed()
        return data

    def _interrupted(self, error: BootseerError) -> None:
        """Wait for the next attempt. Raises: `error` where there is none."""
        self._new_bytes = 0
        part = self._drop_range()
        if isinstance(error, DeadlineError) and part and part.waited_s < self._file.stall_s:
            # Late, which is no failure: others of the server's connections may do.
            self._is_second = self._file.pace.spend()
        if not self._is_second:
            if part is not None:
                part.blame()
            pause_s = self._attempts.pause_s(error)
            if pause_s is None:
                raise error
            time.sleep(pause_s)

    def _drop_range(self) -> Range | None:
        part, self._range = self._range, None
        if part is not None:
            part.close()
        return part

    # ---- several connections ------------------------------------------------------------------

    def _of_part(self, fetcher: ChunkFetcher, size: int) -> bytes:
        """Return what comes next of the next part. Raises: BootseerError."""
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
        """Begin to read parts until `STREAMS_COUNT` of them are under way."""
        while self._next < self._end and len(self._parts) < STREAMS_COUNT:
            part = Chunk(self._file.name, self._next, min(PART_BYTES, self._end - self._next))
            fetch = covering((part,), Priority.PREFETCH)
            self._parts.append((part, fetcher.submit([fetch], self._came.__setitem__)))
            self._next = part.end

    def close(self) -> None:
        """Idempotent; threads end after the piece that they wait for."""
        self._drop_range()
        if self._fetcher is not None:
            self._fetcher.close()
        self._parts.clear()
        super().close()
