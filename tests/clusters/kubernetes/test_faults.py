"""Kills of each Bootseer process on a node while a trainer with a served image saves there.

The trainer goes on or gets an error, and its pod can be deleted. The next pod of the node starts
and finds each checkpoint that was reported as saved.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.machine import ClusterNode
from testbed.kubernetes.objects import pod
from testbed.kubernetes.starts import (
    REPLAY,
    TRAIN,
    assert_nothing_lost,
    assert_nothing_on_the_disk,
    checkpoint_states,
    following,
    index,
    saved_steps,
    wait_saved,
)
from testbed.waiting import wait_for

PROCESSES = {
    "snapshotter": "bootseer -v snapshotter",
    "driver": "bootseer -v kubernetes csi",
    "webhook": "bootseer kubernetes webhook",
    "spawner": "bootseer kubernetes spawner",
    "checkpoint server": "bootseer.fuse.striped.mounted.server",
    "image server": "bootseer.prefetch.serve.server",
}
# Their end ends the mounts that they hold: readers and writers get an error.
HOLDERS = ("spawner", "checkpoint server", "image server")


@pytest.fixture(scope="module")
def indexed(cluster: KubernetesCluster, installed: Installation, trainer: str) -> None:
    """Index the image and wipe the node, so that the image is served and not pulled."""
    index(installed, trainer)
    cluster.wipe(cluster.nodes[0])
    installed.wait_ready()


@pytest.fixture(autouse=True)
def emptied(cluster: KubernetesCluster, installed: Installation) -> Iterator[None]:
    """Remove the test's pods."""
    yield
    cluster.kubectl("delete", "pods", "--selector=bed=yes", "--timeout=150s", timeout_s=200)
    installed.wait_ready()


@pytest.mark.parametrize("victim", PROCESSES)
def test_a_killed_process_costs_an_error_at_most(
    cluster: KubernetesCluster,
    installed: Installation,
    indexed: None,
    trainer: str,
    tmp_path: Path,
    victim: str,
) -> None:
    first = cluster.nodes[0]
    name = f"under-{victim.replace(' ', '-')}"
    source = f"{cluster.hdfs.url}/checkpoints/{name}"
    annotations = {**REPLAY, "bootseer.io/checkpoint": source}
    script = f"{TRAIN} --checkpoints /mnt/checkpoints --steps 1000000 --pause 0.2"
    cluster.apply(pod(name, trainer, script, node=first.name, annotations=annotations))
    cluster.wait_pod(name, "Running", timeout_s=300)
    with following(cluster, name, tmp_path / "log") as log:
        wait_saved(log, 3)
        # The webhook may run on any node.
        kill(cluster.nodes if victim == "webhook" else [first], PROCESSES[victim])
        if victim in HOLDERS:
            goal = len(saved_steps(log)) + 4
            wait_for(
                lambda: (
                    has_ended(cluster, name) or said_since(log) or len(saved_steps(log)) >= goal
                ),
                "an error, or further checkpoints", timeout_s=120, interval_s=0.5,
            )  # fmt: skip
        else:
            wait_saved(log, 3)
        steps = saved_steps(log)
    cluster.kubectl("delete", "pod", name, "--timeout=150s", timeout_s=200)
    installed.wait_ready()
    files = checkpoint_states(cluster, f"{name}-checks", trainer, source, first)
    assert_nothing_lost(files, steps)
    assert_nothing_on_the_disk(first)


def kill(nodes: Sequence[ClusterNode], pattern: str) -> None:
    """Kill every process on these nodes whose command line contains `pattern`."""
    killed = [node.run("pkill", "-KILL", "-f", pattern, check=False) for node in nodes]
    assert any(one.returncode == 0 for one in killed), f"nothing runs {pattern}"


def has_ended(cluster: KubernetesCluster, name: str) -> bool:
    """Return whether the trainer has ended."""
    return cluster.get("pod", name)["status"]["phase"] in ("Failed", "Succeeded")


def said_since(log: Path) -> bool:
    """Return whether a save has failed."""
    return "not saved" in log.read_text()
