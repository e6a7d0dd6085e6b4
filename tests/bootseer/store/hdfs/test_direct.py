"""Files written directly to DataNodes: whole for every reader, or left to somebody else."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import pytest
from msgspec.structs import replace

from bootseer.errors import UnavailableError
from bootseer.store import open_store
from bootseer.store.backend import Writer
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.store.hdfs.direct.checksums import crc32c
from bootseer.store.hdfs.direct.direct_writer import DirectFile
from bootseer.store.hdfs.rpc.protobuf import Message, delimited, take_delimited
from bootseer.store.hdfs.writer import HdfsWriter
from bootseer.transfer.attempt import Attempt
from testbed.hdfs.cluster import MiniHdfs
from testbed.waiting import wait_for
from tests.bootseer.store.hdfs import protobuf as pb

KIB = 1024
BLOCK = 1024 * KIB
CONTENT = random.Random(6).randbytes(3 * BLOCK + 777)

pytestmark = pytest.mark.hdfs


@pytest.fixture
def backend(hdfs_url: str) -> Iterator[HdfsBackend]:
    backend = HdfsBackend(f"{hdfs_url}?block_size_bytes={BLOCK}&replication=2")
    yield backend
    backend.close()


def _begin(backend: HdfsBackend, path: str) -> HdfsWriter:
    """A file of which nothing was written; directly, if the cluster allows."""
    writer: Writer = backend.create(path)
    assert isinstance(writer, HdfsWriter)
    writer.expect_checksums()
    assert backend.place(path, ())
    return writer


def _write(writer: HdfsWriter, sizes: list[int], content: bytes = CONTENT) -> None:
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
        assert writer._direct is not None
        writer.keep_alive()
        writer.keep_alive()
        writer.write(b"end")
    # By hdfs-native, which looks at the checksums that HDFS has of it.
    assert backend.read("f") == CONTENT + b"end"
    assert backend.read("f", 2 * BLOCK + 5, 10) == CONTENT[2 * BLOCK + 5 : 2 * BLOCK + 15]
    assert len(backend.stored_blocks("f")) == 4


def test_all_is_confirmed_before_a_file_is_complete(backend: HdfsBackend) -> None:
    writer = _begin(backend, "f")
    _write(writer, [])
    direct = writer._direct
    assert direct is not None
    assert writer.held_bytes == direct.unconfirmed_bytes > 0
    writer.close()
    assert direct._block.confirmed_bytes == direct._block.sent_bytes == 777
    writer.close()


def test_a_datanode_that_refuses_is_left_to_the_library(
    backend: HdfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _begin(backend, "f")
    placed = backend.placer.take_placed(backend.full("f"))
    assert placed is not None
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    added = replace(placed.added, address=address)
    refused = replace(placed, added=added)
    monkeypatch.setattr(backend.placer, "take_placed", lambda path: refused)
    _write(writer, [])
    assert writer._direct is None
    writer.close()
    assert backend.read("f") == CONTENT


def test_what_was_confirmed_before_a_failure_can_be_read(hdfs_url: str) -> None:
    backend = HdfsBackend(f"{hdfs_url}?replication=2")
    writer = _begin(backend, "f")
    _write(writer, [BLOCK] * 2)
    direct = writer._direct
    assert direct is not None

    def is_confirmed() -> bool:
        direct.keep_alive()
        return direct._block.confirmed_bytes >= 2 * BLOCK

    wait_for(is_confirmed, "both blocks")
    direct._block._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(UnavailableError):
        writer.write(bytes(BLOCK))
    writer.abandon()
    assert backend.read("f", 0, 2 * BLOCK) == CONTENT[: 2 * BLOCK]
    backend.close()


@pytest.mark.parametrize("size", [1, 511, 64 * KIB])
def test_a_small_file_has_the_checksums_of_any_other(backend: HdfsBackend, size: int) -> None:
    """Copies are compared by them (distcp)."""
    for path, is_direct in (("small", True), ("other", False)):
        writer = backend.create(path)
        assert isinstance(writer, HdfsWriter)
        writer.is_kept = is_direct
        writer.write(CONTENT[:size])
        writer.close()
        assert backend.read(path) == CONTENT[:size]
    assert _checksum(backend, "small") == _checksum(backend, "other")


class _BlockOpResponse(Message, frozen=True):
    checksum: Annotated[bytes, 3]
    """OpBlockChecksumResponseProto."""


def _checksum(backend: HdfsBackend, path: str) -> bytes:
    """Of all checksums of its block, and their kind, as the DataNode tells who compares copies."""
    (block,) = backend.stored_blocks(path)
    message = pb.blob(1, pb.blob(1, block.block.encode()) + pb.blob(2, block.token))
    with socket.create_connection(block.replicas[0].address, 10) as datanode:
        # Op.BLOCK_CHECKSUM
        datanode.sendall(b"\x00\x1c\x55" + delimited(message))
        received, (found, end) = b"", take_delimited(b"", 4096)
        while found is None:
            received += datanode.recv(end - len(received))
            found, end = take_delimited(received, 4096)
    return _BlockOpResponse.decode(found).checksum


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
    """As in a pod, whose image knows no such user."""
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

        def read(offset: int, length: int, *, is_second: bool = False) -> bytes:
            buffer, attempt = bytearray(length), Attempt()
            attempt.is_second = is_second
            count = store.read_verified("blobs/x", offset, memoryview(buffer), attempt)
            return bytes(buffer[:count])

        assert read(0, 1000) == data[:1000]
        hdfs.stop_namenode()
        try:
            assert read(1, 2 << 20) == data[1 : (2 << 20) + 1]
            assert read(2 << 20, 1 << 20) == data[2 << 20 :]
        finally:
            hdfs.start_namenode()
        # Who doubts the bytes has HDFS check them.
        assert read(5, 100, is_second=True) == data[5:105]
        assert read(7, 100) == data[7:107]
