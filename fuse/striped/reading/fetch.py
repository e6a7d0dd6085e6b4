"""One run of bytes that a reader wants, and the attempts at it.

Owns that the first result is the only one, and that nothing is written into a buffer that somebody
uses once there is one. Thread-safe.
"""

import threading
from collections.abc import Callable

from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.reading.late import Run as AnyRun
from bootseer.fuse.striped.view import Span


class Fetch:
    """A run of bytes that a reader wants."""

    __slots__ = (
        "__weakref__",
        "buffer",
        "data",
        "earlier",
        "error",
        "file",
        "is_decided",
        "lock",
        "on_done",
        "outage",
        "runs",
        "span",
        "target",
        "tried",
    )

    def __init__(
        self,
        file: OpenFile,
        span: Span,
        on_done: Callable[["Fetch"], None],
        *,
        buffer: memoryview | None = None,
        target: memoryview | None = None,
    ) -> None:
        """`buffer`: memory for the first attempt. `target`: where its owner wants the bytes."""
        self.file = file
        self.span = span
        self.on_done = on_done
        self.buffer = buffer
        self.target = target
        self.lock = threading.Lock()
        self.runs: list[AnyRun[Fetch]] = []
        self.tried: set[int] = set()
        self.earlier: AnyRun[Fetch] | None = None
        """The last attempt, which failed or is late: the next one goes on behind its bytes."""
        self.is_decided = False
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.outage: BaseException | None = None
        """What the last attempt failed with, while another one is to come."""

    def decide(self, data: memoryview) -> bool:
        """Makes the verified bytes `data` the result; False if there is one, or none is wanted."""
        with self.lock:
            if self.is_decided:
                return False
            self._end()
            self.data = data
            if self.target is not None and data is not self.target:
                # After the others have stopped: one of them was writing there.
                self.target[:] = data
                self.data = self.target
            return True

    @property
    def is_begun(self) -> bool:
        """Whether a thread has taken it on."""
        return bool(self.tried)

    @property
    def done_bytes(self) -> int:
        """How much has come, by the attempt that came furthest of those that go on."""
        with self.lock:
            runs = [*self.runs, self.earlier] if self.earlier is not None else self.runs
            return max((run.done_bytes for run in runs), default=0)

    def fail(self, error: BaseException) -> bool:
        """End the fetch with `error`, whatever is under way; False if it has ended."""
        with self.lock:
            if self.is_decided:
                return False
            self._end()
            self.error = error
            return True

    def give_up(self) -> None:
        """Give up a fetch that no reader wants any more. What can be stopped is, and `target` not
        written to again."""
        with self.lock:
            self._end()

    def _end(self) -> None:
        self.is_decided = True
        self.buffer = self.earlier = None
        for run in self.runs:
            run.attempt.give_up()
            if run.buffer is self.target:
                run.attempt.stop()


Run = AnyRun[Fetch]
