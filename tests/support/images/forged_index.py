"""Indexes of trees with forged contents and a right checksum.

Reads and writes the format itself, as docs/format/index.md describes it.
"""

import hashlib
import struct

import zstandard

from bootseer.blob.index import encode
from bootseer.blob.tree import Tree

# Names of the sections from number 1 on, with the type code of their numbers, or "" for a heap.
SECTIONS = {
    "blob_size_bytes": "Q",
    "blob_frame_count": "I",
    "blob_digests": "",
    "frame_length": "I",
    "frame_stream_length": "I",
    "frame_digests": "",
    "names": "",
    "name_parent": "I",
    "name_inode": "I",
    "mode": "I",
    "uid": "I",
    "gid": "I",
    "mtime_ns": "q",
    "size_bytes": "Q",
    "rdev": "Q",
    "link": "I",
    "links": "",
    "xattr": "I",
    "xattrs": "",
    "extent_count": "I",
    "extent_file_offset": "Q",
    "extent_blob": "I",
    "extent_blob_offset": "Q",
    "extent_length": "Q",
    "digest": "I",
    "digests": "",
    "blob_stream_length": "Q",
    "blob_stream_digests": "",
}
DEPTH_MAX = 4096
"""Largest depth of directories."""

Sections = dict[str, bytes]

_HEADER = struct.Struct("<8sHHIIIQ")
_SECTION = struct.Struct("<HHQQ")
_TABLE = _HEADER.size + 32


def sections_of(tree: Tree) -> Sections:
    """Return the contents of each section of the tree's index."""
    data = encode(tree)
    position = _TABLE + _SECTION.size * len(SECTIONS)
    found = {}
    for number, name in enumerate(SECTIONS):
        _, codec, _, length = _SECTION.unpack_from(data, _TABLE + _SECTION.size * number)
        stored = data[position : position + length]
        found[name] = zstandard.decompress(stored) if codec else stored
        position += length
    assert position == len(data)
    return found


def forge(sections: Sections, inode_count: int, name_count: int, codec: int = 1) -> bytes:
    """Return an index of these sections with a right checksum."""
    table, stored = b"", b""
    for number, name in enumerate(SECTIONS, 1):
        raw = sections[name]
        packed = zstandard.compress(raw) if codec else raw
        table += _SECTION.pack(number, codec, len(raw), len(packed))
        stored += packed
    total = _TABLE + len(table) + len(stored)
    header = _HEADER.pack(b"BOOTTREE", 1, len(SECTIONS), inode_count, name_count, 0, total)
    checksum = hashlib.sha256(header + bytes(32) + table + stored).digest()
    return header + checksum + table + stored
