"""Status of a mount, and the owner of its files."""

import os
import stat
import sys
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError, UnavailableError
from bootseer.fuse.striped.mounted.status import mount_status
from bootseer.served.control import ask
from testbed.hdfs.cluster import MiniHdfs
from testbed.mounts.fuse_mount import check_python, run
from testbed.users import as_user
from tests.fuse.striped.support.mounting import checkpoints, shell

pytestmark = pytest.mark.needs("fuse")

HOLD = """
import sys, time
file = open(sys.argv[1] + "/new", "wb", buffering=0)
file.write(bytes(3_000_000))
assert open(sys.argv[1] + "/old", "rb").read() == b"old"
from bootseer.fuse.striped.mounted.status import mount_status
from pathlib import Path
status = mount_status(Path(sys.argv[2]), Path(sys.argv[1]))
assert status["unfinished"] == ["new"], status
assert status["files_open"] == 1, status
assert status["requests"] > 5, status
assert 0 < status["memory"]["limit_bytes"] <= 128 * 2**20
assert status["throughput"]["served_bytes_per_s"] >= 0
"""


def test_the_status_of_a_mount(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "old").write_bytes(b"old")
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        check_python(HOLD, mountpoint, mount.run_dir)
        status = mount_status(mount.run_dir, mountpoint)
        assert status["directory"] == str(mountpoint)
        assert status["unfinished"] == []
        with pytest.raises(UnavailableError, match="unknown command"):
            ask(mount.state_dir, "nonsense")
        command = [sys.executable, "-m", "bootseer", "--run-dir", str(mount.run_dir)]
        shown = run([*command, "status", str(mountpoint)])
        assert "sequential streams" in shown.stdout, shown.stderr
        assert run([*command, "status", "a", "b"]).returncode == 2
        assert run([*command, "checkpoint", "mount", "only-one"]).returncode == 2
    with pytest.raises(NotFoundError):
        mount_status(mount.run_dir, mountpoint)


def test_what_was_read_is_read_from_memory(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    def read_count() -> int:
        return int(mount_status(mount.run_dir, mountpoint)["requests"])

    with checkpoints(tmp_path, mountpoint, local_url, page_cache=True) as mount:
        for byte in b"AB":
            content = bytes([byte]) * 12_000_000
            (mountpoint / "new").write_bytes(content)
            os.rename(mountpoint / "new", mountpoint / "f")
            assert (mountpoint / "f").read_bytes() == content
            before = read_count()
            assert (mountpoint / "f").read_bytes() == content
            # The open and the close, and not the twelve reads of a file of twelve megabytes.
            assert read_count() - before < 8


@pytest.mark.hdfs
def test_reads_are_told_by_datanode(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path
) -> None:
    with checkpoints(tmp_path, mountpoint, hdfs_url) as mount:
        shell("head -c 12000000 /dev/zero > {d}/f && cat {d}/f > /dev/null", d=mountpoint)
        sources = mount_status(mount.run_dir, mountpoint)["statistics"]["sources"]
    read = {one["name"]: one["read_bytes"] for one in sources if one["read_bytes"]}
    # Bytes that a busy DataNode did not send are read by the library, which does not name the
    # source.
    assert set(read) & {f"127.0.0.1:{port}" for port in hdfs.datanode_ports}
    assert sum(read.values()) >= 12_000_000
    written = {one["name"]: one["written_bytes"] for one in sources if one["written_bytes"]}
    assert sum(written.values()) == 12_000_000
    assert all(name.startswith("part ") for name in written)


@pytest.mark.needs("root", "mount")
def test_owner_and_umask_decide_who_may_write(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    # Other users may not enter a folder of root.
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent != Path("/") and not parent.stat().st_mode & stat.S_IXOTH:
            os.chmod(parent, 0o711)
    options = {"allow_other": True, "uid": 4321, "gid": 8765, "umask": 0o027}
    with checkpoints(tmp_path, mountpoint, local_url, **options):
        as_owner = " ".join(as_user(4321))
        as_group = "setpriv --reuid 9999 --regid 8765 --clear-groups"
        as_other = " ".join(as_user(9999))
        shell(f"{as_owner} sh -c 'mkdir {{d}}/sub; echo text > {{d}}/sub/f'", d=mountpoint)
        assert shell("stat -c '%u %g %a' {d}/sub {d}/sub/f", d=mountpoint).split("\n")[:2] == [
            "4321 8765 750",
            "4321 8765 640",
        ]
        shell(f"{as_group} cat {{d}}/sub/f; ! {as_group} touch {{d}}/sub/g", d=mountpoint)
        shell(f"! {as_other} ls {{d}}", d=mountpoint)
