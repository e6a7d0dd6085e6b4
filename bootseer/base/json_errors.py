"""Errors that cross from one process of ours to another: as a small JSON object and back.

Alone owns that form. The class goes by name, so that the other side raises the same and ends with
the same exit code. Pure (no I/O).
"""

from msgspec import Struct

from bootseer import errors
from bootseer.base.redact import redact
from bootseer.errors import BootseerError, SetupFailedError, UnavailableError

# Six bytes each as JSON at worst: what a pipe takes at once, while no process reads it yet.
_MESSAGE_CHARS_MAX = 8000


class Failure(Struct, frozen=True):
    """An error on its way: the name of its class, and what it says."""

    error: str
    message: str
    exit_code: int | None = None
    """The exit code of a command that Bootseer ran for the user."""


def failure_of(error: BaseException, what: str) -> Failure:
    """The error as a document of at most 64 KiB of JSON. `what` names the program that failed, for
    errors that are not ours."""
    if isinstance(error, BootseerError):
        name, message = type(error).__name__, str(error)
    else:
        name, message = UnavailableError.__name__, f"{what} failed: {error!r}"
    exit_code = error.exit_code if isinstance(error, SetupFailedError) else None
    return Failure(name, redact(message)[:_MESSAGE_CHARS_MAX], exit_code)


def error_of(failure: Failure) -> BootseerError:
    """The error to raise; UnavailableError where the class is none of ours."""
    if failure.exit_code is not None:
        return SetupFailedError(failure.message, failure.exit_code)
    kind = getattr(errors, failure.error, None)
    if not (isinstance(kind, type) and issubclass(kind, BootseerError)):
        return UnavailableError(failure.message)
    if issubclass(kind, SetupFailedError):
        return UnavailableError(failure.message)
    return kind(failure.message)
