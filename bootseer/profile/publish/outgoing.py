"""Lines of a node's timelines in a form that may leave the node: whole JSON lines without secrets.

Jobs write to their timelines, too, with secrets in errors and names: each text in a line is
redacted, and a line that is not JSON is left out. Functions only.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bootseer.base.redact import redactor
from bootseer.report.sources import BYTES_MAX
from bootseer.timeline.otlp import START_EVENT

_LINE_BYTES_MAX = 1024 * 1024
_SPANS_A_LINE = 200
_TEXTS_MAX = 4096
"""Most texts whose redacted form is kept: names and values that many lines repeat."""


class TimelineLine(NamedTuple):
    """A line of a timeline."""

    path: str
    end: int
    """Offset of the line's end in its file."""
    document: dict[str, Any]


def outgoing(paths: Iterable[Path]) -> Iterator[TimelineLine]:
    """Yield the lines of these files, up to a start's size limit. Raises: OSError."""
    left = BYTES_MAX
    redact = lru_cache(_TEXTS_MAX)(redactor())
    for path in paths:
        with open(path, "rb", opener=_opener) as file:
            data = file.read(left)
        left -= len(data)
        end = 0
        for text in data.splitlines(keepends=True):
            end += len(text)
            document = _document(text, redact)
            if document is not None:
                yield TimelineLine(str(path), end, document)


def _opener(path: str, flags: int) -> int:
    # A job may have replaced the file by a link or a pipe.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def encode(lines: Iterable[TimelineLine]) -> bytes:
    """Return the lines of a timeline, with the spans of one writer in one line.

    Begins of stages that have ended are left out: the end repeats all that they say.
    """
    spans: dict[bytes, list[Any]] = {}
    others: list[TimelineLine] = []
    ended: set[str] = set()
    for line in lines:
        match line.document:
            case {
                "resourceSpans": [
                    {
                        "resource": resource,
                        "scopeSpans": [{"scope": {"name": "bootseer"}, "spans": [span]}],
                    }
                ]
            } if isinstance(span, dict):
                ended.add(str(span.get("spanId")))
                spans.setdefault(msgspec.json.encode(resource), []).append(span)
            case _:
                others.append(line)
    requests: list[Any] = [line.document for line in others if not _is_begin_of(line, ended)]
    for writer, found in spans.items():
        resource = msgspec.Raw(writer)
        for first in range(0, len(found), _SPANS_A_LINE):
            scope = {"scope": {"name": "bootseer"}, "spans": found[first : first + _SPANS_A_LINE]}
            requests.append({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})
    return b"".join(msgspec.json.encode(request) + b"\n" for request in requests)


def _is_begin_of(line: TimelineLine, ended: Collection[str]) -> bool:
    match line.document:
        case {
            "resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": name, "spanId": id}]}]}]
        }:
            return name == START_EVENT and str(id) in ended
    return False


def _document(text: bytes, redact: Callable[[str], str]) -> dict[str, Any] | None:
    # The last line may be incomplete, since somebody is writing it.
    if len(text) > _LINE_BYTES_MAX or not text.endswith(b"\n"):
        return None
    try:
        document = _without_secrets(msgspec.json.decode(text), redact)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _without_secrets(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_without_secrets(one, redact) for one in value]
    if isinstance(value, dict):
        return {redact(key): _without_secrets(one, redact) for key, one in value.items()}
    return value
