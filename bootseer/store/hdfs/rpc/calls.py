"""Calls to a NameNode that hdfs-native does not make: `concat`, where blocks are, space.

Owns what these calls say by Hadoop's RPC, version 9 (simple authentication only, one call per
connection), and who is asked. The call is repeated under the same identity after a broken
connection, and the NameNode's retry cache makes it happen once. Thread-safe.
"""

import itertools
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from bootseer.errors import DeadlineError, UnavailableError, UnsupportedError
from bootseer.store.hdfs.direct.added_block import AddedBlock, rack_of
from bootseer.store.hdfs.direct.replicas import Replica
from bootseer.store.hdfs.rpc import protobuf as pb
from bootseer.store.hdfs.rpc.failover import CONNECT_S, Turns
from bootseer.store.hdfs.rpc.frames import (
    FRAME_MAX_BYTES,
    NotHadoopError,
    RpcError,
    frame,
    header,
    receive,
    result_of,
)

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_ATTEMPTS_MAX = 5
_PAUSE_S = 0.3
_CONTEXT_CALL_ID = -3

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
    turns: Turns = field(default_factory=Turns)
    """Whom to ask first; shared by copies."""

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

    def ask(self, attempts_max: int | None = None) -> None:
        """Return if it takes calls from us: not where it wants Kerberos. Raises: as `concat`."""
        self._call("getFileInfo", pb.text(1, "/"), attempts_max)

    def _call(self, method: str, message: bytes, attempts_max: int | None = None) -> bytes:
        """`attempts_max`: None: until the deadline where there are several, of which one is active
        sooner or later; one that refuses goes on doing so."""
        client = os.urandom(16)
        end_s = time.monotonic() + self.deadline_s
        cause: Exception = UnsupportedError("no NameNode is known")
        count = len(self.addresses)
        if attempts_max is None and count < 2:
            attempts_max = _ATTEMPTS_MAX
        for attempt in itertools.count():
            is_last = attempt + 1 == attempts_max
            for index, until_s in self.turns.shares(count, end_s, is_last=is_last):
                try:
                    answer = self._call_one(
                        self.addresses[index], client, attempt, method, message, until_s
                    )
                except RpcError as error:
                    if "StandbyException" not in str(error):
                        self.turns.first = index
                        raise
                    cause = error
                except OSError as error:
                    cause = error
                else:
                    self.turns.first = index
                    return answer
            if is_last:
                break
            if time.monotonic() + _PAUSE_S > end_s:
                raise DeadlineError(f"no NameNode answered within {self.deadline_s:g} s: {cause}")
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
        connect_s = max(0.1, end_s - time.monotonic())
        if len(self.addresses) > 1:
            connect_s = min(connect_s, CONNECT_S)
        with socket.create_connection(where, connect_s) as connection:
            connection.sendall(
                b"hrpc\x09\x00\x00"
                + frame(header(_CONTEXT_CALL_ID, client, -1), context)
                + frame(header(0, client, attempt), request, message)
            )
            # The whole answer has one deadline, not each of its bytes.
            (length,) = struct.unpack(">I", receive(connection, 4, end_s))
            if length > FRAME_MAX_BYTES:
                raise NotHadoopError(f"{address[0]}:{address[1]} does not speak Hadoop's RPC")
            return result_of(receive(connection, length, end_s))


def _servers(located_block: bytes) -> dict[str, bytes]:
    """DatanodeInfoProto by UUID, which stands in its DatanodeIDProto; of a LocatedBlockProto."""
    servers = {}
    for info in pb.every(located_block, 3):
        for identity in pb.every(info, 1):
            for uuid in pb.every(identity, 3):
                servers[uuid.decode("utf-8", "replace")] = info
    return servers
