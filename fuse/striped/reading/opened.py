"""Open files: their sequential readers, their stored files, and their reads.

A `StreamTracker` detects sequential readers, and says how far to read ahead of them. A generation
of a file has one tracker for all descriptors, because requests do not say which reader they come
from; a tracker holds the offsets at which it expects the next read of each reader.

A stored file has several readers (`Replicas`), because a reader reads each block from the same
replica, and another reader may get another replica. hdfs-native neither says which DataNode serves
nor lets its caller choose, so `Replicas` notes which readers were slow and fast at which block.
Thread-safe. Opening waits as long as the backend does.

A `UnitRead` is the read of a stripe unit of an `OpenFile`, or of a block, as a job of the fetch
engine: it says where the bytes are stored, how they are checked, and which memory they go to.
"""

import errno
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.fuse.striped.memory import Memory
from bootseer.fuse.striped.view import ByteRange, FileView
from bootseer.store.backend import Backend, HasDescriptor, Reader
from bootseer.store.single_flight import SingleFlight
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.engine import JobAttempt, JobState, ReadInto, ReadJob

if TYPE_CHECKING:
    # Loaded only in a mount that a start with a fan-out uses.
    from bootseer.fanout.local import SharedRanges

_STREAMS_MAX = 32
# Reads of one sequential reader may be served slightly out of order by several server threads.
_SLACK_BYTES = 2 * 2**20
# Read-ahead as a multiple of the bytes that a stream has read: a header of a few KiB that is read
# in small pieces must not start megabytes of reads.
_GROWTH = 4
# The least window at the start, and the most that is read ahead for the first large read alone.
_START_WINDOW_BYTES = 64 * 2**20
# Bytes of a stream from which on whole stripe units are fetched for it.
_UNITS_FROM_BYTES = 512 * 2**10
FANOUT_SOURCE = "fan-out"
"""Name, in the statistics, of the source of bytes that other nodes have sent."""

_BLOCKS_AHEAD = 4
# Units of each part within the window: one is handed to the reader, two are fetched, and one waits,
# so that no server idles until the reader has come further.
_ROUNDS_AHEAD = 4
# Attempts to read a stored file that is missing: with several servers, one may not know it yet.
_MISSING_ATTEMPTS_MAX = 3
# Each reader may get another replica; a block rarely has more than three.
_READERS_MAX = 5
# Stored files of one file that are kept open: each reader holds a descriptor, or the places of all
# blocks, and a file that was appended to often has many parts.
_FILES_MAX = 64
_DEFAULT_BLOCK_BYTES = 64 * 2**20

Key: TypeAlias = tuple[str, int, bool]
"""Identity of the file, offset of the first byte, and whether the run is a whole stripe unit."""


class _ReadStream(Struct):
    """State of one reader of a file."""

    next: int
    """Offset at which the next read is expected."""
    read_bytes: int
    ahead: int
    """Offset up to which read-ahead was advised."""
    used_s: float
    is_sequential: bool
    window_bytes: int
    """Largest number of bytes to read ahead."""
    least_bytes: int = 0
    """Read-ahead from the first large read on."""
    widened_until: int = 0
    """Offset up to which the window is not widened again."""


class Advice(Struct, frozen=True):
    """Advice about one read: which bytes to fetch for it and ahead of it."""

    whole_units: bool
    """Whether to fetch whole units for the read, not just blocks."""
    ahead_start: int
    ahead_end: int
    """Read ahead `[ahead_start, ahead_end)`; empty for a random read."""


class StreamTracker:
    """Detector of the sequential readers of one file. The caller locks."""

    def __init__(self, window_bytes: int = _START_WINDOW_BYTES, first_bytes: int = 0) -> None:
        """Track with windows of `window_bytes`, which `widen_window` widens.

        `first_bytes`: bytes to read ahead at once for a reader that begins at the start of the
        file.
        """
        self._streams: list[_ReadStream] = []
        self._window_bytes = window_bytes
        self._first_bytes = first_bytes

    def observe(self, start: int, end: int, window_max_bytes: int, now_s: float) -> Advice:
        """Note a read of `[start, end)`; return which bytes to fetch for it and ahead of it."""
        stream = self._match(start)
        if stream is None:
            stream = _ReadStream(end, end - start, end, now_s, False, self._window_bytes)
            if not start:
                stream.least_bytes = self._first_bytes
            self._streams.append(stream)
            if len(self._streams) > _STREAMS_MAX:
                self._streams.remove(min(self._streams, key=lambda old: old.used_s))
            # A large first read at the start of a file is a reader of the whole file.
            if start > 0 or end < _UNITS_FROM_BYTES:
                return Advice(False, end, end)
            stream.is_sequential = True
        else:
            stream.used_s = now_s
            if start != stream.next:
                # Out of order, or a skip within the slack: still the same reader.
                stream.next = max(stream.next, end)
                return Advice(stream.read_bytes >= _UNITS_FROM_BYTES, end, end)
            stream.is_sequential = True
            stream.read_bytes += end - start
            stream.next = end
        if stream.read_bytes < _UNITS_FROM_BYTES:
            return Advice(False, end, end)
        window_bytes = min(stream.window_bytes, window_max_bytes)
        ahead_end = end + min(stream.least_bytes + _GROWTH * stream.read_bytes, window_bytes)
        ahead_start = max(stream.ahead, end)
        stream.ahead = max(ahead_end, ahead_start)
        return Advice(True, ahead_start, stream.ahead)

    def widen_window(self, end: int) -> None:
        """Widen the window of the stream at `end`, which waits for a slow stored file.

        A wider window keeps the faster stored files busy meanwhile.
        """
        for stream in self._streams:
            if stream.next == end >= stream.widened_until:
                stream.window_bytes += stream.window_bytes // 2
                stream.widened_until = end + stream.window_bytes // 2

    def active_count(self, since_s: float) -> int:
        """Return the number of sequential streams that have read something since then."""
        return sum(1 for s in self._streams if s.is_sequential and s.used_s >= since_s)

    def note_shortfall(self, end: int, reached: int) -> None:
        """Note that read-ahead which was advised up to `end` was started only up to `reached`."""
        for stream in self._streams:
            if stream.ahead == end:
                stream.ahead = reached

    def _match(self, start: int) -> _ReadStream | None:
        best: _ReadStream | None = None
        for stream in self._streams:
            distance = abs(start - stream.next)
            if distance == 0:
                return stream
            # Only a sequential stream gets slack: two random reads that lie close are no stream.
            near = stream.is_sequential and distance <= _SLACK_BYTES
            if near and (best is None or distance < abs(start - best.next)):
                best = stream
        return best


class Replicas:
    """The readers of one stored file."""

    def __init__(self, backend: Backend, path: str, is_checked: bool) -> None:
        self._backend = backend
        self._path = path
        self._is_checked = is_checked
        self._lock = threading.Lock()
        self._readers: dict[int, Reader] = {}
        self._numbers = itertools.count()
        self._opening = SingleFlight()
        self._block_bytes = _DEFAULT_BLOCK_BYTES
        self._slow: set[tuple[int, int]] = set()
        self._fast: dict[int, int] = {}
        """Number of the reader that was fast, by block."""

    def pick(self, offset: int, avoided: Collection[int]) -> tuple[int, Reader]:
        """Return the best reader for the block at `offset`, and its number.

        A reader whose number is in `avoided` is taken only if there is no other reader and no more
        may be opened. Raises: as opening.
        """
        if avoided:
            return self._best(offset, avoided) or self._open()
        return self._opening.do("", lambda: self._best(offset, ()), self._open)

    def _best(self, offset: int, avoided: Collection[int]) -> tuple[int, Reader] | None:
        """Return the best open reader; None if another one should be opened."""
        with self._lock:
            block = self._block(offset)
            others = [n for n in self._readers if n not in avoided]
            fast = self._fast.get(block)
            if fast in others:
                return fast, self._readers[fast]
            for number in others:
                if (number, block) not in self._slow:
                    return number, self._readers[number]
            if len(self._readers) >= _READERS_MAX:
                # All readers were slow for this block, so not the replica but the storage is slow.
                number = (others or list(self._readers))[-1]
                return number, self._readers[number]
            return None

    def descriptor(self) -> HasDescriptor | None:
        """Return a reader with a descriptor for the kernel, or None. Raises: as opening."""
        reader = self.pick(0, ())[1]
        return reader if isinstance(reader, HasDescriptor) else None

    def note_slow(self, number: int, offset: int) -> None:
        """Note that a reader was slow at `offset`."""
        with self._lock:
            block = self._block(offset)
            self._slow.add((number, block))
            if self._fast.get(block) == number:
                del self._fast[block]

    def note_fast(self, number: int, offset: int) -> None:
        """Note that a reader was fast at `offset`."""
        with self._lock:
            block = self._block(offset)
            self._slow.discard((number, block))
            self._fast[block] = number

    def drop(self, number: int) -> None:
        """Drop a reader that failed: its knowledge of the file may be out of date."""
        with self._lock:
            self._readers.pop(number, None)

    def _block(self, offset: int) -> int:
        return offset // self._block_bytes

    def _open(self) -> tuple[int, Reader]:
        reader = self._backend.open_reader(self._path, is_checked=self._is_checked)
        with self._lock:
            number = next(self._numbers)
            self._readers[number] = reader
            self._block_bytes = reader.block_bytes or self._block_bytes
            return number, reader


class OpenedParts:
    """The stored files behind one open file. They are closed when this is dropped."""

    def __init__(self, *, are_checked: bool) -> None:
        """`are_checked`: whether the layout has checksums for the bytes."""
        self._are_checked = are_checked
        self._lock = threading.Lock()
        self._replicas: OrderedDict[str, Replicas] = OrderedDict()

    def replicas(self, backend: Backend, path: str) -> Replicas:
        """Return the readers of the stored file at `path`."""
        with self._lock:
            found = self._replicas.get(path)
            if found is None:
                found = self._replicas[path] = Replicas(backend, path, self._are_checked)
                if len(self._replicas) > _FILES_MAX:
                    self._replicas.popitem(last=False)
            else:
                self._replicas.move_to_end(path)
            return found


class Sources:
    """Places that the stored bytes of a mount are read from.

    A part belongs to one generation, so the fan-out never brings bytes of another generation.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.shared: SharedRanges | None = None
        """Ranges of parts that the fan-out of a start brings; None if no start with one runs."""


class OpenFile:
    """Generation of a file that is open or read ahead.

    The lock of the `reader` guards `streams` and the counts; the engine's lock guards `passed`.
    The thread that changes the file's name replaces `view` and `pinned`.
    """

    __slots__ = ("active_count", "open_count", "parts", "passed", "pinned", "streams", "view")

    def __init__(self, view: FileView) -> None:
        self.view = view
        # Only blocks within the window are read at once, so it spans several blocks or rounds.
        window_bytes = max(_BLOCKS_AHEAD * view.block_bytes, _ROUNDS_AHEAD * view.round_bytes)
        self.streams = StreamTracker(
            max(_START_WINDOW_BYTES, window_bytes), min(_START_WINDOW_BYTES, view.round_bytes)
        )
        self.parts = OpenedParts(are_checked=view.layout is not None)
        self.active_count = 0
        """Count of active streams, as of the last time they were counted."""
        self.open_count = 0
        self.passed: deque[Key] = deque()
        """Units that the file's only reader has passed, the latest last."""
        self.pinned: bytes | None = None
        """Whole content, set before the stored file is replaced or removed."""


class UnitRead(ReadJob):
    """Read of a unit or block of an open file."""

    def __init__(
        self,
        sources: Sources,
        memory: Memory,
        file: OpenFile,
        span: ByteRange,
        *,
        patience_s: float,
        buffer: memoryview | None = None,
        target: memoryview | None = None,
    ) -> None:
        """Make a read of `span`, which `FetchEngine.add` starts.

        An attempt waits `patience_s` for memory; `buffer` is memory for the first one. With
        `target`, the bytes are written to this memory of the caller until `leave_target`.
        """
        view = file.view
        path, offset = view.source(span)
        place = f"{path}:{offset // view.block_bytes}" if view.block_bytes else path
        what = f"{view.path} at {span.start} from {sources.backend.url}"
        super().__init__(place, span.length, what)
        self.span = span
        self.data: memoryview | None = None
        """The bytes, checked; set when they are here."""
        self._path = view.path
        self._file: OpenFile | None = file
        """None after the end: dropping the last reference to an `OpenFile` closes its files."""
        self._sources = sources
        self._memory = memory
        self._patience_s = patience_s
        self._buffer = buffer
        self._target = target
        self._in_target: list[JobAttempt] = []
        """Attempts that read into the target."""
        self._leaving = threading.Lock()
        """Held while the target is written to by `land`."""
        self._replicas: Replicas | None = None
        self._offset = 0
        self._readers: dict[int, Reader] = {}
        self._is_changed = False

    @property
    def view(self) -> FileView:
        """View of the file, while the read has not ended."""
        assert self._file is not None
        return self._file.view

    # ---- called by the engine -----------------------------------------------------------------

    def open(self, one: JobAttempt) -> ReadInto:
        assert self._file is not None
        # The path is computed for each attempt, because the parts move with a renamed directory.
        path, offset = self.view.source(self.span)
        replicas = self._replicas = self._file.parts.replicas(self._sources.backend, path)
        self._offset = offset
        has_checksums = self.view.layout is not None
        shared = self._sources.shared
        if shared is None or one.attempt.asks_elsewhere or not shared.covers(path):
            return self._open_stored(one, replicas, has_checksums=has_checksums)

        def read_into(start: int, buffer: memoryview, attempt: Attempt) -> int:
            if shared.bring(path, offset + start, buffer, attempt):
                attempt.server = FANOUT_SOURCE
                return len(buffer)
            if attempt.is_given_up:
                return 0
            stored = self._open_stored(one, replicas, has_checksums=has_checksums)
            return stored(start, buffer, attempt)

        return read_into

    def _open_stored(self, one: JobAttempt, replicas: Replicas, *, has_checksums: bool) -> ReadInto:
        """Choose a reader of the stored file, or open one; as `open`."""
        offset = self._offset
        avoided = set(self.avoided_readers)
        try:
            number, reader = replicas.pick(offset, avoided)
        except NotFoundError as error:
            raise self._error_of_missing(error) from error
        self._readers[number] = reader
        one.number, one.has_replicas = number, reader.has_replicas
        one.tells_progress = reader.can_stop
        # `is_checked` turns off the storage's own checksums. They are needed after a failure, to
        # find an undamaged replica, and for a late read that no other replica can repeat.
        one.attempt.is_checked = (
            has_checksums
            and not self.failure_count
            and not self.wrong_count
            and (reader.has_replicas or not avoided)
        )

        def read_into(start: int, buffer: memoryview, attempt: Attempt) -> int:
            try:
                return reader.read_into(offset + start, buffer, attempt)
            except BaseException as error:
                if not attempt.is_given_up:
                    replicas.drop(number)
                if isinstance(error, NotFoundError):
                    raise self._error_of_missing(error) from error
                raise

        return read_into

    def _error_of_missing(self, error: NotFoundError) -> BootseerError:
        if self.failure_count + 1 < _MISSING_ATTEMPTS_MAX:
            return UnavailableError(str(error))
        return error

    def buffer(self, one: JobAttempt) -> memoryview:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            return buffer
        target = self._target
        # There is no reader yet if the fan-out is asked first.
        reader = self._readers.get(one.number)
        may_stop = reader is not None and reader.can_stop
        if target is not None and may_stop and all(o.has_returned for o in self._in_target):
            self._in_target.append(one)
            return target
        return self._memory.take(
            self.length, self._patience_s, lambda: self.state is JobState.ENDED
        )

    def spare_buffer(self) -> memoryview | None:
        return self._memory.try_take(self.length)

    def check(self, one: JobAttempt, data: memoryview) -> None:
        view = self.view
        assert self._replicas is not None
        try:
            view.verify(self.span, data)
            if view.layout is None:
                # No checksum tells whether the bytes are of one generation.
                readers = tuple(self._readers.values())
                self._is_changed = not all(view.matches(reader.current()) for reader in readers)
        except BaseException:
            self._replicas.drop(one.number)
            raise
        if not one.was_late and one.number in self._readers:
            self._replicas.note_fast(one.number, self._offset)

    def land(self, one: JobAttempt, data: memoryview) -> None:
        if self._is_changed:
            raise UnavailableError(
                f"{self._path} was changed elsewhere while open here; open it again"
            )
        if self._target is not None and data is not self._target:
            for other in self._in_target:
                other.attempt.stop()
            with self._leaving:
                if self._target is not None:
                    self._target[:] = data
                    data = self._target
        self.data = data

    def late(self, one: JobAttempt) -> None:
        if self._replicas is not None:
            self._replicas.note_slow(one.number, self._offset)

    def waiter_error(self, error: BaseException) -> BaseException:
        if isinstance(error, NotFoundError):
            return UnavailableError(
                f"{self._path} cannot be read on: the stored file behind it is gone; it was "
                "replaced or removed elsewhere while open here"
            )
        if isinstance(error, (BootseerError, OSError)):
            return error
        return UnavailableError(f"cannot read {self._path}: {type(error).__name__}: {error}")

    def ended(self) -> None:
        self._buffer = self._file = self._replicas = None
        self._readers.clear()

    # ---- called by readers --------------------------------------------------------------------

    def leave_target(self) -> None:
        """Return when nothing is written into the target any more; called after the read ended."""
        for one in self._in_target:
            one.attempt.stop()
        with self._leaving:
            self._target = None

    def raise_error(self) -> None:
        """Raise the error that ended the read, if there was one.

        Each of several readers gets its own copy: an exception holds the traceback of one thread.
        """
        error = self.error
        if error is None:
            return
        if isinstance(error, BootseerError):
            raise type(error)(*error.args)
        assert isinstance(error, OSError)
        code = error.errno or errno.EIO
        raise OSError(code, os.strerror(code), self._path)


class CopiedUnit(UnitRead):
    """Read of a stripe unit whose bytes are passed on by the thread that has read them."""

    def __init__(
        self,
        sources: Sources,
        memory: Memory,
        file: OpenFile,
        unit: ByteRange,
        consume: Callable[[int, memoryview], None],
        slots: threading.Semaphore,
        *,
        patience_s: float,
    ) -> None:
        """Make a read that calls `consume(start, bytes)`, and releases a slot when it has ended."""
        super().__init__(sources, memory, file, unit, patience_s=patience_s)
        self._consume: Callable[[int, memoryview], None] | None = consume
        self._slots = slots

    def land(self, one: JobAttempt, data: memoryview) -> None:
        super().land(one, data)
        # The memory is free for the next read as soon as the bytes are passed on.
        self.data = None
        with self._leaving:
            if self._consume is not None:
                self._consume(self.span.start, data)

    def ended(self) -> None:
        super().ended()
        self._slots.release()

    def leave(self) -> None:
        """Return when `consume` is not running and will not be called any more."""
        with self._leaving:
            self._consume = None
