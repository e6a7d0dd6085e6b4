"""Varints and length-prefixed messages of Protocol Buffers streams. Pure."""

_VARINT_MAX_BYTES = 10


def varint(value: int) -> bytes:
    """Return a non-negative number as a varint: 7 bits per byte, the lowest bits first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def delimited(message: bytes) -> bytes:
    """Return a message preceded by its length."""
    return varint(len(message)) + message


def take_delimited(data: bytes | bytearray, max_bytes: int) -> tuple[bytes | None, int]:
    """Return the length-prefixed message at the start of `data`, and the position of its end.

    While a part of the message is missing, return None and the position up to which `data` is
    needed at least. Raises: ValueError for a message longer than `max_bytes`.
    """
    length = 0
    for index, byte in enumerate(data[:_VARINT_MAX_BYTES]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    else:
        if len(data) >= _VARINT_MAX_BYTES:
            raise ValueError("a length that does not end")
        return None, len(data) + 1
    if length > max_bytes:
        raise ValueError("too long a message")
    start = index + 1
    end = start + length
    return (bytes(data[start:end]) if end <= len(data) else None), end
