"""JSON from a disk or a network, taken apart with every type, count and size checked.

Pure. Each function raises CorruptError naming `where` the document came from, and
`parse_versioned` UnknownFormatError.
"""

import re
from collections.abc import Mapping
from typing import Any

from bootseer.base.bounded_json import members_digest, parse_json
from bootseer.errors import CorruptError, UnknownFormatError

DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
ANY_DIGEST = re.compile(rf"{DIGEST.pattern}|blake3:[0-9a-f]{{64}}")
"""Also of streams that no image names."""
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
BLOB_DIGEST = re.compile(r"(?:sha256|blake3):[0-9a-f]{64}")

CHECKSUM = "checksum"
COUNT_MAX = 2**53
"""What every JSON reader reads exactly."""


def parse(data: bytes, size_max: int, where: str) -> Any:
    """The document in `data`, of at most `size_max` bytes."""
    return parse_json(data, where, size_max)


def parse_versioned(
    data: bytes, size_max: int, kind: str, version: int, where: str, what: str
) -> dict[str, Any]:
    """As `parse`, a document of this `kind` and `version`. `what`: what another document is not.

    Raises: UnknownFormatError for any other.
    """
    document = parse(data, size_max, where)
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise UnknownFormatError(f"{where} is {what}")
    if document.get("version") != version:
        found = str(document.get("version"))[:20]
        raise UnknownFormatError(f"{where} has version {found}; this release reads {version}")
    return document


def check_checksum(document: Any, where: str) -> None:
    """Compare a document with its checksum, if it has one: those of earlier releases have none. To
    be asked first: what is damaged may look like a later version's.

    Raises: CorruptError.
    """
    if not isinstance(document, dict) or CHECKSUM not in document:
        return
    try:
        is_right = document[CHECKSUM] == members_digest(document, CHECKSUM)
    except RecursionError:
        is_right = False
    if not is_right:
        raise CorruptError(f"{where} does not match its checksum: it is damaged, or was edited")


def with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, so that `check_checksum` finds damage in it."""
    return {**document, CHECKSUM: members_digest(document, CHECKSUM)}


def object_in(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """An object; {} where it is absent or null."""
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: {key} is not an object")
    return value


def list_in(
    document: Mapping[str, Any], key: str, kind: type, count_max: int, where: str
) -> list[Any]:
    """A list with entries of one type; [] where it is absent or null."""
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > count_max:
        raise CorruptError(f"{where}: {key} is not a list of at most {count_max} entries")
    if not all(isinstance(entry, kind) for entry in value):
        raise CorruptError(f"{where}: {key} has an entry of a wrong type")
    return value


def string_in(document: Mapping[str, Any], key: str, where: str) -> str:
    """A string without NUL; "" where it is absent or null."""
    value = document.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise CorruptError(f"{where}: {key} is not a string")
    return value


def strings_in(
    document: Mapping[str, Any], key: str, count_max: int, where: str
) -> tuple[str, ...]:
    """A list of strings without NUL."""
    values = list_in(document, key, str, count_max, where)
    if any("\0" in value for value in values):
        raise CorruptError(f"{where}: {key} has an entry with a NUL")
    return tuple(values)


def count_in(document: Mapping[str, Any], key: str, where: str, count_max: int = COUNT_MAX) -> int:
    """A whole number from 0 to `count_max`; must be there."""
    value = document.get(key)
    if type(value) is not int or not 0 <= value <= count_max:
        raise CorruptError(f"{where}: {key} is not a number from 0 to {count_max}")
    return value


def digest_in(
    document: Mapping[str, Any], key: str, where: str, form: re.Pattern[str] = DIGEST
) -> str:
    """A digest; must be there."""
    return check_digest(document.get(key), where, form)


def check_digest(value: object, where: str, form: re.Pattern[str] = DIGEST) -> str:
    """`value` if it is a digest."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise CorruptError(f"{where}: {str(value)[:100]!r} is not a digest")
    return value
