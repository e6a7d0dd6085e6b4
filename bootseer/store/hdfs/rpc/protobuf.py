"""The codec of protocol buffers: messages that are read are declared as classes. Pure.

    class Checksum(Message, frozen=True):
        kind: Annotated[int, 1]
        piece_bytes: Annotated[int, 2] = 512

A field is a number, a bool, a string, bytes, another message, or a tuple of these (`repeated`). One
without a default must be there. Fields that are not declared are skipped. A field `Annotated[bytes,
WHOLE]` holds the message as it came, and is what is sent of it. The messages are in messages.py.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Self, get_args, get_origin, get_type_hints

from msgspec import Struct

WHOLE = 0
"""The number of no field: stands for the whole message."""

_VARINT_MAX_BYTES = 10


class Message(Struct, frozen=True):
    """A message. It is decoded with all that is in it, or refused as a whole."""

    def encode(self) -> bytes:
        """The message as it is sent."""
        values = {number: getattr(self, field.name) for number, field in _declared(type(self))}
        return values.pop(WHOLE, b"") or encode(values)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises: ValueError for what is no such message."""
        known = dict(_declared(cls))
        values: dict[str, Any] = {known[WHOLE].name: data} if WHOLE in known else {}
        for number, value in _sent(data):
            field = known.get(number)
            if field is None or number == WHOLE:
                continue
            if type(value) is not field.wire:
                raise ValueError(f"{cls.__name__}.{field.name} is of another kind")
            if field.is_repeated:
                values.setdefault(field.name, []).append(field.read(value))
            else:
                values[field.name] = field.read(value)
        try:
            return cls(**{k: tuple(v) if type(v) is list else v for k, v in values.items()})
        except TypeError as error:
            raise ValueError(str(error)) from None


Value = int | str | bytes | Message | tuple[Any, ...] | None


class _Field(Struct, frozen=True):
    name: str
    wire: type
    """int: a varint; bytes: what stands behind its length."""
    read: Callable[[Any], Any]
    is_repeated: bool


@cache
def _declared(message: type[Message]) -> tuple[tuple[int, _Field], ...]:
    found = []
    for name, hint in get_type_hints(message, include_extras=True).items():
        kind, number = get_args(hint)
        is_repeated = get_origin(kind) is tuple
        kind = (get_args(kind) or (kind,))[0]  # of X | None, and of tuple[X, ...]
        read = kind.decode if issubclass(kind, Message) else bytes.decode if kind is str else kind
        wire = int if issubclass(kind, int) else bytes
        found.append((number, _Field(name, wire, read, is_repeated)))
    return tuple(found)


def _sent(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields, in order; not those of fixed size, of which our
    messages have none. Raises: ValueError."""
    position = 0
    while position < len(data):
        key, position = read_varint(data, position)
        kind = key & 7
        if kind == 0:
            number, position = read_varint(data, position)
            yield key >> 3, number
        elif kind == 2:
            length, position = read_varint(data, position)
            yield key >> 3, data[position : position + length]
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise ValueError("an unforeseen kind of field")
    if position > len(data):
        raise ValueError("a field is cut off")


def encode(fields: Mapping[int, Value]) -> bytes:
    """A message that has these values, by number; those that are None are left out."""
    return b"".join(_encoded(number, value) for number, value in fields.items())


def arguments(*values: Value) -> bytes:
    """A message whose fields are numbered in this order, from 1."""
    return encode(dict(enumerate(values, 1)))


def _encoded(number: int, value: Value) -> bytes:
    if value is None:
        return b""
    if isinstance(value, tuple):
        return b"".join(_encoded(number, one) for one in value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + delimited(
        value if isinstance(value, bytes) else value.encode()
    )


def zigzag(value: int) -> int:
    """How a number of type sint32 or sint64 is sent."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def varint(value: int) -> bytes:
    """A number of 7 bits a byte, lowest first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where it ends. Raises: ValueError."""
    value = shift = 0
    for byte in data[position : position + _VARINT_MAX_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number does not end")


def delimited(message: bytes) -> bytes:
    """A message behind its length."""
    return varint(len(message)) + message


def take_delimited(data: bytes | bytearray, max_bytes: int) -> tuple[bytes | None, int]:
    """The message that `data` begins with, behind its length, and where it ends; None as long as
    some of it is missing, and a byte that it reaches to at least. Raises: ValueError for one that
    is longer than `max_bytes`."""
    head = bytes(data[:_VARINT_MAX_BYTES])
    if len(head) < _VARINT_MAX_BYTES and all(byte > 0x7F for byte in head):
        return None, len(data) + 1
    length, start = read_varint(head, 0)
    if length > max_bytes:
        raise ValueError("too long a message")
    end = start + length
    return (bytes(data[start:end]) if end <= len(data) else None), end
