"""Mounts of HDFS by Hadoop's own client, with a Java machine in the process that serves."""

import random
from pathlib import Path

import pytest

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.api.copy import copy_out, open_storage
from bootseer.fuse.striped.mounted.life.mount import restart_checkpoints
from bootseer.fuse.striped.mounted.life.status import mount_status
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.java_client import java_client_environment
from tests.fuse.striped.support.mounting import checkpoints, settings_in, shell

pytestmark = [pytest.mark.needs("fuse"), pytest.mark.hdfs]


def test_a_mount_is_written_read_and_restarted(
    hdfs: MiniHdfs,
    hdfs_url: str,
    tmp_path: Path,
    mountpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in java_client_environment().items():
        monkeypatch.setenv(name, value)
    big = tmp_path / "big"
    big.write_bytes(random.Random(5).randbytes(9_876_543))
    with checkpoints(tmp_path, mountpoint, f"java+{hdfs_url}?replication=2") as mount:
        shell("cp {b} {d}/new && sync {d}/new && mv {d}/new {d}/model", b=big, d=mountpoint)
        shell("cmp {b} {d}/model", b=big, d=mountpoint)
        shell("mkdir {d}/step && echo 1 > {d}/latest && echo 2 > {d}/latest", d=mountpoint)
        before = mount.worker_pid
        try:
            restart_checkpoints(mount.run_dir, mountpoint, timeout_s=60)
        except UnsupportedError:
            assert mount.worker_pid == before
        else:
            assert mount.worker_pid != before
        shell("cmp {b} {d}/model && test $(cat {d}/latest) = 2", b=big, d=mountpoint)
        status = mount_status(mount.run_dir, mountpoint)
        assert status["files_open"] == 0
    # Both clients mean the same by what is stored.
    with open_storage(settings_in(tmp_path), hdfs_url) as storage:
        copy_out(storage, "model", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == big.read_bytes()


def test_a_mount_that_cannot_find_hadoop_says_so(
    tmp_path: Path, mountpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLASSPATH", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with (
        pytest.raises(UnsupportedError, match=r"needs Java's libjvm\.so"),
        checkpoints(tmp_path, mountpoint, "java+hdfs://127.0.0.1:1/x"),
    ):
        pass
