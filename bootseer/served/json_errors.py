"""Errors that cross from one process of ours to another: as a small JSON object and back.

Alone owns that form. The class goes by name, so that the other side raises the same and ends with
the same exit code. Pure (no I/O).
"""

from collections.abc import Mapping
from typing import Any

from bootseer import errors
from bootseer.base.redact import redact
from bootseer.errors import BootseerError, SetupFailedError, UnavailableError

# Six bytes each as JSON at worst: what a pipe takes at once, while nobody reads it yet.
_MESSAGE_CHARS_MAX = 8000


def error_to_json(error: BaseException, what: str) -> dict[str, Any]:
    """At most 64 KiB as JSON. `what` names who failed, for errors that are not ours."""
    if isinstance(error, BootseerError):
        name, message = type(error).__name__, str(error)
    else:
        name, message = UnavailableError.__name__, f"{what} failed: {error!r}"
    document: dict[str, Any] = {"error": name, "message": redact(message)[:_MESSAGE_CHARS_MAX]}
    if isinstance(error, SetupFailedError):
        document["exit_code"] = error.exit_code
    return document


def error_from_json(document: Mapping[str, Any]) -> BootseerError:
    """The error to raise; UnavailableError where the class is none of ours."""
    message = str(document.get("message", "it did not say why"))
    if "exit_code" in document:
        return SetupFailedError(message, int(document["exit_code"]))
    kind = getattr(errors, str(document.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, BootseerError)):
        return UnavailableError(message)
    if issubclass(kind, SetupFailedError):
        return UnavailableError(message)
    return kind(message)
