"""Files of HDFS that are kept open for many reads, by the cheaper of two ways.

A reader that checks the bytes itself (`Attempt.is_checked`) is served by DataNodes directly: such
bytes go from the DataNode's page cache to its socket, and from ours into the caller's buffer,
without a copy or a look in between. (hdfs-native checks every byte, and copies it three times:
measured 1.4 CPU s/GiB, against 0.6 here.) The NameNode is asked once per reader. No authentication,
no encryption: whatever is not as foreseen is a failure, and hdfs-native reads instead.

    HdfsReader ──► DataNodes ──► Replicas (which DataNode)      Where this fails, or the bytes have
        └────────► hdfs-native                                  to be checked: hdfs-native.

Blocks lie on different DataNodes, so what is read in parallel loads them evenly; one that is slower
than the others gets as much less, and one that has failed is left for a minute. Any thread; waits
are bounded; a forked child begins with connections of its own.
"""

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.varints import take_delimited
from bootseer.errors import InvalidInputError
from bootseer.store.backend import FileInfo
from bootseer.store.deadline import Call, begin_in_children
from bootseer.store.hdfs import messages
from bootseer.store.hdfs.namenode import Address, Replica, StoredBlock
from bootseer.store.hdfs.native import Native, keep_for_ever
from bootseer.transfer.attempt import Attempt

if TYPE_CHECKING:
    from hdfs_native import FileReader, FileStatus

_log = logging.getLogger(__name__)

# The tokens with which DataNodes let us read blocks are good for some hours (10 by default), and
# hdfs-native asks for new ones only when it opens a file.
OPENED_S = 3600.0
REMEMBERED_S = 60.0
"""How long what was learned of a DataNode holds: then it has a new chance."""
_TELLING_BYTES = 256 << 10
"""A read of less is as slow as its way there and back."""
_ALIKE = 3.0
"""DataNodes whose paces differ less are as fast as one another: what is seen of each varies so."""
_PATIENCE_S = 0.1
"""Before the first byte of a read comes, a disk may have to find it."""
_FAR = 4.0
"""A read from another rack counts as so many: the network between racks is shared by all."""
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


class HdfsReader:
    """A file whose blocks the NameNode has named: us, hdfs-native, or both.

    It names the nearest replica first, and equally near ones in random order, so that another
    reader of hdfs-native's may be served by other DataNodes.
    """

    can_stop = True

    def __init__(
        self,
        native: Native,
        data_nodes: "DataNodes",
        path: str,
        info_path: str,
        name: str,
        blocks: tuple[StoredBlock, ...] = (),
    ) -> None:
        """`path`: absolute; `info_path`: that of `current`; `name`: for messages. `blocks`: those
        that are read directly; without any the file is opened here. Raises: NotFoundError,
        UnavailableError, DeadlineError."""
        self._native = native
        self._data_nodes = data_nodes
        self._path = path
        self._info_path = info_path
        self._name = name
        self.blocks = blocks
        self._file: tuple[FileReader, FileInfo, int] | None = None
        self._opened_until_s = 0.0
        self.begin()
        begin_in_children(self)
        if not blocks:
            native.call(lambda _: self.opened, "read", name)

    def begin(self) -> None:
        """Start without an opened file, as a forked child has to."""
        if self._file is not None:
            keep_for_ever(self._file[0])
        self._lock = threading.Lock()
        self._file = None

    @property
    def opened(self) -> "tuple[FileReader, FileInfo, int]":
        """The file as hdfs-native has opened it, its info, and the number of replicas. Only for
        work that `Native.run` does."""
        with self._lock:
            if self._file is None:
                self._file = self._open()
                self._opened_until_s = time.monotonic() + OPENED_S
            return self._file

    def _open(self) -> "tuple[FileReader, FileInfo, int]":
        client = self._native.client()
        reader = client.read(self._path)
        # In this order: what was replaced meanwhile does not look like what is read.
        status = client.get_file_info(self._path)
        return reader, info_of(self._info_path, status), status.replication or 1

    def _usable(self) -> "FileReader":
        """Return the opened file; opened again now and then, if it is the same file still."""
        reader, info, _ = self.opened
        with self._lock:
            is_due = time.monotonic() > self._opened_until_s
            if is_due:
                # For one reader to do; the others go on with what there is.
                self._opened_until_s = time.monotonic() + OPENED_S
        if is_due:
            with contextlib.suppress(Exception):
                again = self._open()
                if again[1] == info:
                    with self._lock:
                        self._file = again
                    return again[0]
        return reader

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].length if self.blocks else self.opened[1].block_bytes

    @property
    def has_replicas(self) -> bool:
        if self.blocks:
            return any(len(block.replicas) > 1 for block in self.blocks)
        return self.opened[2] > 1

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer`; see `Reader`."""
        count = 0
        if attempt.is_checked and self.blocks:
            count = self._data_nodes.read_into(self.blocks, offset, buffer, attempt)
            if count == len(buffer) or attempt.is_given_up:
                return count
            attempt.server = ""
        return fill(self._native, self._usable, self._name, offset, buffer, attempt, count)

    def current(self) -> FileInfo:
        """Return the info of the opened file: blocks never change, whatever becomes of the name."""
        return self.opened[1]


def info_of(path: str, status: "FileStatus") -> FileInfo:
    """Return what hdfs-native says of the file or folder at `path`."""
    size_bytes = 0 if status.isdir else status.length
    block_bytes = status.blocksize or 0
    return FileInfo(
        path, size_bytes, status.modification_time * 1_000_000, status.isdir, block_bytes
    )


# ---- by hdfs-native ------------------------------------------------------------------------------


def read_bytes(native: Native, path: str, name: str, offset: int, length: int | None) -> bytes:
    """Return `[offset, offset + length)` of a file that is opened for this; None: to the end."""

    def work(call: Call[bytes]) -> bytes:
        chunks = []
        for chunk in _stream(native.client().read(path), offset, length):
            chunks.append(chunk)
            call.progress()
            if call.abandoned:
                break
        # One copy; a bytearray turned into bytes would be two.
        return b"".join(chunks)

    return native.run(work, "read", name, is_question=True)


def fill(
    native: Native,
    opened: "Callable[[], FileReader]",
    name: str,
    offset: int,
    buffer: memoryview,
    attempt: Attempt,
    done_bytes: int = 0,
) -> int:
    """Fill `buffer`, which begins with `done_bytes` that are here already, from `offset` of the
    file that `opened` returns; returns the count, short at the end of the file, and when the
    attempt was given up."""

    def work(call: Call[int]) -> int:
        done = done_bytes
        for chunk in _stream(opened(), offset + done, len(buffer) - done):
            if not attempt.put(done, buffer, chunk):
                break
            done += len(chunk)
            call.progress()
        return done

    try:
        return native.run(work, "read", name)
    except BaseException:
        attempt.stop()  # a helper that is still in the library must not write any more
        raise


def _stream(reader: "FileReader", offset: int, length: int | None) -> Iterator[bytes]:
    if offset < 0 or (length is not None and length < 0):
        raise InvalidInputError(f"the range ({offset}, {length}) is negative")
    # Reading past the end is a panic of the Rust code, so never ask for it.
    wanted = max(0, len(reader) - offset)
    if length is not None:
        wanted = min(wanted, length)
    if not wanted:
        return iter(())
    stream: Iterator[bytes] = reader.read_range_stream(offset, wanted)
    return stream


# ---- by DataNodes --------------------------------------------------------------------------------


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


class _GivenUpError(Exception):
    """The attempt was given up."""


class DataNodes:
    """The DataNodes of one cluster."""

    def __init__(self, silence_max_s: float) -> None:
        """`silence_max_s`: how long a DataNode may send nothing, or next to nothing."""
        self._silence_max_s = silence_max_s
        self.begin()
        begin_in_children(self)

    def begin(self) -> None:
        """Start without connections, as a forked child has to."""
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
            except _GivenUpError:
                break
            except (OSError, ValueError, struct.error) as error:
                self._shun(address, error)
                attempt.done_bytes = done
                break
            finally:
                self._replicas.end(address, attempt)
        return attempt.done_bytes

    def close(self) -> None:
        """Close idle connections. Idempotent."""
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
        request = messages.op_read_block(block.block, block.token, _CLIENT, start, end - start)
        connection.socket.sendall(request)
        self._check_response(connection, start, attempt)
        first = self._exactly(connection, messages.PACKET_HEAD_BYTES, attempt)
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
        self._receive(connection, views, len(target), attempt)
        if received != headers:
            raise ValueError("not the packets that were asked for")
        connection.socket.sendall(messages.READ_STATUS)
        self._keep(connection)

    def _receive(
        self, connection: Connection, views: list[memoryview], length: int, attempt: Attempt
    ) -> None:
        """Fill `views`, in which there are `length` bytes of the file. Raises: _GivenUpError."""
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
                    raise _GivenUpError
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

    def _check_response(self, connection: Connection, within: int, attempt: Attempt) -> None:
        """Read BlockOpResponseProto: bytes from `within` on, without checksums, are to come."""
        received = b""
        while True:
            response, end = take_delimited(received, _RESPONSE_MAX_BYTES)
            if response is not None:
                break
            received += self._exactly(connection, end - len(received), attempt)
        answer = messages.parse("BlockOpResponse", response)
        reading = answer.readOpChecksumInfo
        if answer.status != messages.SUCCESS or not answer.HasField("readOpChecksumInfo"):
            raise ValueError("refused")
        if (reading.checksum.type, reading.chunkOffset) != (messages.NO_CHECKSUM, within):
            raise ValueError("not what was asked for")

    def _exactly(self, connection: Connection, count: int, attempt: Attempt) -> bytes:
        data = bytearray(count)
        self._receive(connection, [memoryview(data)], 0, attempt)
        return bytes(data)

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
    """Return the headers of all packets of a read, with the empty one at the end."""
    headers = []
    for number, at in enumerate(range(0, length, packet_bytes)):
        headers.append(messages.packet_head(start + at, number, min(packet_bytes, length - at)))
    headers.append(messages.packet_head(start + length, len(headers), 0, is_last=True))
    return b"".join(headers)


def _views(headers: bytearray, parts: Sequence[memoryview], packet_bytes: int) -> list[memoryview]:
    """Return the buffers to fill after the first header: packets with the bytes of `parts`."""
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


# ---- which DataNode ------------------------------------------------------------------------------


class _Read(Struct, eq=False):
    attempt: Attempt
    begun_s: float
    begun_bytes: int
    beside: int
    """How many were under way at the DataNode, this one among them."""


class Replicas:
    """The DataNodes of one cluster."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: defaultdict[Address, list[_Read]] = defaultdict(list)
        self._paces: dict[Address, tuple[float, float]] = {}
        """Seconds per byte of a DataNode that serves one read at a time; until when that holds."""
        self._failed_until_s: dict[Address, float] = {}

    def begin(self, replicas: tuple[Replica, ...], attempt: Attempt) -> Address | None:
        """Choose the best one for `attempt`, counted until `end`; None: each has failed lately."""
        now_s = self._clock()
        with self._lock:
            usable = [
                each for each in replicas if self._failed_until_s.get(each.address, 0.0) <= now_s
            ]
            if not usable:
                return None
            typical = self._typical(now_s)
            costs = [self._cost(each, typical, now_s) for each in usable]
            address = usable[costs.index(min(costs))].address
            reads = self._under_way[address]
            reads.append(_Read(attempt, now_s, attempt.done_bytes, len(reads) + 1))
            return address

    def end(self, address: Address, attempt: Attempt) -> None:
        """End the read of `attempt`, and learn from it."""
        now_s = self._clock()
        with self._lock:
            reads = self._under_way[address]
            read = next(each for each in reads if each.attempt is attempt)
            reads.remove(read)
            known = self._known(address, now_s)
            seen = _seen(read, now_s)
            if attempt.is_given_up:
                # It would have taken longer.
                pace = max(known, seen)
            elif attempt.done_bytes - read.begun_bytes >= _TELLING_BYTES:
                pace = (known + seen) / 2 if known else seen
            else:
                return
            self._paces[address] = (pace, now_s + REMEMBERED_S)

    def failed(self, address: Address) -> bool:
        """Leave a DataNode that failed for a while; return whether it was not left already."""
        now_s = self._clock()
        with self._lock:
            is_new = self._failed_until_s.get(address, 0.0) <= now_s
            self._failed_until_s[address] = now_s + REMEMBERED_S
            return is_new

    def _cost(self, replica: Replica, typical: float, now_s: float) -> float:
        """Return the time of a read there, in reads of a typical DataNode that is idle."""
        reads = self._under_way[replica.address]
        # What has not come yet says how slow it is at least.
        waited = (_seen(read, now_s - _PATIENCE_S) for read in reads)
        pace = max(self._known(replica.address, now_s), *waited, 0.0)
        cost = float(len(reads) + 1)
        if typical and pace > _ALIKE * typical:
            cost *= pace / typical
        return cost * _FAR if replica.is_far else cost

    def _typical(self, now_s: float) -> float:
        """Return the median pace of the known DataNodes; 0 if none is known."""
        known = sorted(pace for pace, until_s in self._paces.values() if until_s > now_s)
        return known[(len(known) - 1) // 2] if known else 0.0

    def _known(self, address: Address, now_s: float) -> float:
        pace, until_s = self._paces.get(address, (0.0, 0.0))
        return pace if until_s > now_s else 0.0


def _seen(read: _Read, now_s: float) -> float:
    """Return the seconds per byte that a read has shown of its DataNode so far."""
    done_bytes = max(read.attempt.done_bytes - read.begun_bytes, _TELLING_BYTES)
    return (now_s - read.begun_s) / done_bytes / read.beside
