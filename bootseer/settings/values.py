"""Values as people write them in settings and options: sizes, ages, times, names. Pure (no I/O)."""

import re

from bootseer.errors import InvalidInputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
# What a file offset can hold.
_SIZE_LIMIT_BYTES = 2**63
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_AGE_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
AUTOMATIC_AGE_S = -1.0
"""The maximum age that depends on the set-up."""
_AGE_MAX_S = 100 * 365 * 86_400
# Names that become file names or parts of store keys.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def parse_size(text: str) -> int:
    """Bytes from "512", "64MiB", "1.5 GB". Raises: InvalidInputError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a size; write for example 512MiB or 20GB")
    unit = (match[2] or "").lower()
    size_bytes = float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit])
    if size_bytes >= _SIZE_LIMIT_BYTES:
        raise InvalidInputError(f"{text!r} is more than any disk holds; write for example 20GB")
    return int(size_bytes)


def parse_age(text: str) -> float:
    """Seconds from "7d", "12h", "30m", "2w" or "3600"; 0 from "off". Raises: InvalidInputError."""
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
    """`parse_age`, for snapshots: also "auto", and no age of zero. Raises: InvalidInputError."""
    if text == "auto":
        return AUTOMATIC_AGE_S
    seconds = parse_age(text)
    if seconds == 0 and text != "off":
        raise InvalidInputError(
            f"{text!r} would let every node run the set-up at every start; to have it made anew "
            "once change --salt, to have no limit write off"
        )
    return seconds


def is_name(text: str) -> bool:
    """Whether `text` can be part of a file name or key."""
    return bool(_NAME.fullmatch(text))


def parse_name(text: str) -> str:
    """`text`, when it is such a name. Raises: InvalidInputError."""
    if not is_name(text):
        raise InvalidInputError(
            f"{text!r} is not a usable name; use letters, digits, '.', '_' and '-', at most 128"
        )
    return text


def as_name(text: str) -> str:
    """What a scheduler calls something, as `parse_name` wants it; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:128]


def parse_duration(text: str) -> float:
    """Seconds from "30", "1.5s", "10m", "2h" or "1d". Raises: InvalidInputError."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a duration; write for example 30, 30s or 10m")
    return float(match[1]) * _AGE_UNITS_S[match[2]]
