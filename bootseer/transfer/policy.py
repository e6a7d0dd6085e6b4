"""The one policy of attempts: which failures are worth another attempt, when, and how often.

All code that reads or writes stored bytes over a network asks this module: the transfer engine,
striped reading and writing, extraction, registries, HDFS and HTTP. When a read is late, and should
be asked for elsewhere, says `pace`. Pure: the clock and the dice are handed in. docs/operations.md
has the numbers in one table.
"""

import errno
import math
import os
import time
from collections.abc import Callable

from msgspec import Struct

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    from_oserror,
)

# What a network file system below a file:// store reports while a server restarts.
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
    """Whether the same read may succeed a little later."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    if isinstance(error, (CorruptError, ConnectionError, TimeoutError)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


_TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later, by the status of an HTTP answer."""
    return status in _TRANSIENT_STATUSES


WRONG_ATTEMPTS = 4
"""How often bytes are read that do not match their checksum: HDFS has three replicas, of which each
may be damaged by itself, and a bit may flip on its way."""


def dice() -> float:
    """Return a random number in [0, 1), for which a start need not load Python's generator."""
    return int.from_bytes(os.urandom(6)) / 2**48


class Policy(Struct, frozen=True):
    """Exponential back-off with jitter, up to a number of attempts."""

    attempts: float = 6
    """How often something is asked for before its failure is final. With the waits between (0.1 +
    0.2 + 0.4 + 0.8 + 1.6 s) some 3 s: a restart behind a load balancer is ridden out, and a start
    that must do without this store or registry does so soon."""
    base_s: float = 0.1
    """The longest wait after the first failure; it doubles with each further one."""
    cap_s: float = 2.0
    """No wait is longer: what comes back is noticed while its user still watches."""

    def delay_s(self, failures_count: int, fraction: float) -> float:
        """Return the wait after so many failures in a row; `fraction` in [0, 1) is random.

        Between half of the full wait and all of it: nodes that failed at the same moment spread
        out, and no node retries at once.
        """
        # The exponent is bounded so that no float overflows.
        full_s = min(self.cap_s, self.base_s * 2.0 ** min(failures_count - 1, 60))
        return full_s * (0.5 + 0.5 * fraction)

    def pause_s(
        self,
        error: BaseException,
        failures_count: int,
        left_s: float,
        fraction: float,
    ) -> float | None:
        """Return the wait before the next attempt, None where there is none.

        `error` is the last of so many failures in a row, `left_s` the rest of the deadline. The
        wait is not shorter than the server has said.

        Wrong bytes are asked for again at once: elsewhere they may be right.
        """
        attempts, wait_s = self.attempts, self.delay_s(failures_count, fraction)
        if isinstance(error, CorruptError):
            attempts, wait_s = min(attempts, WRONG_ATTEMPTS), 0.0
        elif isinstance(error, UnavailableError):
            wait_s = max(wait_s, error.retry_after_s)
        is_over = failures_count >= attempts or wait_s >= left_s or not is_retryable(error)
        return None if is_over else wait_s


REQUEST = Policy()
"""For a request that others can do without."""
ONCE = Policy(attempts=1)
"""For callers that try again themselves."""
SOON = Policy(attempts=math.inf, base_s=0.02)
"""For what another server is about to know: a DataNode's report takes milliseconds."""
UNTIL_DEADLINE = Policy(attempts=math.inf)
"""Where only the deadline ends the attempts: for the reads and writes of a running job, which has
no other way."""
OUTAGE_DEADLINES = 1.5
"""How many deadlines a running job waits for a storage that is gone. More than one, so that a
server that takes a whole deadline to come back is still found, and has time to begin."""


class Attempts:
    """The attempts at one thing: after each failure, whether and when there is another one. For
    one thread."""

    def __init__(
        self,
        policy: Policy = REQUEST,
        deadline_s: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = dice,
    ) -> None:
        """No attempt begins later than `deadline_s` from now on, or from the last progress."""
        self._policy = policy
        self._deadline_s = deadline_s
        self._clock = clock
        self._dice = dice
        self._ends_s = clock() + deadline_s
        self.failures_count = 0
        """Failures since there was progress."""

    @property
    def left_s(self) -> float:
        """Rest of the deadline in seconds, never below 0."""
        return max(0.0, self._ends_s - self._clock())

    def progressed(self) -> None:
        """Note that the last attempt brought something: failures count anew."""
        self.failures_count = 0
        self._ends_s = self._clock() + self._deadline_s

    def pause_s(self, error: BaseException) -> float | None:
        """Return the wait after an attempt that ended in `error`; None: it was the last."""
        self.failures_count += 1
        return self._policy.pause_s(error, self.failures_count, self.left_s, self._dice())


def as_bootseer_error(error: BaseException, what: str) -> BootseerError:
    """Return `error` as a BootseerError that says that `what` ("read blobs/x") failed.

    An error that is ours already keeps its class and its message.
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

    A raised exception collects the traceback of its thread, so that one object must not be raised
    by several waiters at once.
    """
    try:
        copy = type(error)(*error.args)
    except TypeError:
        # A class with a constructor of its own; sharing it only makes the traceback longer.
        return error
    copy.__cause__ = error.__cause__ or error
    return copy
