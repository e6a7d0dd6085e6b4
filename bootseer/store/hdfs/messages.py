"""Messages of HDFS's protocols, with the names and numbers of Hadoop's .proto files. Pure.

They are from RpcHeader.proto, IpcConnectionContext.proto and ProtobufRpcEngine.proto (RPC, version
9), hdfs.proto and ClientNamenodeProtocol.proto, and datatransfer.proto (data transfer, version 28).
Only messages and fields that Bootseer uses are declared, the messages without "Proto" in their
names; undeclared fields are kept when a message is sent on. Two types differ from Hadoop's, but are
the same on the wire: enumerations are numbers, since protobuf drops an unknown value as if it were
missing, and messages that are only passed on (tokens) are bytes.
"""

import struct
from typing import Any

from google.protobuf.message import DecodeError

from bootseer.base.protobuf_messages import Messages, build, describe
from bootseer.base.varints import delimited

SUCCESS = 0
"""Success in RpcStatusProto, and in the Status of data transfer."""
RPC_BEGIN = b"hrpc\x09\x00\x00"
"""Connection header: magic, version, service class, and simple authentication (none)."""
PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
NO_CHECKSUM, CRC32, CRC32C = 0, 1, 2
"""ChecksumTypeProto."""
HEARTBEAT = -1
"""Sequence number of a heartbeat (a packet without data), and of its acknowledgement."""

# fmt: off
_MESSAGES: Messages = {
    # RPC
    "RpcRequestHeader": (
        (1, "uint32", "rpcKind"), (2, "uint32", "rpcOp"), (3, "!sint32", "callId"),
        (4, "!bytes", "clientId"), (5, "sint32", "retryCount"),
    ),
    "RpcResponseHeader": (
        (2, "uint32", "status"), (4, "bytes", "exceptionClassName"), (5, "bytes", "errorMsg"),
    ),
    "UserInformation": ((1, "string", "effectiveUser"),),
    "IpcConnectionContext": ((2, ".hdfs.UserInformation", "userInfo"), (3, "string", "protocol")),
    "RequestHeader": (
        (1, "!string", "methodName"), (2, "!string", "declaringClassProtocolName"),
        (3, "!uint64", "clientProtocolVersion"),
    ),
    # files and blocks
    "ExtendedBlock": (
        (1, "!string", "poolId"), (2, "!uint64", "blockId"), (3, "!uint64", "generationStamp"),
        (4, "uint64", "numBytes"),
    ),
    "DatanodeID": (
        (1, "!string", "ipAddr"), (2, "!string", "hostName"), (3, "!string", "datanodeUuid"),
        (4, "!uint32", "xferPort"),
    ),
    "DatanodeInfo": ((1, "!.hdfs.DatanodeID", "id"), (8, "string", "location")),
    "LocatedBlock": (
        (1, "!.hdfs.ExtendedBlock", "b"), (2, "!uint64", "offset"),
        (3, "*.hdfs.DatanodeInfo", "locs"), (4, "!bool", "corrupt"), (5, "!bytes", "blockToken"),
        (7, "*uint32", "storageTypes"), (8, "*string", "storageIDs"),
    ),
    "LocatedBlocks": (
        (2, "*.hdfs.LocatedBlock", "blocks"), (3, "!bool", "underConstruction"),
        (4, ".hdfs.LocatedBlock", "lastBlock"), (6, "bytes", "fileEncryptionInfo"),
        (7, "bytes", "ecPolicy"),
    ),
    "HdfsFileStatus": (
        (11, "uint64", "blocksize"), (15, "bytes", "fileEncryptionInfo"), (17, "bytes", "ecPolicy"),
    ),
    "FsServerDefaults": ((1, "!uint64", "blockSize"),),
    "QuotaUsage": ((3, "!uint64", "spaceConsumed"), (4, "!uint64", "spaceQuota")),
    # calls of NameNodes
    "GetBlockLocationsRequest": (
        (1, "!string", "src"), (2, "!uint64", "offset"), (3, "!uint64", "length"),
    ),
    "GetBlockLocationsResponse": ((1, "!.hdfs.LocatedBlocks", "locations"),),
    "GetFileInfoRequest": ((1, "!string", "src"),),
    "GetFileInfoResponse": ((1, ".hdfs.HdfsFileStatus", "fs"),),
    "AddBlockRequest": (
        (1, "!string", "src"), (2, "!string", "clientName"), (3, ".hdfs.ExtendedBlock", "previous"),
        (4, "*.hdfs.DatanodeInfo", "excludeNodes"),
    ),
    "AddBlockResponse": ((1, "!.hdfs.LocatedBlock", "block"),),
    "AbandonBlockRequest": (
        (1, "!.hdfs.ExtendedBlock", "b"), (2, "!string", "src"), (3, "!string", "holder"),
    ),
    "AbandonBlockResponse": (),
    "CompleteRequest": (
        (1, "!string", "src"), (2, "!string", "clientName"), (3, ".hdfs.ExtendedBlock", "last"),
    ),
    "CompleteResponse": ((1, "!bool", "result"),),
    "ConcatRequest": ((1, "!string", "trg"), (2, "*string", "srcs")),
    "ConcatResponse": (),
    "GetFsStatsRequest": (),
    "GetFsStatsResponse": ((1, "!uint64", "capacity"), (3, "!uint64", "remaining")),
    "GetServerDefaultsRequest": (),
    "GetServerDefaultsResponse": ((1, "!.hdfs.FsServerDefaults", "serverDefaults"),),
    "GetQuotaUsageRequest": ((1, "!string", "path"),),
    "GetQuotaUsageResponse": ((1, "!.hdfs.QuotaUsage", "usage"),),
    # data transfer
    "Checksum": ((1, "!uint32", "type"), (2, "!uint32", "bytesPerChecksum")),
    "BaseHeader": ((1, "!.hdfs.ExtendedBlock", "block"), (2, "bytes", "token")),
    "ClientOperationHeader": ((1, "!.hdfs.BaseHeader", "baseHeader"), (2, "!string", "clientName")),
    "OpReadBlock": (
        (1, "!.hdfs.ClientOperationHeader", "header"), (2, "!uint64", "offset"),
        (3, "!uint64", "len"), (4, "bool", "sendChecksums"),
    ),
    "ClientReadStatus": ((1, "!uint32", "status"),),
    "OpWriteBlock": (
        (1, "!.hdfs.ClientOperationHeader", "header"), (2, "*.hdfs.DatanodeInfo", "targets"),
        (4, "!uint32", "stage"), (5, "!uint32", "pipelineSize"), (6, "!uint64", "minBytesRcvd"),
        (7, "!uint64", "maxBytesRcvd"), (8, "!uint64", "latestGenerationStamp"),
        (9, "!.hdfs.Checksum", "requestedChecksum"), (11, "uint32", "storageType"),
        (12, "*uint32", "targetStorageTypes"), (16, "string", "storageId"),
        (17, "*string", "targetStorageIds"),
    ),
    "ReadOpChecksumInfo": ((1, "!.hdfs.Checksum", "checksum"), (2, "!uint64", "chunkOffset")),
    "BlockOpResponse": (
        (1, "!uint32", "status"), (4, ".hdfs.ReadOpChecksumInfo", "readOpChecksumInfo"),
    ),
    "PipelineAck": ((1, "!sint64", "seqno"), (2, "*uint32", "reply")),
}
# fmt: on

Message = Any
"""Instance of a class of `MESSAGES`."""
MESSAGES: dict[str, Any] = build((describe("hdfs", _MESSAGES, syntax="proto2"),))
"""Class of each message by name. In `LocatedBlock.locs` the nearest DataNode comes first."""


def parse(name: str, data: bytes) -> Message:
    """Return the message `name` in `data`.

    Raises: ValueError for other data, also for a message without a required field.
    """
    message = MESSAGES[name]()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {name}: {error}") from None
    if not message.IsInitialized():
        # The missing fields are not listed: the list for a large message takes hundreds of MB.
        raise ValueError(f"a {name} that lacks required fields")
    return message


def encoded(name: str, **fields: Any) -> bytes:
    """Return the message `name` preceded by its length, as it is sent; None means an absent field.

    All required fields must be given.
    """
    return delimited(MESSAGES[name](**fields).SerializeToString())


# ---- data transfer: operations and packets -------------------------------------------------------

# Version and operation code; a length-prefixed message follows.
_WRITE_BLOCK, _READ_BLOCK = b"\x00\x1c\x50", b"\x00\x1c\x51"
_PIPELINE_SETUP_CREATE = 6
_CHECKSUM_OK = 6


def op_read_block(block: Message, token: bytes, client: str, offset: int, length: int) -> bytes:
    """Return the request to read a range of a block without checksums."""
    header = {"baseHeader": {"block": block, "token": token}, "clientName": client}
    return _READ_BLOCK + encoded(
        "OpReadBlock", header=header, offset=offset, len=length, sendChecksums=False
    )


READ_STATUS = encoded("ClientReadStatus", status=_CHECKSUM_OK)
"""Confirmation that all bytes arrived; the DataNode then accepts the next request."""


def op_write_block(located: Message, client: str, checksum: tuple[int, int]) -> bytes:
    """Return the request to begin a block, for its first DataNode, which passes the request on.

    `checksum`: type, and number of bytes per checksum.
    """
    types, storages = list(located.storageTypes), list(located.storageIDs)
    return _WRITE_BLOCK + encoded(
        "OpWriteBlock",
        header={
            "baseHeader": {"block": located.b, "token": located.blockToken},
            "clientName": client,
        },
        targets=located.locs[1:],
        stage=_PIPELINE_SETUP_CREATE,
        pipelineSize=len(located.locs) or 1,
        # The block is empty.
        minBytesRcvd=0,
        maxBytesRcvd=0,
        latestGenerationStamp=located.b.generationStamp,
        requestedChecksum={"type": checksum[0], "bytesPerChecksum": checksum[1]},
        storageType=types[0] if types else None,
        targetStorageTypes=types[1:],
        storageId=storages[0] if storages else None,
        targetStorageIds=storages[1:],
    )


# A packet is two lengths, PacketHeaderProto, checksums and data. One header is needed per 64 KiB
# read, and its fields have fixed sizes, so it is built by `struct`. Each field is preceded by its
# tag: offset in the block (field 1), sequence number (2), whether it is the last packet, which is
# empty (3), bytes of data (4).
_LENGTHS = struct.Struct(">IH")
_HEADER = struct.Struct("<BqBqBBBi")
PACKET_HEAD_BYTES = _LENGTHS.size + _HEADER.size


def packet_head(
    offset: int, number: int, count: int, *, sums_bytes: int = 0, is_last: bool = False
) -> bytes:
    """Return the lengths and the header of a packet with `count` bytes of data."""
    # The first length includes its own four bytes.
    lengths = _LENGTHS.pack(4 + sums_bytes + count, _HEADER.size)
    return lengths + _HEADER.pack(0x09, offset, 0x11, number, 0x18, is_last, 0x25, count)


def packet_data_bytes(head: bytes) -> int:
    """Return the number of bytes of data that the header of a packet announces."""
    count: int = _HEADER.unpack_from(head, _LENGTHS.size)[-1]
    return count
