"""Deadlines for calls into blocking code that cannot be interrupted.

hdfs-native blocks inside Rust without the GIL (a stopped NameNode was seen to hold a call for more
than a minute). System calls on a network file system and most clients behind fsspec block in the
same way. So each call runs in a helper thread, one of a bounded number, and the caller stops
waiting when the call makes no progress. The helper is lost until the call returns. Handing a call
over costs about 30 us; the calls themselves take a millisecond and more. Thread-safe. A forked
child starts without helpers.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakSet

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    import queue

Result = TypeVar("Result")

DEFAULT_DEADLINE_S = 60.0
"""Deadline of a backend whose caller and URL set none."""
SLOWEST_BYTES_PER_S = 1_000_000
"""Slowest accepted rate of a request that reports no progress before its end: its deadline is
extended by its size over this rate."""
_ON_WAIT_EVERY_S = 5.0
# More than the parallel calls of any of our plans; a call that hangs keeps one thread.
_THREADS_MAX = 128


class Call(Generic[Result]):
    """Call in a helper thread, with its progress and whether the caller still waits."""

    def __init__(self, function: "Callable[[Call[Result]], Result]") -> None:
        self._function = function
        self._finished = threading.Lock()
        self._finished.acquire()
        self._result: Result | None = None
        self._error: BaseException | None = None
        # The function holds this lock while it writes into the caller's buffer or hands over its
        # result, so that an abandoned call cannot touch a buffer which the caller has reused.
        self.handover = threading.Lock()
        self.abandoned = False
        self.progress_count = 0

    def progress(self) -> None:
        """Report progress, which restarts the caller's deadline."""
        self.progress_count += 1
        WAIT_BUDGET.answered()

    def execute(self) -> None:
        """Run the function; called by a helper thread."""
        _HERE.call = self
        try:
            if not self.abandoned:
                self._result = self._function(self)
        except BaseException as error:  # a Rust panic is not an Exception; the caller gets it
            self._error = error
        finally:
            _HERE.call = None
            self._finished.release()

    def wait(
        self, timeout_s: Callable[[], float], on_wait: Callable[[], None] | None = None
    ) -> bool:
        """Wait for the call, calling `on_wait` now and then; return whether it finished.

        Return False after `timeout_s()` without progress, which may change while this waits.
        """
        seen_count = 0
        while not self._ends_within(timeout_s, on_wait):
            if self.progress_count == seen_count:
                return False
            seen_count = self.progress_count
        return True

    def _ends_within(
        self, timeout_s: Callable[[], float], on_wait: Callable[[], None] | None
    ) -> bool:
        began_s = time.monotonic()
        while (left_s := began_s + timeout_s() - time.monotonic()) > 0:
            if self._finished.acquire(timeout=min(left_s, _ON_WAIT_EVERY_S)):
                return True
            # Which takes time itself.
            if on_wait is not None and time.monotonic() + _ON_WAIT_EVERY_S < began_s + timeout_s():
                on_wait()
        return self._finished.acquire(blocking=False)

    def result(self) -> Result:
        """Return the function's result or raise its exception; call this after `wait`."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, since the function returned


class DeadlineCaller:
    """Pool of at most `threads_max` helper threads, started when needed, that run calls."""

    def __init__(self, name: str, threads_max: int = _THREADS_MAX) -> None:
        self._threads_max = threads_max
        self._name = name
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Start without helpers. A forked child calls this: threads stay in the parent."""
        import queue  # here, since a folder on a disk of this node needs no helper

        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_count = 0
        self._busy_count = 0

    def run(
        self,
        function: Callable[[Call[Result]], Result],
        timeout_s: float,
        what: str = "",
        *,
        hint: str = "",
        failure: type[BootseerError] = DeadlineError,
        on_wait: Callable[[], None] | None = None,
    ) -> Result:
        """Run `function` in a helper thread; return its result or raise its exception.

        Args:
            function: Function that takes its `Call`.
            timeout_s: Longest time without progress; noticed after at most twice that time.
            what: Verb and object of the call, for the message of `failure`.
            hint: Text behind that message.
            failure: Class of the error if the call made no progress for `timeout_s`, or if no
                helper was free for as long. The call itself may still run.
            on_wait: Called every few seconds in the caller's thread, but not near the end of the
                wait.

        Raises: `failure`; AwayError if the process may not wait any more (`wait_budget`);
        UnavailableError if no helper can be started.
        """
        prefix = f"cannot {what}: " if what else ""
        if WAIT_BUDGET.is_spent:
            raise WAIT_BUDGET.error(prefix, hint)
        began_s = time.monotonic()
        waited_s = 0.0

        def longest_wait_s() -> float:
            nonlocal waited_s
            # Longer once the storage has answered, for instance to another call.
            waited_s = min(timeout_s, WAIT_BUDGET.left_s)
            return waited_s

        call: Call[Result] = Call(function)
        self._find_helper()
        self._queue.put(call)  # type: ignore[arg-type]  # the queue never looks at the result
        try:
            finished = call.wait(longest_wait_s, on_wait)
        except BaseException:  # KeyboardInterrupt in the waiting thread
            self._abandon(call)
            raise
        if not finished:
            self._abandon(call)
            WAIT_BUDGET.spend(time.monotonic() - began_s)
            shown_s = round(waited_s, 1) if waited_s >= 1 else waited_s
            raise failure(f"{prefix}no answer within {shown_s:g} s{hint}")
        try:
            result = call.result()
        except (DeadlineError, UnavailableError):
            WAIT_BUDGET.spend(time.monotonic() - began_s)
            raise
        except (NotFoundError, AlreadyExistsError):
            WAIT_BUDGET.answered()
            raise
        WAIT_BUDGET.answered()
        return result

    def _find_helper(self) -> None:
        """Count one more call, and start a helper for it unless one is idle.

        Raises: UnavailableError if there is no helper at all, and none can be started.
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
                    return  # an existing helper takes the call when it is free
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
            del call  # otherwise the last result would live until the next call

    def close(self) -> None:
        """End the idle helpers; a helper inside a call ends when the call returns."""
        with self._lock:
            count, self._threads_count = self._threads_count, 0
        for _ in range(count):
            self._queue.put(None)


_HERE = threading.local()


def note_progress() -> None:
    """Report progress of the call that this thread executes; does nothing in other threads."""
    call = getattr(_HERE, "call", None)
    if call is not None:
        call.progress()


class ForkResettable(Protocol):
    """Object with locks, threads or connections that a forked child must replace by new ones."""

    def reset(self) -> None:
        """Set up new locks and connections: inherited locks may stay held for ever."""
        ...


_RESETTABLE: "WeakSet[ForkResettable]" = WeakSet()


def reset_in_children(resettable: ForkResettable) -> None:
    """Register an object whose `reset` is called in each process forked from this one."""
    _RESETTABLE.add(resettable)


def _begin_in_child() -> None:
    for resettable in list(_RESETTABLE):
        resettable.reset()


os.register_at_fork(after_in_child=_begin_in_child)
