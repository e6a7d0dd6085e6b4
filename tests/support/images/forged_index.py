"""Tree indexes with a right checksum and whatever contents."""

import hashlib
import struct

import zstandard

from bootseer.blob import columns
from bootseer.blob.tree import Tree

Sections = dict[str, bytes]


def sections_of(tree: Tree) -> Sections:
    return {name: tree.columns.load(name) for name in columns.SECTIONS}


def forge(sections: Sections, inode_count: int, name_count: int, codec: int = 1) -> bytes:
    """An index with a right checksum and whatever contents."""
    table, stored = b"", b""
    for name, (number, _) in columns.SECTIONS.items():
        raw = sections[name]
        packed = zstandard.compress(raw) if codec else raw
        table += struct.pack("<HHQQ", number, codec, len(raw), len(packed))
        stored += packed
    total = 64 + len(table) + len(stored)
    header = struct.pack(
        "<8sHHIIIQ", b"BOOTTREE", 1, len(columns.SECTIONS), inode_count, name_count, 0, total
    )
    checksum = hashlib.sha256(header + bytes(32) + table + stored).digest()
    return header + checksum + table + stored
