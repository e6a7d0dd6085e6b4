"""Protocol buffers written by hand, with the field numbers of Hadoop's definitions."""

from collections import defaultdict

from bootseer.base.varints import varint


def number(field: int, value: int) -> bytes:
    """Return a field that holds an unsigned number."""
    return varint(field << 3) + varint(value)


def blob(field: int, data: bytes) -> bytes:
    """Return a field that holds bytes, or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def text(field: int, text: str) -> bytes:
    """Return a field that holds a string."""
    return blob(field, text.encode())


def fields(message: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of a well-formed message's fields, by number."""
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    position = 0

    def take() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = take()
        if key & 7 == 0:
            found[key >> 3].append(take())
        else:
            assert key & 7 == 2
            length = take()
            found[key >> 3].append(message[position : position + length])
            position += length
    return found
