"""`BlobReader`: ranges of blobs, and whole blobs from start to end, of one repository.

Owns which server gave which blob, so that one that gave a wrong one is not asked first again.
Nothing is verified but sizes: only who reads to the end knows the digest. Thread-safe.
"""

import contextlib
import re
from collections import OrderedDict
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
from bootseer.registry.servers import Servers
from bootseer.registry.session import Session
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import STALL_S, Pace
from bootseer.transfer.policy import ONCE, Policy

GIVERS_MAX = 1000
"""More than are read between two looks at one blob."""
_RANGE = re.compile("bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|[*])")


class BlobReader:
    """The blobs of one repository."""

    def __init__(self, servers: Servers, deadline_s: float) -> None:
        self._servers = servers
        self._stall_s = min(STALL_S, deadline_s)
        self._pace = Pace()
        self._givers: OrderedDict[str, Callable[[], None]] = OrderedDict()
        """Per blob read from its start lately: notes a failure of the server that gave it."""

    def read(self, digest: str, size_bytes: int, start: int, end: int) -> bytes:
        """The bytes [start, end) of a blob of `size_bytes`, not verified. Raises: as `manifest`."""
        with self._stream(digest, size_bytes, start, min(end, size_bytes)) as stream:
            return stream.readall() or b""

    def read_into(
        self, digest: str, size_bytes: int, start: int, buffer: memoryview, attempt: Attempt
    ) -> int:
        """Fill `buffer` from `start`, once: who makes the attempt goes on where it ended. Returns
        the count. Raises: as `manifest`."""
        end, done = min(start + len(buffer), size_bytes), 0

        def open_range(start: int, end: int, _: bool) -> OpenedRange:
            return self._open_range(digest, size_bytes, start, end, attempt.is_second, ONCE)

        # Whether it is late is seen by who makes the attempt.
        with BlobStream(
            open_range,
            start,
            end,
            self._name(digest),
            pace=Pace(credit=0.0),
            policy=ONCE,
            stall_s=self._stall_s,
        ) as stream:
            while (data := stream.read(len(buffer) - done)) and attempt.put(done, buffer, data):
                done += len(data)
        return done

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
        large = LargeBlob(
            first,
            partial(self._stream, digest, size_bytes),
            lambda _, *part: self.read_into(digest, size_bytes, *part),
            size_bytes,
            policy=self._servers.policy,
            stall_s=self._stall_s,
        )
        return cast(BinaryIO, large)

    def _name(self, digest: str) -> str:
        return f"{self._servers.name}@{digest[:19]}"

    def _stream(self, digest: str, size_bytes: int, start: int, end: int) -> BlobStream:
        return BlobStream(
            partial(self._open_range, digest, size_bytes),
            start,
            end,
            self._name(digest),
            pace=self._pace,
            policy=self._servers.policy,
            stall_s=self._stall_s,
        )

    def _open_range(
        self,
        digest: str,
        size_bytes: int,
        start: int,
        end: int,
        is_second: bool,
        policy: Policy | None = None,
    ) -> OpenedRange:
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
                # A server that lives for weeks reads blobs without number.
                while len(self._givers) > GIVERS_MAX:
                    with contextlib.suppress(KeyError):  # another thread was faster
                        self._givers.popitem(last=False)
            partial_answer = response.status == 206
            skip_bytes = 0 if partial_answer else start
            return OpenedRange(response, skip_bytes, partial_answer, session.note_failure)

        return self._servers.ask("pull", get, policy=policy, is_second=is_second)
