"""What `msgspec.Struct` leaves to its users. Pure; any thread."""

from typing import Any

from msgspec import Struct


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
