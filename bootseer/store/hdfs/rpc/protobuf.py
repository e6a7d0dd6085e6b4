"""Protocol buffers, as far as messages to and from HDFS need them. Pure."""

from collections.abc import Iterator

_VARINT_MAX_BYTES = 10


def varint(value: int) -> bytes:
    """A number of 7 bits a byte, lowest first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def number(field: int, value: int) -> bytes:
    """A field that holds an unsigned number."""
    return varint(field << 3) + varint(value)


def signed(field: int, value: int) -> bytes:
    """A field of type sint32 or sint64."""
    return number(field, value << 1 if value >= 0 else (-value << 1) - 1)


def blob(field: int, data: bytes) -> bytes:
    """A field that holds bytes, or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def text(field: int, text: str) -> bytes:
    """A field that holds a string."""
    return blob(field, text.encode("utf-8"))


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where it ends. Raises: IndexError, ValueError."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("too long a number")


def delimited(data: bytes | bytearray, max_bytes: int) -> tuple[bytes | None, int]:
    """The message that `data` begins with, behind its length, and where it ends; None as long as
    some of it is missing, and a byte that it reaches to at least. Raises: ValueError for one that
    is longer than `max_bytes`."""
    head = bytes(data[:_VARINT_MAX_BYTES])
    try:
        length, start = read_varint(head, 0)
    except IndexError:
        return None, len(data) + 1
    if length > max_bytes:
        raise ValueError("too long a message")
    end = start + length
    return (bytes(data[start:end]) if end <= len(data) else None), end


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order. Raises: IndexError, ValueError."""
    position = 0
    while position < len(data):
        key, position = read_varint(data, position)
        value: int | bytes
        if key & 7 == 0:
            value, position = read_varint(data, position)
        elif key & 7 == 1:
            value, position = data[position : position + 8], position + 8
        elif key & 7 == 2:
            length, position = read_varint(data, position)
            value, position = data[position : position + length], position + length
        elif key & 7 == 5:
            value, position = data[position : position + 4], position + 4
        else:
            raise ValueError("an unforeseen kind of field")
        yield key >> 3, value


def positive(value: int | bytes | None) -> int:
    """`value`, if it is a number. Raises: ValueError."""
    if not isinstance(value, int):
        raise ValueError("a number is missing")
    return value


def every(data: bytes, field: int) -> list[bytes]:
    """All byte strings (texts, messages) of one field."""
    return [value for number, value in fields(data) if number == field and type(value) is bytes]
