"""The exceptions of Bootseer, and the one table from each to an errno and an exit code.

Owns nothing else. Every error also subclasses the builtin that a caller who knows nothing of
Bootseer would catch (`FileNotFoundError`, `TimeoutError`, ...). A message says what failed, on
which path or URL, and what the user can do. Edges (a FUSE handler, a click command) translate
with `errno_of` and `exit_code_of` and never invent codes of their own.
"""

import errno
import sys

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


class BootseerError(Exception):
    """Base of every error that Bootseer raises on purpose. The message is one clear sentence."""


class InvalidInputError(BootseerError, ValueError):
    """What the user gave cannot be used: a malformed URL, option, size or configuration value."""


class NotFoundError(BootseerError, FileNotFoundError):
    """A file, key, image or snapshot does not exist."""


class AlreadyExistsError(BootseerError, FileExistsError):
    """Something exists where it must not."""


class PermissionDeniedError(BootseerError, PermissionError):
    """The operating system or the server refused access."""


class NoSpaceError(BootseerError, OSError):
    """A disk, all disks of a storage or a memory budget are full."""


class QuotaExceededError(NoSpaceError):
    """A quota of the storage is used up; the storage itself may have room."""


class DeadlineError(BootseerError, TimeoutError):
    """An operation did not finish within its deadline."""


class CorruptError(BootseerError, ValueError):
    """Bytes do not match their digest, checksum or format."""


class UnknownFormatError(BootseerError, ValueError):
    """A file is of a kind or version that this release does not read."""


class UnavailableError(BootseerError, ConnectionError):
    """A server, store or mount cannot be reached now; trying later may help."""

    retry_after_s = 0.0
    """How long to wait at least, as the server said."""


class UnsupportedError(BootseerError, OSError):
    """This kernel, machine, privilege or backend cannot do what was asked."""


class BusyError(BootseerError, OSError):
    """Something is in use, mounted or leased by another process or node."""


class SetupFailedError(BootseerError):
    """A command that Bootseer ran for the user failed; `exit_code` is the command's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# class -> (errno for FUSE replies, exit code of the command line). The exit codes are a promise
# to scripts: never reuse or renumber one.
_CODES: dict[type[BaseException], tuple[int, int]] = {
    BootseerError: (errno.EIO, EXIT_FAILURE),
    InvalidInputError: (errno.EINVAL, EXIT_USAGE),
    NotFoundError: (errno.ENOENT, 10),
    AlreadyExistsError: (errno.EEXIST, 11),
    PermissionDeniedError: (errno.EACCES, 12),
    NoSpaceError: (errno.ENOSPC, 13),
    DeadlineError: (errno.ETIMEDOUT, 14),
    CorruptError: (errno.EIO, 15),
    UnknownFormatError: (errno.EIO, 16),
    UnavailableError: (errno.EIO, 17),
    UnsupportedError: (errno.EOPNOTSUPP, 18),
    BusyError: (errno.EBUSY, 19),
    QuotaExceededError: (errno.EDQUOT, 20),
}


# errno -> class, where an error of the operating system says enough about what went wrong.
_BY_ERRNO: dict[int, type[BootseerError]] = {
    errno.ENOENT: NotFoundError,
    errno.ENOTDIR: NotFoundError,
    errno.ESRCH: NotFoundError,
    errno.EISDIR: InvalidInputError,
    errno.ENAMETOOLONG: InvalidInputError,
    errno.ELOOP: InvalidInputError,
    errno.EEXIST: AlreadyExistsError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: QuotaExceededError,
    errno.ETIMEDOUT: DeadlineError,
    errno.EBUSY: BusyError,
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSYS: UnsupportedError,
    errno.ECONNREFUSED: UnavailableError,
    errno.ECONNRESET: UnavailableError,
    errno.ENOTCONN: UnavailableError,
    errno.EHOSTUNREACH: UnavailableError,
    errno.ENETUNREACH: UnavailableError,
    errno.ESTALE: UnavailableError,
}


def errno_of(error: BaseException) -> int:
    """Returns the errno of a file system's reply to `error`; EIO for an unforeseen exception."""
    if not isinstance(error, BootseerError) and isinstance(error, OSError) and error.errno:
        return error.errno
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls][0]
    return errno.EIO


def missing_package(error: ModuleNotFoundError) -> BaseException:
    """What to say where a package is not installed that Bootseer's commands need; `error` itself
    where the module is one of ours."""
    name = error.name or ""
    if not name or name.split(".")[0] == "bootseer":
        return error
    return UnsupportedError(
        f"{sys.prefix} has Bootseer without the packages that its commands need (there is no "
        f"{name}): bootseer.stage and bootseer.ready work there, commands do not; install it once "
        "more without --no-deps, or run the commands from an environment that has all of it"
    )


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a command that ended with `error`; 1 for an unforeseen exception."""
    if isinstance(error, SetupFailedError):
        return error.exit_code
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls][1]
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _CODES[_BY_ERRNO[error.errno]][1]
    builtin = {TimeoutError: DeadlineError, ConnectionError: UnavailableError}
    for base, ours in builtin.items():
        if isinstance(error, base):
            return _CODES[ours][1]
    return EXIT_FAILURE


def from_oserror(error: OSError, what: str) -> BootseerError:
    """`error` as one of ours, with `what` ("write the index to /x") put before the reason. One that
    is ours already says what failed.

    Returns the exception; raise it `from error`.
    """
    if isinstance(error, BootseerError):
        return type(error)(*error.args)
    reason = error.strerror or str(error)
    message = f"cannot {what}: {reason}"
    return _BY_ERRNO.get(error.errno or 0, BootseerError)(message)
