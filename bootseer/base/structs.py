"""What `msgspec.Struct` leaves to its users. Pure; any thread."""

import json
import os
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

S = TypeVar("S", bound=Struct)


def asdict(struct: Struct) -> dict[str, Any]:
    """The fields by name; structs within, also in lists, tuples and dicts, are dicts then."""
    return {name: _plain(getattr(struct, name)) for name in struct.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return asdict(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def to_builtins(struct: Struct) -> dict[str, Any]:
    """What JSON has, for another process of ours; a path is text."""
    plain: dict[str, Any] = msgspec.to_builtins(struct, enc_hook=os.fspath)
    return plain


def from_builtins(plain: Any, kind: type[S]) -> S:
    """The inverse. Raises: msgspec.ValidationError."""
    return msgspec.convert(plain, kind, dec_hook=lambda path, text: path(text))


def to_line(struct: Struct) -> str:
    """One line of JSON. Paths may be no UTF-8, which msgspec's own encoder refuses."""
    return json.dumps(to_builtins(struct))


def from_line(line: str | bytes, kind: type[S]) -> S:
    """The inverse. Raises: ValueError, msgspec.ValidationError."""
    return from_builtins(json.loads(line), kind)
