"""Every message that goes to and comes from HDFS: what its fields mean, and their numbers. Pure.

From Hadoop's RpcHeader.proto, IpcConnectionContext.proto and ProtobufRpcEngine.proto (RPC, version
9), hdfs.proto and ClientNamenodeProtocol.proto, and datatransfer.proto (data transfer, version 28),
where numbers never change. The classes are called as there, without "Proto"; of each only what we
use is declared. What is only sent is a function. A call's arguments are numbered in their order.
"""

import struct
from typing import Annotated

from bootseer.store.hdfs.rpc.protobuf import (
    WHOLE,
    Message,
    Value,
    arguments,
    delimited,
    encode,
    zigzag,
)

SUCCESS = 0
"""RpcStatusProto, and Status of data transfer."""

# ---- Hadoop's RPC -------------------------------------------------------------------------------

RPC_BEGIN = b"hrpc\x09\x00\x00"
"""Magic, version, service class, and no authentication: the user is believed."""
_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_PROTOCOL_BUFFERS, _ORDINARY_CALL, _PROTOCOL_VERSION = 2, 0, 1


class RpcResponseHeader(Message, frozen=True):
    status: Annotated[int, 2] = SUCCESS
    exception: Annotated[bytes, 4] = b""
    """A class of Java."""
    text: Annotated[bytes, 5] = b""


def rpc_request_header(call_id: int, client: bytes, retry_count: int) -> bytes:
    """Before each message."""
    return arguments(
        _PROTOCOL_BUFFERS, _ORDINARY_CALL, zigzag(call_id), client, zigzag(retry_count)
    )


def connection_context(user: str) -> bytes:
    """IpcConnectionContextProto with its UserInformationProto: who calls."""
    return encode({2: arguments(user), 3: _PROTOCOL})


def request_header(method: str) -> bytes:
    """Which method is called."""
    return arguments(method, _PROTOCOL, _PROTOCOL_VERSION)


# ---- what NameNodes say -------------------------------------------------------------------------


class ExtendedBlock(Message, frozen=True):
    pool: Annotated[str, 1]
    block: Annotated[int, 2]
    generation_stamp: Annotated[int, 3]
    length: Annotated[int, 4] = 0


class DatanodeID(Message, frozen=True):
    address: Annotated[str, 1]
    host: Annotated[str, 2]
    uuid: Annotated[str, 3]
    port: Annotated[int, 4]


class DatanodeInfo(Message, frozen=True):
    id: Annotated[DatanodeID, 1]
    rack: Annotated[str, 8] = ""
    whole: Annotated[bytes, WHOLE] = b""


class LocatedBlock(Message, frozen=True):
    block: Annotated[ExtendedBlock, 1]
    offset: Annotated[int, 2]
    is_corrupt: Annotated[bool, 4]
    token: Annotated[bytes, 5]
    """TokenProto: what a DataNode wants to see where blocks are guarded; sent on as it came."""
    servers: Annotated[tuple[DatanodeInfo, ...], 3] = ()
    """The nearest one first."""
    storage_types: Annotated[tuple[int, ...], 7] = ()
    storages: Annotated[tuple[str, ...], 8] = ()


class LocatedBlocks(Message, frozen=True):
    is_being_written: Annotated[bool, 3]
    blocks: Annotated[tuple[LocatedBlock, ...], 2] = ()
    last: Annotated[LocatedBlock | None, 4] = None
    encryption: Annotated[bytes | None, 6] = None
    erasure_coding: Annotated[bytes | None, 7] = None


class HdfsFileStatus(Message, frozen=True):
    block_bytes: Annotated[int, 11]
    encryption: Annotated[bytes | None, 15] = None
    erasure_coding: Annotated[bytes | None, 17] = None


class FsServerDefaults(Message, frozen=True):
    block_bytes: Annotated[int, 1]


class QuotaUsage(Message, frozen=True):
    used_bytes: Annotated[int, 3]
    quota_bytes: Annotated[int, 4]


class Result(Message, frozen=True):
    """The response of a call that returns a message."""

    message: Annotated[bytes, 1]


class CompleteResponse(Message, frozen=True):
    is_complete: Annotated[bool, 1] = False


class GetFsStatsResponse(Message, frozen=True):
    capacity_bytes: Annotated[int, 1]
    remaining_bytes: Annotated[int, 3]


# ---- data transfer ------------------------------------------------------------------------------

# Version and operation; a message follows, behind its length.
_WRITE_BLOCK, _READ_BLOCK = b"\x00\x1c\x50", b"\x00\x1c\x51"
_PIPELINE_SETUP_CREATE = 6
_CHECKSUM_OK = 6
NO_CHECKSUM = 0
"""ChecksumTypeProto."""
HEARTBEAT = -1
"""The number of a packet without data that is sent now and then, and of its acknowledgement."""


class Checksum(Message, frozen=True):
    kind: Annotated[int, 1]
    piece_bytes: Annotated[int, 2]


class ReadOpChecksumInfo(Message, frozen=True):
    checksum: Annotated[Checksum, 1]
    offset: Annotated[int, 2]


class BlockOpResponse(Message, frozen=True):
    status: Annotated[int, 1]
    reading: Annotated[ReadOpChecksumInfo | None, 4] = None


class PipelineAck(Message, frozen=True):
    number: Annotated[int, 1]
    """The packet's number, as `zigzag` makes it."""
    replies: Annotated[tuple[int, ...], 2] = ()
    """A status of each DataNode."""


def op_read_block(
    block: ExtendedBlock, token: bytes, client: str, offset: int, length: int
) -> bytes:
    """Asks for a range of a block, without checksums."""
    header = arguments(arguments(block, token), client)
    return _READ_BLOCK + delimited(arguments(header, offset, length, False))


READ_STATUS = delimited(arguments(_CHECKSUM_OK))
"""ClientReadStatusProto: the bytes came; the DataNode then takes the next request."""


def op_write_block(located: LocatedBlock, client: str, checksum: Checksum) -> bytes:
    """Begins a block on its servers; the first of them is asked, and passes it on."""
    others = located.servers[1:]
    message: dict[int, Value] = {
        1: arguments(arguments(located.block, located.token), client),
        2: others,
        4: _PIPELINE_SETUP_CREATE,
        5: 1 + len(others),
        6: 0,  # bytes that the servers have already, at least and
        7: 0,  # at most
        8: located.block.generation_stamp,
        9: checksum,
        11: located.storage_types[:1],
        12: located.storage_types[1:],
        16: located.storages[:1],
        17: located.storages[1:],
    }
    return _WRITE_BLOCK + delimited(encode(message))


# A packet is two lengths, PacketHeaderProto, checksums and data. There is a header for each 64 KiB
# that is read, and all its fields are of fixed size, so it is packed at once; before each stands
# its number and kind: offset in the block (1), number of the packet (2), whether it is the last
# one, which is empty (3), bytes of data (4).
_LENGTHS = struct.Struct(">IH")
_HEADER = struct.Struct("<BqBqBBBi")
PACKET_HEAD_BYTES = _LENGTHS.size + _HEADER.size


def packet_head(
    offset: int, number: int, count: int, *, sums_bytes: int = 0, is_last: bool = False
) -> bytes:
    """What comes before the checksums of a packet with `count` bytes of data."""
    # The length counts itself.
    lengths = _LENGTHS.pack(4 + sums_bytes + count, _HEADER.size)
    return lengths + _HEADER.pack(0x09, offset, 0x11, number, 0x18, is_last, 0x25, count)


def packet_data_bytes(head: bytes) -> int:
    """How much data follows a head, by what it says itself."""
    count: int = _HEADER.unpack_from(head, _LENGTHS.size)[-1]
    return count
