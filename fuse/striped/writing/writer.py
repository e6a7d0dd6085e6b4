"""Writes one logical file: from the bytes as they come to a generation that is published whole.

Owns the file's *tail* (bytes not yet sent to a part, which may still be changed) and the segments
already written. Thread-safe, one call at a time. Nothing is visible to a reader before `publish`;
after any failure nothing ever will be, and every later call raises the same error.
"""

import contextlib
import threading
from collections.abc import Callable

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView, moved_identity
from bootseer.fuse.striped.writing.bodies import begin_body, continue_body, looks_like_layout
from bootseer.fuse.striped.writing.body import Body
from bootseer.fuse.striped.writing.resources import WriterResources
from bootseer.fuse.striped.writing.striped_body import StripedBody
from bootseer.fuse.striped.writing.tail import Data, Tail


def _never() -> bool:
    return False


class FileWriter:
    """A file in the making, or one that is appended to."""

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        *,
        base: FileView | None = None,
        expected: str | None = None,
    ) -> None:
        """`base`: the generation to append to; without one the file starts empty. `expected`: the
        identity of the file that it may replace; anything, without one.

        Raises UnsupportedError for a base that cannot be appended to, and on a storage where
        nothing could appear whole or not at all.
        """
        backend = shared.backend
        if not (backend.traits.one_step_rename or backend.traits.one_step_replace):
            raise UnsupportedError(
                f"{backend.url} cannot replace a file in one step, which a safe commit needs: "
                "mount it with --read-only"
            )
        self._path = path
        self.view = base
        """The generation that this writer published last, or started from; of a file that has no
        name any more, what `publish` stored of it."""
        self._unchanged_bytes = base.size_bytes if base is not None else 0
        """How much of the beginning of `view` the file still begins with."""
        self._shared = shared
        self._settings = settings
        self._lock = threading.RLock()
        self._body: Body | None = None
        """What was sent; None as long as all is in the tail."""
        self._tail = Tail()
        self._announced_bytes = 0
        self._is_dirty = base is None
        self._was_written = False
        self._expected = base.identity if base is not None else expected
        self._error: BaseException | None = None
        self._is_detached = False
        if base is not None:
            self._body, self._tail = continue_body(shared, path, settings, base)

    @property
    def path(self) -> str:
        """The file's, also when it is renamed while it is written."""
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        with self._lock:
            if self._expected is not None:
                self._expected = moved_identity(self._expected, self._path, path)
            if self.view is not None:
                self.view = self.view.renamed(path)
            self._path = path
            if self._body is not None:
                self._body.path = path

    @property
    def size_bytes(self) -> int:
        """How long the file is, with all that was written, or announced by `truncate`, so far."""
        return max(self._end, self._announced_bytes)

    @property
    def sent_bytes(self) -> int:
        """What lies before this cannot be changed any more."""
        return self._body.sent_bytes if self._body is not None else 0

    @property
    def unchanged_bytes(self) -> int:
        """How many of the first bytes of `view` are those of the file."""
        return self._unchanged_bytes

    @property
    def starts_anew(self) -> bool:
        """Whether the next `publish` replaces whatever has the name then."""
        return self._expected is None

    @property
    def has_parts(self) -> bool:
        """Whether bytes of the file were sent to the storage, beside its name."""
        return self._body is not None

    @property
    def has_new_parts(self) -> bool:
        """Whether parts were sent that only the next `publish` makes part of the file."""
        return self._body is not None and self._body.has_new_parts

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

    @property
    def has_unsaved_bytes(self) -> bool:
        """Whether bytes of it are in this process alone; also of a file without a name."""
        return self._was_written and self._error is None

    # ---- writing --------------------------------------------------------------------------

    def append(self, data: Data, cancelled: Callable[[], bool] = _never) -> int:
        """Write at the end, whatever the caller thinks the offset is."""
        with self._lock:
            return self.write(self.size_bytes, data, cancelled)

    def write(self, offset: int, data: Data, cancelled: Callable[[], bool] = _never) -> int:
        """Take `data` at `offset`: at the end, or within what has not been sent yet. A bytearray
        is this writer's from then on.

        Anything else is EOPNOTSUPP. Waits while the mount's memory is used up. Raises NoSpaceError,
        DeadlineError, UnavailableError, ...: then, as after EOPNOTSUPP, the file has failed for
        good. A program that goes on closing it must not put half a file in a good one's place.
        """
        with self._lock:
            self._check()
            count = len(data)
            if not count:
                return 0
            gap = offset - self._end
            with _Failing(self):
                if offset < self.sent_bytes or gap > self._settings.stripe_unit_bytes:
                    raise UnsupportedError(
                        f"{self.path}: a striped file is written from start to end; what lies "
                        f"before byte {self.sent_bytes} is on its way already"
                    )
                if gap > 0:
                    self._add(bytes(gap), cancelled)
                within = self._end - offset
                if within:
                    self._unchanged_bytes = min(self._unchanged_bytes, offset)
                    data = memoryview(data)
                    self._tail.patch(offset - self.sent_bytes, data[:within])
                    data = data[within:]
                self._note_change()
                self._add(data, cancelled)
            return count

    def truncate(self, size_bytes: int) -> None:
        """Cut to nothing, or within what has not been sent yet, else EOPNOTSUPP; or grow.

        What is grown is expected to be written then, as safetensors does: zeros are put only for
        up to one unit of it.
        """
        with self._lock:
            self._check()
            # A file that was opened empty, and is then told to be so, was emptied for certain.
            if size_bytes == self.size_bytes and not (size_bytes == 0 and self._is_dirty):
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
            self._note_change()

    def read(self, offset: int, length: int) -> bytes | None:
        """Bytes that were written and not sent yet; None where they are elsewhere.

        Raises the error of an earlier call that failed.
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

    # ---- committing -----------------------------------------------------------------------

    def publish(self, cancelled: Callable[[], bool] = _never) -> None:
        """Make all that was written the file's content, durably and in one step.

        Does nothing where nothing changed. The bytes of a file that has no name any more are made
        durable, so that they can be read back. Raises as `write`, and ESTALE where somebody
        replaced the file that was being appended to.
        """
        with self._lock:
            self._check()
            if self._is_detached:
                self._store_nameless(cancelled)
            elif self._is_dirty:
                with _Failing(self):
                    self._publish(cancelled)

    def publish_as(self, path: str) -> None:
        """Publish the file under another name, which it has from then on.

        After a failure it has the old name. It has failed as well, unless no byte was sent yet.
        """
        with self._lock:
            self._check()
            old_path, self.path = self._path, path
            try:
                with _Failing(self) if self._body is not None else contextlib.nullcontext():
                    self._publish(_never)
            except BaseException:
                self.path = old_path
                raise

    def _publish(self, cancelled: Callable[[], bool]) -> None:
        self._fill_up(cancelled)
        if self._fits_a_plain_file():
            view = self._shared.tree.publish_plain(self.path, self._tail.pieces(), self._expected)
        else:
            body = self._body or self._begin_body()
            view = body.publish(self._tail, self._expected, cancelled)
        self._note_stored(view)
        if self._body is not None or self._expected is not None:
            # What comes next builds on what is stored: it must still be the file's.
            self._expected = view.identity
        self._is_dirty = False

    def _store_nameless(self, cancelled: Callable[[], bool]) -> None:
        """Store what was sent of a file without a name; what was not is in memory anyway."""
        if self._body is None or not self._was_written:
            return
        body = self._body
        with _Failing(self):
            self._fill_up(cancelled)
            view = body.store_nameless(self._tail, cancelled)
        if view is not None:
            self._note_stored(view)

    def _note_stored(self, view: FileView) -> None:
        self.view = view
        self._unchanged_bytes = view.size_bytes
        self._was_written = False

    @property
    def is_detached(self) -> bool:
        """Whether the file is gone: what is written goes nowhere."""
        return self._is_detached

    def detach(self) -> None:
        """The file was unlinked, or replaced by a rename: it will never be visible."""
        with self._lock:
            self._is_detached = True

    def attach(self) -> None:
        """The file was not unlinked after all."""
        with self._lock:
            self._is_detached = False

    def close(self, wait_s: float = 0.0) -> None:
        """Let go; what was not published vanishes, in the background after `wait_s`.

        Idempotent, never raises.
        """
        with self._lock:
            if self._body is not None:
                self._body.close(wait_s)
                self._body = None
            self._tail.clear()

    # ---- inside ---------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """What was written ends here."""
        return self.sent_bytes + self._tail.length

    def _fill_up(self, cancelled: Callable[[], bool]) -> None:
        """Put zeros where the file was announced to be longer than what was written."""
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
                self._send_tail(cancelled)
            room = unit_bytes - self._tail.length
            if len(data) <= room:
                self._tail.append(data)
                return
            data = memoryview(data)
            self._tail.append(data[:room])
            data = data[room:]

    def _send_tail(self, cancelled: Callable[[], bool]) -> None:
        body = self._body or self._begin_body()
        body.send(self._tail.pieces(), self._tail.length, cancelled)
        self._tail.clear()

    def _begin_body(self) -> Body:
        if self._is_detached:
            # No other tool will see it, and parts can be read back without a name.
            self._body = StripedBody(self._shared, self._path, self._settings)
        else:
            self._body = begin_body(self._shared, self._path, self._settings, self._tail)
        return self._body

    def _fits_a_plain_file(self) -> bool:
        return self._body is None and not looks_like_layout(self._tail)

    def _reset(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None
        self._tail.clear()
        self._announced_bytes = 0
        # From here on this is a new file: whatever stands under the name is replaced.
        self._expected = None
        self.view = None
        self._unchanged_bytes = 0

    def _note_change(self) -> None:
        self._is_dirty = self._was_written = True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Remember `error` for every later call, and give up what was written."""
        self._error = error
        self.close()


class _Failing:
    """Whatever is raised within makes the file fail for good, an interrupted wait as well."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._writer.fail(error)
