"""What the parts of a segment have come to while they are written, and the wait for more of it.

Owns the first failure, which decides what the writer is told, and the deadline: it begins anew with
every step of any part. Thread-safe; the waits are for the one thread that sends.
"""

import threading
import time
from collections.abc import Callable, Sequence

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.fuse.striped.writing.parts.part_writer import PartWriter

_POLL_S = 0.2


class PartsWatch:
    """The state that the parts of one segment share."""

    def __init__(
        self, parts: Sequence[PartWriter], folder: str, url: str, patience_s: float
    ) -> None:
        """`parts` may grow meanwhile. `folder` and `url` are what messages name."""
        self.changed = threading.Condition()
        self.failed = False
        self.ended_count = 0
        self._parts = parts
        self._folder = folder
        self._url = url
        self._patience_s = patience_s
        self._error: BaseException | None = None
        self._outage: BaseException | None = None
        """What the storage said last since nothing moves any more."""
        self._progress_s = time.monotonic()

    @property
    def have_all_ended(self) -> bool:
        """Whether no part uses the storage any more."""
        return self.ended_count == len(self._parts)

    @property
    def open_count(self) -> int:
        """How many parts are being written."""
        return len(self._parts) - self.ended_count

    def note_progress(self) -> None:
        """The deadline begins anew."""
        self._outage = None
        self._progress_s = time.monotonic()

    def note_outage(self, error: BaseException) -> None:
        """A part failed, and is going to be written again."""
        self._outage = error

    def fail(self, error: BaseException) -> None:
        """The first failure decides what the writer is told."""
        with self.changed:
            if self._error is None:
                self._error = error
            self.failed = True
            self.changed.notify_all()

    def note_begun(self, part: PartWriter) -> None:
        """It is known what the part takes."""
        with self.changed:
            part.is_begun = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what a part failed with."""
        error = self._error
        if error is None:
            return
        if isinstance(error, BootseerError | OSError):
            raise error
        raise UnavailableError(
            f"cannot write {self._folder}: {type(error).__name__}: {error}"
        ) from error

    # ---- waiting --------------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Return when all parts have ended, or one has failed, or nothing moved for the deadline,
        which is a failure, too."""
        self.note_progress()
        for part in self._parts:
            while not part.done.wait(_POLL_S):
                if self.failed:
                    break
                if time.monotonic() - self._progress_s > self._patience_s:
                    self.fail(self._late(part.name))

    def wait_for_a_beginning(self, cancelled: Callable[[], bool]) -> bool:
        """Wait until one more part is known to take what is charged for it, or not; False where
        all are. Raises as `wait_for_change`."""
        self.note_progress()
        with self.changed:
            unknown = self._unknown()
            while unknown and len(self._unknown()) == len(unknown) and not self.failed:
                self.wait_for_change(cancelled)
        return bool(unknown)

    def _unknown(self) -> list[PartWriter]:
        return [
            part
            for part in self._parts
            if part.charge_bytes and not part.is_begun and not part.done.is_set()
        ]

    def wait_for_an_end(self, cancelled: Callable[[], bool]) -> bool:
        """Wait until one more part has ended; False if all have. Raises as `wait_for_change`."""
        self.note_progress()
        with self.changed:
            ended_count = self.ended_count
            if self.have_all_ended:
                return False
            while self.ended_count == ended_count:
                self.wait_for_change(cancelled)
                if self.failed:
                    break
        return True

    def wait_for_change(self, cancelled: Callable[[], bool]) -> None:
        """Wait a moment for a part to begin, end or fail; `changed` is held. Raises DeadlineError,
        InterruptedError."""
        self.changed.wait(_POLL_S)
        if cancelled():
            raise InterruptedError
        if time.monotonic() - self._progress_s > self._patience_s:
            raise self._late(self._parts[-1].name)

    def _late(self, part: str) -> BaseException:
        return self._outage or DeadlineError(
            f"cannot write {self._folder}/{part}: no answer from {self._url} within "
            f"{self._patience_s:.0f} s"
        )
