"""`BlobReader`: ranges of blobs, and whole blobs from start to end, of one repository.

Owns which server gave which blob, so that one that gave a wrong one is not asked first again.
Nothing is verified but sizes: only who reads to the end knows the digest. Thread-safe.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, cast

from bootseer.errors import CorruptError
from bootseer.registry.download import (
    FIRST_BYTES,
    LARGE_BYTES,
    BlobStream,
    LargeBlob,
    OpenedRange,
)
from bootseer.registry.http.retry import STALL_S
from bootseer.registry.servers import Servers
from bootseer.registry.session import Session

_RANGE = re.compile("bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|[*])")


class BlobReader:
    """The blobs of one repository."""

    def __init__(self, servers: Servers, deadline_s: float) -> None:
        self._servers = servers
        self._deadline_s = deadline_s
        self._givers: dict[str, Callable[[], None]] = {}
        """Per blob read from its start: notes a failure of the server that gave it."""

    def read(self, digest: str, size_bytes: int, start: int, end: int) -> bytes:
        """The bytes [start, end) of a blob of `size_bytes`, not verified. Raises: as `manifest`."""
        with self._stream(digest, size_bytes, start, min(end, size_bytes)) as stream:
            return stream.readall() or b""

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """A whole blob of `size_bytes` for one read from start to end, which survives broken
        connections. Its size is checked, its digest is not: who finds it wrong opens it again,
        and then another server is asked first.

        `read` raises as `manifest`.
        """
        if blame := self._givers.pop(digest, None):
            blame()
        if size_bytes < LARGE_BYTES:
            return cast(BinaryIO, self._stream(digest, size_bytes, 0, size_bytes))
        first = self._stream(digest, size_bytes, 0, FIRST_BYTES)
        if not first.is_ranged:
            first.extend(size_bytes)
            return cast(BinaryIO, first)
        return cast(
            BinaryIO, LargeBlob(first, partial(self._stream, digest, size_bytes), size_bytes)
        )

    def _stream(self, digest: str, size_bytes: int, start: int, end: int) -> BlobStream:
        what = f"{self._servers.name}@{digest[:19]}"
        window_s = min(STALL_S, self._deadline_s)
        return BlobStream(partial(self._open_range, digest, size_bytes), start, end, what, window_s)

    def _open_range(self, digest: str, size_bytes: int, start: int, end: int) -> OpenedRange:
        def get(session: Session) -> OpenedRange:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            response = session.open("GET", f"blobs/{digest}", headers=headers)
            if response.status == 206:
                found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
                wrong = found is None or int(found[1]) != start or int(found[2]) >= end
                wrong = wrong or (found is not None and found[3] not in ("*", str(size_bytes)))
            else:
                wrong = response.headers.get("Content-Length", str(size_bytes)) != str(size_bytes)
            if wrong:
                response.close()
                raise CorruptError(
                    f"{session.name}: the blob {digest} has not the {size_bytes} bytes declared"
                )
            if start == 0:
                self._givers[digest] = session.note_failure
            partial_answer = response.status == 206
            skip_bytes = 0 if partial_answer else start
            return OpenedRange(response, skip_bytes, partial_answer, session.note_failure)

        return self._servers.ask("pull", get)
