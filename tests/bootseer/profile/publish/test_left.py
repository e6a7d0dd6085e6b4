"""Publication of a start after its publisher was killed with the job, as Slurm does it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.report.sources import StoredTimelines, read_start
from bootseer.store import open_store
from testbed.node import Completed, Node, node_at
from testbed.waiting import wait_for

_VARIABLES = {"BOOTSEER_PUBLISH_TIMELINES": "on", "SLURM_JOB_ID": "7"}
_CODE = "import bootseer; bootseer.stage('late').end(); print('began', flush=True); input()"


def _kill_a_start(node: Node, note: str) -> Path:
    """Kill all processes of a start by SIGKILL; return the folder of its note, named `note`."""
    job = node.start(
        "run", *("--", sys.executable, "-c", _CODE), variables=_VARIABLES, stdin=subprocess.PIPE
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "began\n"
    timelines = node.base / "run/services"
    wait_for(lambda: any(timelines.glob("*/*.taken")), "the publisher")
    for pid in node.processes():
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=60)
    node.wait_clean()
    (taken,) = timelines.glob("*/*.taken")
    return taken.rename(taken.with_name(note)).parent


def _end(node: Node, job: str) -> Completed:
    """Run the epilog of this job, which has none of its variables except its number."""
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "slurm", "epilog"],
        env={**node.environment, "SLURM_JOB_ID": job},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("note", ["1.note", "1.0.taken"], ids=["at once", "after a look"])
def test_the_epilog_publishes_what_a_killed_publisher_has_not(tmp_path: Path, note: str) -> None:
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        folder = _kill_a_start(node, note)
        done = _end(node, "8")
        assert (done.returncode, done.stderr) == (0, "")
        assert (folder / note).exists()
        done = _end(node, "7")
        assert (done.returncode, done.stderr) == (0, "")
        assert not folder.exists()
        with open_store(node.store) as store:
            assert "late" in {stage.name for stage in read_start(StoredTimelines(store), "job")}


def test_a_store_that_is_dead_is_said_by_the_epilog(tmp_path: Path) -> None:
    with node_at(tmp_path / "node", "hdfs://127.0.0.1:1/store?deadline_s=2") as node:
        folder = _kill_a_start(node, "1.note")
        done = _end(node, "7")
        assert done.returncode == 0
        assert "bootseer: the store: " in done.stderr
        assert not folder.exists()
