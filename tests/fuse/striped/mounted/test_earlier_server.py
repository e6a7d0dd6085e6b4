"""Servers of earlier releases, which had files named after the mount point and no folder."""

import json
import os
from pathlib import Path

import pytest

from bootseer.base.documents import to_line
from bootseer.fuse.striped.mounted.life.known import earlier_files, find_known
from bootseer.fuse.striped.mounted.life.mount import MountedCheckpoints, unmount_checkpoints
from bootseer.fuse.striped.mounted.life.serve import _moved_from_earlier
from bootseer.fuse.striped.mounted.life.spec import MountSpec
from bootseer.fuse.striped.mounted.life.status import all_statuses, mount_status
from bootseer.served.folders import is_alive, read_state
from tests.fuse.striped.support.mounting import checkpoints

pytestmark = pytest.mark.fuse


def _as_earlier(mount: MountedCheckpoints) -> Path:
    """Let a mount look as one of an earlier release; what its files' names begin with."""
    state = read_state(mount.state_dir)
    assert state is not None
    files = earlier_files(mount.run_dir, mount.directory)
    files.parent.mkdir(mode=0o700)
    document = {
        "url": mount.url,
        "directory": str(mount.directory),
        "pid": state.pid,
        "start_ticks": int(state.pid_started),
        "started_s": state.started_ns / 1e9,
        "worker_pid": state.worker_pid,
        "worker_ticks": int(state.worker_started),
        "root_was_made": False,
        "ended": False,
        "unwritten": [],
    }
    files.with_suffix(".json").write_text(json.dumps(document))
    files.with_suffix(".log").write_text("a log\n")
    files.with_suffix(".journal").write_text('{"version": 1}\n')
    (mount.state_dir / "control").rename(files.with_suffix(".control"))
    (mount.state_dir / "state.json").unlink()
    return files


def test_it_is_seen_asked_and_unmounted(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        pid, worker_pid = mount.pid, mount.worker_pid
        files = _as_earlier(mount)
        status = mount_status(mount.run_dir, mountpoint)
        assert (status["pid"], status["worker_pid"]) == (pid, worker_pid)
        assert [one["directory"] for one in all_statuses(mount.run_dir)] == [str(mountpoint)]
        assert unmount_checkpoints(mount.run_dir, mountpoint) == ()
        assert not os.path.ismount(mountpoint)
        assert list(files.parent.iterdir()) == []
        assert find_known(mount.run_dir, mountpoint) is None


def test_it_gets_a_folder_when_it_becomes_this_code(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        files = _as_earlier(mount)
        known = find_known(mount.run_dir, mountpoint)
        assert known is not None
        spec = MountSpec(
            url=local_url,
            directory=str(mountpoint),
            run_dir=str(mount.run_dir),
            memory_bytes=2**27,
            deadline_s=20.0,
        )
        assert json.loads(to_line(spec))["directory"] == str(mountpoint)
        folder, lock = _moved_from_earlier(spec)
        state = read_state(folder)
        assert state is not None
        assert (state.directory, state.pid) == (str(mountpoint), known.state.pid)
        assert (folder / "journal").read_text() == '{"version": 1}\n'
        assert (mount.run_dir / "logs" / f"{folder.name}.log").read_text() == "a log\n"
        assert is_alive(folder)
        assert list(files.parent.iterdir()) == []
        os.close(lock)


def test_earlier_releases_take_no_checkpoint_folder_for_an_image(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        document = json.loads((mount.state_dir / "state.json").read_text())
    # They read what has all of these.
    names = ("id", "reference", "index_digest", "workload", "directory", "pid", "started_ns")
    assert {*names, "purpose", "scratch"} - document.keys() == {"scratch"}
