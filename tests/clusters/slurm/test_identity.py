"""Identity of a start on a real Slurm: array tasks, components of a heterogeneous job."""

import json
from typing import Any

import pytest

from testbed.slurm.cluster import SlurmCluster
from tests.clusters.slurm.test_faults import assert_clean, script
from tests.clusters.slurm.test_prolog import said

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]

# The job ends before its timeline is published: the epilog publishes it.
RUN = "bootseer run -- python -c 'import bootseer; bootseer.ready()'"


def report(cluster: SlurmCluster, *words: str) -> Any:
    """Return the report as a logged-in user sees it."""
    done = cluster.controller.run("bootseer", "report", *words, "--json", user="alice")
    assert done.returncode == 0, done.stderr + cluster.logs()
    return json.loads(done.stdout)


def test_tasks_of_an_array_are_starts_of_their_own(cluster: SlurmCluster) -> None:
    words = ("-J", "arrayed", "--array=3-4", "-n1", "-o", "array-%a.out")
    job = cluster.submit(*words, script=script(f"srun {RUN}"))
    for task in ("3", "4"):
        assert cluster.wait_for_state(f"{job}_{task}", "COMPLETED", "FAILED") == "COMPLETED"
    assert_clean(cluster)
    for task in ("3", "4"):
        found = report(cluster, "arrayed", "--submission", f"{job}_{task}")
        assert (found["attempt"], found["node_count"], found["rank_count"]) == (0, 1, 1)


def test_twenty_tasks_of_an_array_start_at_once(cluster: SlurmCluster, hdfs_url: str) -> None:
    """With a shared environment, and a checkpoint folder each."""
    set_up = "mkdir -p /tmp/packages; echo shared > /tmp/packages/one"
    run = f"srun bootseer run --setup '{set_up}' --target /tmp/packages "
    run += f"--checkpoint {hdfs_url}-$SLURM_ARRAY_TASK_ID:/tmp/ckpt-$SLURM_JOB_ID -- "
    run += "sh -c 'cp /tmp/packages/one /tmp/ckpt-$SLURM_JOB_ID/'"
    words = ("-J", "twenty", "--array=1-20", "-n1", "-o", "twenty-%a.out")
    job = cluster.submit(*words, script=script(run))
    for task in range(1, 21):
        state = cluster.wait_for_state(f"{job}_{task}", "COMPLETED", "FAILED", timeout_s=240)
        assert state == "COMPLETED", (cluster.home / f"alice/twenty-{task}.out").read_text()
    assert_clean(cluster)
    texts = [(cluster.home / f"alice/twenty-{task}.out").read_text() for task in range(1, 21)]
    assert sum(text.count("bootseer: stored snapshot") for text in texts) == 1
    # Their prologs and epilogs do not disturb one another.
    assert [said(cluster, name) for name in cluster.nodes] == [[], []]
    for task in range(1, 21):
        ls = ("bootseer", "checkpoint", "ls", f"{hdfs_url}-{task}")
        assert "one" in cluster.run(*ls, user="alice")


def test_components_of_a_heterogeneous_job_are_one_start(cluster: SlurmCluster) -> None:
    words = ("-J", "mixed", "-o", "mixed.out", "-N1", "-n1", "-c4", ":", "-N1", "-n2", "-c2")
    job = cluster.submit(*words, script=script(f"srun --het-group=0,1 {RUN}"))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    assert_clean(cluster)
    found = report(cluster, "mixed", "--submission", str(job))
    assert (found["node_count"], found["rank_count"]) == (2, 3)


def test_the_epilog_of_each_component_publishes_what_was_killed(cluster: SlurmCluster) -> None:
    """A component's own number differs from the number that the job's tasks know."""
    words = ("-J", "killed", "-o", "killed.out", "-N1", "-n1", "-c4", ":", "-N1", "-n1", "-c2")
    run = "srun --het-group=0,1 bootseer run -- sh -c 'kill -9 -1'"
    job = cluster.submit(*words, script=script(run))
    cluster.wait_for_state(job, "COMPLETED", "FAILED", "CANCELLED")
    assert_clean(cluster)
    # Without this, the report reads the files that the nodes have written into the user's home.
    cluster.controller.run("rm", "-rf", "/home/alice/.local/state")
    found = report(cluster, "killed", "--submission", str(job))
    assert (found["node_count"], found["rank_count"]) == (2, 2)


def test_a_job_is_the_job_of_its_name_and_number(cluster: SlurmCluster) -> None:
    """`srun` alone, without a batch script."""
    done = cluster.controller.run("srun", "-J", "alone", "-N2", "sh", "-c", RUN, user="alice")
    assert done.returncode == 0, done.stderr
    assert_clean(cluster)
    found = report(cluster, "alone")
    assert (found["node_count"], found["rank_count"]) == (2, 2)
