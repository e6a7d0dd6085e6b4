"""Calls to a NameNode that hdfs-native does not make: `concat`, where blocks are written, space.

Owns the bytes of Hadoop's RPC, version 9, as far as these calls need them (simple authentication
only, one call per connection). The call is repeated under the same identity after a broken
connection, and the NameNode's retry cache makes it happen once. Thread-safe.
"""

import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bootseer.errors import DeadlineError, UnavailableError, UnsupportedError

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_FRAME_MAX_BYTES = 1 << 20
_ATTEMPTS_MAX = 5
_PAUSE_S = 0.3
# Of RpcRequestHeaderProto: protocol buffers, "final packet" (an ordinary call).
_RPC_KIND, _RPC_OPERATION = 2, 0
_CONTEXT_CALL_ID = -3
_SUCCESS = 0


class RpcError(Exception):
    """The NameNode's answer is an exception; the text begins with its Java class."""


UNANSWERED = (RpcError, OSError, ValueError, IndexError)
"""What a call may end with, also where the answer is nonsense: for whom it was only a question."""


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """A block that was allocated, and is still empty."""

    block: bytes
    """ExtendedBlockProto."""
    servers: dict[str, bytes]
    """DatanodeInfoProto by UUID."""


@dataclass(frozen=True, slots=True)
class NameNode:
    """Where to call, and as whom."""

    addresses: tuple[tuple[str, int], ...]
    """Of an HA pair all; the active one answers."""
    user: str
    deadline_s: float

    def concat(self, target: str, sources: Sequence[str]) -> None:
        """Join absolute paths. Raises: RpcError, UnavailableError, DeadlineError."""
        message = _text(1, target) + b"".join(_text(2, source) for source in sources)
        self._call("concat", message)

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """The DataNodes of the block that is being written at the end of `path`.

        Raises: as `concat`.
        """
        answer = self._call("getBlockLocations", _text(1, path) + _number(2, 0) + _number(3, 1))
        servers: list[str] = []
        # GetBlockLocationsResponseProto > LocatedBlocksProto: lastBlock, or else the blocks
        for located in _all(answer, 1):
            for block in _all(located, 4) or _all(located, 2)[-1:]:
                servers += _servers(block)
        return tuple(servers)

    def add_block(self, path: str, holder: str, excluded: Sequence[bytes]) -> AddedBlock:
        """Allocate the first block of a file that `holder` is writing, not on the `excluded`
        (DatanodeInfoProto). Raises: as `concat`."""
        message = _text(1, path) + _text(2, holder)
        message += b"".join(_bytes(4, server) for server in excluded)
        (located,) = _all(self._call("addBlock", message), 1)
        (block,) = _all(located, 1)
        return AddedBlock(block, _servers(located))

    def abandon_block(self, path: str, holder: str, block: bytes) -> None:
        """Give back what `add_block` returned. Raises: as `concat`."""
        self._call("abandonBlock", _bytes(1, block) + _text(2, path) + _text(3, holder))

    def capacity(self) -> tuple[int, int]:
        """The cluster's bytes in all, and those that are free. Raises: as `concat`."""
        numbers = dict(_fields(self._call("getFsStats", b"")))
        # GetFsStatsResponseProto: capacity, used, remaining
        return _positive(numbers.get(1)), _positive(numbers.get(3))

    def default_block_bytes(self) -> int:
        """Of files whose writer does not say. Raises: as `concat`."""
        # GetServerDefaultsResponseProto > FsServerDefaultsProto: blockSize
        (defaults,) = _all(self._call("getServerDefaults", b""), 1)
        return _positive(dict(_fields(defaults)).get(1))

    def quota(self, path: str) -> tuple[int, int] | None:
        """The space quota of a directory and what it has used, both with replication; None where
        it has none, which costs the NameNode a walk through it. Raises: as `concat`."""
        for usage in _all(self._call("getQuotaUsage", _text(1, path)), 1):
            numbers = dict(_fields(usage))
            # QuotaUsageProto: count, quota, spaceConsumed, spaceQuota
            total, used = numbers.get(4), numbers.get(3)
            # Of 64 bits; "none" is -1.
            if isinstance(total, int) and 0 <= total < 2**63:
                return total, _positive(used)
        return None

    def answers(self) -> bool:
        """Whether it takes calls from us: no where it wants Kerberos, or is not there."""
        try:
            self._call("getFileInfo", _text(1, "/"))
        except (RpcError, UnavailableError, DeadlineError, UnsupportedError):
            return False
        return True

    def _call(self, method: str, message: bytes) -> bytes:
        client = secrets.token_bytes(16)
        end_s = time.monotonic() + self.deadline_s
        cause: Exception = UnsupportedError("no NameNode is known")
        for attempt in range(_ATTEMPTS_MAX):
            for address in self.addresses:
                try:
                    return self._call_one(address, client, attempt, method, message, end_s)
                except RpcError as error:
                    if "StandbyException" not in str(error):
                        raise
                    cause = error
                except OSError as error:
                    cause = error
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
        context = _bytes(2, _text(1, self.user)) + _text(3, _PROTOCOL)
        request = _text(1, method) + _text(2, _PROTOCOL) + _number(3, 1)
        with socket.create_connection(address, max(0.1, end_s - time.monotonic())) as connection:
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
    for info in _all(located_block, 3):
        for identity in _all(info, 1):
            for uuid in _all(identity, 3):
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
        length, start = _read_varint(answer, 0)
        header = answer[start : start + length]
        status = [value for field, value in _fields(header) if field == 2 and value != _SUCCESS]
        if not status:
            length, start = _read_varint(answer, start + length)
            return answer[start : start + length]
        texts = _all(header, 4) + _all(header, 5)
    except (IndexError, ValueError) as error:
        raise ConnectionError("the NameNode's answer cannot be understood") from error
    raise RpcError(": ".join(text.decode("utf-8", "replace") for text in texts))


# ---- protocol buffers ---------------------------------------------------------------------


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _signed(field: int, value: int) -> bytes:
    return _number(field, value << 1 if value >= 0 else (-value << 1) - 1)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8"))


def _header(call_id: int, client: bytes, retry_count: int) -> bytes:
    return (
        _number(1, _RPC_KIND)
        + _number(2, _RPC_OPERATION)
        + _signed(3, call_id)
        + _bytes(4, client)
        + _signed(5, retry_count)
    )


def _frame(*messages: bytes) -> bytes:
    body = b"".join(_varint(len(message)) + message for message in messages)
    return struct.pack(">I", len(body)) + body


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("too long a number")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        value: int | bytes
        if key & 7 == 0:
            value, position = _read_varint(data, position)
        elif key & 7 == 1:
            value, position = data[position : position + 8], position + 8
        elif key & 7 == 2:
            length, position = _read_varint(data, position)
            value, position = data[position : position + length], position + length
        elif key & 7 == 5:
            value, position = data[position : position + 4], position + 4
        else:
            raise ValueError("an unforeseen kind of field")
        yield key >> 3, value


def _positive(value: int | bytes | None) -> int:
    if not isinstance(value, int):
        raise ValueError("a number is missing")
    return value


def _all(data: bytes, field: int) -> list[bytes]:
    """All byte strings (texts, messages) of one field."""
    return [value for number, value in _fields(data) if number == field and type(value) is bytes]
