"""Writer of one logical file: from written bytes to a generation that is published whole.

The last bytes of the file are its *tail*: up to one stripe unit in memory, open to change. Full
units go to the file's *form* (`forms`), which stores them in parallel. A file that never outgrows
its tail is stored as an ordinary file by `publish` itself.

    NEW ------ write, truncate ---> DIRTY --publish--> CLEAN --write, truncate--> DIRTY
     +--publish (an empty file)--------------------------^
    DIRTY --publish without a name--> SAVED --write, truncate--> DIRTY
    any state --a call fails--> FAILED         any other state --close--> CLOSED

Beside the state, a file may be *detached*: its name was removed or belongs to another file. Bytes
that are written to a detached file can be read back through the writer, and never become visible.

No reader sees anything before `publish`. After a failure every later call raises the first error,
because a program that continues to write must not publish a file with a hole. After `close` every
call raises EBADF, so that a late request cannot publish the rest.

Thread safety: any thread may call any method; calls wait for each other.
"""

import contextlib
import enum
import errno
import os
import threading
from collections.abc import Callable, Iterator

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView, moved_identity
from bootseer.fuse.striped.writing.forms import (
    Form,
    StripedForm,
    begin_form,
    continue_form,
    looks_like_layout,
)
from bootseer.fuse.striped.writing.part_set import WriterResources
from bootseer.fuse.striped.writing.tail import Data, Tail


def _never() -> bool:
    return False


class WriterState(enum.Enum):
    """State of a file writer; see the diagram above."""

    NEW = enum.auto()
    """An empty file to be published; nothing was written."""
    DIRTY = enum.auto()
    """Bytes were written or cut since the last publish."""
    SAVED = enum.auto()
    """A detached file whose bytes are durable; nothing was written since."""
    CLEAN = enum.auto()
    """The stored file has all written bytes, or is the file that is appended to."""
    FAILED = enum.auto()
    CLOSED = enum.auto()


_UNPUBLISHED = frozenset({WriterState.NEW, WriterState.DIRTY, WriterState.SAVED})


class FileWriter:
    """Writer of a new file, or of bytes that are appended to a file."""

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        *,
        base: FileView | None = None,
        expected: str | None = None,
    ) -> None:
        """Make a writer of the file `path`.

        `base`: generation to append to; without it the file starts empty. `expected`: identity of
        the file that may be replaced; any file by default.

        Raises: UnsupportedError if bytes cannot be appended to `base`, or if the storage cannot
        publish a file atomically.
        """
        backend = shared.backend
        if not (backend.traits.one_step_rename or backend.traits.one_step_replace):
            raise UnsupportedError(
                f"{backend.url} cannot replace a file in one step, which a safe commit needs: "
                "mount it with --read-only"
            )
        self.state = WriterState.NEW if base is None else WriterState.CLEAN
        self.view = base
        """The generation that this writer published last or started from; for a detached file, the
        generation that `publish` stored."""
        self.is_detached = False
        """Whether the file has lost its name, so that written bytes never become visible."""
        self._path = path
        self._shared = shared
        self._settings = settings
        self._expected = base.identity if base is not None else expected
        self._unchanged_bytes = base.size_bytes if base is not None else 0
        self._form: Form | None = None
        """Stored form of the sent bytes; None while all bytes are in the tail."""
        self._tail = Tail()
        self._announced_bytes = 0
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        if base is not None:
            self._form, self._tail = continue_form(shared, path, settings, base)

    # ---- facts --------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Path of the file. Set it when the file is renamed while it is written."""
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        with self._lock:
            if self._expected is not None:
                self._expected = moved_identity(self._expected, self._path, path)
            if self.view is not None:
                self.view = self.view.renamed(path)
            self._path = path
            if self._form is not None:
                self._form.path = path

    @property
    def size_bytes(self) -> int:
        """Length of the file: the end of the written bytes, or a larger size set by `truncate`."""
        return max(self._end, self._announced_bytes)

    @property
    def sent_bytes(self) -> int:
        """Length of the bytes that were sent and cannot be changed any more."""
        return self._form.sent_bytes if self._form is not None else 0

    @property
    def unchanged_bytes(self) -> int:
        """Number of leading bytes that the file has in common with `view`."""
        return self._unchanged_bytes

    @property
    def starts_anew(self) -> bool:
        """Whether the next `publish` replaces any file that has the name."""
        return self._expected is None

    @property
    def has_parts(self) -> bool:
        """Whether bytes of the file were sent to the storage."""
        return self._form is not None

    @property
    def has_new_parts(self) -> bool:
        """Whether parts were sent that are not published yet."""
        return self._form is not None and self._form.has_new_parts

    @property
    def has_failed(self) -> bool:
        """Whether an earlier call failed, so that all later calls fail."""
        return self.state is WriterState.FAILED

    @property
    def was_written(self) -> bool:
        """Whether the file was written or truncated since the last `publish`."""
        return self.state is WriterState.DIRTY

    @property
    def needs_publishing(self) -> bool:
        """Whether `publish` would make the file, or a new generation of it, visible."""
        return self.state in _UNPUBLISHED and not self.is_detached

    # ---- writing ------------------------------------------------------------------------------

    def append(self, data: Data, cancelled: Callable[[], bool] = _never) -> int:
        """Write at the current end of the file; return the count."""
        with self._lock:
            return self.write(self.size_bytes, data, cancelled)

    def write(self, offset: int, data: Data, cancelled: Callable[[], bool] = _never) -> int:
        """Take `data` at `offset`, which is the end or lies within the tail; return the count.

        A bytearray belongs to the writer from then on. Block while the mount's memory is used up.
        Raise UnsupportedError (EOPNOTSUPP) for any other offset, NoSpaceError, DeadlineError,
        UnavailableError, ...; then the file has failed for good.
        """
        with self._lock:
            self._check()
            count = len(data)
            if not count:
                return 0
            gap = offset - self._end
            with _FailOnError(self):
                if offset < self.sent_bytes or gap > self._settings.stripe_unit_bytes:
                    raise UnsupportedError(
                        f"{self.path}: a striped file is written from start to end; the bytes "
                        f"before byte {self.sent_bytes} are sent already"
                    )
                if gap > 0:
                    self._add(bytes(gap), cancelled)
                within = self._end - offset
                if within:
                    self._unchanged_bytes = min(self._unchanged_bytes, offset)
                    data = memoryview(data)
                    self._tail.patch(offset - self.sent_bytes, data[:within])
                    data = data[within:]
                self.state = WriterState.DIRTY
                self._add(data, cancelled)
            return count

    def truncate(self, size_bytes: int) -> None:
        """Cut the file to nothing, or within its tail, or announce a larger size.

        A caller that announces a size is expected to write so many bytes, as safetensors does:
        `publish` adds zeros for at most one stripe unit. Raise UnsupportedError for a size before
        the tail.
        """
        with self._lock:
            self._check()
            # An explicit truncation of a new, empty file counts as a change.
            is_truncated_again = size_bytes == 0 and self.state in _UNPUBLISHED
            if size_bytes == self.size_bytes and not is_truncated_again:
                return
            if size_bytes == 0:
                self._reset()
            elif size_bytes >= self.sent_bytes:
                if size_bytes < self._end:
                    self._unchanged_bytes = min(self._unchanged_bytes, size_bytes)
                    self._tail.cut(size_bytes - self.sent_bytes)
                self._announced_bytes = size_bytes
            else:
                raise UnsupportedError(
                    f"{self.path}: a striped file can be cut to nothing, or back to byte "
                    f"{self.sent_bytes}, not to {size_bytes}"
                )
            self.state = WriterState.DIRTY

    def read(self, offset: int, length: int) -> bytes | None:
        """Return bytes of the tail; None for a range that begins before it.

        Raise the error of an earlier call that failed.
        """
        with self._lock:
            self._check()
            end = min(offset + length, self.size_bytes)
            if offset >= end:
                return b""
            if offset < self.sent_bytes:
                return None
            start = offset - self.sent_bytes
            return self._tail.join()[start : start + length].ljust(end - offset, b"\0")

    # ---- committing ---------------------------------------------------------------------------

    def publish(self, cancelled: Callable[[], bool] = _never) -> None:
        """Make the written bytes the file's content, durably and in one step, if they changed.

        The bytes of a detached file are only made durable, so that they can be read back. Raise as
        `write`, and ESTALE if the file that bytes are appended to was replaced.
        """
        with self._lock:
            self._check()
            if self.is_detached:
                self._save(cancelled)
            elif self.needs_publishing:
                with _FailOnError(self):
                    self._publish(cancelled)

    def publish_as(self, path: str) -> None:
        """Publish the file under another name, which it keeps.

        On an error the file keeps its old name; it also fails if bytes were sent.
        """
        with self._lock:
            self._check()
            old_path, self.path = self._path, path
            try:
                with _FailOnError(self) if self._form is not None else contextlib.nullcontext():
                    self._publish(_never)
            except BaseException:
                self.path = old_path
                raise

    def _publish(self, cancelled: Callable[[], bool]) -> None:
        self._fill_up(cancelled)
        if self._form is None and not looks_like_layout(self._tail):
            tree, pieces = self._shared.tree, self._tail.pieces()
            view = tree.publish_plain(self.path, pieces, self._expected)
        else:
            form = self._form or self._begin_form()
            view = form.publish(self._tail, self._expected, cancelled)
        if self._form is not None or self._expected is not None:
            # Later bytes will be appended to this generation, so it must not be replaced before.
            self._expected = view.identity
        self._note_stored(view, WriterState.CLEAN)

    def _save(self, cancelled: Callable[[], bool]) -> None:
        """Make the bytes of a detached file durable; a file that is only a tail stays in memory."""
        if self._form is None or self.state is not WriterState.DIRTY:
            return
        with _FailOnError(self):
            self._fill_up(cancelled)
            view = self._form.store_nameless(self._tail, cancelled)
        if view is not None:
            self._note_stored(view, WriterState.SAVED)

    def _note_stored(self, view: FileView, state: WriterState) -> None:
        self.view = view
        self._unchanged_bytes = view.size_bytes
        self.state = state

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the writer's lock in the `with` block."""
        with self._lock:
            yield

    def detach(self) -> None:
        """Note that the file has lost its name: it was unlinked, or replaced by a rename."""
        with self._lock:
            self.is_detached = True

    def attach(self) -> None:
        """Undo `detach`."""
        with self._lock:
            self.is_detached = False

    def fail(self, error: BaseException) -> None:
        """Raise `error` from every later call, and discard the unpublished bytes."""
        with self._lock:
            if self.state is not WriterState.FAILED:
                self._error, self.state = error, WriterState.FAILED
            self._discard(0.0)

    def close(self, wait_s: float = 0.0) -> None:
        """Discard the unpublished bytes, after `wait_s` in the background.

        Idempotent, never raises.
        """
        with self._lock:
            if self.state is not WriterState.FAILED:
                self.state = WriterState.CLOSED
            self._discard(wait_s)

    # ---- inside -------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self.sent_bytes + self._tail.length

    def _fill_up(self, cancelled: Callable[[], bool]) -> None:
        """Add zeros up to the announced size."""
        gap = self.size_bytes - self._end
        if gap > self._settings.stripe_unit_bytes:
            raise UnsupportedError(
                f"{self.path}: its size was set to {self._announced_bytes} bytes, and only "
                f"{self._end} were written"
            )
        self._add(bytes(gap), cancelled)
        self._announced_bytes = 0

    def _add(self, data: Data, cancelled: Callable[[], bool]) -> None:
        unit_bytes = self._settings.stripe_unit_bytes
        while len(data):
            # A full unit is sent when the next byte comes: a file of exactly one unit stays whole.
            if self._tail.length == unit_bytes:
                form = self._form or self._begin_form()
                form.send(self._tail.pieces(), self._tail.length, cancelled)
                self._tail.clear()
            room = unit_bytes - self._tail.length
            if len(data) <= room:
                self._tail.append(data)
                return
            data = memoryview(data)
            self._tail.append(data[:room])
            data = data[room:]

    def _begin_form(self) -> Form:
        if self.is_detached:
            # Parts can be read back without a name, and no other tool needs to read the file.
            self._form = StripedForm(self._shared, self._path, self._settings)
        else:
            self._form = begin_form(self._shared, self._path, self._settings, self._tail)
        return self._form

    def _reset(self) -> None:
        self._discard(0.0)
        self._announced_bytes = 0
        # The file is new from now on, and replaces whatever file has the name.
        self._expected = None
        self.view = None
        self._unchanged_bytes = 0

    def _discard(self, wait_s: float) -> None:
        form, self._form = self._form, None
        if form is not None:
            form.close(wait_s)
        self._tail.clear()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.state is WriterState.CLOSED:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)


class _FailOnError:
    """Context manager that makes the file fail if the block raises, even InterruptedError.

    It is a class because a generator would take 5 % of the time to write a small file.
    """

    __slots__ = ("_writer",)

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._writer.fail(error)
