"""Writing one file to HDFS, past the failures that hdfs-native 0.14.7 does not survive; or
directly, without hdfs-native, as long as nothing fails (`direct`).

A DataNode may have died without the NameNode knowing (for ten minutes, by default), a pipeline
may lose a DataNode, or the NameNode may answer the request for the next block with
NotReplicatedYetException, because the report of the block before is still on its way (seen for
one block in a few hundred on a loaded cluster). hdfs-native then fails, and forgets the block.

Owns the way out: the last bytes written are kept; a short file is begun again; a longer one is
finished by lease recovery (0.1 to 1 s), which keeps a prefix of what was sent, opened for append,
and continued from there. A writer belongs to one thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from bootseer.store.backend import Piece, Writer
from bootseer.store.deadline import Call
from bootseer.store.hdfs.connection import HdfsConnection, begin_direct
from bootseer.store.hdfs.direct.checksums import LARGE, STANDARD
from bootseer.store.hdfs.direct.direct_writer import DirectFile
from bootseer.store.hdfs.rpc.calls import UNANSWERED
from bootseer.transfer.policy import Attempts, Policy

logger = logging.getLogger(__name__)

# Some 15 s, not counting what each call waits for a NameNode: whoever writes a part of a checkpoint
# then begins another file, on other DataNodes.
_AGAIN = Policy(attempts=12)
# A call takes a fraction of a second at this size, so each one is progress for the deadline.
_PIECE_BYTES = 2 << 20
# Kept for another try: more than a pipeline has under way (80 packets of 64 KiB) and a piece.
_TAIL_MAX_BYTES = 8 << 20
# Such a file is complete 20 ms after it was closed; hdfs-native takes half a second.
_SMALL_MAX_BYTES = 64 << 10
# From this attempt on, one replica must do: where every DataNode is in every pipeline, a dead one
# would spoil all others. The wanted number is asked for again at the end.
_SINGLE_REPLICA_ATTEMPT = 2
# Of the deadline: where a dead DataNode is the second of a pipeline, hdfs-native was seen to wait
# for ever (in one write of seven beside one, on a busy machine). A new pipeline does not.
_STALL_SHARE = 0.25


class HdfsWriter(Writer):
    """A new file, complete and durable when closed."""

    def __init__(self, connection: HdfsConnection, path: str, full: str) -> None:
        self._connection = connection
        self._path = path
        self._full = full
        self._writer: Any = None
        self._tail: deque[Piece] = deque()
        self._tail_bytes = 0
        self._size_bytes = 0
        self._wanted_replication: int | None = None
        self._direct: DirectFile | None = None
        self.is_kept = True
        """All of it is still in the tail: a small file is written when it is closed."""
        self._awaits_placement = False

    def open(self, *, overwrite: bool) -> Self:
        """Create the file. Raises: AlreadyExistsError."""
        self._writer = self._connection.create_raw(self._path, overwrite=overwrite)
        return self

    def expect_checksums(self) -> None:
        self._awaits_placement = True
        self._connection.placer.await_placed(self._full)

    def keep_alive(self) -> None:
        if self._direct is not None:
            self._write_direct(self._direct.keep_alive)

    def write(self, data: Piece) -> None:
        if not isinstance(data, bytes | bytearray):
            data = bytes(data)  # hdfs-native is fast for these alone
        for start in range(0, len(data), _PIECE_BYTES):
            # A slice of all of it would be a copy.
            small = data if len(data) <= _PIECE_BYTES else data[start : start + _PIECE_BYTES]
            self.write_all([small], lambda: None)

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        if self._writer is None:
            raise InvalidInputError(f"cannot write {self._connection.name(self._path)}: closed")
        if self._awaits_placement:
            self._awaits_placement = False
            self._direct = begin_direct(self._connection, self._path, LARGE)
        direct = self._direct
        if direct is not None:
            for piece in pieces:
                self._write_direct(partial(direct.write, piece))
                note_progress()
            return
        self._tail.extend(pieces)
        count = sum(map(len, pieces))
        self._tail_bytes += count
        self._size_bytes += count
        if self.is_kept:
            if self._size_bytes <= _SMALL_MAX_BYTES:
                return
            self.is_kept = False
            pieces = list(self._tail)
        try:
            # One call, and so one change of threads, for all of them.
            self._send(pieces, note_progress)
        except UnavailableError as error:
            self._try_again(error, close=False)
        # Only now: the failure of a piece may concern those before it.
        while self._tail_bytes - len(self._tail[0]) > _TAIL_MAX_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def _write_direct(self, step: Callable[[], None]) -> None:
        try:
            step()
        except UNANSWERED as error:
            name = self._connection.name(self._path)
            raise UnavailableError(f"cannot write {name}: {error}") from error

    def _drop_direct(self) -> None:
        if self._awaits_placement:
            self._awaits_placement = False
            self._connection.placer.take_placed(self._full)
        if self._direct is not None:
            self._direct.drop()
            self._direct = None

    def _send(
        self,
        pieces: Iterable[Piece],
        note_progress: Callable[[], None],
        deadline_s: float | None = None,
    ) -> None:
        writer = self._writer

        def work(call: Call[None]) -> None:
            for piece in pieces:
                if call.abandoned:
                    return
                writer.write(piece)
                call.progress_count += 1
                note_progress()

        self._call(work, deadline_s)

    def _send_again(self, pieces: Iterable[Piece]) -> None:
        try:
            self._send(pieces, lambda: None, self._connection.deadline_s * _STALL_SHARE)
        except DeadlineError as error:
            raise UnavailableError(str(error)) from error

    def _try_again(self, cause: UnavailableError, *, close: bool) -> None:
        """Bring the file to where it should be, and close it or leave it open."""
        # The NameNode goes on offering a DataNode that has just died for seconds, and a block may
        # not be reported yet.
        attempts = Attempts(_AGAIN)
        end_s = time.monotonic() + self._connection.deadline_s
        kept_bytes = 0
        while True:
            if isinstance(cause.__cause__, NotFoundError):
                raise cause  # deleted or replaced by another client: not ours any more
            if isinstance(cause.__cause__, DeadlineError) and time.monotonic() > end_s:
                raise cause.__cause__
            pause_s = attempts.pause_s(cause)
            if pause_s is None:
                raise cause
            logger.debug("%s: attempt %d after %s", self._path, attempts.failures_count, cause)
            time.sleep(pause_s)
            try:
                waiting = "NotReplicatedYet" in str(cause)  # for a report: all servers are well
                single = attempts.failures_count > _SINGLE_REPLICA_ATTEMPT and not waiting
                size_bytes = self._reopen(single=single, is_kept=waiting)
                if size_bytes > kept_bytes:
                    # Of a file of many blocks each may have to wait.
                    attempts.progressed()
                    kept_bytes = size_bytes
                self._send_again(self._missing(size_bytes))
                if close:
                    self._close_raw()
                return
            except UnavailableError as error:
                cause = error

    def _reopen(self, *, single: bool, is_kept: bool) -> int:
        """Have the file open for writing, and return its size; `single`: with one replica;
        `is_kept`: what the DataNodes have of it need not be sent again."""
        connection, full = self._connection, self._full
        if single and self._wanted_replication is None:
            status = connection.call(lambda client: client.get_file_info(full), "write", self._path)
            self._wanted_replication = status.replication or 1
        if self._tail_bytes == self._size_bytes and not is_kept:
            replication = 1 if single else None
            self._writer = connection.create_raw(
                self._path, overwrite=True, replication=replication
            )
            return 0
        self._connection.recover_lease(self._path)
        if single:
            connection.call(lambda client: client.set_replication(full, 1), "write", self._path)
        self._writer = connection.call(
            lambda client: client.inner.append(full), "write", self._path
        )
        status = connection.call(lambda client: client.get_file_info(full), "look at", self._path)
        return int(status.length)

    def _missing(self, size_bytes: int) -> list[Piece]:
        """What was given to `write` from `size_bytes` on."""
        position = self._size_bytes - self._tail_bytes
        if not position <= size_bytes <= self._size_bytes:
            raise UnavailableError(
                f"cannot write {self._connection.name(self._path)}: after a failure it has "
                f"{size_bytes} of {self._size_bytes} bytes"
            )
        missing: list[Piece] = []
        for piece in self._tail:
            end = position + len(piece)
            if end > size_bytes:
                missing.append(piece[max(0, size_bytes - position) :])
            position = end
        return missing

    def _finish(self) -> None:
        if self.is_kept:
            self.is_kept = False
            placer = self._connection.placer
            if self._tail:
                placer.await_placed(self._full)
                placer.place(self._full, ())
                self._direct = begin_direct(self._connection, self._path, STANDARD)
            if self._direct is not None:
                try:
                    for piece in self._tail:
                        self._write_direct(partial(self._direct.write, piece))
                    self._write_direct(self._direct.close)
                finally:
                    self._drop_direct()
                return
            self._send(self._tail, lambda: None)
        self._close_raw()

    def _close_raw(self) -> None:
        writer = self._writer
        self._call(lambda _: writer.close())

    def _call(self, work: Callable[[Call[None]], None], deadline_s: float | None = None) -> None:
        try:
            self._connection.run(work, "write", self._path, deadline_s=deadline_s)
        except NotFoundError as error:
            raise UnavailableError(str(error)) from error

    def close(self) -> None:
        if self._writer is None:
            return
        if self._direct is not None:
            # After a failure the caller may want what is there.
            self._write_direct(self._direct.close)
            self._writer = None  # hdfs-native's: the file is closed
        self._drop_direct()
        if self._writer is None:
            return
        try:
            try:
                self._finish()
            except UnavailableError as error:
                self._try_again(error, close=True)
        except BootseerError:
            self.abort()
            raise
        self._writer = None
        self._tail.clear()
        if self._wanted_replication is not None:
            self._restore_replication(self._wanted_replication)

    def _restore_replication(self, count: int) -> None:
        full = self._full
        try:
            self._connection.call(
                lambda client: client.set_replication(full, count), "replicate", self._path
            )
        except BootseerError as error:
            logger.warning("%s has one replica only: %s", self._connection.name(self._path), error)

    @property
    def stays_placed(self) -> bool:
        return self._direct is not None

    @property
    def is_buffered(self) -> bool:
        return self._direct is None

    @property
    def held_bytes(self) -> int:
        if self._direct is not None:
            return self._direct.unconfirmed_bytes
        return _TAIL_MAX_BYTES

    def abandon(self) -> bool:
        """Only a closed file can be read to its end: the lease is recovered for that."""
        self._drop_direct()
        if self._writer is None:
            return True
        self._tail.clear()
        try:
            self._connection.recover_lease(self._path)
        except NotFoundError:
            pass
        except BootseerError as error:
            logger.debug("%s: its end cannot be read: %s", self._path, error)
            return False
        self._writer = None
        return True

    def abort(self) -> None:
        self._drop_direct()
        if self._writer is None:
            return
        # The client is not told to close, which would make the file look complete.
        self._writer = None
        self._tail.clear()
        try:
            full = self._full
            self._connection.call(lambda client: client.delete(full, False), "delete", self._path)
        except NotFoundError:
            pass
        except BootseerError as error:
            logger.warning("left %s behind: %s", self._connection.name(self._path), error)
