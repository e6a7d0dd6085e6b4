"""Saving to a real HDFS whose servers die, restart or are full: whole or absent, with an error."""

import contextlib
import random
import threading
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.fuse.striped.layout import decode_layout
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.store import open_backend
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.running import running
from tests.fuse.striped.support.stored import find_garbage

pytestmark = pytest.mark.hdfs
MIB = 2**20
DATA = random.Random(5).randbytes(40 * MIB + 99)


def open_storage(
    url: str,
    layout: LayoutKind = "striped",
    memory_bytes: int = 64 * MIB,
    count: int = 6,
    deadline_s: float = 20.0,
) -> StripedStorage:
    settings = StripeSettings(MIB, count, deadline_s, layout)
    backend = open_backend(url, deadline_s=deadline_s)
    return StripedStorage(backend, settings, memory_bytes=memory_bytes)


def save(writer: Any, start: int = 0, end: int = len(DATA)) -> None:
    for at in range(start, end, MIB):
        writer.append(DATA[at : min(at + MIB, end)])


def load(url: str, path: str) -> bytes:
    with open_storage(url) as storage:
        file = storage.reader.open(storage.tree.stored.view(path))
        return storage.reader.read_bytes(file, 0, len(DATA) + 1)


@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_a_datanode_that_dies_under_a_save_at_replication_1(
    hdfs: MiniHdfs, hdfs_url: str, layout: LayoutKind
) -> None:
    """The bytes of its only DataNode are written again from memory: the checkpoint is whole."""
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
            assert find_garbage(storage.backend, "") == []
    finally:
        hdfs.start_datanode(1)
        hdfs.wait_for_datanodes(hdfs.datanode_count)
    assert load(url, "f") == DATA


@pytest.fixture(scope="module")
def careful_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """HDFS whose NameNode stays in safe mode for a while after each start, as large ones do.

    It has blocks whose reports it waits for.
    """
    conf = {"dfs.namenode.safemode.extension": "4000"}
    with running(MiniHdfs(tmp_path_factory.mktemp("careful"), datanode_count=2, conf=conf)) as made:
        with open_storage(f"{made.url}/before") as storage:
            writer = storage.writer("f")
            save(writer, 0, 2 * MIB)
            writer.publish()
            writer.close()
        yield made


def test_a_namenode_that_restarts_under_a_save(careful_hdfs: MiniHdfs) -> None:
    """With no part begun, with some, and with all."""
    url = f"{careful_hdfs.url}/restart"
    saved = {
        "striped": {"begins": 0, "middle": 24 * MIB, "end": len(DATA)},
        "plain": {"joined": 24 * MIB},
    }
    with contextlib.ExitStack() as stack:
        writers: list[tuple[Any, int]] = []
        for layout in typing.get_args(LayoutKind):
            storage = stack.enter_context(open_storage(url, layout, 256 * MIB, deadline_s=120))
            storage.backend.mkdir("")
            for name, sent in saved[layout].items():
                writers.append((storage.writer(name), sent))
                save(writers[-1][0], 0, sent)
        careful_hdfs.stop_namenode()
        restart = threading.Timer(4.0, careful_hdfs.start_namenode)
        restart.start()
        try:
            for writer, sent in writers:
                save(writer, sent)
                writer.publish()
        finally:
            restart.join()
            for writer, _ in writers:
                writer.close(5.0)
    careful_hdfs.wait_for_datanodes(careful_hdfs.datanode_count)
    for name in (name for names in saved.values() for name in names):
        assert load(url, name) == DATA, name


def test_a_part_is_one_block(hdfs_url: str) -> None:
    """A client that writes beyond the end of a block has to wait for the NameNode, or fails."""
    url = hdfs_url + "?block_size_bytes=2097152"
    with open_storage(url, memory_bytes=256 * MIB) as storage:
        # The first file of a mount may be written before the storage has told its block size.
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
        assert storage.memory.peak_bytes <= storage.memory.limit_bytes


@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_two_writers_of_one_name_on_two_nodes(hdfs_url: str, layout: LayoutKind) -> None:
    """Each has its own parts and lease; one of them wins as a whole."""
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
        assert find_garbage(other.backend, "") == []
        # At the same moment: fsck may have to find the loser's parts.
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
