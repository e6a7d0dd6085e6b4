"""The relay forwards a DataNode's traffic, counts it, and can break it."""

import os
from collections.abc import Iterator

import pytest

from bootseer.store import open_backend
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.relay import Relays
from testbed.hdfs.running import running

pytestmark = pytest.mark.hdfs

# Of large clusters, whose NameNodes are contacted less often.
_LATE = {"dfs.blockreport.incremental.intervalMsec": "200"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """HDFS behind relays, with late reports of new blocks."""
    folder = tmp_path_factory.mktemp("relayed")
    made = MiniHdfs(folder / "hdfs", datanode_count=2, separate_addresses=True, conf=_LATE)
    with running(made) as cluster:
        yield cluster


@pytest.fixture
def relays(cluster: MiniHdfs) -> Iterator[Relays]:
    with Relays(cluster.datanode_ports, 100e6) as made:
        yield made


def test_a_relay_carries_and_counts(cluster: MiniHdfs, relays: Relays) -> None:
    data = os.urandom(3 << 20)
    backend = open_backend(cluster.url + "/x?block_size_bytes=1048576")
    with backend.create("file") as writer:
        writer.write(data)
    assert backend.read("file") == data
    written = sum(relays.written_bytes(index) for index in range(2))
    read = sum(relays.read_bytes(index) for index in range(2))
    assert len(data) <= written < 1.1 * len(data)
    assert len(data) <= read < 1.1 * len(data)
    for index in range(2):
        relays.cut(index)
        relays.set_rate(index, None)
    assert backend.read("file") == data
    backend.close()


@pytest.mark.usefixtures("relays")
def test_each_block_may_wait_for_the_report_of_the_one_before(cluster: MiniHdfs) -> None:
    """Regression: the file was begun again for each block, and given up at the ninth."""
    data = os.urandom(65536 * 14 + 1)
    backend = open_backend(cluster.url + "/late?block_size_bytes=65536")
    with backend.create("file") as writer:
        for start in range(0, len(data), 100_000):
            writer.write(data[start : start + 100_000])
    assert backend.read("file") == data
    backend.close()
