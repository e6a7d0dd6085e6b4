"""Text for people: sentences and the log on stderr, sizes and times in tables. Loads no click."""

import logging
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

from bootseer.base.redact import redact
from bootseer.errors import EXIT_FAILURE, EXIT_OK, BootseerError


def say(sentence: str) -> None:
    """Print a sentence on stderr, after "bootseer: ", without credentials and control codes."""
    print_stderr(f"bootseer: {redact(printable(sentence))}")


def print_stderr(line: str) -> None:
    """Print a line on stderr without changes."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def warn_unwritten(paths: Iterable[str]) -> int:
    """Name the files whose last bytes are lost; return the exit code."""
    code = EXIT_OK
    for path in paths:
        say(f"{path} was still being written: nothing of it is kept")
        code = EXIT_FAILURE
    return code


def printable(text: str) -> str:
    """Return `text` with control codes escaped: names from a store may hold those of a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, without credentials and control codes."""
    if isinstance(error, BootseerError) or not isinstance(error, OSError):
        text = str(error) or type(error).__name__
    else:
        text = error.strerror or str(error)
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
    return redact(printable(" ".join(text.split("\n"))))


def human_bytes(count: float) -> str:
    """Return a size in decimal units, as networks and disks are sold: 1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_time(time_ns: int) -> str:
    """Return nanoseconds since 1970 as "2026-11-22 09:30:00Z"; "-" for 0 or if too large."""
    try:
        if time_ns:
            return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d %H:%M:%SZ}"
    except (OverflowError, ValueError, OSError):
        pass
    return "-"


def begin_log(verbosity: int) -> None:
    """Send warnings and, as `-v` and `-vv` ask, more to stderr, without credentials."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactingFormatter("bootseer: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _RedactingFormatter(logging.Formatter):
    """Formatter that removes credentials and control codes from the messages of all libraries."""

    def format(self, record: logging.LogRecord) -> str:
        # Line by line, since the line feeds of a traceback stay.
        return redact("\n".join(map(printable, super().format(record).split("\n"))))
