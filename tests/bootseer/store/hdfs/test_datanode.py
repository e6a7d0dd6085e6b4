"""Reads directly from DataNodes bring the right bytes, or are left to hdfs-native."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from bootseer.errors import NotFoundError
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.store.hdfs.messages import MESSAGES, Message
from bootseer.store.hdfs.namenode import Replica, StoredBlock
from bootseer.store.hdfs.reading import DataNodes, packet_headers
from bootseer.transfer.attempt import Attempt
from testbed.bounded import run_bounded
from testbed.servers.answering import answering, talking
from testbed.waiting import pause

KIB = 1024
BLOCK = 1024 * KIB
CONTENT = random.Random(5).randbytes(3 * BLOCK + 777)


class Watched(Attempt):
    """Reader that records where hdfs-native's bytes go."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []

    def put(self, done: int, buffer: memoryview, data: bytes | memoryview) -> bool:
        self.puts.append(done)
        return super().put(done, buffer, data)


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest) -> Iterator[HdfsBackend]:
    url = request.getfixturevalue("hdfs").url
    backend = HdfsBackend(f"{url}/datanode?block_size_bytes={BLOCK}")
    writer = backend.create("f")
    writer.write(CONTENT)
    writer.close()
    yield backend
    backend.close()


@pytest.mark.hdfs
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 4 * KIB),
        (512, 64 * KIB),
        (64 * KIB, 300 * KIB),
        (BLOCK - 4 * KIB, 8 * KIB),
        (0, len(CONTENT)),
        (3 * BLOCK, 777),
        (3, 1),
        (511, 2),
        (700, 200 * KIB),
        (64 * KIB - 1, 64 * KIB + 2),
        (BLOCK - 3, BLOCK + 6),
        (3 * BLOCK + 1, 775),
    ],
)
def test_a_range_is_read_without_the_library(stored: HdfsBackend, offset: int, length: int) -> None:
    reader = stored.open_reader("f", is_checked=True)
    assert [block.length for block in reader.blocks] == [BLOCK, BLOCK, BLOCK, 777]
    buffer = bytearray(length)
    for _ in range(2):  # the second time on a connection that is kept
        attempt = _checked()
        assert reader.read_into(offset, memoryview(buffer), attempt) == length
        assert attempt.server, "by hdfs-native"
        assert buffer == CONTENT[offset : offset + length]
        buffer[:] = bytes(length)


def _checked() -> Attempt:
    attempt = Attempt()
    attempt.is_checked = True
    return attempt


@pytest.mark.hdfs
def test_an_attempt_that_was_given_up_is_not_written_to(stored: HdfsBackend) -> None:
    reader = stored.open_reader("f", is_checked=True)
    buffer = bytearray(BLOCK)
    attempt = _checked()
    attempt.stop()
    assert reader.read_into(0, memoryview(buffer), attempt) == 0
    assert not any(buffer)


@pytest.mark.hdfs
def test_what_a_datanode_has_brought_is_not_read_once_more(stored: HdfsBackend) -> None:
    reader = stored.open_reader("f", is_checked=True)
    # Nobody listens there.
    unreachable = (Replica(("127.0.0.1", 9)),)
    reader.blocks = (*reader.blocks[:2], replace(reader.blocks[2], replicas=unreachable))
    buffer, attempt = bytearray(3 * BLOCK), Watched()
    attempt.is_checked = True
    assert reader.read_into(0, memoryview(buffer), attempt) == len(buffer)
    assert buffer == CONTENT[: 3 * BLOCK]
    assert attempt.puts[0] == 2 * BLOCK


@pytest.mark.hdfs
def test_a_file_that_is_gone_when_its_datanode_fails_is_not_found(stored: HdfsBackend) -> None:
    """The places of blocks are known from the start; the library is asked only on a failure."""
    with contextlib.closing(HdfsBackend(stored.url)) as backend:
        with backend.create("gone") as writer:
            writer.write(CONTENT[:BLOCK])
        reader = backend.open_reader("gone", is_checked=True)
        backend.delete("gone")
        with socket.create_server(("127.0.0.1", 0)) as server:
            nobody = (Replica(server.getsockname()),)
        reader.blocks = tuple(replace(block, replicas=nobody) for block in reader.blocks)
        with pytest.raises(NotFoundError):
            reader.read_into(0, memoryview(bytearray(1024)), _checked())


# BlockOpResponseProto: success; checksums of no kind, 512 bytes each, from offset 0.
_BODY = b"\x08\x00\x22\x09\x0a\x05\x08\x00\x10\x80\x04\x10\x00"
_RESPONSE = bytes([len(_BODY)]) + _BODY
_GOOD = packet_headers(0, 1024, 512)
_HEADER_BYTES = len(_GOOD) // 3


def _block(length: int) -> Message:
    return MESSAGES["ExtendedBlock"](poolId="pool", blockId=7, generationStamp=1, numBytes=length)


def _packets(headers: bytes) -> bytes:
    parts = [headers[at : at + _HEADER_BYTES] for at in range(0, len(headers), _HEADER_BYTES)]
    return parts[0] + b"a" * 512 + parts[1] + b"b" * 512 + parts[2]


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (_RESPONSE + _packets(_GOOD), 1024),
        (b"", 0),
        (b"\xff" * 64, 0),
        (b"\x02\x08\x05", 0),
        (_RESPONSE, 0),
        (_RESPONSE.replace(b"\x08\x00\x10\x80", b"\x08\x02\x10\x80") + _packets(_GOOD), 0),
        (_RESPONSE + _packets(packet_headers(512, 1024, 512)), 0),
        (_RESPONSE + _packets(_GOOD)[:600], 0),
        (_RESPONSE + _packets(_GOOD[:-1] + b"\1"), 0),
        (_RESPONSE + b"\x7f" * 2000, 0),
    ],
    ids=[
        "right",
        "nothing",
        "no-response",
        "refused",
        "no-packet",
        "with-checksums",
        "elsewhere",
        "cut-short",
        "wrong-end",
        "nonsense",
    ],
)
def test_a_datanode_that_answers_otherwise_is_left_alone(
    answer: bytes, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(lambda connection: connection.sendall(answer)) as address:
        nodes = DataNodes(0.5)
        blocks = [StoredBlock(0, _block(4096), b"token", (Replica(address),))]
        assert nodes.read_into(blocks, 0, memoryview(bytearray(1024)), Attempt()) == count
        nodes.close()
    assert bool(caplog.records) == (count == 0)


def test_a_connection_that_the_datanode_has_closed_is_not_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = threading.Semaphore(0)

    def answer_once(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(4096)
        connection.sendall(_RESPONSE + _packets(_GOOD))
        connection.shutdown(socket.SHUT_WR)
        closed.release()
        while connection.recv(4096):
            pass

    with talking(answer_once) as server:
        nodes = DataNodes(20.0)
        host, _, port = server.partition(":")
        replica = Replica((host, int(port)))
        blocks = [StoredBlock(0, _block(4096), b"token", (replica,))]
        for _ in range(2):
            assert nodes.read_into(blocks, 0, memoryview(bytearray(1024)), Attempt()) == 1024
            assert closed.acquire(timeout=20)
        nodes.close()
    assert not caplog.records


def test_a_datanode_that_hangs_is_left_in_time() -> None:
    gone = threading.Event()
    with answering(lambda _: gone.wait(20)) as address:
        blocks = [StoredBlock(0, _block(4096), b"token", (Replica(address),))]
        assert not DataNodes(0.2).read_into(blocks, 0, memoryview(bytearray(512)), Attempt())
        gone.set()


def test_packets_of_one_byte_do_not_take_what_they_would_cost() -> None:
    length = 2**25
    blocks = [StoredBlock(0, _block(length), b"token", (Replica(("127.0.0.1", 1)),))]

    def answer(connection: socket.socket) -> None:
        connection.sendall(_RESPONSE + packet_headers(0, 4, 1)[:_HEADER_BYTES])

    def read() -> None:
        with answering(answer) as address:
            block = replace(blocks[0], replicas=(Replica(address),))
            buffer = memoryview(bytearray(length))
            assert not DataNodes(3).read_into([block], 0, buffer, Attempt())

    assert run_bounded(read, memory_bytes=2**28, cpu_s=3)


def test_a_byte_now_and_then_is_silence() -> None:
    sent = 0

    def answer(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(_RESPONSE + packet_headers(0, 2**20, 2**16)[:_HEADER_BYTES])
        while sent < 1000:
            connection.sendall(b"a")
            sent += 1
            pause(0.02)

    with answering(answer) as address:
        blocks = [StoredBlock(0, _block(2**20), b"token", (Replica(address),))]
        nodes = DataNodes(0.3)
        assert not nodes.read_into(blocks, 0, memoryview(bytearray(2**20)), Attempt())
        nodes.close()
    assert sent < 1000


def test_a_crowded_line_is_no_silence() -> None:
    """A small read once had to be whole within the time that a DataNode may be silent."""
    answer_bytes = _RESPONSE + _packets(_GOOD)

    def answer(connection: socket.socket) -> None:
        for start in range(0, len(answer_bytes), 256):
            connection.sendall(answer_bytes[start : start + 256])
            pause(0.8)

    with answering(answer) as address:
        blocks = [StoredBlock(0, _block(4096), b"token", (Replica(address),))]
        nodes = DataNodes(3.0)
        assert nodes.read_into(blocks, 0, memoryview(bytearray(1024)), Attempt()) == 1024
        nodes.close()


def test_a_datanode_that_is_left_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A read at half the speed for a minute once had no log line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    # Nobody listens there any more.
    block = StoredBlock(0, _block(BLOCK), b"", (Replica(address),))
    datanodes = DataNodes(1.0)
    for _ in range(2):
        assert datanodes.read_into([block], 0, memoryview(bytearray(KIB)), Attempt()) == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{address[0]}:{address[1]}" in record.getMessage()
    assert "refused" in record.getMessage()
