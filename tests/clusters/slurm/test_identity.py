"""Which start it is, told by a real Slurm: tasks of an array, components of a heterogeneous job."""

import json
from typing import Any

import pytest

from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.test_faults import assert_clean, script

pytestmark = [pytest.mark.hdfs, pytest.mark.fuse, pytest.mark.root]

# It ends before anything of it is published: the epilog does so.
RUN = "bootseer run -- python -c 'import bootseer; bootseer.ready()'"


def report(cluster: SlurmCluster, *words: str) -> Any:
    """As a user sees it who logs in."""
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


def test_components_of_a_heterogeneous_job_are_one_start(cluster: SlurmCluster) -> None:
    words = ("-J", "mixed", "-o", "mixed.out", "-N1", "-n1", "-c4", ":", "-N1", "-n2", "-c2")
    job = cluster.submit(*words, script=script(f"srun --het-group=0,1 {RUN}"))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    assert_clean(cluster)
    found = report(cluster, "mixed", "--submission", str(job))
    assert (found["node_count"], found["rank_count"]) == (2, 3)


def test_a_job_is_the_job_of_its_name_and_number(cluster: SlurmCluster) -> None:
    """`srun` alone, without a batch script."""
    done = cluster.controller.run("srun", "-J", "alone", "-N2", "sh", "-c", RUN, user="alice")
    assert done.returncode == 0, done.stderr
    assert_clean(cluster)
    found = report(cluster, "alone")
    assert (found["node_count"], found["rank_count"]) == (2, 2)
