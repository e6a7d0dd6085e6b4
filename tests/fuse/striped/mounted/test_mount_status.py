"""What a mount tells of itself, and as whose it shows its files."""

import os
import stat
import sys
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError, UnavailableError
from bootseer.fuse.striped.mounted.life.control import ask
from bootseer.fuse.striped.mounted.life.mount_spec import (
    MountState,
    control_path,
    forget_ended,
    journal_path,
    log_path,
    read_state,
    start_ticks,
    states,
    write_state,
)
from bootseer.fuse.striped.mounted.life.status import all_statuses, mount_status
from tests.fuse.striped.support.mounting import checkpoints, shell
from tests.hdfs.cluster import MiniHdfs
from tests.support.mounts.fuse_mount import check_python, run

pytestmark = pytest.mark.fuse

HOLD = """
import sys, time
file = open(sys.argv[1] + "/new", "wb", buffering=0)
file.write(bytes(3_000_000))
assert open(sys.argv[1] + "/old", "rb").read() == b"old"
from bootseer.fuse.striped.mounted.life.status import mount_status
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
        (only,) = all_statuses(mount.run_dir)
        assert only["directory"] == str(mountpoint)
        assert only["unfinished"] == []
        with pytest.raises(UnavailableError, match="unknown command"):
            ask(control_path(mount.run_dir, mountpoint), "nonsense")
        command = [sys.executable, "-m", "bootseer", "--run-dir", str(mount.run_dir), "mount"]
        shown = run([*command, "--status", str(mountpoint)])
        assert "sequential streams" in shown.stdout, shown.stderr
        assert run([*command, "--status", "a", "b"]).returncode == 2
        assert run([*command, "only-one"]).returncode == 2
    assert all_statuses(mount.run_dir) == []
    with pytest.raises(NotFoundError):
        mount_status(mount.run_dir, mountpoint)


@pytest.mark.hdfs
def test_reads_are_told_by_datanode(
    hdfs: MiniHdfs, hdfs_url: str, tmp_path: Path, mountpoint: Path
) -> None:
    with checkpoints(tmp_path, mountpoint, hdfs_url) as mount:
        shell("head -c 12000000 /dev/zero > {d}/f && cat {d}/f > /dev/null", d=mountpoint)
        sources = mount_status(mount.run_dir, mountpoint)["statistics"]["sources"]
    read = {one["name"]: one["read_bytes"] for one in sources if one["read_bytes"]}
    # What a busy DataNode did not give is read by the library, which does not tell from where.
    assert set(read) & {f"127.0.0.1:{port}" for port in hdfs.datanode_ports}
    assert sum(read.values()) >= 12_000_000
    written = {one["name"]: one["written_bytes"] for one in sources if one["written_bytes"]}
    assert sum(written.values()) == 12_000_000
    assert all(name.startswith("part ") for name in written)


@pytest.mark.root
def test_owner_and_umask_decide_who_may_write(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it acts as two other users")
    # Others get no further than a folder of root's otherwise.
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent != Path("/") and not parent.stat().st_mode & stat.S_IXOTH:
            os.chmod(parent, 0o711)
    options = {"allow_other": True, "uid": 4321, "gid": 8765, "umask": 0o027}
    with checkpoints(tmp_path, mountpoint, local_url, **options):
        as_owner = "setpriv --reuid 4321 --regid 4321 --clear-groups"
        as_group = "setpriv --reuid 9999 --regid 8765 --clear-groups"
        as_other = "setpriv --reuid 9999 --regid 9999 --clear-groups"
        shell(f"{as_owner} sh -c 'mkdir {{d}}/sub; echo text > {{d}}/sub/f'", d=mountpoint)
        assert shell("stat -c '%u %g %a' {d}/sub {d}/sub/f", d=mountpoint).split("\n")[:2] == [
            "4321 8765 750",
            "4321 8765 640",
        ]
        shell(f"{as_group} cat {{d}}/sub/f; ! {as_group} touch {{d}}/sub/g", d=mountpoint)
        shell(f"! {as_other} ls {{d}}", d=mountpoint)


def test_mounts_that_ended_long_ago_are_forgotten(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    """Jobs mount on folders of their own: each left a state and a log on the node for good."""
    run_dir = tmp_path / "run"
    for number in range(40):
        directory = tmp_path / f"job-{number}"
        is_recent, is_ended = number < 5, number != 20
        write_state(run_dir, MountState(local_url, str(directory), 1, 0, ended=is_ended))
        log_path(run_dir, directory).touch()
        path = log_path(run_dir, directory).with_suffix(".json")
        os.utime(path, (number, number) if not is_recent else None)
    (tmp_path / "stored").mkdir()
    with checkpoints(tmp_path, mountpoint, local_url):
        pass
    kept = {Path(state.directory).name for state in states(run_dir)}
    # The newest twenty are this mount, those of the last hour, and fourteen more.
    assert kept == {mountpoint.name, *(f"job-{n}" for n in (0, 1, 2, 3, 4, *range(26, 40)))}
    assert len(list((run_dir / "checkpoint-mounts").glob("*.log"))) == len(kept)


def test_what_killed_servers_left_goes_with_the_end_of_another(
    tmp_path: Path, local_url: str
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoint-mounts").mkdir(parents=True, mode=0o700)
    pids = {"dead": 0, "alive": os.getpid()}
    for name, pid in pids.items():
        directory = tmp_path / name
        write_state(run_dir, MountState(local_url, str(directory), pid, start_ticks(pid) or 0))
        for path in (journal_path(run_dir, directory), control_path(run_dir, directory)):
            path.touch()
    forget_ended(run_dir)
    for name, count in (("dead", 0), ("alive", 2)):
        directory = tmp_path / name
        paths = (journal_path(run_dir, directory), control_path(run_dir, directory))
        assert sum(path.exists() for path in paths) == count
        assert read_state(run_dir, directory) is not None
