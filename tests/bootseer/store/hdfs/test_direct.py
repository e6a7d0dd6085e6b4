"""Files written directly to DataNodes are whole for every reader, or left to hdfs-native."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import hdfs_native
import pytest
from msgspec.structs import replace

from bootseer.base.varints import delimited, take_delimited
from bootseer.errors import UnavailableError
from bootseer.store import Writer, open_store
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.store.hdfs.direct_write import DirectFile, PlacedBlock, Placer, crc32c
from bootseer.transfer.attempt import Attempt
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.name_node_relay import NameNodeRelay
from testbed.waiting import wait_for
from tests.bootseer.store.hdfs import protobuf as pb
from tests.bootseer.store.using import put

KIB = 1024
BLOCK = 1024 * KIB
CONTENT = random.Random(6).randbytes(3 * BLOCK + 777)

pytestmark = pytest.mark.hdfs


@pytest.fixture
def backend(hdfs_url: str) -> Iterator[HdfsBackend]:
    backend = HdfsBackend(f"{hdfs_url}?block_size_bytes={BLOCK}&replication=2")
    yield backend
    backend.close()


def _begin(backend: HdfsBackend, path: str) -> Writer:
    """Return the writer of a new file; a direct one, if the cluster allows."""
    writer = backend.create(path)
    writer.expect_checksums()
    assert writer.place(())
    return writer


def _write(writer: Writer, sizes: list[int], content: bytes = CONTENT) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(content[at : at + size])
        at += size
    writer.write_all([*pieces, bytearray(content[at:])], lambda: None)


@pytest.mark.parametrize(
    "sizes", [[], [1, 511, 48, 16 * KIB - 1, BLOCK], [BLOCK - 48, 48] * 3, [100 * KIB] * 30]
)
def test_what_is_written_is_whole_for_a_reader_that_checks_it(
    backend: HdfsBackend, sizes: list[int]
) -> None:
    with _begin(backend, "f") as writer:
        _write(writer, sizes)
        assert not writer.is_buffered, "by hdfs-native"
        writer.keep_alive()
        writer.keep_alive()
        writer.write(b"end")
        assert writer.held_bytes
    # Read by hdfs-native, which verifies HDFS's checksums of the file.
    assert backend.read("f") == CONTENT + b"end"
    assert backend.read("f", 2 * BLOCK + 5, 10) == CONTENT[2 * BLOCK + 5 : 2 * BLOCK + 15]
    assert len(backend.open_reader("f", is_checked=True).blocks) == 4
    writer.close()


def _divert(
    monkeypatch: pytest.MonkeyPatch, address: Callable[[tuple[str, int]], tuple[str, int]]
) -> None:
    """Send direct writes to the `address` that is returned for a DataNode's."""
    place = Placer.place

    def elsewhere(*arguments: object) -> PlacedBlock | None:
        placed = place(*arguments)  # type: ignore[arg-type]
        assert placed is not None
        return replace(placed, added=replace(placed.added, address=address(placed.added.address)))

    monkeypatch.setattr(Placer, "place", elsewhere)


def test_a_datanode_that_refuses_is_left_to_the_library(
    backend: HdfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    _divert(monkeypatch, lambda _: nobody)
    writer = _begin(backend, "f")
    _write(writer, [])
    assert writer.is_buffered
    writer.close()
    assert backend.read("f") == CONTENT


def test_what_was_confirmed_before_a_failure_can_be_read(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(HdfsBackend(f"{hdfs_url}?replication=2")) as backend:
        with contextlib.ExitStack() as stack:
            relays: list[NameNodeRelay] = []

            def relayed(address: tuple[str, int]) -> tuple[str, int]:
                host, port = address
                assert host == "127.0.0.1"
                relays.append(stack.enter_context(NameNodeRelay(port)))
                return host, int(relays[-1].address.rpartition(":")[2])

            _divert(monkeypatch, relayed)
            writer = _begin(backend, "f")
            _write(writer, [], CONTENT[: 2 * BLOCK])

            def is_confirmed() -> bool:
                writer.keep_alive()
                return not writer.held_bytes

            wait_for(is_confirmed, "both packets")
            relays[0].close()
            with pytest.raises(UnavailableError):
                writer.write_all([bytes(BLOCK)] * 4, lambda: None)
            assert writer.abandon()
        assert backend.read("f", 0, 2 * BLOCK) == CONTENT[: 2 * BLOCK]


@pytest.mark.parametrize("size", [1, 511, 64 * KIB])
def test_a_small_file_has_the_checksums_of_any_other(
    backend: HdfsBackend, hdfs_url: str, size: int
) -> None:
    """distcp compares copies by their checksums."""
    put(backend, "small", CONTENT[:size])
    options = hdfs_native.WriteOptions(block_size=BLOCK, replication=2)
    path = urlsplit(hdfs_url).path + "/other"
    with hdfs_native.Client(hdfs_url).create(path, options) as writer:
        writer.write(CONTENT[:size])
    assert backend.read("small") == backend.read("other") == CONTENT[:size]
    assert _checksum(backend, "small") == _checksum(backend, "other")


def _checksum(backend: HdfsBackend, path: str) -> object:
    """Return the checksum of all the block's checksums, and their kind, as the DataNode computes
    it."""
    (block,) = backend.open_reader(path, is_checked=True).blocks
    message = pb.blob(1, pb.blob(1, block.block.SerializeToString()) + pb.blob(2, block.token))
    with socket.create_connection(block.replicas[0].address, 10) as datanode:
        # Op.BLOCK_CHECKSUM
        datanode.sendall(b"\x00\x1c\x55" + delimited(message))
        received, (found, end) = b"", take_delimited(b"", 4096)
        while found is None:
            received += datanode.recv(end - len(received))
            found, end = take_delimited(received, 4096)
    (checksum,) = pb.fields(found)[3]  # OpBlockChecksumResponseProto
    return checksum


def test_a_small_file_whose_datanode_fails_is_written_again(
    backend: HdfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(DirectFile, "close", fail)
    with backend.create("f") as writer:
        writer.write(b"small")
        writer.write(bytearray(b" file"))
    assert backend.read("f") == b"small file"


def test_an_empty_file(backend: HdfsBackend) -> None:
    backend.create("f").close()
    assert backend.read("f") == b""


@pytest.mark.needs("mount")
def test_a_user_without_a_name_writes_under_the_number(hdfs_url: str) -> None:
    """The image of a pod may not have its user."""
    code = (
        "import sys; from bootseer.store import open_backend\n"
        "with open_backend(sys.argv[1]).create('f') as writer: writer.write(b'mine')"
    )
    # The interpreter may lie in a folder of root's.
    sees_all = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    words = ["setpriv", "--reuid", "4321", *sees_all, sys.executable, "-c", code, hdfs_url]
    named = ("USER", "LOGNAME", "LNAME", "USERNAME", "HADOOP_USER_NAME")
    environment = {name: value for name, value in os.environ.items() if name not in named}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert HdfsBackend(hdfs_url).read("f") == b"mine"


def test_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283


def test_an_object_that_is_kept_open_is_read_without_the_namenode(
    hdfs: MiniHdfs, hdfs_url: str
) -> None:
    data = os.urandom(3 << 20)
    with open_store(hdfs_url) as store:
        store.publish("blobs/x", data)

        def read(offset: int, length: int, *, asks_elsewhere: bool = False) -> bytes:
            buffer, attempt = bytearray(length), Attempt()
            attempt.asks_elsewhere = asks_elsewhere
            count = store.read_verified("blobs/x", offset, memoryview(buffer), attempt)
            return bytes(buffer[:count])

        assert read(0, 1000) == data[:1000]
        hdfs.stop_namenode()
        try:
            assert read(1, 2 << 20) == data[1 : (2 << 20) + 1]
            assert read(2 << 20, 1 << 20) == data[2 << 20 :]
        finally:
            hdfs.start_namenode()
        # A reader that doubts the bytes lets HDFS verify them.
        assert read(5, 100, asks_elsewhere=True) == data[5:105]
        assert read(7, 100) == data[7:107]
