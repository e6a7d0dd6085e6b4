"""A range of a file over HTTP, piece by piece as it comes.

fsspec has such ranges only as a whole, and asks for the whole again where the connection breaks. A
body that stops, or of which fewer than `FLOOR_BYTES_PER_S` come for as long as a silence may last,
is given up. Any thread, but those of fsspec's loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fsspec.asyn import sync

from bootseer.errors import UnavailableError
from bootseer.store.deadline import Call
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import Progress

_TRIES = 2
"""How often a body is begun that is wanted as a whole: fsspec's clients try heads again, not
bodies."""


def comes_in_pieces(fs: Any) -> bool:
    """Whether `read_pieces` knows this kind of file system."""
    return "http" in _protocols(fs)


def read_pieces(
    fs: Any,
    path: str,
    offset: int,
    buffer: memoryview,
    attempt: Attempt,
    call: Call[Any],
    stall_s: float,
) -> int:
    """Fill `buffer` (not empty) from `offset` of a file; returns the count, short only at its end
    or when the attempt was given up. `stall_s`: how long a silence may last.

    Raises: what `fs` raises; UnavailableError.
    """
    body = _Body(fs, path, offset, offset + len(buffer), call, stall_s)

    async def fill() -> int:
        done = 0
        async for data in body.pieces():
            if not attempt.put(done, buffer, data[: len(buffer) - done]):
                break
            done = attempt.done_bytes
            if done == len(buffer):
                break
        return done

    count: int = sync(fs.loop, fill)
    return count


def read_whole(
    fs: Any, path: str, start: int, end: int | None, call: Call[Any], stall_s: float
) -> bytes:
    """Return the bytes [start, end) of a file, or to its end where `end` is None; all of them by
    one request, so of one generation. Raises: as `read_pieces`."""

    async def read() -> bytes:
        for number in range(_TRIES):
            body = _Body(fs, path, start, end, call, stall_s)
            try:
                return b"".join([data async for data in body.pieces()])
            except Exception:
                if not body.has_begun or number + 1 == _TRIES:
                    raise
        raise AssertionError

    data: bytes = sync(fs.loop, read)
    return data if end is None else data[: end - start]


class _Body:
    """The bytes [start, end) of one file, asked for once."""

    def __init__(
        self,
        fs: Any,
        path: str,
        start: int,
        end: int | None,
        call: Call[Any],
        stall_s: float,
    ) -> None:
        self.has_begun = False
        """Whether the answer's head has come."""
        self._fs = fs
        self._path = path
        self._start = start
        self._range = {}
        if start or end is not None:
            last = "" if end is None else end - 1
            self._range = {"Range": f"bytes={start}-{last}"}
        self._call = call
        self._stall_s = stall_s
        self._brought = 0
        self._progress = Progress(0.0)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what comes, until the end or until the call was left."""
        async for data in self._http_pieces():
            if self._call.abandoned:
                return
            yield data

    async def _http_pieces(self) -> AsyncIterator[bytes]:
        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        options["headers"] = {**options.get("headers", {}), **self._range}
        async with session.get(self._fs.encode_url(self._path), **options) as answer:
            self._fs._raise_not_found_for_status(answer, self._path)
            self._begin()
            # A server without ranges begins at the file's start.
            skip = 0 if answer.status == 206 else self._start
            while data := await self._in_time(answer.content.readany()):
                if self._brought > skip:
                    yield data[max(0, len(data) - (self._brought - skip)) :]

    def _begin(self) -> None:
        self.has_begun = True
        self._progress = Progress(time.monotonic())
        self._call.progress_count += 1

    async def _in_time(self, piece: Awaitable[bytes]) -> bytes:
        # Not `wait_for`, whose task gives way to the end of the connection: what has come is lost
        # then.
        try:
            async with asyncio.timeout(self._stall_s):
                data = await piece
        except TimeoutError as error:
            raise UnavailableError(f"nothing came for {self._stall_s:g} s") from error
        self._brought += len(data)
        now_s = time.monotonic()
        silent_s = self._progress.silent_s(self._brought, now_s)
        if silent_s >= self._stall_s and data:
            raise UnavailableError(f"only a trickle came for {self._stall_s:g} s")
        if not silent_s:
            self._call.progress_count += 1
        return data


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
