"""A real HDFS that dies or freezes below a mount: files are whole or absent, nothing hangs."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.fuse.striped.tools.copy import copy_in, copy_out, open_storage
from testbed.hdfs.cluster import MiniHdfs
from testbed.waiting import wait_for_fuse_request
from tests.fuse.striped.support.mounting import BIG, checkpoints, end, settings_in, shell

pytestmark = [pytest.mark.needs("fuse"), pytest.mark.hdfs]


def test_a_datanode_that_dies_under_a_reader(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path, big: Path
) -> None:
    url = hdfs_url + "?replication=2"
    with open_storage(settings_in(tmp_path), url) as storage:
        copy_in(storage, big, "f")
    with checkpoints(tmp_path, mountpoint, url):
        code = (
            "import os, sys\n"
            "file = open(sys.argv[1] + '/f', 'rb', buffering=0)\n"
            "data = file.read(1 << 20)\n"
            "print('started', flush=True); sys.stdin.readline()\n"
            "while piece := file.read(1 << 20): data += piece\n"
            "assert data == open(sys.argv[2], 'rb').read()\n"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", code, str(mountpoint), str(big)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"started\n"
            hdfs.kill_datanode(0)
            reader.communicate(b"\n", timeout=60)
            assert reader.returncode == 0
        finally:
            end(reader)
            hdfs.start_datanode(0)
            hdfs.wait_for_datanodes(hdfs.datanode_count)


@pytest.mark.parametrize("replication", [1, 2])
def test_a_datanode_that_dies_under_a_writer(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path, big: Path, replication: int
) -> None:
    url = f"{hdfs_url}?replication={replication}"
    old = random.Random(3).randbytes(9_000_000)
    (tmp_path / "old").write_bytes(old)
    with open_storage(settings_in(tmp_path), hdfs_url + "?replication=3") as storage:
        copy_in(storage, tmp_path / "old", "f")
    with checkpoints(tmp_path, mountpoint, url):
        code = (
            "import sys\n"
            "data = open(sys.argv[2], 'rb').read()\n"
            "with open(sys.argv[1] + '/f', 'wb', buffering=0) as file:\n"
            "    for at in range(0, len(data), 1 << 20):\n"
            "        file.write(data[at : at + (1 << 20)])\n"
            "        if at == 20 << 20: print('half', flush=True); sys.stdin.readline()\n"
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(mountpoint), str(big)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
            hdfs.kill_datanode(0)
            _, stderr = writer.communicate(b"\n", timeout=90)
        finally:
            end(writer)
            hdfs.start_datanode(0)
            hdfs.wait_for_datanodes(hdfs.datanode_count)
    with open_storage(settings_in(tmp_path), url) as storage:
        copy_out(storage, "f", tmp_path / "now")
    expected = big.read_bytes() if writer.returncode == 0 else old
    assert (tmp_path / "now").read_bytes() == expected
    assert writer.returncode == 0 or b"OSError" in stderr or b"TimeoutError" in stderr


def test_a_frozen_cluster_can_be_unmounted(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path, big: Path
) -> None:
    with open_storage(settings_in(tmp_path), hdfs_url) as storage:
        copy_in(storage, big, "f")
    with checkpoints(tmp_path, mountpoint, hdfs_url) as mount:
        shell("test $(stat -c %s {d}/f) = " + str(BIG), d=mountpoint)
        hdfs.pause()
        try:
            reader = subprocess.Popen(["cat", str(mountpoint / "f")], stdout=subprocess.DEVNULL)
            wait_for_fuse_request(reader.pid)
            mount.close(1.0)
            assert reader.wait(60) != 0
        finally:
            hdfs.resume()


def test_fsx_while_a_datanode_dies(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path
) -> None:
    """A replica is left: the exerciser does not notice."""
    options = {"stripe_unit_bytes": 64 * 2**10, "stripe_count": 3}
    command = [
        sys.executable,
        "-m",
        "tests.fuse.striped.support.fsx",
        str(mountpoint),
        str(tmp_path),
    ]
    with checkpoints(tmp_path, mountpoint, hdfs_url + "?replication=2", **options):
        exerciser = subprocess.Popen(
            [*command, "12", "40", "65536"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            _wait_done(exerciser, 10)
            hdfs.kill_datanode(0)
            _wait_done(exerciser, 25)
            hdfs.start_datanode(0)
            _, stderr = exerciser.communicate(timeout=90)
            assert exerciser.returncode == 0, stderr.decode()
        finally:
            end(exerciser)
            hdfs.wait_for_datanodes(hdfs.datanode_count)


def _wait_done(exerciser: "subprocess.Popen[bytes]", count: int) -> None:
    """Wait until the exerciser has done so many operations."""
    assert exerciser.stdout is not None
    if not any(int(line) == count for line in exerciser.stdout):
        pytest.fail(exerciser.communicate()[1].decode())
