"""Codec of the section of a tree index with extended attributes. Pure."""

import struct
from collections.abc import Sequence
from typing import TypeAlias

from bootseer.base.display import quoted
from bootseer.errors import CorruptError

Xattrs: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Extended attributes as (name, value), sorted by name."""

NAME_BYTES_MAX = 255
"""XATTR_NAME_MAX of Linux."""
VALUE_BYTES_MAX = 65536
"""XATTR_SIZE_MAX of Linux."""
COUNT_MAX = 65535
"""Largest u16; XATTR_LIST_MAX (64 KiB) limits a file to fewer names."""

_LENGTHS = struct.Struct("<HI")


def encode_xattrs(sets: Sequence[Xattrs]) -> bytes:
    """Encode sets of attributes, each as a u16 count and its attributes.

    An attribute is a u16 name length, a u32 value length, the name and the value.
    """
    out = []
    for attributes in sets:
        if len(attributes) > COUNT_MAX:
            raise CorruptError("an inode has too many extended attributes")
        out.append(struct.pack("<H", len(attributes)))
        for name, value in attributes:
            if len(name) > NAME_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
                raise CorruptError(f"the extended attribute {quoted(name)} is too long")
            out.append(_LENGTHS.pack(len(name), len(value)) + name + value)
    encoded = b"".join(out)
    if decode_xattrs(encoded, len(sets)) != list(sets):
        raise CorruptError("extended attributes must be sorted by name, each name once")
    return encoded


def decode_xattrs(heap: bytes, count_max: int) -> list[Xattrs]:
    """Decode at most `count_max` sets of attributes. Raises: CorruptError."""
    sets: list[Xattrs] = []
    position = 0
    try:
        while position < len(heap):
            if len(sets) == count_max:
                raise CorruptError("there are more sets of extended attributes than inodes")
            (count,) = struct.unpack_from("<H", heap, position)
            position += 2
            attributes = []
            previous = b""
            for _ in range(count):
                name_bytes, value_bytes = _LENGTHS.unpack_from(heap, position)
                position += _LENGTHS.size
                name = heap[position : position + name_bytes]
                position += name_bytes
                value = heap[position : position + value_bytes]
                position += value_bytes
                if position > len(heap) or name_bytes > NAME_BYTES_MAX or b"\0" in name:
                    raise CorruptError("an extended attribute is cut off or has a bad name")
                if value_bytes > VALUE_BYTES_MAX or name <= previous:
                    raise CorruptError("extended attributes are too long, unsorted or repeated")
                previous = name
                attributes.append((name, value))
            sets.append(tuple(attributes))
    except struct.error as error:
        raise CorruptError("the extended attributes are cut off") from error
    return sets
