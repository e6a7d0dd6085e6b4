"""A striped file on HDFS is spread evenly over all servers."""

import contextlib
import random
from pathlib import Path

import pytest

from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.tools.copy import copy_in
from bootseer.store import open_backend
from testbed.hdfs.cluster import MiniHdfs

MIB = 2**20


@pytest.mark.hdfs
def test_a_striped_file_lies_evenly_on_all_datanodes(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path
) -> None:
    part_count = 2 * hdfs.datanode_count
    source = tmp_path / "source"
    source.write_bytes(random.Random(4).randbytes(part_count * MIB))
    settings = StripeSettings(MIB, part_count, 30.0)
    backend = open_backend(hdfs_url + "?replication=1")
    with StripedStorage(backend, settings, memory_bytes=256 * MIB) as storage:
        copy_in(storage, source, "f")
    stored = source.read_bytes()
    marks = [stored[part * MIB : part * MIB + 64] for part in range(part_count)]
    for datanode in range(hdfs.datanode_count):
        beginnings = _beginnings(hdfs.home / f"datanode{datanode}")
        assert sum(mark in beginnings for mark in marks) == 2


def _beginnings(home: Path) -> set[bytes]:
    """Return the first bytes of all blocks of a DataNode."""
    found = set()
    for block in home.rglob("blk_*"):
        # Blocks of files that other tests removed are deleted in the background.
        with contextlib.suppress(FileNotFoundError), block.open("rb") as file:
            found.add(file.read(64))
    return found
