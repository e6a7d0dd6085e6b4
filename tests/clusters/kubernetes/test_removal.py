"""Bootseer removed from a cluster by one command while pods use it: nothing of it stays."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

# A trainer that saves until it is told to end, and needs ten seconds more. As long as its pod
# exists, the kubelet needs the driver, and containerd the snapshotter.
SAVE = f"""{TRAIN.removeprefix("exec ")} --checkpoints /mnt/checkpoints --steps 1000000 \
  --pause 0.2 & trap 'kill -TERM $!; wait $!; python3 -c "import time; time.sleep(10)"' TERM
wait $!"""
# On a busy machine a node may look dead for a while.
STAYS = [{"operator": "Exists"}]
# Command names of Bootseer's processes; folders of the cluster contain its name, too.
OURS = re.compile(r"\x01-m\x01bootseer|/bootseer\x01|bootseer\.(prefetch|fuse|served|kubernetes)")
COMMAND_LINES = r"""for each in /proc/[0-9]*; do
  tr '\0\n' '\1 ' < $each/cmdline; echo
done 2>/dev/null; true"""


@pytest.fixture(autouse=True)
def again(cluster: KubernetesCluster, installed: Installation) -> Iterator[None]:
    """Install Bootseer again for other tests."""
    yield
    installed.apply()
    cluster.kubectl("delete", "jobs,pods", "--selector=bed=yes", "--timeout=120s", timeout_s=180)


@pytest.fixture
def working(
    cluster: KubernetesCluster, installed: Installation, trainer: str, shell: str, tmp_path: Path
) -> Iterator[Path]:
    """Start a Job that saves checkpoints on a served image, and a pod without Bootseer, on one
    node.

    The path is that of the Job's output.
    """
    node = cluster.nodes[0]
    index(installed, trainer)
    plain = pod("plain", shell, "exec sleep 100000", node=node.name, tolerations=STAYS)
    cluster.apply(plain)
    cluster.wait_pod("plain", "Running")
    cluster.apply(job("saves", trainer, f"{cluster.hdfs.url}/checkpoints/removed", node))
    wait_for(lambda: pods_of(cluster, "saves"), "the Job's pod", interval_s=0.5)
    (name,) = pods_of(cluster, "saves")
    cluster.wait_pod(name, "Running", timeout_s=300)
    with following(cluster, name, tmp_path / "log") as log:
        wait_saved(log, 3)
        yield log


def test_a_removal_right_after_the_jobs_leaves_nothing(
    cluster: KubernetesCluster, installed: Installation, trainer: str, working: Path
) -> None:
    node = cluster.nodes[0]
    plain = cluster.get("pod", "plain")["status"]["containerStatuses"]
    # The command returns before the Job's pods have ended.
    cluster.kubectl("delete", "job", "saves")
    installed.remove()
    wait_for(lambda: not pods_of(cluster, "saves"), "the end of the Job's pods", interval_s=1.0)
    for one in cluster.nodes:
        wait_for(partial(is_clean, installed, one), f"nothing of Bootseer on {one.name}")
        assert not ours_in(one)
        assert "io.containerd.snapshotter.v1.bootseer" not in config(one)
        assert "snapshotter.sock" not in config(one)
    now = cluster.get("pod", "plain")["status"]["containerStatuses"]
    assert [one["containerID"] for one in now] == [one["containerID"] for one in plain]
    assert not now[0]["restartCount"]
    assert_nothing_on_the_disk(node)
    # The reported checkpoints exist after another installation.
    installed.apply()
    source = f"{cluster.hdfs.url}/checkpoints/removed"
    files = checkpoint_states(cluster, "checks-removed", trainer, source, node)
    assert_nothing_lost(files, saved_steps(working))


def test_a_forgotten_job_goes_when_it_is_installed_again(
    cluster: KubernetesCluster, installed: Installation, working: Path
) -> None:
    installed.remove()
    for one in cluster.nodes:
        wait_for(partial(is_clean, installed, one), f"nothing of Bootseer on {one.name}")
    cluster.kubectl("delete", "job", "saves", "--wait=false")
    installed.apply()
    wait_for(
        lambda: not pods_of(cluster, "saves"),
        "the end of the Job's pods",
        timeout_s=240,
        interval_s=1.0,
    )
    assert_nothing_on_the_disk(cluster.nodes[0])


def job(name: str, image: str, source: str, node: ClusterNode) -> dict[str, Any]:
    annotations = {**REPLAY, "bootseer.io/checkpoint": source}
    found = pod(name, image, SAVE, node=node.name, annotations=annotations, tolerations=STAYS)
    found["spec"]["terminationGracePeriodSeconds"] = 60
    template = {"metadata": {"annotations": annotations}, "spec": found["spec"]}
    return {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "labels": {"bed": "yes"}},
        "spec": {"backoffLimit": 0, "template": template},
    }  # fmt: skip


def pods_of(cluster: KubernetesCluster, job_name: str) -> list[str]:
    """Return the names of a Job's pods."""
    found = cluster.list("pods", f"--selector=job-name={job_name}", "--namespace", "default")
    return [one["metadata"]["name"] for one in found]


def is_clean(installed: Installation, node: ClusterNode) -> bool:
    return not installed.mounts(node) and not ours_in(node)


def ours_in(node: ClusterNode) -> list[str]:
    """Return the command lines of Bootseer's processes on a node."""
    text = node.run("sh", "-c", COMMAND_LINES).stdout
    return [line for line in text.splitlines() if OURS.search(line)]


def config(node: ClusterNode) -> str:
    return (node.disk / "etc/containerd/config.toml").read_text()
