"""A writer of one object: a single PUT of what is small, a multipart upload of what is large.

An object appears when it is complete, so that a writer that dies leaves nothing to be seen. What a
killed one has uploaded in parts stays in the bucket, unseen, until a rule of the bucket removes it
(docs/stores/s3.md). Of several writers of a new key exactly one wins if the object is sent by a
single PUT (`SINGLE_BYTES`): no storage decides that for multipart uploads (Ceph RGW ignores the
condition there), so of larger ones the last wins that found no object when it began.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from bootseer.errors import DeadlineError, InvalidInputError
from bootseer.store.backend import Piece, Writer
from bootseer.store.buckets.access import SLOWEST_BYTES_PER_S

SINGLE_BYTES = 64 << 20
"""What is sent by a single PUT, and kept in memory until then."""
PART_BYTES = 16 << 20
"""The least size of a part: S3 takes ten thousand parts, so that an object may have 160 GB."""
PARTS_AT_ONCE = 4
LAST_PARTS_S = PARTS_AT_ONCE * PART_BYTES / SLOWEST_BYTES_PER_S
_QUEUE_BYTES = 2 * PART_BYTES


class Sends(Protocol):
    """Who sends a writer's bytes: the backend. Raises: BootseerError."""

    def put(self, path: str, pieces: Sequence[Piece], size_bytes: int, overwrite: bool) -> None:
        """Make an object by one PUT."""
        ...

    def refuse_existing(self, path: str) -> None:
        """Raise AlreadyExistsError when there is an object at `path`."""
        ...

    def upload(self, path: str, pieces: Iterator[Piece]) -> None:
        """Make an object in parts, while pieces come; nothing is left of it when they raise."""
        ...


class BucketWriter(Writer):
    """Keeps what is written until it is worth an upload in parts, or is closed."""

    def __init__(
        self, sends: Sends, path: str, name: str, *, overwrite: bool, deadline_s: float
    ) -> None:
        """`name` is for messages. `deadline_s`: how long a write may wait without progress."""
        self._sends = sends
        self._path = path
        self._name = name
        self._overwrite = overwrite
        self._deadline_s = deadline_s
        self._pieces: list[Piece] = []
        self._size_bytes = 0
        self._upload: _Upload | None = None
        self._is_closed = False

    def write(self, data: Piece) -> None:
        if self._is_closed:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        self._size_bytes += len(data)
        if self._upload is not None:
            self._upload.put(data, self._deadline_s)
            return
        self._pieces.append(data)
        if self._size_bytes > SINGLE_BYTES:
            if not self._overwrite:
                self._sends.refuse_existing(self._path)
            kept, self._pieces = self._pieces, []
            self._upload = _Upload(
                lambda pieces: self._sends.upload(self._path, pieces), self._name
            )
            for piece in kept:
                self._upload.put(piece, self._deadline_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._upload is not None:
            self._upload.finish(self._deadline_s)
            return
        pieces, self._pieces = self._pieces, []
        self._sends.put(self._path, pieces, self._size_bytes, self._overwrite)

    def abort(self) -> None:
        self._is_closed = True
        self._pieces = []
        if self._upload is not None:
            self._upload.abort(self._deadline_s)
            self._upload = None

    @property
    def held_bytes(self) -> int:
        return min(self._size_bytes, SINGLE_BYTES if self._upload is None else _QUEUE_BYTES)


class _AbortedError(Exception):
    """The writer gave up: the upload must leave nothing."""


class _Upload:
    """An upload in a thread of its own, which takes pieces from a queue of bounded size."""

    def __init__(self, send: Callable[[Iterator[Piece]], None], name: str) -> None:
        self._send = send
        self._name = name
        self._queue: queue.SimpleQueue[Piece | type[_AbortedError] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._queued_bytes = 0
        self._taken_count = 0
        self._is_over = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="bootseer-upload", daemon=True).start()

    def put(self, data: Piece, deadline_s: float) -> None:
        """Hand one piece over, as soon as the queue has room. Raises: BootseerError."""
        self._wait(lambda: self._queued_bytes < _QUEUE_BYTES, deadline_s)
        with self._changed:
            self._queued_bytes += len(data)
        self._queue.put(data)

    def finish(self, deadline_s: float) -> None:
        """Wait until the object is there. Raises: BootseerError."""
        self._queue.put(None)
        # The last parts are on their way then, of which nothing is seen.
        self._wait(lambda: False, deadline_s + LAST_PARTS_S)

    def abort(self, deadline_s: float) -> None:
        """Let the upload end without an object, and wait for that. Never raises."""
        self._queue.put(_AbortedError)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, deadline_s)

    def _wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_ready`, or the end.

        Raises: the upload's error; DeadlineError when no piece was taken for `deadline_s`.
        """
        with self._changed:
            while not (self._is_over or is_ready()):
                seen_count = self._taken_count
                if not self._changed.wait(deadline_s) and self._taken_count == seen_count:
                    self._queue.put(_AbortedError)
                    raise DeadlineError(
                        f"cannot write {self._name}: nothing was taken for {deadline_s:g} s"
                    )
            if self._error is not None:
                raise self._error

    def _pieces(self) -> Iterator[Piece]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, type):
                raise piece
            with self._changed:
                self._queued_bytes -= len(piece)
                self._taken_count += 1
                self._changed.notify_all()
            yield piece

    def _run(self) -> None:
        try:
            self._send(self._pieces())
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
