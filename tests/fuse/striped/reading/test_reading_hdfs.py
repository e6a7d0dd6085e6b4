"""Reads from a real HDFS whose servers fail: right bytes, or an error in time."""

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, errno_of
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.tools.copy import copy_in
from bootseer.store import open_backend
from testbed.hdfs.cluster import MiniHdfs

pytestmark = pytest.mark.hdfs

MIB = 2**20
UNIT = MIB
SIZE = 12 * MIB + 4321


@contextlib.contextmanager
def storage_at(url: str, deadline_s: float = 30.0) -> Iterator[StripedStorage]:
    settings = StripeSettings(UNIT, 3, deadline_s)
    backend = open_backend(url, deadline_s=deadline_s)
    with StripedStorage(backend, settings, memory_bytes=64 * MIB) as storage:
        yield storage


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "f"
    path.write_bytes(random.Random(11).randbytes(SIZE))
    return path


def read_all(storage: StripedStorage, path: str = "f") -> bytes:
    file = storage.reader.open(storage.tree.stored.view(path))
    try:
        buffer = bytearray(file.view.size_bytes)
        storage.reader.read_into(file, 0, memoryview(buffer))
        return bytes(buffer)
    finally:
        storage.reader.close(file)


def replicas_with(hdfs: MiniHdfs, content: bytes) -> list[tuple[Path, int]]:
    """Return the files on the DataNodes' disks with the block of `content`, and its offset.

    A part that was written again leaves the block of its first attempt on the disks for some
    seconds. Of several blocks, the one created last is returned.
    """
    blocks: dict[int, list[tuple[Path, int]]] = {}
    for path in hdfs.home.glob("datanode*/**/blk_*"):
        with contextlib.suppress(FileNotFoundError):  # such a block, deleted under the search
            if path.suffix != ".meta" and (at := path.read_bytes().find(content)) >= 0:
                blocks.setdefault(int(path.name.removeprefix("blk_")), []).append((path, at))
    return blocks[max(blocks)]


def test_a_byte_flipped_on_a_disk_is_detected_and_the_other_replica_read(
    hdfs: MiniHdfs, hdfs_url: str, source: Path
) -> None:
    data = source.read_bytes()
    url = hdfs_url + "?replication=2"
    with storage_at(url) as storage:
        copy_in(storage, source, "f")
    flipped = 0
    # One replica each of several blocks, so that some of them are asked first.
    for unit in range(6):
        mark = data[unit * UNIT : unit * UNIT + 64]
        replicas = replicas_with(hdfs, mark)
        # More than two if a DataNode was so slow that the NameNode had its blocks copied.
        assert len(replicas) >= 2
        path, at = replicas[unit % 2]
        with path.open("r+b") as file:
            file.seek(at + 10)
            file.write(bytes([data[unit * UNIT + 10] ^ 1]))
        flipped += 1
    assert flipped == 6
    with storage_at(url) as storage:
        assert read_all(storage) == data


def test_a_file_is_read_on_through_a_restart_of_the_namenode(
    hdfs: MiniHdfs, hdfs_url: str, source: Path
) -> None:
    with storage_at(hdfs_url) as storage:
        copy_in(storage, source, "f")
        file = storage.reader.open(storage.tree.stored.view("f"))
        hdfs.stop_namenode()

        def restart() -> None:
            hdfs.start_namenode()

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            buffer = bytearray(SIZE)
            assert storage.reader.read_into(file, 0, memoryview(buffer)) == SIZE
        finally:
            thread.join()
            hdfs.wait_for_datanodes(hdfs.datanode_count)
            storage.reader.close(file)
        assert buffer == source.read_bytes()


def test_a_datanode_that_is_cut_off_under_a_read_is_gone_around(
    hdfs: MiniHdfs, hdfs_url: str, source: Path
) -> None:
    url = hdfs_url + "?replication=2"
    with storage_at(url) as storage:
        copy_in(storage, source, "f")
        file = storage.reader.open(storage.tree.stored.view("f"))
        head = storage.reader.read_bytes(file, 0, 100)
        hdfs.kill_datanode(1)
        try:
            buffer = bytearray(SIZE)
            storage.reader.read_into(file, 0, memoryview(buffer))
        finally:
            hdfs.start_datanode(1)
            hdfs.wait_for_datanodes(hdfs.datanode_count)
            storage.reader.close(file)
        assert bytes(buffer) == source.read_bytes()
        assert head == buffer[:100]


def test_a_cluster_that_hangs_is_an_error_at_the_deadline(
    hdfs: MiniHdfs, hdfs_url: str, source: Path
) -> None:
    with storage_at(hdfs_url) as storage:
        copy_in(storage, source, "f")
    with storage_at(hdfs_url, deadline_s=5.0) as storage:
        file = storage.reader.open(storage.tree.stored.view("f"))
        hdfs.pause()
        try:
            with pytest.raises(BootseerError) as caught:
                storage.reader.read(file, 0, 100)
            assert errno_of(caught.value) == 110
            # Killed while it waits, the read ends at once.
            with pytest.raises(InterruptedError):
                storage.reader.read(file, 6 * MIB, 100, lambda: True)
        finally:
            hdfs.resume()
            storage.reader.close(file)
    with storage_at(hdfs_url) as storage:
        assert read_all(storage) == source.read_bytes()


def test_an_ordinary_file_is_read_in_parallel_by_its_blocks(
    hdfs: MiniHdfs, hdfs_url: str, source: Path
) -> None:
    data = source.read_bytes()
    with storage_at(hdfs_url + f"?block_size_bytes={4 * MIB}") as storage:
        with storage.backend.create("plain") as writer:
            writer.write(data)
        view = storage.tree.stored.view("plain")
        assert view.layout is None
        assert view.block_bytes == 4 * MIB
        file = storage.reader.open(view)
        pieces = storage.reader.read(file, 0, MIB)
        while sum(map(len, pieces)) < SIZE:
            pieces += storage.reader.read(file, sum(map(len, pieces)), MIB)
        assert b"".join(pieces) == data
        storage.reader.close(file)
        assert read_all(storage, "plain") == data
