"""The policy of attempts: which failures are worth another attempt, when, and how often.

All code that reads or writes stored bytes over a network uses it: the transfer engine, striped
reading and writing, extraction, registries, HDFS and HTTP. `pace` decides whether a read is late.
Pure: callers pass the clock and the random numbers. docs/operations.md has a table of the numbers.
"""

import errno
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from bootseer.base.wait_budget import AwayError, RefusedError, WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    from_oserror,
)

Result = TypeVar("Result")

# Errors of a network file system below a file:// store while a server restarts.
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EIO,
        errno.ESTALE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)


def is_retryable(error: BaseException) -> bool:
    """Return whether the same read may succeed a little later."""
    if isinstance(error, (FileNotFoundError, PermissionError, AwayError)):
        return False
    if isinstance(error, (CorruptError, ConnectionError, TimeoutError)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


_TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))


def is_transient(status: int) -> bool:
    """Return whether the same HTTP request may succeed after an answer with this status."""
    return status in _TRANSIENT_STATUSES


WRONG_ATTEMPTS = 4
"""Attempts at bytes that do not match their checksum: each of HDFS's three replicas may be damaged,
and a bit may flip in transit."""


def random_fraction() -> float:
    """Return a random number in [0, 1), without loading Python's module `random`."""
    return int.from_bytes(os.urandom(6)) / 2**48


class Policy(Struct, frozen=True):
    """Exponential back-off with jitter, up to a number of attempts."""

    attempts: float = 6
    """Attempts before a failure is final. With the waits between (0.1 + 0.2 + 0.4 + 0.8 + 1.6 s)
    they take some 3 s: long enough for a restart behind a load balancer, and short enough for a
    start that has to do without the store or registry."""
    base_s: float = 0.1
    """The longest wait after the first failure; it doubles with each further one."""
    cap_s: float = 2.0
    """The longest wait, so that a server that comes back is noticed soon."""

    def delay_s(self, failures_count: int, fraction: float) -> float:
        """Return the wait after `failures_count` failures in a row; `fraction` in [0, 1) is random.

        The result is between half of the full wait and all of it, so that nodes that failed at the
        same moment do not retry together.
        """
        # Bounded, so that the float does not overflow.
        full_s = min(self.cap_s, self.base_s * 2.0 ** min(failures_count - 1, 60))
        return full_s * (0.5 + 0.5 * fraction)

    def pause_s(
        self,
        error: BaseException,
        failures_count: int,
        left_s: float,
        fraction: float,
    ) -> float | None:
        """Return the wait before the next attempt, or None if there is none.

        Wrong bytes are requested again at once, because another server may have correct ones.

        Args:
            error: The last failure. The wait is at least its `retry_after_s`.
            failures_count: Failures in a row.
            left_s: Rest of the deadline.
            fraction: Random number in [0, 1).
        """
        attempts, wait_s = self.attempts, self.delay_s(failures_count, fraction)
        if isinstance(error, CorruptError):
            attempts, wait_s = min(attempts, WRONG_ATTEMPTS), 0.0
        elif isinstance(error, UnavailableError):
            wait_s = max(wait_s, error.retry_after_s)
        is_over = failures_count >= attempts or wait_s >= left_s or not is_retryable(error)
        return None if is_over else wait_s


REQUEST = Policy()
"""For a request whose caller can go on without an answer."""
ONCE = Policy(attempts=1)
"""For callers that repeat attempts themselves."""
SOON = Policy(attempts=math.inf, base_s=0.02)
"""For information that another server will have soon: a DataNode's report takes milliseconds."""
UNTIL_DEADLINE = Policy(attempts=math.inf)
"""For reads and writes of a running job, which has no alternative: only the deadline ends them."""
OUTAGE_DEADLINES = 1.5
"""Deadlines that a running job waits for an unreachable storage: more than one, so that a server
that takes a whole deadline to restart is still found."""


class Attempts:
    """Attempts at one operation, which tells after each failure about the next. For one thread."""

    def __init__(
        self,
        policy: Policy = REQUEST,
        deadline_s: float = math.inf,
        *,
        wait_budget: WaitBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        random_fraction: Callable[[], float] = random_fraction,
    ) -> None:
        """Begin attempts.

        Args:
            policy: Number of attempts, and the waits between them.
            deadline_s: No attempt begins later than this after now or after the last progress.
            wait_budget: Budget of the process, for requests to its store. It ends the attempts
                when it is spent, and sooner where nobody takes connections; the last of those
                attempts spends it.
            clock: Monotonic clock.
            random_fraction: Random numbers in [0, 1).
        """
        self._policy = policy
        self._deadline_s = deadline_s
        self._wait_budget = wait_budget
        self._clock = clock
        self._random_fraction = random_fraction
        self._ends_s = clock() + deadline_s
        self.failures_count = 0
        """Failures since the last progress."""

    @property
    def left_s(self) -> float:
        """Rest of the deadline in seconds, never below 0."""
        return max(0.0, self._ends_s - self._clock())

    def progressed(self) -> None:
        """Note that the last attempt made progress: the count of failures restarts."""
        self.failures_count = 0
        self._ends_s = self._clock() + self._deadline_s

    def pause_s(self, error: BaseException) -> float | None:
        """Return the wait after an attempt that failed with `error`; None if it was the last."""
        self.failures_count += 1
        left_s, budget = self.left_s, self._wait_budget
        is_refused = isinstance(error, RefusedError)
        if budget is not None:
            left_s = min(left_s, budget.refused_left_s() if is_refused else budget.left_s)
        pause_s = self._policy.pause_s(error, self.failures_count, left_s, self._random_fraction())
        if budget is not None and is_refused and pause_s is None:
            budget.give_up()
        return pause_s

    def wait(self, error: BaseException) -> None:
        """Sleep until the next attempt, after one that failed with `error`.

        Raises: `error` if it was the last.
        """
        pause_s = self.pause_s(error)
        if pause_s is None:
            raise error
        time.sleep(pause_s)

    def repeat(
        self, work: Callable[[], Result], failure: type[BootseerError] = BootseerError
    ) -> Result:
        """Return the result of `work`, which is called again after each `failure` worth it."""
        while True:
            try:
                return work()
            except failure as error:
                self.wait(error)


def as_bootseer_error(error: BaseException, what: str) -> BootseerError:
    """Return `error` as a BootseerError with the message that `what` ("read blobs/x") failed.

    A BootseerError is returned unchanged.
    """
    if isinstance(error, BootseerError):
        return error
    reason = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        ours: BootseerError = NotFoundError(f"cannot {what}: {reason}")
    elif isinstance(error, PermissionError):
        ours = PermissionDeniedError(f"cannot {what}: {reason}")
    elif isinstance(error, TimeoutError):
        ours = DeadlineError(f"cannot {what}: {reason}")
    elif isinstance(error, ConnectionError):
        ours = UnavailableError(f"cannot {what}: {reason}; try again when the store is up")
    elif isinstance(error, OSError):
        ours = from_oserror(error, what)
    else:
        ours = BootseerError(f"cannot {what}: {type(error).__name__}: {reason}")
    ours.__cause__ = error
    return ours


def fresh_copy(error: BootseerError) -> BootseerError:
    """Return a copy of `error` to raise in one thread.

    A raised exception collects the traceback of its thread, so several waiters must not raise the
    same object.
    """
    try:
        copy = type(error)(*error.args)
    except TypeError:
        # The class has a constructor of its own. Sharing only makes the traceback longer.
        return error
    copy.__cause__ = error.__cause__ or error
    return copy
