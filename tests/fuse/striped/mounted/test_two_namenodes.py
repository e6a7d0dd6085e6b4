"""Reads and saves on a real HDFS with two NameNodes while the active one changes."""

import random
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bootseer.fuse.striped.tools.copy import copy_in, copy_out, open_storage
from bootseer.store import open_store
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.name_node_relay import NameNodeRelay
from testbed.hdfs.pair import NAME, PairedHdfs, pair_configuration, write_configuration
from testbed.hdfs.running import running
from tests.fuse.striped.support.mounting import checkpoints, end, settings_in, shell

BIG = 12_345_678

pytestmark = [pytest.mark.needs("fuse"), pytest.mark.hdfs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairedHdfs]:
    with running(PairedHdfs(tmp_path_factory.mktemp("pair"))) as cluster:
        yield cluster


@pytest.fixture
def url(pair: PairedHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(pair.conf_folder))
    return f"{pair.url}/{tmp_path.name}-{secrets.token_hex(4)}"


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(random.Random(9).randbytes(BIG))
    return path


def test_a_namenode_becomes_standby_between_two_calls(
    pair: PairedHdfs, url: str, tmp_path: Path, big: Path
) -> None:
    with open_storage(settings_in(tmp_path), url) as storage:
        copy_in(storage, big, "before")
        pair.fail_over()
        copy_out(storage, "before", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == big.read_bytes()
        copy_in(storage, big, "after")
        assert storage.backend.space() is not None
    with open_store(url) as store:
        assert store.publish("key", b"one")
        pair.fail_over()
        assert not store.publish("key", b"two")
        store.publish("key", b"three", replace=True)
        pair.fail_over()
        assert store.read("key") == b"three"
        lease = store.lease("leases/x", ttl_s=60, owner="me")
        assert lease is not None
        pair.fail_over()
        lease.renew()
        assert store.lease("leases/x", ttl_s=60, owner="you") is None
        lease.release()


_JOB = """
import os, sys
folder, source = sys.argv[1:]
data = open(source, "rb").read()
model = open(folder + "/model", "rb", buffering=0)
read = model.read(1 << 20)
saved = open(folder + "/saved", "wb", buffering=0)
saved.write(data[: 6 << 20])
print("half", flush=True)
sys.stdin.readline()
saved.write(data[6 << 20 :])
os.fsync(saved.fileno())
saved.close()
while piece := model.read(1 << 20):
    read += piece
assert read == data
assert sorted(os.listdir(folder)) == ["model", "saved"]
"""


@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_an_active_namenode_dies_under_a_mount(
    pair: PairedHdfs, url: str, tmp_path: Path, mountpoint: Path, big: Path, layout: str
) -> None:
    """The NameNode dies during a read and a save, and for a while none is active."""
    with checkpoints(tmp_path, mountpoint, url, layout=layout):
        shell("cp {b} {d}/model", b=big, d=mountpoint)
        job = subprocess.Popen(
            [sys.executable, "-c", _JOB, str(mountpoint), str(big)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert job.stdout is not None
            assert job.stdin is not None
            assert job.stdout.readline() == b"half\n"
            pair.kill_active()
            job.stdin.write(b"\n")
            job.stdin.flush()
            pair.take_over()
            job.communicate(timeout=120)
            assert job.returncode == 0
        finally:
            end(job)
            pair.start_killed()
        shell("cmp {b} {d}/saved", b=big, d=mountpoint)


def test_the_active_namenode_falls_silent_under_a_save(
    hdfs: MiniHdfs, tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save goes on with the other one after the deadline."""
    address = urlsplit(hdfs.url).netloc
    with NameNodeRelay(int(address.rpartition(":")[2])) as relay:
        conf = tmp_path / "conf"
        write_configuration(conf, pair_configuration((relay.address, address)))
        monkeypatch.setenv("HADOOP_CONF_DIR", str(conf))
        url = f"hdfs://{NAME}/{tmp_path.name}?deadline_s=8"

        def note(_: int) -> None:
            relay.fall_silent()

        with open_storage(settings_in(tmp_path), url) as storage:
            storage.backend.mkdir("")  # by the one that is going to be silent
            assert copy_in(storage, big, "model", on_progress=note) == BIG
            copy_out(storage, "model", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == big.read_bytes()
