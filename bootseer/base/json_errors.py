"""Errors passed from one process of Bootseer to another, as a small JSON object.

The class is passed by its name, so that the receiver raises the same class and exits with the same
code. Pure.
"""

from msgspec import Struct

from bootseer import errors
from bootseer.base.redact import redact
from bootseer.errors import BootseerError, SetupFailedError, UnavailableError

# A character takes up to six bytes in JSON: the message fits into a pipe (64 KiB) without a reader.
_MESSAGE_CHARS_MAX = 8000


class ErrorDocument(Struct, frozen=True):
    """An error as a document: the name of its class, and its message."""

    error: str
    message: str
    exit_code: int | None = None
    """Exit code of a command that Bootseer ran for the user."""


def encode_error(error: BaseException, what: str) -> ErrorDocument:
    """Return an error as a document of at most 64 KiB of JSON.

    `what` names the program that failed, in the message of an exception that is not a
    `BootseerError`.
    """
    if isinstance(error, BootseerError):
        name, message = type(error).__name__, str(error)
    else:
        name, message = UnavailableError.__name__, f"{what} failed: {error!r}"
    exit_code = error.exit_code if isinstance(error, SetupFailedError) else None
    return ErrorDocument(name, redact(message)[:_MESSAGE_CHARS_MAX], exit_code)


def decode_error(failure: ErrorDocument) -> BootseerError:
    """Return the error to raise for a document; UnavailableError if its class is unknown."""
    if failure.exit_code is not None:
        return SetupFailedError(failure.message, failure.exit_code)
    kind = getattr(errors, failure.error, None)
    if not (isinstance(kind, type) and issubclass(kind, BootseerError)):
        return UnavailableError(failure.message)
    if issubclass(kind, SetupFailedError):
        return UnavailableError(failure.message)
    return kind(failure.message)
