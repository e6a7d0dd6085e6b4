"""The relay forwards a DataNode's traffic, counts it, and can break it."""

import os
from pathlib import Path

import pytest

from bootseer.store import open_backend
from testbed.hdfs.classpath import classpath
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.relay import Relays

pytestmark = pytest.mark.hdfs


def test_a_relay_carries_and_counts(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    classpath()
    with (
        MiniHdfs(tmp_path / "hdfs", datanode_count=2, separate_addresses=True) as cluster,
        Relays(cluster.datanode_ports, 100e6) as relays,
    ):
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
