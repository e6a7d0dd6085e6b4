"""Remains of servers that died, and the processes that remove them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError
from bootseer.linux.mount_table import find_mount
from bootseer.linux.namespaces import mount_namespace
from bootseer.linux.processes import ProcessId
from bootseer.served.ending import make_own_scratch, sweep
from bootseer.served.processes import ATTENDANT, start
from bootseer.served.service import ServiceState, is_alive, lock_new, new_service_dir, write_state
from testbed.paths import REPOSITORY
from testbed.waiting import wait_channels, wait_for


@pytest.mark.needs("root")
def test_what_a_dead_server_has_mounted_elsewhere_stays_as_long_as_somebody_sees_it(
    tmp_path: Path,
) -> None:
    """The job still uses a view of its own after the kill of its server."""
    with subprocess.Popen(["unshare", "--mount", "sleep", "600"]) as job:
        wait_for(lambda: mount_namespace(job.pid) != mount_namespace(), "the mount namespace")
        directory = new_service_dir(tmp_path)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        state = ServiceState(
            id=directory.name, reference="/env", index_digest="", workload="", directory="/none",
            pid=0, started_ns=1, purpose="link", scratch=str(scratch),
            mount_namespace=mount_namespace(job.pid),
        )  # fmt: skip
        write_state(directory, state)
        assert sweep(tmp_path) == 0
        assert scratch.exists()
        job.kill()
        job.wait()
    assert sweep(tmp_path) == 1
    assert not scratch.exists()
    assert not directory.exists()


@pytest.mark.parametrize("forks", [False, True])
def test_the_log_of_a_process_that_lives_stays(tmp_path: Path, forks: bool) -> None:
    """Twenty newer logs once removed those of living keepers, publishers and preloaders."""
    logs = tmp_path / "logs"
    logs.mkdir()
    mine = logs / "start-1.log"
    with start(ATTENDANT, tmp_path, identity="start-1", copy=forks) as process:
        os.utime(mine, (1, 1))
        for number in range(30):
            (logs / f"{number}.log").touch()
        sweep(tmp_path)
        assert mine.exists()
        assert len(list(logs.iterdir())) == 21
        process.abandon()
        sweep(tmp_path)
        assert not mine.exists()
        assert len(list(logs.iterdir())) == 20


def test_a_child_of_a_killed_start_makes_no_folder_that_nobody_would_remove(tmp_path: Path) -> None:
    """The child lives for a moment after the next start has removed the killed one's remains."""
    scratch = tmp_path / "containers" / "swept"
    with pytest.raises(NotFoundError):
        make_own_scratch(scratch)
    assert list(tmp_path.iterdir()) == []
    scratch.mkdir(parents=True)
    assert make_own_scratch(scratch).stat().st_mode & 0o777 == 0o700


@pytest.mark.needs("mount", linux=(6, 9))
def test_a_killed_server_that_waits_for_itself_is_freed_by_the_next_one(
    tmp_path: Path,
) -> None:
    """The server stored a page whose read it had to answer; nothing else would end that wait."""
    source = tmp_path / "source"
    (source / "stick-once").mkdir(parents=True)
    (source / "small").write_bytes(b"small")
    (mountpoint := tmp_path / "mount").mkdir()
    directory = new_service_dir(tmp_path / "run")
    lock = lock_new(directory)
    command = [sys.executable, "-m", "testbed.mounts.flat_server", "supervise"]
    with subprocess.Popen(
        [*command, source, mountpoint, "cached"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, pass_fds=[lock],
    ) as server:  # fmt: skip
        os.close(lock)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        worker = ProcessId.of(int(children.read_text().split()[0]))
        mount = find_mount(mountpoint)
        assert mount is not None
        state = ServiceState(
            id=directory.name, reference="r", index_digest="", workload="", purpose="mount",
            directory=str(mountpoint), started_ns=1,
            pid=server.pid, pid_started=ProcessId.of(server.pid).started,
            worker_pid=worker.pid, worker_started=worker.started,
            device_minor=mount.device_minor,
        )  # fmt: skip
        write_state(directory, state)
        reader = subprocess.Popen(
            ["cat", mountpoint / "small"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        wait_for(lambda: any("folio" in place for place in wait_channels(worker.pid)), "the page")
        server.kill()
        os.kill(worker.pid, signal.SIGKILL)
    wait_for(worker.is_stuck)
    assert is_alive(directory)
    assert sweep(tmp_path / "run") == 1
    # With an error, or with what was stored.
    reader.communicate(timeout=30)
    assert find_mount(mountpoint) is None
    wait_for(lambda: not Path(f"/proc/{worker.pid}").exists())
