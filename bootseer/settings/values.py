"""Parsers of values in settings and options: sizes, ages, durations, names.

Pure, but for the working directory and the home that relative folders are in.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.errors import InvalidInputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
# Largest file offset, plus one.
_SIZE_LIMIT_BYTES = 2**63
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_AGE_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
AUTOMATIC_AGE_S = -1.0
"""Maximum age that stands for "auto": it depends on the set-up."""
_AGE_MAX_S = 100 * 365 * 86_400
# Names that become file names or parts of store keys.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def parse_size(text: str) -> int:
    """Return the bytes of "512", "64MiB" or "1.5 GB". Raises: InvalidInputError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a size; write for example 512MiB or 20GB")
    unit = (match[2] or "").lower()
    size_bytes = float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit])
    if size_bytes >= _SIZE_LIMIT_BYTES:
        raise InvalidInputError(f"{text!r} is more than any disk holds; write for example 20GB")
    return int(size_bytes)


def parse_age(text: str) -> float:
    """Return the seconds of "7d", "12h", "2w" or "3600"; 0 for "off". Raises: InvalidInputError."""
    if text == "off":
        return 0.0
    try:
        seconds = parse_duration(text)
    except InvalidInputError:
        seconds = -1.0
    if not 0 <= seconds <= _AGE_MAX_S:
        raise InvalidInputError(f"{text!r} is not an age; write for example 12h, 7d, 4w or off")
    return seconds


def parse_max_age(text: str) -> float:
    """Return the maximum age of snapshots in seconds; `AUTOMATIC_AGE_S` for "auto", 0 for "off".

    Raises: InvalidInputError, also for an age of zero.
    """
    if text == "auto":
        return AUTOMATIC_AGE_S
    seconds = parse_age(text)
    if seconds == 0 and text != "off":
        raise InvalidInputError(
            f"{text!r} would let every node run the set-up at every start; to have it made anew "
            "once declare a variable with --input-env and change it, to have no limit write off"
        )
    return seconds


def is_name(text: str) -> bool:
    """Return whether `text` can be part of a file name or key."""
    return bool(_NAME.fullmatch(text))


def parse_name(text: str) -> str:
    """Return `text` if it is a usable name. Raises: InvalidInputError."""
    if not is_name(text):
        raise InvalidInputError(
            f"{text!r} is not a usable name; use letters, digits, '.', '_' and '-', at most 128"
        )
    return text


def as_name(text: str) -> str:
    """Return a scheduler's name without the characters that `parse_name` refuses; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:128]


def as_count(text: str) -> int:
    """Return the number that `text` is, of at most nine digits; 0 for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def parse_duration(text: str) -> float:
    """Return the seconds of "30", "1.5s", "10m", "2h" or "1d". Raises: InvalidInputError."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a duration; write for example 30, 30s or 10m")
    return float(match[1]) * _AGE_UNITS_S[match[2]]


def parse_linger(text: str) -> float:
    """Return the seconds of "10m", less than a day; 0 for "off". Raises: InvalidInputError."""
    return 0.0 if text in ("off", "0") else _seconds(text)


def _seconds(text: str) -> float:
    value = parse_duration(text)
    if not 0 < value < 86_400:
        raise InvalidInputError(f"{text!r} is not more than 0 and less than 86400 seconds")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a whole number") from None
    if not 0 <= value < 2**31:
        raise InvalidInputError(f"{text!r} is not from 0 to {2**31 - 1}")
    return value


def _port(text: str) -> int:
    if text == "auto":
        return 0
    value = _count(text)
    if not 0 < value < 2**16:
        raise InvalidInputError(f"{text!r} is no port; write a number from 1 to 65535, or auto")
    return value


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()


# ---- kinds of settings ------------------------------------------------------------------------


class SettingKind(Struct, frozen=True):
    """Kind of a setting's value: how it is written, read and shown."""

    placeholder: str
    """Placeholder of a value in help: "SIZE"."""
    parse: Callable[[str], Any]
    """Raises: InvalidInputError."""
    show: Callable[[Any], str | int | float] = str
    """Returns a value as text, or as a number, that `parse` reads."""


def switch(on: str = "on") -> SettingKind:
    """Return the kind of settings that are `on` or off."""

    def parse(text: str) -> bool:
        if text not in (on, "off"):
            raise InvalidInputError(f"{text!r} is neither {on} nor off")
        return text == on

    return SettingKind(f"{on}|off", parse, lambda value: on if value else "off")


def choice(words: Sequence[str], what: str) -> SettingKind:
    """Return the kind of settings that are one of `words`; `what` names such a word in messages."""

    def parse(text: str) -> str:
        if text not in words:
            raise InvalidInputError(f"{text!r} is no {what}; use {', '.join(words)}")
        return text

    return SettingKind("|".join(words), parse)


def _off_or_number(value: float) -> str | float:
    return value or "off"


def _show_max_age(value: float) -> str | float:
    return "auto" if value == AUTOMATIC_AGE_S else _off_or_number(value)


NAME = SettingKind("NAME", parse_name)
NAME_OR_NONE = SettingKind(
    "NAME|none",
    lambda text: "" if text == "none" else parse_name(text),
    lambda value: value or "none",
)
COUNT = SettingKind("N", _count, int)
SECONDS = SettingKind("TIME", _seconds, float)
SIZE = SettingKind("SIZE", parse_size, int)
FOLDER = SettingKind("DIR", _folder)


def _or_off(placeholder: str) -> SettingKind:
    return SettingKind(
        f"{placeholder}|off",
        lambda text: None if text == "off" else _folder(text),
        lambda value: str(value or "off"),
    )


FOLDER_OR_OFF = _or_off("DIR")
FILE_OR_OFF = _or_off("FILE")
PORT = SettingKind("PORT|auto", _port, lambda value: value or "auto")
LINGER = SettingKind("TIME|off", parse_linger, _off_or_number)
MAX_AGE = SettingKind("TIME|auto|off", parse_max_age, _show_max_age)
SWITCH = switch()
