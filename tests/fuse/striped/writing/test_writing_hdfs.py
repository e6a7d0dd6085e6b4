"""Saving to a real HDFS whose servers die, restart or are full: whole or absent, and told."""

import random
import threading

import pytest

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.striped.layout import decode_layout
from bootseer.fuse.striped.names.retired_parts import find_garbage
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.fuse.striped.writing.writer import FileWriter
from bootseer.store import open_backend
from tests.hdfs.cluster import MiniHdfs

pytestmark = pytest.mark.hdfs
MIB = 2**20
DATA = random.Random(5).randbytes(40 * MIB + 99)


def open_storage(
    url: str, layout: LayoutKind = "striped", memory_bytes: int = 64 * MIB, count: int = 6
) -> StripedStorage:
    settings = StripeSettings(MIB, count, 20.0, layout)
    return StripedStorage(open_backend(url, deadline_s=20), settings, memory_bytes=memory_bytes)


def save(writer: FileWriter, start: int = 0, end: int = len(DATA)) -> None:
    for at in range(start, end, MIB):
        writer.append(DATA[at : min(at + MIB, end)])


def load(url: str, path: str) -> bytes:
    with open_storage(url) as storage:
        file = storage.reader.open(storage.tree.stored.view(path))
        return storage.reader.read_bytes(file, 0, len(DATA) + 1)


def assert_whole_or_absent(url: str, path: str, told: BaseException | None) -> None:
    if told is None:
        assert load(url, path) == DATA
        return
    with pytest.raises(NotFoundError):
        load(url, path)


@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_a_datanode_that_dies_under_a_save_at_replication_1(
    hdfs: MiniHdfs, hdfs_url: str, layout: LayoutKind
) -> None:
    """What its only DataNode had is written again from memory: the checkpoint is whole."""
    url = hdfs_url + "?replication=1"
    try:
        with open_storage(url, layout, memory_bytes=128 * MIB) as storage:
            writer = storage.writer("f")
            save(writer, 0, 24 * MIB)
            hdfs.kill_datanode(1)
            save(writer, 24 * MIB)
            writer.publish()
            writer.close()
        with open_storage(url) as storage:
            assert list(find_garbage(storage.backend, "")) == []
    finally:
        hdfs.start_datanode(1)
        hdfs.wait_for_datanodes(hdfs.datanode_count)
    assert load(url, "f") == DATA


def test_a_namenode_that_restarts_under_a_save(hdfs: MiniHdfs, hdfs_url: str) -> None:
    told: BaseException | None = None
    with open_storage(hdfs_url) as storage:
        writer = storage.writer("f")
        save(writer, 0, 24 * MIB)
        hdfs.stop_namenode()
        restart = threading.Timer(1.0, hdfs.start_namenode)
        restart.start()
        try:
            save(writer, 24 * MIB)
            writer.publish()
        except (BootseerError, OSError) as error:
            told = error
        finally:
            restart.join()
            hdfs.wait_for_datanodes(hdfs.datanode_count)
            writer.close(5.0)
    assert_whole_or_absent(hdfs_url, "f", told)


def test_a_part_is_one_block(hdfs_url: str) -> None:
    """A client that writes over the end of a block has to wait for the NameNode, or fails."""
    url = hdfs_url + "?block_size_bytes=2097152"
    with open_storage(url, memory_bytes=256 * MIB) as storage:
        # The first file of a mount may be written before the storage has said how it cuts.
        for _ in range(2):
            writer = storage.writer("f")
            save(writer, 0, 25 * MIB)
            writer.publish()
            writer.close()
        layout = decode_layout(storage.backend.read("f"), "f")
        sizes = {part.size_bytes for segment in layout.segments for part in segment.parts}
        assert max(sizes) == 2 * MIB
        assert len(layout.segments) == 3
    assert load(url, "f") == DATA[: 25 * MIB]


def test_eight_saves_at_once_stay_within_the_budget(hdfs_url: str) -> None:
    with open_storage(hdfs_url) as storage:
        errors: list[BaseException] = []

        def one(name: str) -> None:
            writer = storage.writer(name)
            try:
                save(writer, 0, 12 * MIB)
                writer.publish()
            except BaseException as error:
                errors.append(error)
            finally:
                writer.close()

        threads = [threading.Thread(target=one, args=(f"f{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert storage.budget.peak_bytes <= storage.budget.limit_bytes


@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_two_writers_of_one_name_on_two_nodes(hdfs_url: str, layout: LayoutKind) -> None:
    """Each has parts, and a lease, of its own; one of them wins, whole."""
    contents = [DATA[: 9 * MIB], DATA[-7 * MIB :]]
    with open_storage(hdfs_url, layout) as one, open_storage(hdfs_url, layout) as other:
        writers = [one.writer("f"), other.writer("f")]
        for at in range(0, 9 * MIB, MIB):
            for writer, content in zip(writers, contents, strict=True):
                writer.append(content[at : at + MIB])
        writers[1].publish()
        assert load(hdfs_url, "f") == contents[1]
        writers[0].publish()
        assert load(hdfs_url, "f") == contents[0]
        for writer in writers:
            writer.close()
        for storage in (one, other):
            storage.tree.close()  # deletes what was replaced
        assert list(find_garbage(other.backend, "")) == []
        # And at the same moment: what loses may have to be found by fsck.
        writers = [one.writer("f"), other.writer("f")]
        for writer, content in zip(writers, contents, strict=True):
            writer.append(content)
        threads = [threading.Thread(target=writer.publish) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for writer in writers:
            writer.close()
    assert load(hdfs_url, "f") in contents
