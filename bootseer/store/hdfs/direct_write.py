"""Direct writes to DataNodes, for small files and for parts that have checksums of their own.

Bytes go from the caller's buffer to the socket. (hdfs-native copies every byte twice, computes its
checksum with a table, and closes a file half a second later: measured 1.9 CPU s/GiB, against 0.65
here.) There is no authentication, encryption or recovery: anything unexpected fails the whole file,
and the caller writes the file again.

`Placer` lets the caller influence on which DataNodes the NameNode places the first block of a file,
which no HDFS client offers. A block is allocated when the client asks for it (`addBlock`). A client
that asks twice without having written gets the same block again, so that it can repeat a request
whose answer was lost. So we ask before hdfs-native does, in the name of the client that holds the
file's lease, and with a list of excluded DataNodes; hdfs-native's own request is then answered with
our block. The name of the lease holder is in the NameNode's refusal of another client.

A `DirectFile` belongs to one thread, a `Placer` to any. Waits are bounded.
"""

import logging
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from zlib import crc32 as slow_crc32

from msgspec import Struct

from bootseer.base.varints import take_delimited
from bootseer.errors import BootseerError
from bootseer.store.backend import Piece
from bootseer.store.deadline import reset_in_children
from bootseer.store.hdfs import messages
from bootseer.store.hdfs.namenode import (
    TOO_FEW_DATANODES,
    UNANSWERED,
    AddedBlock,
    NameNodes,
    RpcError,
)

try:
    from isal.isal_zlib import crc32
except ImportError:  # another processor
    crc32 = slow_crc32

_log = logging.getLogger(__name__)

_PACKET_BYTES = 1 << 20
_MESSAGE_MAX_BYTES = 64 << 10
# Largest number of answers to heartbeats that were never sent, against a server that sends no end.
_STRAY_ANSWERS_MAX = 100
_POLL_S = 0.25
_CONNECT_S = 2.0

# ---- checksums -----------------------------------------------------------------------------------


class ChecksumKind(Struct, frozen=True):
    """Algorithm and piece size of the checksums that HDFS stores with a file."""

    number: int
    """ChecksumTypeProto."""
    piece_bytes: int
    add: Callable[[memoryview, int], int]
    """Function that extends a checksum by further bytes."""


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of `data` after bytes with the checksum `before`."""
    import google_crc32c  # here: those who only read need it not

    checksum: int = google_crc32c.extend(before, bytes(data))  # accepts immutable bytes only
    return checksum


LARGE = ChecksumKind(messages.CRC32, 16 << 10, crc32)
"""Checksums over large pieces, computed by CPU instructions, for bytes with other checksums."""
STANDARD = ChecksumKind(messages.CRC32C, 512, crc32c)
"""Default checksums of HDFS clients."""


def checksums_of(data: list[memoryview], kind: ChecksumKind) -> bytes:
    """Return the checksums of the concatenated `data`, as they are sent in a packet."""
    sums = []
    checksum, room = 0, kind.piece_bytes
    for piece in data:
        rest = piece
        while rest:
            step = rest[:room]
            checksum = kind.add(step, checksum)
            room -= len(step)
            rest = rest[len(step) :]
            if not room:
                sums.append(checksum)
                checksum, room = 0, kind.piece_bytes
    if room < kind.piece_bytes:
        sums.append(checksum)
    return struct.pack(f">{len(sums)}I", *sums)


# ---- placing -------------------------------------------------------------------------------------

# "Client (=X) is not the lease owner (=Y: /path (inode 7) ..." (FSNamesystem.checkLease).
_OWNER = re.compile(r"is not the lease owner \(=([^\s:()]{1,200}): ")


class TooFewServersError(Exception):
    """Raised if the cluster has too few DataNodes other than the excluded ones."""


class PlacedBlock(Struct, frozen=True):
    """Allocated first block of the file `path`, whose lease the client `holder` has."""

    path: str
    holder: str
    added: AddedBlock


class Placer:
    """Allocates the first blocks of new files of one cluster on chosen DataNodes."""

    def __init__(self, name_nodes: NameNodes) -> None:
        self._name_nodes = name_nodes
        self._holder = "unknown"
        self._seen: dict[str, messages.Message] = {}
        """DatanodeInfo of each DataNode that was chosen before, by UUID; exclusions contain it."""
        self._replica_count = 0
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Replace the lock; a forked child calls this."""
        self._lock = threading.Lock()

    @property
    def is_one_rack(self) -> bool:
        """Whether all DataNodes that were chosen so far are in one rack."""
        with self._lock:
            return len({server.location for server in self._seen.values()}) <= 1

    def place(self, path: str, avoid: Collection[str]) -> PlacedBlock | None:
        """Allocate the first block of the empty file at the absolute `path`.

        `avoid` lists UUIDs of DataNodes to exclude. Return None if the NameNode does not answer.
        Raises: TooFewServersError if too few others are left; no block is allocated then.
        """
        name_nodes = self._name_nodes
        with self._lock:
            holder = self._holder
            excluded = [self._seen[uuid] for uuid in avoid if uuid in self._seen]
        try:
            try:
                added = name_nodes.add_block(path, holder, excluded)
            except RpcError as error:
                owner = _OWNER.search(str(error))
                if owner is None:
                    raise
                holder = owner[1]
                added = name_nodes.add_block(path, holder, excluded)
            if excluded and len(added.servers) < self._replica_count:
                # The full number of replicas matters more than their places.
                name_nodes.abandon_block(path, holder, added.located.b)
                raise TooFewServersError
        except UNANSWERED as error:
            if excluded and TOO_FEW_DATANODES in str(error):
                raise TooFewServersError from error
            return None
        with self._lock:
            self._holder = holder
            self._seen.update(added.servers)
            self._replica_count = max(self._replica_count, len(added.servers))
        return PlacedBlock(path, holder, added)

    def open_direct(
        self, placed: PlacedBlock, silence_max_s: float, kind: ChecksumKind
    ) -> "DirectFile | None":
        """Begin a direct write to an allocated block; return None if that is not possible.

        hdfs-native then gets the same block, and supports more configurations.
        """
        try:
            block_bytes = self._name_nodes.plain_block_bytes(placed.path)
            if block_bytes:
                return DirectFile(self._name_nodes, placed, block_bytes, silence_max_s, kind)
        except (*UNANSWERED, BootseerError) as error:
            _log.debug("%s is not written directly to DataNodes: %s", placed.path, error)
        return None

    def servers_of(self, path: str) -> tuple[str, ...]:
        """Return the UUIDs of the DataNodes of the block that is being written at `path`.

        The result is empty if the NameNode does not answer.
        """
        try:
            return self._name_nodes.writing_servers(path)
        except UNANSWERED:
            return ()


# ---- one file ------------------------------------------------------------------------------------


class DirectFile:
    """New file that is written directly to its DataNodes, block by block."""

    def __init__(
        self,
        name_nodes: NameNodes,
        placed: PlacedBlock,
        block_bytes: int,
        silence_max_s: float,
        kind: ChecksumKind,
    ) -> None:
        """Open the first block; `silence_max_s` limits how long a DataNode may accept nothing.

        Raises: as `write`.
        """
        self._name_nodes = name_nodes
        self._placed = placed
        self._block_bytes = block_bytes
        self._silence_max_s = silence_max_s
        self._kind = kind
        self._block = _BlockWriter(placed.added, placed.holder, silence_max_s, kind)
        self._waiting: list[memoryview] = []
        """Data of the next packet, until the packet is full."""
        self._waiting_bytes = 0

    @property
    def unconfirmed_bytes(self) -> int:
        """Number of the last bytes written that not all DataNodes have confirmed."""
        return self._block.sent_bytes - self._block.confirmed_bytes + self._waiting_bytes

    def write(self, data: Piece) -> None:
        """Append `data`. Raises: OSError, ValueError, RpcError, UnavailableError, DeadlineError."""
        rest = memoryview(data)
        while rest:
            block_room = self._block_bytes - self._block.sent_bytes
            if not block_room:
                self._begin_next()
                continue
            # Only the last packet of a block may end inside the piece of a checksum.
            room = min(block_room, _PACKET_BYTES) - self._waiting_bytes
            step = rest[:room]
            self._waiting.append(step)
            self._waiting_bytes += len(step)
            rest = rest[len(step) :]
            if len(step) == room:
                self._send_waiting()

    def _send_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            self._block.write(waiting)

    def keep_alive(self) -> None:
        """Tell the DataNodes that the writer is alive. Raises: as `write`."""
        self._block.keep_alive()

    def close(self) -> None:
        """Complete the file once all replicas are complete. Raises: as `write`."""
        self._send_waiting()
        last = self._block.finish()
        self._name_nodes.complete(self._placed.path, self._placed.holder, last)

    def drop(self) -> None:
        """Close the connection. Idempotent."""
        self._waiting.clear()
        self._block.drop()

    def _begin_next(self) -> None:
        path, holder = self._placed.path, self._placed.holder
        previous = self._block.finish()
        self._block.drop()
        added = self._name_nodes.add_block(path, holder, previous=previous)
        self._block = _BlockWriter(added, holder, self._silence_max_s, self._kind)


class _BlockWriter:
    """Block that is being written, over a connection to the first of its DataNodes."""

    def __init__(
        self, added: AddedBlock, holder: str, silence_max_s: float, kind: ChecksumKind
    ) -> None:
        self._added = added
        self._kind = kind
        self._silence_max_s = silence_max_s
        self.sent_bytes = 0
        self.confirmed_bytes = 0
        self._number = 0
        """Number of the next packet."""
        self._confirmed_count = 0
        self._heartbeat_count = 0
        """Number of heartbeats without an answer so far."""
        self._unconfirmed: deque[int] = deque()
        """Sizes of the packets that were sent and not confirmed."""
        self._received = bytearray()
        self._is_open = False
        self._socket = socket.create_connection(added.address, _CONNECT_S)
        try:
            self._socket.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN | select.POLLOUT)
            checksum = (kind.number, kind.piece_bytes)
            self._send([messages.op_write_block(added.located, holder, checksum)])
            end_s = time.monotonic() + silence_max_s
            while (response := self._message()) is None:
                self._wait(select.POLLIN, end_s)
            if messages.parse("BlockOpResponse", response).status != messages.SUCCESS:
                raise ValueError("the DataNode refuses the block")
            self._is_open = True
        except BaseException:
            self.drop()
            raise

    def write(self, data: list[memoryview]) -> None:
        """Send one packet."""
        sums, count = checksums_of(data, self._kind), sum(map(len, data))
        self._unconfirmed.append(count)
        head = messages.packet_head(self.sent_bytes, self._number, count, sums_bytes=len(sums))
        self._send([head + sums, *data])
        self.sent_bytes += count
        self._number += 1

    def keep_alive(self) -> None:
        self._heartbeat_count += 1
        self._send([messages.packet_head(0, messages.HEARTBEAT, 0)])

    def finish(self) -> messages.Message:
        """Send the last packet; return the block once all DataNodes have confirmed all packets."""
        self._unconfirmed.append(0)
        self._send([messages.packet_head(self.sent_bytes, self._number, 0, is_last=True)])
        known = -1
        while self._unconfirmed:
            # Only confirmations extend the deadline, not other bytes.
            if self._confirmed_count != known:
                known, end_s = self._confirmed_count, time.monotonic() + self._silence_max_s
            self._wait(select.POLLIN, end_s)
        return self._added.block_of(self.sent_bytes)

    def drop(self) -> None:
        self._socket.close()

    def _send(self, buffers: list[bytes | memoryview]) -> None:
        end_s = time.monotonic() + self._silence_max_s
        while buffers:
            try:
                count = self._socket.sendmsg(buffers)
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT, end_s)
                continue
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = memoryview(buffers[0])[count:]
        self._take_confirmations()

    def _wait(self, events: int, end_s: float) -> None:
        """Wait for one of `events`, and handle the confirmations that have arrived."""
        self._poll.modify(self._socket, events)
        while True:
            # Checked before the poll, so that single bytes now and then do not prolong the wait.
            if time.monotonic() > end_s:
                raise TimeoutError("the DataNode takes nothing")
            if ready := self._poll.poll(_POLL_S * 1000):
                break
        if self._is_open and ready[0][1] & ~select.POLLOUT:
            self._take_confirmations()

    def _take_confirmations(self) -> None:
        # The DataNode closes the connection after the last confirmation.
        while self._unconfirmed and (message := self._message()) is not None:
            ack = messages.parse("PipelineAck", message)
            if any(ack.reply):
                raise ValueError("a DataNode failed")
            if ack.seqno == messages.HEARTBEAT:
                self._heartbeat_count -= 1
                if self._heartbeat_count < -_STRAY_ANSWERS_MAX:
                    raise ValueError("answers to heartbeats that were never sent")
                continue
            if ack.seqno != self._confirmed_count:
                raise ValueError("not the packet that is under way")
            self.confirmed_bytes += self._unconfirmed.popleft()
            self._confirmed_count += 1

    def _message(self) -> bytes | None:
        """Return the next message of the DataNode, or None if it has not arrived completely."""
        received = self._received
        while True:
            message, end = take_delimited(received, _MESSAGE_MAX_BYTES)
            if message is not None:
                del received[:end]
                return message
            try:
                data = self._socket.recv(_MESSAGE_MAX_BYTES)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionError("the DataNode closed the connection")
            received += data
