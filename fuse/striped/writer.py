"""Writes one logical file: from the bytes as they come to a generation that is published whole.

Owns the file's *tail* (bytes not yet sent to a part, which may still be changed) and the segments
already written. Thread-safe, one call at a time. Nothing is visible to anybody before `publish`;
after any failure nothing ever will be, and every later call raises the same error.
"""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.layout import (
    DEFAULT_BLOCK_BYTES,
    DEFAULT_STRIPE_COUNT,
    DEFAULT_STRIPE_UNIT_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOCK_COUNT,
    MAX_SEGMENT_COUNT,
    Layout,
    Segment,
    check_geometry,
)
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.segment_writer import SegmentWriter, new_generation
from bootseer.fuse.striped.tail import Tail
from bootseer.fuse.striped.tree import StripedTree
from bootseer.fuse.striped.view import FileView


@dataclass(frozen=True, slots=True)
class StripeSettings:
    """How new files are striped."""

    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    """Files of at most this size are stored as ordinary files."""
    stripe_count: int = DEFAULT_STRIPE_COUNT
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        check_geometry(self.stripe_unit_bytes, self.stripe_count, self.block_bytes)

    @property
    def block_bytes(self) -> int:
        """The unit of verification of new files."""
        return min(DEFAULT_BLOCK_BYTES, self.stripe_unit_bytes)


def _never() -> bool:
    return False


class FileWriter:
    """A file in the making, or one that is appended to."""

    def __init__(
        self,
        tree: StripedTree,
        path: str,
        budget: MemoryBudget,
        settings: StripeSettings,
        *,
        base: FileView | None = None,
    ) -> None:
        """`base`: the generation to append to; without one the file starts empty.

        Raises UnsupportedError for a base that cannot be appended to, and on a storage that cannot
        rename in one step: there nothing could appear whole or not at all.
        """
        if not tree.backend.has_atomic_rename:
            raise UnsupportedError(
                f"{tree.backend.url} cannot rename in one step, which a safe commit needs: "
                "mount it with --read-only"
            )
        self.path = path
        self.view = base
        """The generation that this writer published last, or started from."""
        self._tree = tree
        self._budget = budget
        self._settings = settings
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._current: SegmentWriter | None = None
        self._tail = Tail()
        self._sent_bytes = 0
        self._is_dirty = base is None
        self._was_written = False
        self._expected = base.identity if base is not None else None
        self._error: BaseException | None = None
        self._is_detached = False
        self._unpublished: set[str] = set()
        if base is not None:
            self._continue(base)

    @property
    def size_bytes(self) -> int:
        """How long the file is, with all that was written so far."""
        return self._sent_bytes + self._tail.length

    @property
    def sent_bytes(self) -> int:
        """What lies before this cannot be changed any more."""
        return self._sent_bytes

    @property
    def has_failed(self) -> bool:
        """Whether an earlier call failed, so that every later one will."""
        return self._error is not None

    @property
    def needs_publishing(self) -> bool:
        """Whether something would be lost if the writer were forgotten now."""
        return self._is_dirty and self._error is None and not self._is_detached

    @property
    def was_written(self) -> bool:
        """Whether bytes came, or went, since the last `publish`."""
        return self._was_written

    # ---- writing --------------------------------------------------------------------------

    def append(self, data: bytes | memoryview, cancelled: Callable[[], bool] = _never) -> int:
        """Write at the end, whatever the caller thinks the offset is."""
        with self._lock:
            return self.write(self.size_bytes, data, cancelled)

    def write(
        self, offset: int, data: bytes | memoryview, cancelled: Callable[[], bool] = _never
    ) -> int:
        """Take `data` at `offset`: at the end, or within what has not been sent yet.

        Anything else is EOPNOTSUPP. Waits while the mount's memory is used up. Raises NoSpaceError,
        DeadlineError, UnavailableError, ...: then, as after EOPNOTSUPP, the file has failed for
        good. A program that goes on closing it must not put half a file in a good one's place.
        """
        with self._lock:
            self._check()
            if not len(data):
                return 0
            gap = offset - self.size_bytes
            with self._failing():
                if offset < self._sent_bytes or gap > self._settings.stripe_unit_bytes:
                    raise UnsupportedError(
                        f"{self.path}: a striped file is written from start to end; what lies "
                        f"before byte {self._sent_bytes} is on its way already"
                    )
                if gap > 0:
                    self._add(bytes(gap), cancelled)
                within = self.size_bytes - offset
                rest = memoryview(data)
                if within:
                    self._tail.patch(offset - self._sent_bytes, rest[:within])
                    rest = rest[within:]
                self._note_change()
                self._add(rest, cancelled)
            return len(data)

    def truncate(self, size_bytes: int) -> None:
        """Cut to nothing, or cut or grow within what has not been sent yet; else EOPNOTSUPP."""
        with self._lock:
            self._check()
            if size_bytes == self.size_bytes:
                return
            if size_bytes == 0:
                self._reset()
            elif size_bytes > self.size_bytes:
                self.write(size_bytes - 1, b"\0")
            elif size_bytes >= self._sent_bytes:
                self._tail.cut(size_bytes - self._sent_bytes)
            else:
                raise UnsupportedError(
                    f"{self.path}: a striped file can be cut to nothing, or back to byte "
                    f"{self._sent_bytes}, not to {size_bytes}"
                )
            self._note_change()

    def read(self, offset: int, length: int) -> bytes | None:
        """Bytes that were written and not sent yet; None where they are elsewhere."""
        with self._lock:
            if offset >= self.size_bytes:
                return b""
            if offset < self._sent_bytes:
                return None
            start = offset - self._sent_bytes
            return self._tail.join()[start : start + length]

    # ---- committing -----------------------------------------------------------------------

    def publish(self, cancelled: Callable[[], bool] = _never) -> None:
        """Make all that was written the file's content, durably and in one step.

        Does nothing where nothing changed. Raises as `write`, and ESTALE where somebody replaced
        the file that was being appended to.
        """
        with self._lock:
            self._check()
            if not self._is_dirty or self._is_detached:
                return
            with self._failing():
                if self._fits_a_plain_file():
                    view = self._tree.publish_plain(self.path, self._tail.pieces(), self._expected)
                else:
                    view = self._publish_striped(cancelled)
            self.view = view
            if self._segments or self._expected is not None:
                # What comes next builds on stored segments: they must still be the file's.
                self._expected = view.identity
            self._is_dirty = self._was_written = False

    def detach(self) -> None:
        """The file was unlinked, or replaced by a rename: it will never be visible."""
        with self._lock:
            self._is_detached = True

    def close(self, wait_s: float = 0.0) -> None:
        """Let go; what was not published vanishes, in the background after `wait_s`.

        Idempotent, never raises.
        """
        with self._lock:
            if self._current is not None:
                # It removes its own parts once nobody writes to them any more.
                self._unpublished.discard(self._current.generation)
                self._current.abort(wait_s)
                self._current = None
            if self._unpublished:
                self._tree.discard(self.path, set(self._unpublished))
                self._unpublished.clear()
            self._tail.clear()

    # ---- inside ---------------------------------------------------------------------------

    def _continue(self, base: FileView) -> None:
        """Start from an existing file; its last bytes become the tail where they are few."""
        unit_bytes = self._settings.stripe_unit_bytes
        if base.layout is None:
            if base.size_bytes > unit_bytes:
                raise UnsupportedError(
                    f"{base.path} was not written striped; it can be replaced, not appended to"
                )
            kept, start = [], 0
        else:
            kept = list(base.layout.segments)
            start = base.size_bytes
            if kept[-1].size_bytes < unit_bytes:
                start -= kept.pop().size_bytes
        if start < base.size_bytes:
            file = self._tree.reader.open(base)
            try:
                self._tail = Tail(
                    self._tree.reader.read_bytes(file, start, base.size_bytes - start)
                )
            finally:
                self._tree.reader.close(file)
        self._segments = kept
        self._sent_bytes = start

    def _add(self, data: bytes | memoryview, cancelled: Callable[[], bool]) -> None:
        unit_bytes = self._settings.stripe_unit_bytes
        rest = memoryview(data)
        while len(rest):
            # A full unit is sent when the next byte comes: a file of exactly one unit stays whole.
            if self._tail.length == unit_bytes:
                self._send_tail(cancelled)
            room = unit_bytes - self._tail.length
            self._tail.append(rest[:room])
            rest = rest[room:]

    def _send_tail(self, cancelled: Callable[[], bool]) -> None:
        if self._current is None:
            settings = self._settings
            self._current = SegmentWriter(
                self._tree.backend,
                self.path.rpartition("/")[0],
                self._budget,
                stripe_unit_bytes=settings.stripe_unit_bytes,
                stripe_count=settings.stripe_count,
                block_bytes=settings.block_bytes,
                deadline_s=settings.deadline_s,
            )
            self._unpublished.add(self._current.generation)
        length = self._tail.length
        if self._current.size_bytes + length > MAX_BLOCK_COUNT * self._settings.block_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        self._current.send(self._tail.pieces(), length, cancelled)
        self._sent_bytes += length
        self._tail.clear()

    def _fits_a_plain_file(self) -> bool:
        is_short = self._sent_bytes == 0 and not self._segments and self._current is None
        # Whatever looks like a layout must not be stored as an ordinary file.
        return is_short and not self._tail.join()[:HEADER_BYTES].startswith(MAGIC)

    def _publish_striped(self, cancelled: Callable[[], bool]) -> FileView:
        # A last segment of less than a unit may grow: it is written again with what follows.
        is_only_tail = self._current is None
        kept = self._tail.join() if is_only_tail else b""
        if self._tail.length:
            self._send_tail(cancelled)
        if self._current is not None:
            self._segments.append(self._current.finish())
            self._current = None
        if len(self._segments) > MAX_SEGMENT_COUNT:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        layout = Layout(new_generation(), tuple(self._segments))
        view = self._tree.publish_layout(self.path, layout, self._expected, self._unpublished.clear)
        if kept and len(kept) < self._settings.stripe_unit_bytes:
            self._segments.pop()
            self._sent_bytes -= len(kept)
            self._tail = Tail(kept)
        return view

    def _reset(self) -> None:
        if self._current is not None:
            self._unpublished.discard(self._current.generation)
            self._current.abort()
            self._current = None
        self._segments = []
        self._tail.clear()
        self._sent_bytes = 0
        # From here on this is a new file: whatever stands under the name is replaced.
        self._expected = None

    def _note_change(self) -> None:
        self._is_dirty = self._was_written = True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _failing(self) -> "_Failing":
        return _Failing(self)

    def fail(self, error: BaseException) -> None:
        """Remember `error` for every later call, and give up what was written."""
        self._error = error
        self.close()


class _Failing:
    """Whatever is raised within makes the file fail for good, but for an interrupted wait."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._writer.fail(error)
