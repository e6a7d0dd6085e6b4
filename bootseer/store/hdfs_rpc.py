"""Calls to a NameNode that hdfs-native does not make: `concat`, where blocks are, space.

Owns the bytes of Hadoop's RPC, version 9, as far as these calls need them (simple authentication
only, one call per connection). The call is repeated under the same identity after a broken
connection, and the NameNode's retry cache makes it happen once. Thread-safe.
"""

import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from bootseer.errors import DeadlineError, UnavailableError, UnsupportedError
from bootseer.store import hdfs_protobuf as pb
from bootseer.store.hdfs_added_block import AddedBlock, rack_of
from bootseer.store.hdfs_replicas import Replica

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_FRAME_MAX_BYTES = 1 << 20
ATTEMPTS_MAX = 5
_PAUSE_S = 0.3
# Of RpcRequestHeaderProto: protocol buffers, "final packet" (an ordinary call).
_RPC_KIND, _RPC_OPERATION = 2, 0
_CONTEXT_CALL_ID = -3
_SUCCESS = 0


class RpcError(Exception):
    """The NameNode's answer is an exception; the text begins with its Java class."""


UNANSWERED = (RpcError, OSError, ValueError, IndexError)
"""What a call may end with, also where the answer is nonsense: for whom it was only a question."""


class StoredBlock(Struct, frozen=True):
    """A block of a file, and who has it."""

    start: int
    """In the file."""
    length: int
    block: bytes
    """ExtendedBlockProto."""
    token: bytes
    """TokenProto: what a DataNode wants to see where blocks are guarded."""
    replicas: tuple[Replica, ...]
    """The nearest one first."""


class NameNode(Struct, frozen=True):
    """Where to call, and as whom."""

    addresses: tuple[tuple[str, int], ...]
    """Of an HA pair all; the active one answers."""
    user: str
    deadline_s: float
    calls_by_name: bool = False
    """Whether DataNodes are called by their names, not their addresses."""

    def concat(self, target: str, sources: Sequence[str]) -> None:
        """Join absolute paths. Raises: RpcError, UnavailableError, DeadlineError."""
        message = pb.text(1, target) + b"".join(pb.text(2, source) for source in sources)
        self._call("concat", message)

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """The DataNodes of the block that is being written at the end of `path`.

        Raises: as `concat`.
        """
        answer = self._call(
            "getBlockLocations", pb.text(1, path) + pb.number(2, 0) + pb.number(3, 1)
        )
        servers: list[str] = []
        # GetBlockLocationsResponseProto > LocatedBlocksProto: lastBlock, or else the blocks
        for located in pb.every(answer, 1):
            for block in pb.every(located, 4) or pb.every(located, 2)[-1:]:
                servers += _servers(block)
        return tuple(servers)

    def stored_blocks(self, path: str, end: int) -> tuple[StoredBlock, ...]:
        """The blocks of the bytes before `end` of a file, in order; none where a block is no plain
        run of its bytes (encrypted, erasure-coded) or is being written. Raises: as `concat`;
        ValueError."""
        message = pb.text(1, path) + pb.number(2, 0) + pb.number(3, end)
        (located,) = pb.every(self._call("getBlockLocations", message), 1)
        # LocatedBlocksProto: underConstruction, fileEncryptionInfo, ecPolicy
        facts = dict(pb.fields(located))
        if facts.get(3) != 0 or 6 in facts or 7 in facts:
            return ()
        return tuple(self._stored_block(block) for block in pb.every(located, 2))

    def _stored_block(self, located: bytes) -> StoredBlock:
        # LocatedBlockProto: b, offset, locs, corrupt, blockToken
        facts = dict(pb.fields(located))
        (block,), (token,) = pb.every(located, 1), pb.every(located, 5)
        infos = pb.every(located, 3) if facts.get(4) == 0 else []
        racks = [rack_of(info) for info in infos]
        replicas = tuple(
            Replica(self._address(info), rack != racks[0])
            for info, rack in zip(infos, racks, strict=True)
        )
        length = pb.positive(dict(pb.fields(block)).get(4))
        return StoredBlock(pb.positive(facts.get(2)), length, block, token, replicas)

    def add_block(
        self, path: str, holder: str, excluded: Sequence[bytes], *, previous: bytes | None = None
    ) -> AddedBlock:
        """Allocate a block of a file that `holder` is writing, not on the `excluded`
        (DatanodeInfoProto): the first one, or that after `previous` (ExtendedBlockProto).

        Raises: as `concat`; ValueError, IndexError.
        """
        message = pb.text(1, path) + pb.text(2, holder)
        if previous is not None:
            message += pb.blob(3, previous)
        message += b"".join(pb.blob(4, server) for server in excluded)
        (located,) = pb.every(self._call("addBlock", message), 1)
        (block,), (token,) = pb.every(located, 1), pb.every(located, 5)
        types = tuple(value for field, value in pb.fields(located) if field == 7)
        return AddedBlock(
            block,
            _servers(located),
            token,
            tuple(pb.positive(value) for value in types),
            tuple(pb.every(located, 8)),
            self._address(pb.every(located, 3)[0]),
        )

    def _address(self, info: bytes) -> tuple[str, int]:
        """Of a DatanodeInfoProto > DatanodeIDProto: ipAddr, hostName, xferPort."""
        identity = dict(pb.fields(pb.every(info, 1)[0]))
        host = identity.get(2 if self.calls_by_name else 1)
        if not isinstance(host, bytes):
            raise ValueError("a DataNode has no address")
        return host.decode("utf-8"), pb.positive(identity.get(4))

    def plain_block_bytes(self, path: str) -> int:
        """How large the blocks of a file are at most; 0 where their bytes are not the file's
        (encrypted, erasure-coded). Raises: as `concat`; ValueError."""
        (status,) = pb.every(self._call("getFileInfo", pb.text(1, path)), 1)
        # HdfsFileStatusProto: blocksize, fileEncryptionInfo, ecPolicy
        facts = dict(pb.fields(status))
        return 0 if {15, 17} & facts.keys() else pb.positive(facts.get(11))

    def complete(self, path: str, holder: str, last: bytes) -> bool:
        """Close a file with its `last` block (ExtendedBlockProto); False: not all of its blocks
        were reported yet. Raises: as `concat`."""
        message = pb.text(1, path) + pb.text(2, holder) + pb.blob(3, last)
        return dict(pb.fields(self._call("complete", message))).get(1) == 1

    def abandon_block(self, path: str, holder: str, block: bytes) -> None:
        """Give back what `add_block` returned. Raises: as `concat`."""
        self._call("abandonBlock", pb.blob(1, block) + pb.text(2, path) + pb.text(3, holder))

    def capacity(self) -> tuple[int, int]:
        """The cluster's bytes in all, and those that are free. Raises: as `concat`."""
        numbers = dict(pb.fields(self._call("getFsStats", b"")))
        # GetFsStatsResponseProto: capacity, used, remaining
        return pb.positive(numbers.get(1)), pb.positive(numbers.get(3))

    def default_block_bytes(self) -> int:
        """Of files whose writer does not say. Raises: as `concat`."""
        # GetServerDefaultsResponseProto > FsServerDefaultsProto: blockSize
        (defaults,) = pb.every(self._call("getServerDefaults", b""), 1)
        return pb.positive(dict(pb.fields(defaults)).get(1))

    def quota(self, path: str) -> tuple[int, int] | None:
        """The space quota of a directory and what it has used, both with replication; None where
        it has none, which costs the NameNode a walk through it. Raises: as `concat`."""
        for usage in pb.every(self._call("getQuotaUsage", pb.text(1, path)), 1):
            numbers = dict(pb.fields(usage))
            # QuotaUsageProto: count, quota, spaceConsumed, spaceQuota
            total, used = numbers.get(4), numbers.get(3)
            # Of 64 bits; "none" is -1.
            if isinstance(total, int) and 0 <= total < 2**63:
                return total, pb.positive(used)
        return None

    def ask(self, attempts_max: int = ATTEMPTS_MAX) -> None:
        """Return if it takes calls from us: not where it wants Kerberos. Raises: as `concat`."""
        self._call("getFileInfo", pb.text(1, "/"), attempts_max)

    def _call(self, method: str, message: bytes, attempts_max: int = ATTEMPTS_MAX) -> bytes:
        client = secrets.token_bytes(16)
        end_s = time.monotonic() + self.deadline_s
        cause: Exception = UnsupportedError("no NameNode is known")
        for attempt in range(attempts_max):
            for address in self.addresses:
                try:
                    return self._call_one(address, client, attempt, method, message, end_s)
                except RpcError as error:
                    if "StandbyException" not in str(error):
                        raise
                    cause = error
                except OSError as error:
                    cause = error
            if attempt + 1 == attempts_max:
                break
            if time.monotonic() + _PAUSE_S > end_s:
                raise DeadlineError(f"no NameNode answered within {self.deadline_s:g} s")
            time.sleep(_PAUSE_S)
        raise UnavailableError(f"no NameNode answers: {cause}") from cause

    def _call_one(
        self,
        address: tuple[str, int],
        client: bytes,
        attempt: int,
        method: str,
        message: bytes,
        end_s: float,
    ) -> bytes:
        context = pb.blob(2, pb.text(1, self.user)) + pb.text(3, _PROTOCOL)
        request = pb.text(1, method) + pb.text(2, _PROTOCOL) + pb.number(3, 1)
        # Of a name that is text the resolver loads Unicode's tables first, 5 ms of a start.
        where: Any = (address[0].encode(), address[1]) if address[0].isascii() else address
        with socket.create_connection(where, max(0.1, end_s - time.monotonic())) as connection:
            connection.sendall(
                b"hrpc\x09\x00\x00"
                + _frame(_header(_CONTEXT_CALL_ID, client, -1), context)
                + _frame(_header(0, client, attempt), request, message)
            )
            # The whole answer has one deadline, not each of its bytes.
            (length,) = struct.unpack(">I", _receive(connection, 4, end_s))
            if length > _FRAME_MAX_BYTES:
                raise ConnectionError(f"{address[0]} does not speak Hadoop's RPC")
            return _result(_receive(connection, length, end_s))


def _servers(located_block: bytes) -> dict[str, bytes]:
    """DatanodeInfoProto by UUID, which stands in its DatanodeIDProto; of a LocatedBlockProto."""
    servers = {}
    for info in pb.every(located_block, 3):
        for identity in pb.every(info, 1):
            for uuid in pb.every(identity, 3):
                servers[uuid.decode("utf-8", "replace")] = info
    return servers


def _receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the NameNode closed the connection")
        data += piece
    return data


def _result(answer: bytes) -> bytes:
    """The message that the answer holds. Raises: RpcError, what the NameNode raised."""
    try:
        header, end = _message(answer)
        status = [value for field, value in pb.fields(header) if field == 2 and value != _SUCCESS]
        if not status:
            return _message(answer[end:])[0]
        texts = pb.every(header, 4) + pb.every(header, 5)
    except (IndexError, ValueError) as error:
        raise ConnectionError("the NameNode's answer cannot be understood") from error
    raise RpcError(": ".join(text.decode("utf-8", "replace") for text in texts))


def _message(data: bytes) -> tuple[bytes, int]:
    message, end = pb.delimited(data, _FRAME_MAX_BYTES)
    if message is None:
        raise ValueError("no message")
    return message, end


def _header(call_id: int, client: bytes, retry_count: int) -> bytes:
    return (
        pb.number(1, _RPC_KIND)
        + pb.number(2, _RPC_OPERATION)
        + pb.signed(3, call_id)
        + pb.blob(4, client)
        + pb.signed(5, retry_count)
    )


def _frame(*messages: bytes) -> bytes:
    body = b"".join(pb.varint(len(message)) + message for message in messages)
    return struct.pack(">I", len(body)) + body
