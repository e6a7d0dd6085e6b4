"""Exceptions of Bootseer, and the table that maps each to an errno and an exit code.

Every error also subclasses the builtin exception that a caller who does not know Bootseer would
catch (`FileNotFoundError`, `TimeoutError`, ...). A message says what failed, on which path or URL,
and what the user can do. FUSE handlers and click commands translate with `errno_of` and
`exit_code_of` and never choose codes of their own.
"""

import errno
import sys

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


class BootseerError(Exception):
    """Base of every error that Bootseer raises on purpose. The message is one clear sentence."""


class InvalidInputError(BootseerError, ValueError):
    """A URL, option, size or configuration value that the user gave is malformed."""


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
    """Shortest wait before the next attempt, as the server said; 0 if it did not."""


class UnsupportedError(BootseerError, OSError):
    """The kernel, machine or backend does not support the operation, or a privilege is missing."""


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
    """Return the errno of a file system's reply to `error`; EIO for an unforeseen exception."""
    if not isinstance(error, BootseerError) and isinstance(error, OSError) and error.errno:
        return error.errno
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls][0]
    return errno.EIO


def missing_package(error: ModuleNotFoundError) -> BaseException:
    """Return the error to raise for a dependency that is not installed.

    Returns `error` itself if the missing module is a module of Bootseer.
    """
    name = error.name or ""
    if not name or name.split(".")[0] == "bootseer":
        return error
    return UnsupportedError(
        f"the package {name} is not installed in {sys.prefix}: bootseer.stage and bootseer.ready "
        "work without it, commands do not. Install Bootseer again without --no-deps, or run its "
        "commands from another environment"
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ended with `error`; 1 for an unforeseen exception."""
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
    """Return `error` as a BootseerError whose message says what failed; raise it `from error`.

    `what` ("write the index to /x") precedes the reason. A BootseerError keeps its message.
    """
    if isinstance(error, BootseerError):
        return type(error)(*error.args)
    reason = error.strerror or str(error)
    message = f"cannot {what}: {reason}"
    return _BY_ERRNO.get(error.errno or 0, BootseerError)(message)
