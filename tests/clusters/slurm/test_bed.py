"""The tests' cluster leaves nothing behind, also after the kill of a test run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.paths import REPOSITORY
from testbed.slurm.cluster import cluster_folder, require_slurm
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount")

HOLD = """
import sys, time
from testbed.slurm.cluster import running_cluster
with running_cluster() as cluster:
    cluster.submit("-N2", "--wrap", "sleep 600")
    print(cluster.folder, flush=True)
    time.sleep(600)
"""


def _users_of(folder: str) -> list[str]:
    """Return the processes whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if folder.encode() in told:
            found.append(told.decode(errors="replace"))
    return found


def test_a_test_run_that_is_killed_leaves_nothing() -> None:
    require_slurm()
    before = Path("/etc/passwd").read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        assert Path(folder).is_dir()
        assert _users_of(folder)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not _users_of(folder), "the end of all machines")
    assert Path(folder).is_dir()
    with cluster_folder():
        assert not Path(folder).exists()
    groups = Path("/sys/fs/cgroup/freezer").glob(f"bootseer-slurm-{process.pid}-*")
    assert list(groups) == []

    assert Path("/etc/passwd").read_bytes() == before
