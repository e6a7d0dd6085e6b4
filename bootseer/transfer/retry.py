"""Which failures are worth another attempt, when, and how they are told. Pure (no I/O).

Owns the retry policy of transfers; knows neither threads nor the clock.
"""

import errno

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


class RetryPolicy(Struct, frozen=True):
    """Exponential backoff with jitter."""

    attempts: int = 4
    """Reads of one range before its failure is final."""
    base_s: float = 0.05
    """Longest wait before the second attempt; it doubles with each further one."""
    cap_s: float = 2.0

    def delay_s(self, attempts_made: int, fraction: float) -> float:
        """How long to wait after `attempts_made` failed attempts; `fraction` in [0, 1) is random.

        Between half of the full wait and all of it: nodes that failed at the same moment spread
        out, and nobody retries at once.
        """
        # The exponent is bounded so that no float overflows.
        full_s = min(self.cap_s, self.base_s * 2.0 ** min(attempts_made - 1, 60))
        return full_s * (0.5 + 0.5 * fraction)

    def allows(self, error: BaseException, attempts_made: int) -> bool:
        """Whether another attempt may follow `error`."""
        return attempts_made < self.attempts and is_retryable(error)


def as_bootseer_error(error: BaseException, what: str) -> BootseerError:
    """`error` as one of ours, saying that `what` ("read blobs/x") failed.

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
    """A copy to raise in one thread: a raised exception collects that thread's traceback, so one
    object must not be raised by several waiters at once."""
    try:
        copy = type(error)(*error.args)
    except TypeError:
        # A class with a constructor of its own; sharing it only makes the traceback longer.
        return error
    copy.__cause__ = error.__cause__ or error
    return copy
