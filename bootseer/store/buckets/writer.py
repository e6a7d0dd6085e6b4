"""Writer of one object: a single PUT for a small object, a multipart upload for a large one.

An object appears when it is complete: a writer that dies leaves no visible object. The parts that a
killed writer has uploaded stay in the bucket, invisible, until a rule of the bucket removes them
(docs/stores/s3.md). Of several writers of a new key exactly one wins if the object is sent by a
single PUT (`SINGLE_BYTES`). Multipart uploads cannot be made conditional everywhere (Ceph RGW
ignores the condition), so of several writers of a larger object that found no object when they
began, the last one wins.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from bootseer.errors import DeadlineError, InvalidInputError
from bootseer.store.backend import Piece, Writer
from bootseer.store.deadline import SLOWEST_BYTES_PER_S

SINGLE_BYTES = 64 << 20
"""Largest object that is kept in memory and sent by a single PUT."""
PART_BYTES = 16 << 20
"""Size of a part. S3 accepts ten thousand parts, so an object may have 160 GB."""
PARTS_AT_ONCE = 4
LAST_PARTS_S = PARTS_AT_ONCE * PART_BYTES / SLOWEST_BYTES_PER_S
_QUEUE_BYTES = 2 * PART_BYTES


class WriterRequests(Protocol):
    """Requests that a writer needs of its backend. Each raises BootseerError."""

    def put(self, path: str, pieces: Sequence[Piece], size_bytes: int, overwrite: bool) -> None:
        """Create an object by one PUT."""
        ...

    def refuse_existing(self, path: str) -> None:
        """Raise AlreadyExistsError if there is an object at `path`."""
        ...

    def upload(self, path: str, pieces: Iterator[Piece]) -> None:
        """Create an object by a multipart upload; no object is left if `pieces` raises."""
        ...


class BucketWriter(Writer):
    """Writer that keeps data in memory until `close`, or until a multipart upload is worthwhile."""

    def __init__(
        self, requests: WriterRequests, path: str, name: str, *, overwrite: bool, deadline_s: float
    ) -> None:
        """Prepare to write `path`, which messages call `name`.

        `deadline_s`: longest time that a write may wait without progress.
        """
        self._requests = requests
        self._path = path
        self._name = name
        self._overwrite = overwrite
        self._deadline_s = deadline_s
        self._pieces: list[Piece] = []
        self._size_bytes = 0
        self._upload: _MultipartUpload | None = None
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
                self._requests.refuse_existing(self._path)
            kept, self._pieces = self._pieces, []
            self._upload = _MultipartUpload(
                lambda pieces: self._requests.upload(self._path, pieces), self._name
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
        self._requests.put(self._path, pieces, self._size_bytes, self._overwrite)

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
    """Raised in the upload's thread to end the upload without an object."""


class _MultipartUpload:
    """Multipart upload in its own thread, which takes pieces from a queue of bounded size."""

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
        """Queue one piece, after waiting until the queue has room. Raises: BootseerError."""
        self._wait(lambda: self._queued_bytes < _QUEUE_BYTES, deadline_s)
        with self._changed:
            self._queued_bytes += len(data)
        self._queue.put(data)

    def finish(self, deadline_s: float) -> None:
        """Wait until the object is complete. Raises: BootseerError."""
        self._queue.put(None)
        # The last parts are being sent, and report no progress.
        self._wait(lambda: False, deadline_s + LAST_PARTS_S)

    def abort(self, deadline_s: float) -> None:
        """End the upload without an object, and wait for its end. Never raises."""
        self._queue.put(_AbortedError)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, deadline_s)

    def _wait(self, is_ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `is_ready` returns True or the upload has ended.

        Raises: the upload's error; DeadlineError if no piece was taken for `deadline_s`.
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
