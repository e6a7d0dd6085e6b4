"""A full storage or a used-up quota: the writer gets an error, and nothing is left."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.store import open_backend
from testbed.hdfs.cluster import MiniHdfs
from testbed.mounts.fuse_mount import check_python, run
from testbed.needs import MissingError, require
from testbed.waiting import wait_for
from tests.bootseer.store.hdfs.quota import set_space_quota
from tests.fuse.striped.support.mounting import checkpoints, shell
from tests.fuse.striped.support.stored import find_garbage

pytestmark = [pytest.mark.needs("fuse"), pytest.mark.hdfs]
MIB = 2**20

# A process of its own leaves the mount. The old file stays, and every later call on the descriptor
# returns the same error.
TOLD = """
import errno, os, sys
folder, wanted = sys.argv[1], getattr(errno, sys.argv[2])
for what in sys.argv[3:]:
    name, _, size = what.partition(":")
    fd = os.open(folder + "/" + name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    told = []
    calls = [lambda: os.write(fd, bytes(1 << 20))] * int(size) + [lambda: os.fsync(fd)]
    for call in [*calls, lambda: os.close(fd)]:
        try:
            call()
            assert not told, "a call after the failure succeeded"
        except OSError as error:
            told.append(error.errno)
    assert set(told) == {wanted}, (what, told)
assert os.listdir(folder) == ["f"]
assert open(folder + "/f").read() == "old"
"""


def assert_nothing_is_left(url: str) -> None:
    """Assert that no part is left once the parts' threads have cleaned up."""
    with contextlib.closing(open_backend(url)) as backend:
        wait_for(lambda: not find_garbage(backend, ""), "the end of the parts")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[MiniHdfs]:
    """HDFS whose only DataNode has a disk of 40 MiB."""
    require("root")
    disk = tmp_path / "tiny" / "datanode0"
    disk.mkdir(parents=True)
    done = run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk])
    if done.returncode:
        raise MissingError(f"cannot mount a tmpfs: {done.stderr}")
    try:
        conf = {"dfs.blocksize": "1m"}
        with MiniHdfs(tmp_path / "tiny", datanode_count=1, conf=conf) as cluster:
            yield cluster
    finally:
        run(["umount", "-l", disk])


def test_full_datanodes_are_told_to_the_writer(
    tiny: MiniHdfs, tmp_path: Path, mountpoint: Path
) -> None:
    """Regression: the error was EIO, and was retried as if the DataNode were dead."""
    url = tiny.url + "/x"
    with checkpoints(tmp_path, mountpoint, url):
        shell("printf old > {d}/f", d=mountpoint)
        check_python(TOLD, mountpoint, "ENOSPC", "new:60")
        assert_nothing_is_left(url)
    # A dead DataNode with free space is another matter.
    with contextlib.closing(open_backend(url, deadline_s=5)) as backend:

        def has_room() -> bool:
            # The save's bytes are removed after a while.
            with contextlib.closing(open_backend(url)) as asked:
                space = asked.space()
            return space is not None and space.free_bytes > 20 * MIB

        wait_for(has_room, "room")
        tiny.kill_datanode(0)
        with pytest.raises(UnavailableError), backend.create("g") as writer:
            writer.write(b"x")


def test_a_quota_is_told_to_the_writer(hdfs_url: str, tmp_path: Path, mountpoint: Path) -> None:
    with checkpoints(tmp_path, mountpoint, hdfs_url):
        shell("printf old > {d}/f", d=mountpoint)
        set_space_quota(hdfs_url, 10 * MIB)  # less than a block
        check_python(TOLD, mountpoint, "EDQUOT", "f:12", "new:3")
        assert_nothing_is_left(hdfs_url)
