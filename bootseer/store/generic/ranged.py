"""A range of a file over HTTP or in S3, piece by piece as it comes.

fsspec has such ranges only as a whole, and asks for the whole again where the connection breaks.
Any thread, but those of fsspec's loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fsspec.asyn import sync

from bootseer.errors import UnavailableError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import STALL_S

_PIECE_BYTES = 64 * 1024


def comes_in_pieces(fs: Any) -> bool:
    """Whether `read_pieces` knows this kind of file system."""
    return "http" in _protocols(fs) or "s3" in _protocols(fs)


def read_pieces(fs: Any, path: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
    """Fill `buffer` (not empty) from `offset` of a file; returns the count, short only at its end
    or when the attempt was given up. Raises: what `fs` raises, TimeoutError, UnavailableError."""
    pieces = _http_pieces if "http" in _protocols(fs) else _s3_pieces

    async def fill() -> int:
        done = 0
        async for data in pieces(fs, path, offset, offset + len(buffer)):
            if not attempt.put(done, buffer, data[: len(buffer) - done]):
                break
            done = attempt.done_bytes
            if done == len(buffer):
                break
        return done

    count: int = sync(fs.loop, fill)
    return count


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


async def _http_pieces(fs: Any, url: str, start: int, end: int) -> AsyncIterator[bytes]:
    session = await fs.set_session()
    options = dict(fs.kwargs)
    options["headers"] = {**options.get("headers", {}), "Range": f"bytes={start}-{end - 1}"}
    async with session.get(fs.encode_url(url), **options) as answer:
        fs._raise_not_found_for_status(answer, url)
        # A server without ranges begins at the file's start.
        skip = 0 if answer.status == 206 else start
        brought = 0
        while data := await _in_time(answer.content.readany()):
            brought += len(data)
            if brought > skip:
                yield data[max(0, len(data) - (brought - skip)) :]


async def _s3_pieces(fs: Any, path: str, start: int, end: int) -> AsyncIterator[bytes]:
    bucket, key, version = fs.split_path(path)
    which = {"VersionId": version} if fs.version_aware and version else {}
    answer = await fs._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **which, **fs.req_kw
    )
    wanted = int(answer["ContentLength"])
    async with answer["Body"] as body:
        while data := await _in_time(body.read(_PIECE_BYTES)):
            wanted -= len(data)
            yield data
    if wanted > 0:
        raise UnavailableError(f"the connection to {bucket} ended early")


async def _in_time(piece: Awaitable[bytes]) -> bytes:
    # Not `wait_for`, whose task gives way to the end of the connection: what has come is lost then.
    async with asyncio.timeout(STALL_S):
        return await piece
