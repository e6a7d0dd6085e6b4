"""Reader of an HDFS file that is kept open for many reads.

If the caller checks the bytes itself (`Attempt.is_checked`), they are read from DataNodes directly:
they go from the DataNode's page cache to its socket, and from our socket into the caller's buffer,
without copies or checksums in between. (hdfs-native checks every byte and copies it three times:
measured 1.4 CPU s/GiB, against 0.6 here.) The NameNode is asked once per reader. Direct reads have
no authentication and no encryption. If anything is unexpected, or the bytes must be checked,
hdfs-native reads them instead.

    HdfsReader ──► DataNodes ──► Replicas (chooses the DataNode)
        └────────► hdfs-native

Parallel reads of different blocks load the DataNodes evenly. A DataNode that is slower than the
others gets fewer reads, one that has failed is avoided for a minute. Any thread; waits are bounded;
a forked child starts without connections.
"""

import contextlib
import logging
import math
import select
import socket
import struct
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.varints import take_delimited
from bootseer.store.backend import FileInfo
from bootseer.store.deadline import Call, reset_in_children
from bootseer.store.hdfs import messages
from bootseer.store.hdfs.namenode import Address, Replica, StoredBlock
from bootseer.store.hdfs.native import Native, leak
from bootseer.store.paths import check_range
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import ByteProgress, floor_bytes_per_s

if TYPE_CHECKING:
    from hdfs_native import FileReader, FileStatus

_log = logging.getLogger(__name__)

# Block tokens are valid for some hours (10 by default), and hdfs-native asks for new ones only when
# it opens a file, so a file is opened again after this time.
OPENED_S = 3600.0
REMEMBERED_S = 60.0
"""Time for which the speed or failure of a DataNode is remembered."""
_DOUBTED_S = 2.0
"""Time for which a DataNode counts as slow after a read that was given up; doubled each time until
a read ends well. The bytes may have waited behind those of other reads."""
_FADE_S = 5.0
"""Time in which the weight of a past read falls to a third in the plan."""
_PLAN_S = 0.1
"""Time after which the plan is made anew."""
_PLAN_STEPS = 160
"""Steps of one plan, of 4 us each: enough to even out a chain of eight DataNodes (eight groups)."""
_GROUPS_MAX = 32
"""Groups of DataNodes in the plan, those that were read last. The blocks of more groups are spread
evenly enough without a plan."""
_PACE_MIN_BYTES = 256 << 10
"""Size from which the time of a read depends on the DataNode's speed, not on the round trip."""
_ALIKE_RATIO = 3.0
"""Ratio up to which two DataNodes count as equally fast: measurements vary so much."""
_PATIENCE_S = 0.1
"""Time before the first byte of a read that is not held against a DataNode: its disk may seek."""
_FAR_FACTOR = 4.0
"""Cost of a read from another rack, in reads from the own rack: the network between racks is shared
by all reads from other racks."""
_CLIENT = "bootseer"
_RESPONSE_MAX_BYTES = 4096
# A DataNode sends from and to multiples of this, or to the end of the block. The bytes around the
# requested range go into a separate buffer.
_ALIGNMENT = 512
_PACKET_MAX_BYTES = 16 << 20
# Hadoop sends packets of 64 KiB, or of io.file.buffer.size, at least 4 KiB. Smaller packets are
# refused: their headers would be many times larger than the data.
_PACKET_TYPICAL_BYTES = 4096
_SMALL_PACKETS_MAX = 16
# Bytes to wait for before a read: a wake-up per packet would cost more CPU than copying its bytes.
_LOW_WATER_BYTES = 256 << 10
_VIEWS_MAX = 128
_POLL_S = 0.25
_CONNECT_S = 2.0
SILENCES_PER_DEADLINE = 4
"""A silent DataNode is given up early enough for attempts by hdfs-native and of another replica."""
# A DataNode waits 4 s for the next request (dfs.datanode.socket.reuse.keepalive).
_KEPT_S = 2.0


class HdfsReader:
    """Reader of a file whose blocks are known to us, to hdfs-native, or to both.

    The NameNode lists the nearest replica first, and equally near ones in random order, so that
    another hdfs-native reader of the file may be served by other DataNodes.
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
        """Prepare to read a file; without `blocks`, open it by hdfs-native.

        Args:
            native: Client of the cluster by hdfs-native.
            data_nodes: Client of the cluster's DataNodes.
            path: Absolute path.
            info_path: Path in the result of `current`.
            name: Name of the file for messages.
            blocks: Blocks to read from DataNodes directly.

        Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        self._native = native
        self._data_nodes = data_nodes
        self._path = path
        self._info_path = info_path
        self._name = name
        self.blocks = blocks
        self._file: tuple[FileReader, FileInfo, int] | None = None
        self._opened_until_s = 0.0
        self.reset()
        reset_in_children(self)
        if not blocks:
            native.call(lambda _: self.opened, "read", name)

    def reset(self) -> None:
        """Start without an open file; a forked child calls this."""
        if self._file is not None:
            leak(self._file[0])
        self._lock = threading.Lock()
        self._file = None

    @property
    def opened(self) -> "tuple[FileReader, FileInfo, int]":
        """hdfs-native's open file, its attributes and its number of replicas.

        Call this only inside the work of `Native.run`.
        """
        with self._lock:
            if self._file is None:
                self._file = self._open()
                self._opened_until_s = time.monotonic() + OPENED_S
            return self._file

    def _open(self) -> "tuple[FileReader, FileInfo, int]":
        client = self._native.client()
        reader = client.read(self._path)
        # After the file is opened: if it was replaced in between, the attributes differ from those
        # of earlier reads.
        status = client.get_file_info(self._path)
        return reader, file_info(self._info_path, status), status.replication or 1

    def _current_file(self) -> "FileReader":
        """Return the open file; reopen it every `OPENED_S` if it is still the same file."""
        reader, info, _ = self.opened
        with self._lock:
            is_due = time.monotonic() > self._opened_until_s
            if is_due:
                # One thread reopens the file; the others go on with the old one.
                self._opened_until_s = time.monotonic() + OPENED_S
        if is_due:
            with contextlib.suppress(Exception):
                reopened = self._open()
                if reopened[1] == info:
                    with self._lock:
                        self._file = reopened
                    return reopened[0]
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
        """Fill `buffer` from `offset`; see `Reader`."""
        count = 0
        if attempt.is_checked and self.blocks:
            count = self._data_nodes.read_into(self.blocks, offset, buffer, attempt)
            if count == len(buffer) or attempt.is_given_up:
                return count
            attempt.server = ""
        return fill_buffer(
            self._native, self._current_file, self._name, offset, buffer, attempt, count
        )

    def current(self) -> FileInfo:
        """Return the attributes of the open file, which stay the same if its name is reused."""
        return self.opened[1]


def file_info(path: str, status: "FileStatus") -> FileInfo:
    """Return the attributes of the file or folder at `path` from hdfs-native's status."""
    size_bytes = 0 if status.isdir else status.length
    block_bytes = status.blocksize or 0
    return FileInfo(
        path, size_bytes, status.modification_time * 1_000_000, status.isdir, block_bytes
    )


# ---- by hdfs-native ------------------------------------------------------------------------------


def read_bytes(native: Native, path: str, name: str, offset: int, length: int | None) -> bytes:
    """Open a file and return its bytes `[offset, offset + length)`; None reads to the end."""

    def work(call: Call[bytes]) -> bytes:
        chunks = []
        for chunk in _stream(native.client().read(path), offset, length):
            chunks.append(chunk)
            call.progress()
            if call.abandoned:
                break
        # One copy; a bytearray turned into bytes would be two.
        return b"".join(chunks)

    return native.run(work, "read", name, is_idempotent=True)


def fill_buffer(
    native: Native,
    opened: "Callable[[], FileReader]",
    name: str,
    offset: int,
    buffer: memoryview,
    attempt: Attempt,
    done_bytes: int = 0,
) -> int:
    """Fill `buffer` from `offset` of the file that `opened` returns, by hdfs-native.

    `done_bytes` bytes at the start of the buffer are filled already. Return the number of bytes in
    the buffer, which is smaller at the end of the file or if the attempt was given up.
    """

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
        attempt.stop()  # a helper thread still in the library must not write into the buffer
        raise


def _stream(reader: "FileReader", offset: int, length: int | None) -> Iterator[bytes]:
    check_range(offset, length)
    # The Rust code panics on a read beyond the end.
    wanted = max(0, len(reader) - offset)
    if length is not None:
        wanted = min(wanted, length)
    if not wanted:
        return iter(())
    stream: Iterator[bytes] = reader.read_range_stream(offset, wanted)
    return stream


# ---- by DataNodes --------------------------------------------------------------------------------


class DataNodeConnection:
    """Connection to one DataNode, used by one thread; closed when the last reference is dropped."""

    def __init__(self, address: Address, connected: socket.socket) -> None:
        self.address = address
        self.socket = connected
        self.socket.setblocking(False)
        if self.socket.family in (socket.AF_INET, socket.AF_INET6):
            # Without this, Nagle's algorithm holds the next request back until the DataNode's
            # delayed acknowledgement of the last status, 40 ms later.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.idle_since_s = 0.0

    def __del__(self) -> None:
        self.socket.close()


class _GivenUpError(Exception):
    """The attempt was given up."""


class DataNodes:
    """Client of the DataNodes of one cluster, with a pool of connections."""

    def __init__(self, silence_max_s: float) -> None:
        """Start without connections.

        `silence_max_s`: longest time in which a DataNode may send (almost) nothing.
        """
        self._silence_max_s = silence_max_s
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Start without connections; a forked child calls this."""
        self._lock = threading.Lock()
        self._idle: list[DataNodeConnection] = []
        """Idle connections, the one that is idle longest first."""
        self._replicas = ReplicaChooser()

    def read_into(
        self, blocks: Sequence[StoredBlock], offset: int, buffer: memoryview, attempt: Attempt
    ) -> int:
        """Fill `buffer` from `offset` of the file that consists of `blocks`, without checksums.

        Return the number of bytes read; it is smaller if the attempt was given up or a DataNode
        failed.
        """
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
                self._avoid(address, error)
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
        self, connection: DataNodeConnection, views: list[memoryview], length: int, attempt: Attempt
    ) -> None:
        """Fill `views`, in which there are `length` bytes of the file. Raises: _GivenUpError."""
        start_bytes = attempt.done_bytes
        wanted_bytes = missing = sum(map(len, views))
        deadline_s = SILENCES_PER_DEADLINE * self._silence_max_s
        floor = floor_bytes_per_s(length or math.inf, deadline_s)
        progress = ByteProgress(time.monotonic(), floor)
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
            silent_s = progress.silent_s(wanted_bytes - missing, time.monotonic())
            if silent_s >= self._silence_max_s and missing:
                raise TimeoutError("the DataNode sends nothing, or next to nothing")
            if count < 0:
                continue
            while count and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]
            attempt.done_bytes = start_bytes + max(0, length - missing)

    def _check_response(
        self, connection: DataNodeConnection, within: int, attempt: Attempt
    ) -> None:
        """Receive BlockOpResponseProto, and check that bytes from `within` on will follow."""
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
            raise ValueError("the answer has another checksum or offset than requested")

    def _exactly(self, connection: DataNodeConnection, count: int, attempt: Attempt) -> bytes:
        data = bytearray(count)
        self._receive(connection, [memoryview(data)], 0, attempt)
        return bytes(data)

    # ---- connections ------------------------------------------------------------------------

    def take(self, address: Address) -> DataNodeConnection:
        with self._lock:
            self._drop_expired()
            for index in reversed(range(len(self._idle))):
                if self._idle[index].address == address:
                    connection = self._idle.pop(index)
                    if not connection.poll.poll(0):  # readable means that the DataNode closed it
                        return connection
        return DataNodeConnection(address, socket.create_connection(address, _CONNECT_S))

    def _keep(self, connection: DataNodeConnection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            self._drop_expired()

    def _drop_expired(self) -> None:
        oldest_s = time.monotonic() - _KEPT_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            del self._idle[0]

    def _avoid(self, address: Address, error: Exception) -> None:
        if self._replicas.failed(address):
            # Logged once: the DataNode's other reads fail at the same moment.
            _log.warning(
                "DataNode %s:%d failed: its blocks are read by hdfs-native, which is slower, for "
                "%.0f s: %s",
                *address,
                REMEMBERED_S,
                str(error) or type(error).__name__,
            )
        with self._lock:
            self._idle = [idle for idle in self._idle if idle.address != address]


def packet_headers(start: int, length: int, packet_bytes: int) -> bytes:
    """Return the headers of all packets of a read, including the empty packet at the end."""
    headers = []
    for number, at in enumerate(range(0, length, packet_bytes)):
        headers.append(messages.packet_head(start + at, number, min(packet_bytes, length - at)))
    headers.append(messages.packet_head(start + length, len(headers), 0, is_last=True))
    return b"".join(headers)


def _views(headers: bytearray, parts: Sequence[memoryview], packet_bytes: int) -> list[memoryview]:
    """Return the buffers for all bytes after the first header: parts of `parts`, and headers."""
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


# ---- choice of a DataNode ------------------------------------------------------------------------


class _Read(Struct, eq=False):
    attempt: Attempt
    begun_s: float
    begun_bytes: int
    beside: int
    """Number of reads in progress at the DataNode when this read began, including this one."""


class _Doubt(Struct):
    """Lower bound of a DataNode's slowness, from reads that were given up."""

    pace: float
    """Seconds per byte, at least."""
    until_s: float
    lasts_s: float


class _Group(Struct, eq=False):
    """Blocks whose replicas are on the same DataNodes."""

    shares: dict[Address, float]
    """Share of the reads that each DataNode is to get."""
    given: dict[Address, float]
    """Number of reads that each DataNode got, the older the less each counts, as of `at_s`."""
    at_s: float

    def fade(self, now_s: float) -> None:
        """Let the weights of earlier reads fall."""
        factor = math.exp((self.at_s - now_s) / _FADE_S)
        self.given = {address: count * factor for address, count in self.given.items()}
        self.at_s = now_s


def divide(
    amount: float, loads: Mapping[Address, float], speeds: Mapping[Address, float]
) -> dict[Address, float]:
    """Divide `amount` among DataNodes so that all that get a part finish at the same time. Pure.

    `loads`: work that each DataNode has already; `speeds`: its work in a unit of time. Return the
    part of each.
    """
    level = load = speed = 0.0
    for address in sorted(loads, key=lambda one: loads[one] / speeds[one]):
        if speed and loads[address] >= level * speeds[address]:
            break
        load += loads[address]
        speed += speeds[address]
        level = (amount + load) / speed
    return {one: max(0.0, level * speeds[one] - loads[one]) for one in loads}


class ReplicaChooser:
    """Choice of the DataNode for each read, by the load, speed and failures of the DataNodes.

    A read goes where the fewest reads are under way. Among equals a plan decides, which gives all
    DataNodes equally much to do for their speed. A rule for the two replicas of one block could not
    do that: beside a slow DataNode, its neighbour must leave its other blocks to the next DataNode,
    and that one to the next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: defaultdict[Address, list[_Read]] = defaultdict(list)
        self._paces: dict[Address, tuple[float, float]] = {}
        """Seconds per byte of each DataNode for a single read, and the time until which it counts.
        """
        self._doubts: dict[Address, _Doubt] = {}
        self._failed_until_s: dict[Address, float] = {}
        self._groups: OrderedDict[tuple[Address, ...], _Group] = OrderedDict()
        """The groups of DataNodes that were read lately, the latest last."""
        self._planned_s = -math.inf

    def begin(self, replicas: tuple[Replica, ...], attempt: Attempt) -> Address | None:
        """Choose the best replica for a read, which counts as load until `end`.

        Return None if all replicas have failed lately.
        """
        now_s = self._clock()
        with self._lock:
            usable = [
                each for each in replicas if self._failed_until_s.get(each.address, 0.0) <= now_s
            ]
            if not usable:
                return None
            typical = self._typical_pace(now_s)
            group = self._group(usable, now_s)
            if now_s - self._planned_s >= _PLAN_S:
                self._plan(typical, now_s)

            def order(replica: Replica) -> tuple[float, bool, float]:
                given = group.given.get(replica.address, 0.0) + 1.0
                share = group.shares.get(replica.address, 0.0)
                cost = self._cost(replica, typical, now_s)
                return cost, replica.is_far, given / share if share else math.inf

            address = min(usable, key=order).address
            group.given[address] = group.given.get(address, 0.0) + 1.0
            reads = self._under_way[address]
            reads.append(_Read(attempt, now_s, attempt.done_bytes, len(reads) + 1))
            return address

    def end(self, address: Address, attempt: Attempt) -> None:
        """End the read of `attempt`, and update the speed of its DataNode."""
        now_s = self._clock()
        with self._lock:
            reads = self._under_way[address]
            read = next(each for each in reads if each.attempt is attempt)
            reads.remove(read)
            known = self._known_pace(address, now_s)
            seen = _pace_so_far(read, now_s)
            if attempt.is_given_up:
                # The whole read would have taken longer.
                doubt = self._doubts.get(address)
                lasts_s = min(2 * doubt.lasts_s, REMEMBERED_S) if doubt else _DOUBTED_S
                pace = max(seen, self._doubted_pace(address, now_s))
                self._doubts[address] = _Doubt(pace, now_s + lasts_s, lasts_s)
            elif attempt.done_bytes - read.begun_bytes >= _PACE_MIN_BYTES:
                self._doubts.pop(address, None)
                pace = (known + seen) / 2 if known else seen
                self._paces[address] = (pace, now_s + REMEMBERED_S)

    def failed(self, address: Address) -> bool:
        """Avoid a failed DataNode for a while; return whether it was not being avoided already."""
        now_s = self._clock()
        with self._lock:
            is_new = self._failed_until_s.get(address, 0.0) <= now_s
            self._failed_until_s[address] = now_s + REMEMBERED_S
            return is_new

    def _group(self, usable: Sequence[Replica], now_s: float) -> _Group:
        """Return the group of the nearest of these replicas."""
        addresses = [each.address for each in usable if not each.is_far]
        key = tuple(sorted(addresses or [each.address for each in usable]))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(dict.fromkeys(key, 1.0 / len(key)), {}, now_s)
            if len(self._groups) > _GROUPS_MAX:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
            group.fade(now_s)
        return group

    def _plan(self, typical: float, now_s: float) -> None:
        """Set the shares of all groups.

        Each step divides the reads of one group, beside those of the others that each DataNode has
        by now. Repeated steps converge.
        """
        self._planned_s = now_s
        loads: defaultdict[Address, float] = defaultdict(float)
        speeds: dict[Address, float] = {}
        counts: list[tuple[_Group, float]] = []
        for group in self._groups.values():
            group.fade(now_s)
            count = sum(group.given.values())
            if count and len(group.shares) > 1:
                counts.append((group, count))
            for address, share in group.shares.items():
                loads[address] += share * count
                speeds[address] = 1.0 / self._slowness(address, typical, now_s)
        for _ in range(_PLAN_STEPS // len(counts) if counts else 0):
            for group, count in counts:
                others = {one: loads[one] - share * count for one, share in group.shares.items()}
                parts = divide(count, others, speeds)
                for one, part in parts.items():
                    loads[one] = others[one] + part
                group.shares = {one: part / count for one, part in parts.items()}

    def _cost(self, replica: Replica, typical: float, now_s: float) -> float:
        """Return the expected time of a read from a replica, in reads from an idle, typical one."""
        cost = float(len(self._under_way[replica.address]) + 1)
        cost *= self._slowness(replica.address, typical, now_s)
        return cost * _FAR_FACTOR if replica.is_far else cost

    def _slowness(self, address: Address, typical: float, now_s: float) -> float:
        """Return how many times slower a DataNode is than a typical one, 1.0 if alike."""
        # Reads that are overdue show how slow the DataNode is at least.
        reads = self._under_way[address]
        waited = (_pace_so_far(read, now_s - _PATIENCE_S) for read in reads)
        pace = max(self._known_pace(address, now_s), self._doubted_pace(address, now_s), *waited)
        return pace / typical if typical and pace > _ALIKE_RATIO * typical else 1.0

    def _typical_pace(self, now_s: float) -> float:
        """Return the median pace of the known DataNodes; 0 if none is known."""
        known = sorted(pace for pace, until_s in self._paces.values() if until_s > now_s)
        return known[(len(known) - 1) // 2] if known else 0.0

    def _known_pace(self, address: Address, now_s: float) -> float:
        pace, until_s = self._paces.get(address, (0.0, 0.0))
        return pace if until_s > now_s else 0.0

    def _doubted_pace(self, address: Address, now_s: float) -> float:
        doubt = self._doubts.get(address)
        return doubt.pace if doubt is not None and doubt.until_s > now_s else 0.0


def _pace_so_far(read: _Read, now_s: float) -> float:
    """Return the seconds per byte of a read so far."""
    done_bytes = max(read.attempt.done_bytes - read.begun_bytes, _PACE_MIN_BYTES)
    return (now_s - read.begun_s) / done_bytes / read.beside
