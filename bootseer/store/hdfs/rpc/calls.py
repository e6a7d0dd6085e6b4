"""Calls to a NameNode that hdfs-native does not make: `concat`, where blocks are, space.

Owns what these calls say by Hadoop's RPC, version 9 (simple authentication only, one call per
connection), and who is asked. The call is repeated under the same identity after a broken
connection, and the NameNode's retry cache makes it happen once. Thread-safe.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.errors import DeadlineError, UnavailableError, UnsupportedError
from bootseer.store.hdfs.direct.replicas import Replica
from bootseer.store.hdfs.errors import is_not_serving
from bootseer.store.hdfs.rpc import messages
from bootseer.store.hdfs.rpc.frames import (
    FRAME_MAX_BYTES,
    NotHadoopError,
    RpcError,
    frame,
    receive,
    result_of,
)
from bootseer.store.hdfs.rpc.protobuf import Value, arguments
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE, Attempts, Policy

_CONTEXT_CALL_ID = -3

UNANSWERED = (RpcError, OSError, ValueError)
"""What a call may end with, also where the answer is nonsense: for whom it was only a question."""
CONNECT_S = 5.0
"""The deadline of a connection where other NameNodes are left: TCP asks three times meanwhile."""


class StoredBlock(Struct, frozen=True):
    """A block of a file, and who has it."""

    start: int
    """The block's offset in the file."""
    block: messages.ExtendedBlock
    token: bytes
    replicas: tuple[Replica, ...]
    """The nearest one first."""

    @property
    def length(self) -> int:
        """How many bytes of the file are in it."""
        return self.block.length


class AddedBlock(Struct, frozen=True):
    """A block that was allocated, and is still empty."""

    located: messages.LocatedBlock
    address: tuple[str, int]
    """The address of the first server."""

    @property
    def servers(self) -> dict[str, messages.DatanodeInfo]:
        """The servers by UUID, in the order in which they pass on what is written."""
        return {server.id.uuid: server for server in self.located.servers}

    def block_of(self, size_bytes: int) -> messages.ExtendedBlock:
        """The block with so much in it."""
        return replace(self.located.block, length=size_bytes)


class Failover:
    """The order in which the NameNodes of one cluster are asked; they are counted from 0.

    The one that answered last comes first. One that is silent (its host is dead, or it hangs)
    leaves time for the others, and for another round: none may be active for a while. Any thread.
    """

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first = 0

    def shares(self, count: int, end_s: float, *, is_last: bool) -> Iterator[tuple[int, float]]:
        """Yields for one round each NameNode to ask and its deadline on the monotonic clock.

        `is_last`: no further round follows.
        """
        first = self.first
        for turn in range(count):
            left_count = count - turn
            now_s = time.monotonic()
            until_s = now_s + max(0.0, end_s - now_s) / (left_count if is_last else 2 * left_count)
            yield (first + turn) % count, until_s if count > 1 else end_s


class NameNode(Struct, frozen=True):
    """Where to call, and as whom."""

    addresses: tuple[tuple[str, int], ...]
    """The addresses of all NameNodes of an HA pair; the active one answers."""
    user: str
    deadline_s: float
    calls_by_name: bool = False
    """Whether DataNodes are called by their names, not their addresses."""
    failover: Failover = field(default_factory=Failover)
    """Which NameNode to ask first; shared by copies."""
    is_patient: bool = False
    """Whether a NameNode that is gone, or not ready yet, is asked again until the deadline."""

    def concat(self, target: str, sources: Sequence[str]) -> None:
        """Join absolute paths. Raises: RpcError, UnavailableError, DeadlineError; ValueError for an
        answer that makes no sense."""
        self._call("concat", target, tuple(sources))

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """The DataNodes of the block that is being written at the end of `path`.

        Raises: as `concat`.
        """
        found = self._located(path, 1)
        blocks = found.blocks[-1:] if found.last is None else (found.last,)
        return tuple(server.id.uuid for block in blocks for server in block.servers)

    def is_being_written(self, path: str) -> bool:
        """Whether a client has a file open for writing. Raises: as `concat`; RpcError with a
        FileNotFoundException where there is none."""
        return self._located(path, 1).is_being_written

    def stored_blocks(self, path: str, end: int) -> tuple[StoredBlock, ...]:
        """The blocks of the bytes before `end` of a file, in order; none where a block is no plain
        run of its bytes (encrypted, erasure-coded) or is being written. Raises: as `concat`."""
        found = self._located(path, end)
        is_plain = found.encryption is None and found.erasure_coding is None
        if found.is_being_written or not is_plain:
            return ()
        return tuple(
            StoredBlock(block.offset, block.block, block.token, self._replicas(block))
            for block in found.blocks
        )

    def _located(self, path: str, end: int) -> messages.LocatedBlocks:
        return messages.LocatedBlocks.decode(self._result("getBlockLocations", path, 0, end))

    def _replicas(self, block: messages.LocatedBlock) -> tuple[Replica, ...]:
        servers = () if block.is_corrupt else block.servers
        return tuple(
            Replica(self._address(server), server.rack != servers[0].rack) for server in servers
        )

    def add_block(
        self,
        path: str,
        holder: str,
        excluded: Sequence[messages.DatanodeInfo],
        *,
        previous: messages.ExtendedBlock | None = None,
    ) -> AddedBlock:
        """Allocate a block of a file that `holder` is writing, not on the `excluded`: the first
        one, or that after `previous`. Raises: as `concat`."""
        answer = self._result("addBlock", path, holder, previous, tuple(excluded))
        located = messages.LocatedBlock.decode(answer)
        if not located.servers:
            raise ValueError("a block without DataNodes")
        return AddedBlock(located, self._address(located.servers[0]))

    def _address(self, server: messages.DatanodeInfo) -> tuple[str, int]:
        return server.id.host if self.calls_by_name else server.id.address, server.id.port

    def plain_block_bytes(self, path: str) -> int:
        """How large the blocks of a file are at most; 0 where their bytes are not the file's
        (encrypted, erasure-coded). Raises: as `concat`."""
        status = messages.HdfsFileStatus.decode(self._result("getFileInfo", path))
        is_plain = status.encryption is None and status.erasure_coding is None
        return status.block_bytes if is_plain else 0

    def complete(self, path: str, holder: str, last: messages.ExtendedBlock) -> bool:
        """Close a file with its `last` block; False: not all of its blocks were reported yet.
        Raises: as `concat`."""
        answer = self._call("complete", path, holder, last)
        return messages.CompleteResponse.decode(answer).is_complete

    def abandon_block(self, path: str, holder: str, block: messages.ExtendedBlock) -> None:
        """Give back what `add_block` returned. Raises: as `concat`."""
        self._call("abandonBlock", block, path, holder)

    def capacity(self) -> tuple[int, int]:
        """The cluster's bytes in all, and those that are free. Raises: as `concat`."""
        answer = messages.GetFsStatsResponse.decode(self._call("getFsStats"))
        return answer.capacity_bytes, answer.remaining_bytes

    def default_block_bytes(self) -> int:
        """The block size of files whose writer names none. Raises: as `concat`."""
        defaults = messages.FsServerDefaults.decode(self._result("getServerDefaults"))
        return defaults.block_bytes

    def quota(self, path: str) -> tuple[int, int] | None:
        """The space quota of a directory and what it has used, both with replication; None where
        it has none, which costs the NameNode a walk through it. Raises: as `concat`."""
        usage = messages.QuotaUsage.decode(self._result("getQuotaUsage", path))
        # Of 64 bits; "none" is -1.
        return (usage.quota_bytes, usage.used_bytes) if usage.quota_bytes < 2**63 else None

    def ask(self, attempts_max: int | None = None) -> None:
        """Return if it takes calls from us: not where it wants Kerberos. Raises: as `concat`."""
        self._answer("getFileInfo", arguments("/"), attempts_max)

    def _result(self, method: str, *values: Value) -> bytes:
        return messages.Result.decode(self._call(method, *values)).message

    def _call(self, method: str, *values: Value) -> bytes:
        return self._answer(method, arguments(*values))

    def _answer(self, method: str, message: bytes, attempts_max: int | None = None) -> bytes:
        """`attempts_max`: None: until the deadline where there are several, of which one is active
        sooner or later; one that refuses goes on doing so."""
        client = os.urandom(16)
        end_s = time.monotonic() + self.deadline_s
        policy = UNTIL_DEADLINE if len(self.addresses) > 1 or self.is_patient else REQUEST
        if attempts_max is not None:
            policy = Policy(attempts=attempts_max)
        attempts = Attempts(policy, self.deadline_s)
        cause: Exception = UnsupportedError("no NameNode is known")
        count = len(self.addresses)
        while True:
            attempt = attempts.failures_count
            is_last = attempt + 1 == policy.attempts
            for index, until_s in self.failover.shares(count, end_s, is_last=is_last):
                try:
                    answer = self._call_one(
                        self.addresses[index], client, attempt, method, message, until_s
                    )
                except RpcError as error:
                    is_standby = "StandbyException" in str(error)
                    if not is_standby:
                        self.failover.first = index
                    if not is_standby and not (self.is_patient and is_not_serving(error)):
                        raise
                    cause = error
                except OSError as error:
                    cause = error
                else:
                    self.failover.first = index
                    return answer
            pause_s = attempts.pause_s(UnavailableError(str(cause)))
            if is_last:
                raise UnavailableError(f"no NameNode answers: {cause}") from cause
            if pause_s is None:
                raise DeadlineError(f"no NameNode answered within {self.deadline_s:g} s: {cause}")
            time.sleep(pause_s)

    def _call_one(
        self,
        address: tuple[str, int],
        client: bytes,
        attempt: int,
        method: str,
        message: bytes,
        end_s: float,
    ) -> bytes:
        # Of a name that is text the resolver loads Unicode's tables first, 5 ms of a start.
        where: Any = (address[0].encode(), address[1]) if address[0].isascii() else address
        connect_s = max(0.1, end_s - time.monotonic())
        if len(self.addresses) > 1:
            connect_s = min(connect_s, CONNECT_S)
        with socket.create_connection(where, connect_s) as connection:
            begin = messages.rpc_request_header(_CONTEXT_CALL_ID, client, -1)
            call = messages.rpc_request_header(0, client, attempt)
            connection.sendall(
                messages.RPC_BEGIN
                + frame(begin, messages.connection_context(self.user))
                + frame(call, messages.request_header(method), message)
            )
            # The whole answer has one deadline, not each of its bytes.
            (length,) = struct.unpack(">I", receive(connection, 4, end_s))
            if length > FRAME_MAX_BYTES:
                raise NotHadoopError(f"{address[0]}:{address[1]} does not speak Hadoop's RPC")
            return result_of(receive(connection, length, end_s))
