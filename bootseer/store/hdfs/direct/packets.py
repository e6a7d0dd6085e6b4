"""The packets of Hadoop's data transfer, version 28, in which blocks are read and written. Pure.

The fields of a header are of fixed length: lengths, then PacketHeaderProto with the offset in the
block, the packet's number, whether it is the last one (which is empty), and how much data it has.
Checksums follow the header, and the data follows them.
"""

import struct

from bootseer.store.hdfs.rpc import protobuf as pb

VERSION = b"\x00\x1c"
_LENGTHS = struct.Struct(">IH")
_HEADER = struct.Struct("<BqBqBBBi")
HEAD_BYTES = _LENGTHS.size + _HEADER.size


def packet_head(
    offset: int, number: int, count: int, *, sums_bytes: int = 0, is_last: bool = False
) -> bytes:
    """What comes before the checksums of a packet with `count` bytes of data."""
    # The length counts itself.
    lengths = _LENGTHS.pack(4 + sums_bytes + count, _HEADER.size)
    return lengths + _HEADER.pack(0x09, offset, 0x11, number, 0x18, is_last, 0x25, count)


def data_bytes(head: bytes) -> int:
    """How much data follows a head, by what it says itself."""
    count: int = _HEADER.unpack_from(head, _LENGTHS.size)[-1]
    return count


def block_message(block: bytes, token: bytes) -> bytes:
    """BaseHeaderProto: which block (ExtendedBlockProto), and the right to it (TokenProto)."""
    return pb.blob(1, block) + pb.blob(2, token)
