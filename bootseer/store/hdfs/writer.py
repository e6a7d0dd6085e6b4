"""Writer of one HDFS file, which survives the failure of a DataNode.

*Direct* writing (`direct_write`) takes a third of hdfs-native's processor time, but cannot survive
a failure. Two kinds of files are written directly: files whose readers have checksums of their own,
and whose owner can write them again; and small files, which are kept in memory until they are
closed.

*Streamed* writing uses hdfs-native 0.14.7. It fails, and loses a block, in three cases: a DataNode
has died and the NameNode does not know (for ten minutes by default); a pipeline loses a DataNode;
the NameNode answers the request for the next block with NotReplicatedYetException, because the
report of the last block has not arrived (seen for one block in a few hundred on a loaded cluster).
So the last bytes written are kept, and the file is *recovered*: a short file is created again; a
longer one is closed by lease recovery (0.1 to 1 s), which keeps a prefix of the bytes sent, opened
for append, and continued from there. With Kerberos, encryption zones or erasure coding all files
are streamed.

    BUFFERED ──► DIRECT ───────────────► CLOSED     From every state: abort()   ──► CLOSED, no file
        └──────► STREAMED ◄─► _recover ───┘                           abandon() ──► CLOSED, a prefix
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import Any

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from bootseer.store.backend import Piece, Writer
from bootseer.store.deadline import Call
from bootseer.store.hdfs.direct_write import (
    LARGE,
    STANDARD,
    ChecksumKind,
    DirectFile,
    PlacedBlock,
    Placer,
    TooFewServersError,
)
from bootseer.store.hdfs.namenode import UNANSWERED
from bootseer.store.hdfs.native import Native
from bootseer.transfer.policy import Attempts, Policy

_log = logging.getLogger(__name__)

RETRY = Policy(attempts=12)
"""Recovery of a file that its owner cannot write again: about 15 s besides the waits of calls."""
RETRY_IN_GROUP = Policy(attempts=4)
"""Recovery of a file whose owner writes it again on other DataNodes, up to four times. The last
attempt uses one replica."""
# Writing one piece takes a fraction of a second, so each piece is progress for the deadline.
_PIECE_BYTES = 2 << 20
# Bytes kept for recovery: more than a pipeline has in flight (80 packets of 64 KiB) and a piece.
_TAIL_MAX_BYTES = 8 << 20
# Largest file written directly in `close`, in 20 ms; hdfs-native takes half a second.
_SMALL_MAX_BYTES = 64 << 10
# Attempts after this one use a single replica: if every pipeline contains every DataNode, a dead
# DataNode would fail all of them. The wanted replication is set again at the end.
_SINGLE_REPLICA_ATTEMPT = 2
# Shares of the deadline after which a write that makes no progress has failed, so that others can
# be tried: the first one, and one after a recovery. If a dead DataNode is the second one of a
# pipeline, hdfs-native may wait for ever (seen in one of seven such writes on a busy machine).
_SILENCE_SHARE = 0.5
_STALL_SHARE = 0.25


class _WriterState(Enum):
    BUFFERED = auto()
    """All data is in the tail; the file is empty in HDFS."""
    DIRECT = auto()
    STREAMED = auto()
    CLOSED = auto()


class HdfsWriter(Writer):
    """New HDFS file, complete and durable when `close` has returned. Used by one thread."""

    def __init__(
        self,
        native: Native,
        placer: Placer,
        path: str,
        name: str,
        *,
        overwrite: bool = False,
        retry_policy: Policy = RETRY,
    ) -> None:
        """Create the file at the absolute `path`, which messages call `name`.

        `retry_policy` says how often the file is recovered after a failure. Raises:
        AlreadyExistsError if the file exists and `overwrite` is not set.
        """
        self._native = native
        self._placer = placer
        self._path = path
        self._name = name
        self._retry_policy = retry_policy
        self._state = _WriterState.BUFFERED
        self._has_checksums = False
        self._placed: PlacedBlock | None = None
        self._direct: DirectFile | None = None
        """Set in the state DIRECT."""
        self._servers: tuple[str, ...] = ()
        """Servers of a direct write."""
        self._tail: deque[Piece] = deque()
        """Last data written, which a recovery may have to send again."""
        self._tail_bytes = 0
        self._size_bytes = 0
        """Number of bytes written; not counted in the state DIRECT."""
        self._wanted_replication: int | None = None
        """Replication to restore at the end, if a recovery has reduced it to one."""
        self._stream: Any = native.create(path, name, overwrite=overwrite)

    def expect_checksums(self) -> None:
        """Note that the caller has checksums of the data, and can write the file again.

        Call this before the first write.
        """
        self._has_checksums = True

    def place(self, avoid: Collection[str]) -> tuple[str, ...] | None:
        """Allocate the file's first block on servers other than `avoid`, before the first write.

        Return the servers, one per replica; an empty tuple if the NameNode does not answer; None if
        there are too few other servers, and nothing was allocated. Never raises.
        """
        try:
            self._placed = self._placer.place(self._path, avoid)
        except TooFewServersError:
            return None
        return tuple(self._placed.added.servers) if self._placed else ()

    def servers(self) -> tuple[str, ...]:
        """Return the servers of the block that is being written, one per replica. Never raises.

        They may differ from the result of `place`. The result is empty if HDFS does not answer.
        """
        if self._direct is not None:
            return self._servers
        return self._placer.servers_of(self._path)

    @property
    def is_buffered(self) -> bool:
        return self._state is not _WriterState.DIRECT

    @property
    def held_bytes(self) -> int:
        return self._direct.unconfirmed_bytes if self._direct else _TAIL_MAX_BYTES

    def keep_alive(self) -> None:
        if self._direct is not None:
            self._run_direct(self._direct.keep_alive)

    def write(self, data: Piece) -> None:
        if not isinstance(data, bytes | bytearray):
            data = bytes(data)  # hdfs-native is slow for other types
        for start in range(0, len(data), _PIECE_BYTES):
            # Not a slice of the whole, which would be a copy.
            small = data if len(data) <= _PIECE_BYTES else data[start : start + _PIECE_BYTES]
            self.write_all([small], _ignore)

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        if self._state is _WriterState.CLOSED:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        if self._has_checksums and self._state is _WriterState.BUFFERED and not self._size_bytes:
            self._direct = self._begin_direct(LARGE)
            if self._direct is not None:
                self._state = _WriterState.DIRECT
        if self._direct is not None:
            for piece in pieces:
                self._run_direct(self._direct.write, piece)
                note_progress()
            return
        self._tail.extend(pieces)
        count = sum(map(len, pieces))
        self._tail_bytes += count
        self._size_bytes += count
        if self._state is _WriterState.BUFFERED:
            if self._size_bytes <= _SMALL_MAX_BYTES:
                return
            self._state = _WriterState.STREAMED
            pieces = list(self._tail)
        try:
            # One call for all pieces, so that threads switch once.
            self._send(pieces, note_progress)
        except UnavailableError as error:
            self._recover(error, close=False)
        # The tail is cut after the write, whose failure may affect earlier pieces.
        while self._tail_bytes - len(self._tail[0]) > _TAIL_MAX_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def close(self) -> None:
        if self._direct is not None:
            # No abort after a failure: the caller may read the bytes written so far.
            self._run_direct(self._direct.close)
        elif self._state is not _WriterState.CLOSED:
            try:
                try:
                    if self._state is _WriterState.STREAMED or not self._write_small():
                        self._close_stream()
                except UnavailableError as error:
                    self._recover(error, close=True)
            except BootseerError:
                self.abort()
                raise
            self._restore_replication()
        self._end()

    def abandon(self) -> bool:
        """Close the file by lease recovery, since only a closed file can be read to its end."""
        if self._direct is not None:
            self._direct.drop()
        if self._state is _WriterState.CLOSED:
            return True
        try:
            self._native.recover_lease(self._path, self._name)
        except NotFoundError:
            pass
        except BootseerError as error:
            _log.debug("%s: its end cannot be read: %s", self._name, error)
            return False
        self._end()
        return True

    def abort(self) -> None:
        was_open = self._state is not _WriterState.CLOSED
        # The stream is not closed, since that would make the file look complete.
        self._end()
        if was_open:
            try:
                self._native.call(
                    lambda client: client.delete(self._path, False), "delete", self._name
                )
            except NotFoundError:
                pass
            except BootseerError as error:
                _log.warning("left %s behind: %s", self._name, error)

    def _end(self) -> None:
        self._state = _WriterState.CLOSED
        if self._direct is not None:
            self._direct.drop()
            self._direct = None
        self._stream = None
        self._tail.clear()

    # ---- direct ---------------------------------------------------------------------------------

    def _begin_direct(self, kind: ChecksumKind) -> DirectFile | None:
        """Begin a direct write if the first block is allocated and its DataNode allows it."""
        placed, self._placed = self._placed, None
        if placed is None:
            return None
        self._servers = tuple(placed.added.servers)
        return self._placer.open_direct(placed, self._native.deadline_s * _SILENCE_SHARE, kind)

    def _run_direct(self, step: Callable[..., None], *arguments: Piece) -> None:
        try:
            step(*arguments)
        except UNANSWERED as error:
            raise UnavailableError(f"cannot write {self._name}: {error}") from error

    def _write_small(self) -> bool:
        """Write the buffered bytes directly and complete the file.

        Return False if hdfs-native sent them instead, and the file must still be closed.
        """
        self._state = _WriterState.STREAMED  # a recovery after a failure streams
        if not self._tail:
            return False
        self.place(())
        direct = self._begin_direct(STANDARD)
        if direct is None:
            self._send(self._tail, _ignore)
            return False
        try:
            for piece in self._tail:
                self._run_direct(direct.write, piece)
            self._run_direct(direct.close)
        finally:
            direct.drop()
        return True

    # ---- streamed -------------------------------------------------------------------------------

    def _send(
        self,
        pieces: Iterable[Piece],
        note_progress: Callable[[], None],
        deadline_s: float | None = None,
    ) -> None:
        stream = self._stream

        def work(call: Call[None]) -> None:
            for piece in pieces:
                if call.abandoned:
                    return
                stream.write(piece)
                call.progress()
                note_progress()

        self._call(work, deadline_s)

    def _close_stream(self) -> None:
        stream = self._stream
        self._call(lambda _: stream.close())

    def _call(self, work: Callable[[Call[None]], None], deadline_s: float | None = None) -> None:
        silence_s = deadline_s or self._native.deadline_s * _SILENCE_SHARE
        try:
            self._native.run(work, "write", self._name, deadline_s=silence_s)
        except (NotFoundError, DeadlineError) as error:
            # hdfs-native may wait for ever beside a dead DataNode: a recovery finds others.
            raise UnavailableError(str(error)) from error

    def _recover(self, cause: UnavailableError, *, close: bool) -> None:
        """Reopen the file and send the missing bytes, again and again until all are written."""
        # For seconds the NameNode goes on to offer a DataNode that has just died, and a block may
        # not be reported yet.
        attempts = Attempts(self._retry_policy)
        end_s = time.monotonic() + self._native.deadline_s
        kept_bytes = 0
        while True:
            if isinstance(cause.__cause__, NotFoundError):
                raise cause  # another client has deleted or replaced the file
            if isinstance(cause.__cause__, DeadlineError) and time.monotonic() > end_s:
                raise cause.__cause__
            pause_s = attempts.pause_s(cause)
            if pause_s is None:
                raise cause
            _log.debug("%s: attempt %d after %s", self._name, attempts.failures_count, cause)
            time.sleep(pause_s)
            try:
                waiting = "NotReplicatedYet" in str(cause)  # for a report; no server has failed
                single = attempts.failures_count > _SINGLE_REPLICA_ATTEMPT and not waiting
                size_bytes = self._reopen(single=single, is_kept=waiting)
                if size_bytes > kept_bytes:
                    # Each block of a large file may have to wait for a report.
                    attempts.progressed()
                    kept_bytes = size_bytes
                stall_s = self._native.deadline_s * _STALL_SHARE
                self._send(self._missing(size_bytes), _ignore, stall_s)
                if close:
                    self._close_stream()
                return
            except UnavailableError as error:
                cause = error

    def _reopen(self, *, single: bool, is_kept: bool) -> int:
        """Open the file for writing again, and return its size.

        With `single`, the file gets one replica. With `is_kept`, bytes that DataNodes have are not
        sent again.
        """
        native, path, name = self._native, self._path, self._name
        if single and self._wanted_replication is None:
            status = native.call(lambda client: client.get_file_info(path), "write", name)
            self._wanted_replication = status.replication or 1
        if self._tail_bytes == self._size_bytes and not is_kept:
            replication = 1 if single else None
            self._stream = native.create(path, name, overwrite=True, replication=replication)
            return 0
        native.recover_lease(path, name)
        if single:
            native.call(lambda client: client.set_replication(path, 1), "write", name)
        self._stream = native.call(lambda client: client.inner.append(path), "write", name)
        status = native.call(lambda client: client.get_file_info(path), "look at", name)
        return int(status.length)

    def _missing(self, size_bytes: int) -> list[Piece]:
        """Return the data from the offset `size_bytes` on."""
        position = self._size_bytes - self._tail_bytes
        if not position <= size_bytes <= self._size_bytes:
            raise UnavailableError(
                f"cannot write {self._name}: after a failure it has {size_bytes} of "
                f"{self._size_bytes} bytes"
            )
        missing: list[Piece] = []
        for piece in self._tail:
            end = position + len(piece)
            if end > size_bytes:
                missing.append(piece[max(0, size_bytes - position) :])
            position = end
        return missing

    def _restore_replication(self) -> None:
        count = self._wanted_replication
        if count is None:
            return
        try:
            self._native.call(
                lambda client: client.set_replication(self._path, count), "replicate", self._name
            )
        except BootseerError as error:
            _log.warning("%s has one replica only: %s", self._name, error)


def _ignore() -> None:
    pass
