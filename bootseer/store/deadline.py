"""Calls into blocking foreign code that end by a deadline.

Owns a bounded set of daemon threads. hdfs-native blocks inside Rust, releases the GIL and cannot
be interrupted (a NameNode that is stopped was seen to hold a call for more than a minute). The same
holds for system calls on a network file system, and for most clients behind fsspec. So each call
runs in a helper thread and its caller stops waiting when the call makes no progress. The helper is
then lost until the call returns. Handing a call over costs some 30 us; the calls themselves cost a
millisecond and more. Thread-safe. A forked child starts with helpers of its own.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from bootseer.base.patience import PATIENCE
from bootseer.errors import DeadlineError, UnavailableError

Result = TypeVar("Result")

_LOOK_EVERY_S = 5.0


class NoAnswerError(DeadlineError):
    """A call that its caller left at the deadline; the call itself may still go on."""


class Call(Generic[Result]):
    """One call; its function reports progress here and sees whether a caller still waits."""

    def __init__(self, function: "Callable[[Call[Result]], Result]") -> None:
        self._function = function
        self._finished = threading.Lock()
        self._finished.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None
        # Held while results are handed over, so that an abandoned call cannot touch a buffer
        # that its owner has begun to use for something else.
        self.handover = threading.Lock()
        self.abandoned = False
        self.progress_count = 0

    def progress(self) -> None:
        """Note that the call goes on: its caller's waiting starts again."""
        self.progress_count += 1

    def execute(self) -> None:
        """Run the function; called by a helper thread."""
        _HERE.call = self
        try:
            if not self.abandoned:
                self._result = self._function(self)
        except BaseException as error:  # a Rust panic is no Exception; it belongs to the caller
            self._error = error
        finally:
            _HERE.call = None
            self._finished.release()

    def wait(self, timeout_s: float, look: Callable[[], None] | None = None) -> bool:
        """Whether the call finished; gives up after `timeout_s` without progress. Meanwhile `look`
        is called now and then."""
        seen_count = 0
        while not self._ends_within(timeout_s, look):
            if self.progress_count == seen_count:
                return False
            seen_count = self.progress_count
        return True

    def _ends_within(self, timeout_s: float, look: Callable[[], None] | None) -> bool:
        if look is None:
            return self._finished.acquire(timeout=timeout_s)
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._finished.acquire(timeout=min(left_s, _LOOK_EVERY_S)):
                return True
            look()
        return self._finished.acquire(blocking=False)

    def result(self) -> Result:
        """What the function returned or raised, after `wait` returned True."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, since the function returned


class DeadlineCaller:
    """Runs functions in at most `threads_max` helper threads, which are made when needed."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self.begin()
        begin_in_children(self)

    def begin(self) -> None:
        """Start without helpers, as a forked child has to: its parent's stayed there."""
        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_count = 0
        self._busy_count = 0

    def run(
        self,
        function: Callable[[Call[Result]], Result],
        timeout_s: float,
        look: Callable[[], None] | None = None,
    ) -> Result:
        """Return what `function` returns, or raise what it raises. While it takes long, `look` is
        called every few seconds, in the caller's thread.

        Raises: NoAnswerError when it made no progress for `timeout_s` (noticed at most twice
        as late), or found no free helper for as long; UnavailableError when no helper can be
        started.
        """
        timeout_s = min(timeout_s, PATIENCE.left_s)
        if timeout_s <= 0:
            raise NoAnswerError(f"no answer within {PATIENCE.limit_s:g} s, in earlier calls")
        began_s = time.monotonic()
        call: Call[Result] = Call(function)
        self._find_helper()
        self._queue.put(call)  # type: ignore[arg-type]  # the queue never looks at the result
        try:
            finished = call.wait(timeout_s, look)
        except BaseException:  # KeyboardInterrupt in the waiting thread
            self._abandon(call)
            raise
        if not finished:
            self._abandon(call)
            PATIENCE.spend(time.monotonic() - began_s)
            shown_s = round(timeout_s, 1) if timeout_s >= 1 else timeout_s
            raise NoAnswerError(f"no answer within {shown_s:g} s")
        try:
            return call.result()
        except (DeadlineError, UnavailableError):
            PATIENCE.spend(time.monotonic() - began_s)
            raise

    def _find_helper(self) -> None:
        """Count one more call, and start a helper for it unless one is idle.

        Raises: UnavailableError when there is no helper at all, and none can be started.
        """
        with self._lock:
            self._busy_count += 1
            if not self._busy_count > self._threads_count < self._threads_max:
                return
            try:
                threading.Thread(
                    target=self._work, args=(self._queue,), name=self._name, daemon=True
                ).start()
            except RuntimeError as error:
                if self._threads_count:
                    return  # the helpers that there are take it in turn
                self._busy_count -= 1
                raise UnavailableError(
                    f"cannot start a thread ({error}): raise the limit of processes (ulimit -u, or "
                    "pids.max of the cgroup) or free memory"
                ) from error
            self._threads_count += 1

    def _abandon(self, call: Call[Result]) -> None:
        with call.handover:
            call.abandoned = True

    def _work(self, calls: "queue.SimpleQueue[Call[object] | None]") -> None:
        while (call := calls.get()) is not None:
            call.execute()
            with self._lock:
                self._busy_count -= 1
            del call  # else the last result lives until the next call

    def close(self) -> None:
        """End the idle helpers; a helper inside a call ends when the call returns."""
        with self._lock:
            count, self._threads_count = self._threads_count, 0
        for _ in range(count):
            self._queue.put(None)


_HERE = threading.local()


def note_progress() -> None:
    """Note that the call which this thread executes goes on; elsewhere this does nothing."""
    call = getattr(_HERE, "call", None)
    if call is not None:
        call.progress()


class Begun(Protocol):
    """Locks, threads and connections, in whose place a forked child has to begin with new ones."""

    def begin(self) -> None:
        """Start anew. Of the parent's locks some may be held for ever."""
        ...


_BEGUN: "WeakSet[Begun]" = WeakSet()


def begin_in_children(begun: Begun) -> None:
    """Call `begin` in each process that is forked from this one."""
    _BEGUN.add(begun)


def _begin_in_child() -> None:
    for begun in list(_BEGUN):
        begun.begin()


os.register_at_fork(after_in_child=_begin_in_child)
