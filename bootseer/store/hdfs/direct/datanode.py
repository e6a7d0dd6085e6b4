"""Reads ranges of blocks directly from DataNodes, for readers that check the bytes themselves.

Owns the connections, and what Hadoop's data transfer needs for reads without checksums: such bytes
go from the DataNode's page cache to its socket, and from ours into the caller's buffer, without a
copy or a look in between. (hdfs-native checks every byte, and copies
it three times: measured 1.4 CPU s/GiB, against 0.6 here.) No authentication, no encryption:
whatever is not as foreseen is a failure, and hdfs-native reads instead. Thread-safe; waits are
bounded.
"""

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from bootseer.store.hdfs.direct.replicas import REMEMBERED_S, Address, Replicas
from bootseer.store.hdfs.rpc import messages
from bootseer.store.hdfs.rpc.calls import StoredBlock
from bootseer.store.hdfs.rpc.protobuf import take_delimited
from bootseer.transfer.attempt import Attempt

_log = logging.getLogger(__name__)

_CLIENT = "bootseer"
_RESPONSE_MAX_BYTES = 4096
# What a DataNode sends begins and ends at a multiple of this, or at the end of the block: what is
# sent beside the bytes that are wanted goes to memory of its own.
_ALIGNMENT = 512
_PACKET_MAX_BYTES = 16 << 20
# Hadoop sends 64 KiB in a packet, or io.file.buffer.size, at least 4 KiB: of less, headers and the
# time that each takes would be many times what was asked for.
_PACKET_TYPICAL_BYTES = 4096
_SMALL_PACKETS_MAX = 16
# A wake-up for each packet would cost more than its bytes.
_LOW_WATER_BYTES = 256 << 10
_VIEWS_MAX = 128
_POLL_S = 0.25
_CONNECT_S = 2.0
# A DataNode waits 4 s for the next request (dfs.datanode.socket.reuse.keepalive).
_KEPT_S = 2.0


class Connection:
    """A connection to one DataNode, taken by one thread; closed when it is dropped."""

    def __init__(self, address: Address, connected: socket.socket) -> None:
        self.address = address
        self.socket = connected
        self.socket.setblocking(False)
        if self.socket.family in (socket.AF_INET, socket.AF_INET6):
            # Else Nagle's algorithm holds the next request back until the DataNode has acknowledged
            # the status of the last one, which it delays by 40 ms.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.idle_since_s = 0.0

    def __del__(self) -> None:
        self.socket.close()


class DataNodes:
    """The DataNodes of one cluster."""

    def __init__(self, silence_max_s: float) -> None:
        """`silence_max_s`: how long a DataNode may send nothing, or next to nothing."""
        self._silence_max_s = silence_max_s
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        """The one that is idle longest first."""
        self._replicas = Replicas()

    def read_into(
        self, blocks: Sequence[StoredBlock], offset: int, buffer: memoryview, attempt: Attempt
    ) -> int:
        """Fill `buffer` from `offset` of the file that consists of `blocks`, unchecked. Returns the
        count: short when the attempt was given up, and where it must be read otherwise."""
        for block in blocks:
            done = attempt.done_bytes
            position = offset + done
            if not block.start <= position < block.start + block.length:
                continue
            within = position - block.start
            length = min(len(buffer) - done, block.length - within)
            if not length:
                break
            address = self._replicas.begin(block.replicas, attempt)
            if address is None:
                break
            attempt.server = f"{address[0]}:{address[1]}"
            try:
                self._read(address, block, within, buffer[done : done + length], attempt)
            except (OSError, ValueError, struct.error) as error:
                self._shun(address, error)
                attempt.done_bytes = done
                break
            finally:
                self._replicas.end(address, attempt)
            if attempt.is_given_up:
                break
        return attempt.done_bytes

    def close(self) -> None:
        """Close what is idle. Idempotent."""
        with self._lock:
            self._idle.clear()

    # ---- one range of one block -------------------------------------------------------------

    def _read(
        self,
        address: Address,
        block: StoredBlock,
        within: int,
        target: memoryview,
        attempt: Attempt,
    ) -> None:
        start = within - within % _ALIGNMENT
        end = min(-(-(within + len(target)) // _ALIGNMENT) * _ALIGNMENT, block.length)
        before = memoryview(bytearray(within - start))
        behind = memoryview(bytearray(end - within - len(target)))
        connection = self.take(address)
        end_s = time.monotonic() + self._silence_max_s
        request = messages.op_read_block(block.block, block.token, _CLIENT, start, end - start)
        connection.socket.sendall(request)
        self._check_response(connection, start, end_s)
        first = self._exactly(connection, messages.PACKET_HEAD_BYTES, end_s)
        packet_bytes = messages.packet_data_bytes(first)
        if not 0 < packet_bytes <= _PACKET_MAX_BYTES:
            raise ValueError("not the length of a packet")
        wanted = end - start
        if wanted // packet_bytes > wanted // _PACKET_TYPICAL_BYTES + _SMALL_PACKETS_MAX:
            raise ValueError("packets of hardly any bytes")
        headers = packet_headers(start, wanted, packet_bytes)
        received = bytearray(len(headers))
        received[: messages.PACKET_HEAD_BYTES] = first
        views = _views(received, (before, target, behind), packet_bytes)
        if not self._receive(connection, views, len(target), attempt):
            return
        if received != headers:
            raise ValueError("not the packets that were asked for")
        connection.socket.sendall(messages.READ_STATUS)
        self._keep(connection)

    def _receive(
        self, connection: Connection, views: list[memoryview], length: int, attempt: Attempt
    ) -> bool:
        """Fill `views`, in which there are `length` bytes of the file; False when given up."""
        start_bytes = attempt.done_bytes
        missing = sum(map(len, views))
        silent_s = time.monotonic() + self._silence_max_s
        telling = missing - _LOW_WATER_BYTES
        """What is missing when it is not silent any more: a byte now and then is silence, too."""
        low_water = 0
        at = 0
        while missing:
            wanted = min(missing, _LOW_WATER_BYTES)
            if wanted != low_water:
                low_water = wanted
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            connection.poll.poll(_POLL_S * 1000)
            with attempt.lock:
                if attempt.is_given_up:
                    return False
                try:
                    count = connection.socket.recvmsg_into(views[at : at + _VIEWS_MAX])[0]
                except BlockingIOError:
                    count = -1
            if not count:
                raise ConnectionError("the DataNode closed the connection")
            missing -= max(count, 0)
            now_s = time.monotonic()
            if missing <= telling:
                silent_s, telling = now_s + self._silence_max_s, missing - _LOW_WATER_BYTES
            elif now_s >= silent_s and missing:
                raise TimeoutError("the DataNode sends nothing, or next to nothing")
            if count < 0:
                continue
            while count and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]
            attempt.done_bytes = start_bytes + max(0, length - missing)
        return True

    def _check_response(self, connection: Connection, within: int, end_s: float) -> None:
        """Read BlockOpResponseProto: bytes from `within` on, without checksums, are to come."""
        received = b""
        while True:
            response, end = take_delimited(received, _RESPONSE_MAX_BYTES)
            if response is not None:
                break
            received += self._exactly(connection, end - len(received), end_s)
        answer = messages.BlockOpResponse.decode(response)
        if answer.status != messages.SUCCESS or answer.reading is None:
            raise ValueError("refused")
        if (answer.reading.checksum.kind, answer.reading.offset) != (messages.NO_CHECKSUM, within):
            raise ValueError("not what was asked for")

    def _exactly(self, connection: Connection, count: int, end_s: float) -> bytes:
        data = b""
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        while len(data) < count:
            # First: where a byte comes now and then, there is always something to read.
            if time.monotonic() >= end_s:
                raise TimeoutError("the DataNode's answer does not end")
            try:
                piece = connection.socket.recv(count - len(data))
            except BlockingIOError:
                connection.poll.poll(_POLL_S * 1000)
                continue
            if not piece:
                raise ConnectionError("the DataNode closed the connection")
            data += piece
        return data

    # ---- connections ------------------------------------------------------------------------

    def take(self, address: Address) -> Connection:
        with self._lock:
            self._forget_old()
            for index in reversed(range(len(self._idle))):
                if self._idle[index].address == address:
                    connection = self._idle.pop(index)
                    if not connection.poll.poll(0):  # else the DataNode has closed it
                        return connection
        return Connection(address, socket.create_connection(address, _CONNECT_S))

    def _keep(self, connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            self._forget_old()

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - _KEPT_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            del self._idle[0]

    def _shun(self, address: Address, error: Exception) -> None:
        if self._replicas.failed(address):
            # Not for each read: its other reads fail in the same moment.
            _log.warning(
                "DataNode %s:%d is left for %.0f s, and read from more slowly by hdfs-native: %s",
                *address,
                REMEMBERED_S,
                str(error) or type(error).__name__,
            )
        with self._lock:
            self._idle = [idle for idle in self._idle if idle.address != address]


def packet_headers(start: int, length: int, packet_bytes: int) -> bytes:
    """The headers of all packets that are to come, the empty one at the end too."""
    headers = []
    for number, at in enumerate(range(0, length, packet_bytes)):
        headers.append(messages.packet_head(start + at, number, min(packet_bytes, length - at)))
    headers.append(messages.packet_head(start + length, len(headers), 0, is_last=True))
    return b"".join(headers)


def _views(headers: bytearray, parts: Sequence[memoryview], packet_bytes: int) -> list[memoryview]:
    """What is to be filled after the first header, in order: packets with the bytes of `parts`."""
    all_headers = memoryview(headers)
    views = []
    at = messages.PACKET_HEAD_BYTES
    room = packet_bytes
    for part in parts:
        rest = part
        while rest:
            if not room:
                views.append(all_headers[at : at + messages.PACKET_HEAD_BYTES])
                at += messages.PACKET_HEAD_BYTES
                room = packet_bytes
            views.append(rest[:room])
            rest = rest[room:]
            room -= len(views[-1])
    views.append(all_headers[at : at + messages.PACKET_HEAD_BYTES])
    return views
