"""Write one file to HDFS so that the failure of a DataNode does not fail the file.

*Direct* writing (`direct_write`) takes a third of hdfs-native's processor time, but cannot survive
a failure. Two kinds of files are written so: those whose readers have checksums of their own, and
whose owner can write them again, and small ones, which are kept in memory until they are closed.

*Streamed* writing uses hdfs-native 0.14.7, which fails, and forgets a block, where a DataNode has
died without the NameNode knowing (for ten minutes, by default), where a pipeline loses a DataNode,
and where the NameNode answers the request for the next block with NotReplicatedYetException,
because the report of the block before is still on its way (seen for one block in a few hundred on a
loaded cluster). So the last bytes written are kept, and the file is *recovered*: a short file is
begun again; a longer one is finished by lease recovery (0.1 to 1 s), which keeps a prefix of what
was sent, opened for append, and continued from there. With Kerberos, encryption zones and erasure
coding all files are streamed.

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
    Placed,
    Placer,
    TooFewServersError,
)
from bootseer.store.hdfs.namenode import UNANSWERED
from bootseer.store.hdfs.native import Native
from bootseer.transfer.policy import Attempts, Policy

_log = logging.getLogger(__name__)

AGAIN = Policy(attempts=12)
"""For a file that nobody writes again: some 15 s, not counting what each call waits for a NameNode.
"""
AGAIN_IN_A_GROUP = Policy(attempts=4)
"""For a file whose owner begins another one, on other DataNodes, up to four times. The last attempt
makes do with one replica."""
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
# Of the deadline: a DataNode that hangs is left in time for the caller to try another one.
_SILENCE_SHARE = 0.5


class _State(Enum):
    BUFFERED = auto()
    """All of it is in the tail; the NameNode knows an empty file."""
    DIRECT = auto()
    STREAMED = auto()
    CLOSED = auto()


class HdfsWriter(Writer):
    """A new file of HDFS, complete and durable when `close` has returned. Used by one thread."""

    def __init__(
        self,
        native: Native,
        placer: Placer,
        path: str,
        name: str,
        *,
        overwrite: bool = False,
        again: Policy = AGAIN,
    ) -> None:
        """Create the file at the absolute `path`, which messages call `name`.

        `again`: how often a failed file is recovered.

        Raises: AlreadyExistsError when it exists and `overwrite` is not set.
        """
        self._native = native
        self._placer = placer
        self._path = path
        self._name = name
        self._again = again
        self._state = _State.BUFFERED
        self._is_verified = False
        self._placed: Placed | None = None
        self._direct: DirectFile | None = None
        """In the state DIRECT."""
        self._servers: tuple[str, ...] = ()
        """Those that a direct write goes to."""
        self._tail: deque[Piece] = deque()
        """What may have to be streamed again."""
        self._tail_bytes = 0
        self._size_bytes = 0
        """How much was written; not in the state DIRECT."""
        self._wanted_replication: int | None = None
        """Where the file was given a single replica for now."""
        self._stream: Any = native.create(path, name, overwrite=overwrite)

    def expect_checksums(self) -> None:
        """Note that the caller has checksums of all that will be written, and can write the file
        again. Before anything is written."""
        self._is_verified = True

    def place(self, avoid: Collection[str]) -> tuple[str, ...] | None:
        """Have servers chosen, other than `avoid`, for the file's first block, before anything is
        written.

        Returns them, one for each replica; empty where HDFS does not say; None where there are too
        few others, and nothing was chosen. Never raises: nothing depends on it but speed.
        """
        try:
            self._placed = self._placer.place(self._path, avoid)
        except TooFewServersError:
            return None
        return tuple(self._placed.added.servers) if self._placed else ()

    def servers(self) -> tuple[str, ...]:
        """Return the servers that take the block which is being written now, one for each replica;
        they may differ from those that `place` returned.

        Empty where HDFS does not say. Never raises.
        """
        if self._direct is not None:
            return self._servers
        return self._placer.servers_of(self._path)

    @property
    def is_buffered(self) -> bool:
        return self._state is not _State.DIRECT

    @property
    def held_bytes(self) -> int:
        return self._direct.unconfirmed_bytes if self._direct else _TAIL_MAX_BYTES

    def keep_alive(self) -> None:
        if self._direct is not None:
            self._directly(self._direct.keep_alive)

    def write(self, data: Piece) -> None:
        if not isinstance(data, bytes | bytearray):
            data = bytes(data)  # hdfs-native is fast for these alone
        for start in range(0, len(data), _PIECE_BYTES):
            # A slice of all of it would be a copy.
            small = data if len(data) <= _PIECE_BYTES else data[start : start + _PIECE_BYTES]
            self.write_all([small], _ignore)

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        if self._state is _State.CLOSED:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        if self._is_verified and self._state is _State.BUFFERED and not self._size_bytes:
            self._direct = self._begin_direct(LARGE)
            if self._direct is not None:
                self._state = _State.DIRECT
        if self._direct is not None:
            for piece in pieces:
                self._directly(self._direct.write, piece)
                note_progress()
            return
        self._tail.extend(pieces)
        count = sum(map(len, pieces))
        self._tail_bytes += count
        self._size_bytes += count
        if self._state is _State.BUFFERED:
            if self._size_bytes <= _SMALL_MAX_BYTES:
                return
            self._state = _State.STREAMED
            pieces = list(self._tail)
        try:
            # One call, and so one change of threads, for all of them.
            self._send(pieces, note_progress)
        except UnavailableError as error:
            self._recover(error, close=False)
        # Only now: the failure of a piece may concern those before it.
        while self._tail_bytes - len(self._tail[0]) > _TAIL_MAX_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def close(self) -> None:
        if self._direct is not None:
            # After a failure the caller may want what is there.
            self._directly(self._direct.close)
        elif self._state is not _State.CLOSED:
            try:
                try:
                    if self._state is _State.STREAMED or not self._write_small():
                        self._close_stream()
                except UnavailableError as error:
                    self._recover(error, close=True)
            except BootseerError:
                self.abort()
                raise
            self._restore_replication()
        self._end()

    def abandon(self) -> bool:
        """Leave the file, closed by lease recovery: only a closed one can be read to its end."""
        if self._direct is not None:
            self._direct.drop()
        if self._state is _State.CLOSED:
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
        was_open = self._state is not _State.CLOSED
        # The client is not told to close, which would make the file look complete.
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
        self._state = _State.CLOSED
        if self._direct is not None:
            self._direct.drop()
            self._direct = None
        self._stream = None
        self._tail.clear()

    # ---- direct ---------------------------------------------------------------------------------

    def _begin_direct(self, kind: ChecksumKind) -> DirectFile | None:
        """Return what writes directly, where the file is placed and its DataNode takes it so."""
        placed, self._placed = self._placed, None
        if placed is None:
            return None
        self._servers = tuple(placed.added.servers)
        return self._placer.open_direct(placed, self._native.deadline_s * _SILENCE_SHARE, kind)

    def _directly(self, step: Callable[..., None], *arguments: Piece) -> None:
        try:
            step(*arguments)
        except UNANSWERED as error:
            raise UnavailableError(f"cannot write {self._name}: {error}") from error

    def _write_small(self) -> bool:
        """Write the buffered bytes; return whether that has completed the file."""
        self._state = _State.STREAMED  # also for what follows a failure
        if not self._tail:
            return False
        self.place(())
        direct = self._begin_direct(STANDARD)
        if direct is None:
            self._send(self._tail, _ignore)
            return False
        try:
            for piece in self._tail:
                self._directly(direct.write, piece)
            self._directly(direct.close)
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
        try:
            self._native.run(work, "write", self._name, deadline_s=deadline_s)
        except NotFoundError as error:
            raise UnavailableError(str(error)) from error

    def _recover(self, cause: UnavailableError, *, close: bool) -> None:
        """Send the missing bytes again until all are there, and close the file or leave it open."""
        # The NameNode goes on offering a DataNode that has just died for seconds, and a block may
        # not be reported yet.
        attempts = Attempts(self._again)
        end_s = time.monotonic() + self._native.deadline_s
        kept_bytes = 0
        while True:
            if isinstance(cause.__cause__, NotFoundError):
                raise cause  # deleted or replaced by another client: not ours any more
            if isinstance(cause.__cause__, DeadlineError) and time.monotonic() > end_s:
                raise cause.__cause__
            pause_s = attempts.pause_s(cause)
            if pause_s is None:
                raise cause
            _log.debug("%s: attempt %d after %s", self._name, attempts.failures_count, cause)
            time.sleep(pause_s)
            try:
                waiting = "NotReplicatedYet" in str(cause)  # for a report: all servers are well
                single = attempts.failures_count > _SINGLE_REPLICA_ATTEMPT and not waiting
                size_bytes = self._reopen(single=single, is_kept=waiting)
                if size_bytes > kept_bytes:
                    # Of a file of many blocks each may have to wait.
                    attempts.progressed()
                    kept_bytes = size_bytes
                try:
                    stall_s = self._native.deadline_s * _STALL_SHARE
                    self._send(self._missing(size_bytes), _ignore, stall_s)
                except DeadlineError as error:
                    raise UnavailableError(str(error)) from error
                if close:
                    self._close_stream()
                return
            except UnavailableError as error:
                cause = error

    def _reopen(self, *, single: bool, is_kept: bool) -> int:
        """Open the file for writing again, and return its size; `single`: with one replica;
        `is_kept`: bytes that the DataNodes have need not be sent again."""
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
        """Return the pieces that were written from `size_bytes` on."""
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
