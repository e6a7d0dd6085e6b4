"""Codec of the columns that the worker processes of an extraction get in a memory file.

Columns are plain arrays, each preceded by its length, so that a worker reads them within
milliseconds and without importing the rest of Bootseer. Stateless.
"""

import os
from array import array
from collections.abc import Mapping, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, TypeAlias

# Names and array typecodes of the columns in the order of the file; "" stands for bytes.
SECTIONS = {
    "settings": "q",
    "names": "",
    "name_parent": "I",
    "name_inode": "I",
    "directory_name": "I",
    "mode": "I",
    "uid": "I",
    "gid": "I",
    "mtime_ns": "q",
    "size_bytes": "Q",
    "extent_start": "Q",
    "extent_file_offset": "Q",
    "extent_blob": "I",
    "extent_blob_offset": "Q",
    "extent_length": "Q",
    "blob_base": "Q",
    "blob_frame": "I",
    "frame_offset": "Q",
    "frame_stream_offset": "Q",
    "frame_digests": "",
    "files": "I",
    "group_start": "I",
    "part_name": "I",
    "part_start": "I",
    "places": "Q",
    "recorded": "",
}
SETTINGS = ("owners", "uid", "gid", "umask", "atime_ns", "is_verified", "file_count")

Section: TypeAlias = "array[int] | bytes"
_LENGTH = Struct("<Q")


def pick(column: Sequence[Any], indexes: Sequence[int]) -> Sequence[Any]:
    """Return the elements of a column at `indexes`, in one call of C code."""
    return itemgetter(*indexes)(column) if len(indexes) > 1 else [column[i] for i in indexes]


def write_columns(fd: int, columns: Mapping[str, Section]) -> None:
    """Write the columns to a memory file."""
    pieces: list[bytes | memoryview] = []
    for name in SECTIONS:
        section = memoryview(columns[name]).cast("B")
        pieces += [_LENGTH.pack(len(section)), section]
    data = memoryview(b"".join(pieces))
    while data:
        data = data[os.write(fd, data) :]


def read_columns(data: memoryview) -> dict[str, Any]:
    """Return the columns that `write_columns` wrote, and `name_list`, the list of the names."""
    columns: dict[str, Any] = {}
    position = 0
    for name, kind in SECTIONS.items():
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        section = data[position : position + length]
        if kind:
            columns[name] = array(kind)
            columns[name].frombytes(section)
        else:
            columns[name] = bytes(section)
        position += length
    columns["name_list"] = columns["names"].split(b"\0")
    return columns
