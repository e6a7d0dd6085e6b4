"""Checkpoints of a trainer whose pod, node or Bootseer processes end.

The trainer runs an unmodified image, is not root, and reports each checkpoint as saved after it has
closed the file. Reported checkpoints must be whole on another node; all others are whole or absent.
No checkpoint lies on its node's disk.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.images import bootseer_image
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
    saved_steps,
    wait_saved,
)
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

USER = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}
SAVE = f"{TRAIN} --checkpoints /mnt/checkpoints --steps 1000000 --pause 0.2"


@pytest.fixture(autouse=True)
def emptied(cluster: KubernetesCluster, installed: Installation) -> Iterator[None]:
    """Remove the test's pods, and switch nodes on again."""
    yield
    for node in cluster.nodes:
        if not node.is_on:
            cluster.power_on(node)
    cluster.wait_ready()
    cluster.kubectl("delete", "pods", "--selector=bed=yes", "--timeout=120s", timeout_s=180)
    installed.wait_ready()


def trainer_pod(cluster: KubernetesCluster, name: str, image: str, node: ClusterNode) -> str:
    """Start a pod that saves checkpoints until it is told to stop; return their URL."""
    source = f"{cluster.hdfs.url}/checkpoints/{name}"
    given = pod(
        name, image, SAVE, node=node.name, securityContext=USER, terminationGracePeriodSeconds=60,
        annotations={**REPLAY, "bootseer.io/checkpoint": source},
    )  # fmt: skip
    cluster.apply(given)
    cluster.wait_pod(name, "Running", timeout_s=300)
    return source


def delete(cluster: KubernetesCluster, name: str, node: ClusterNode) -> None:
    cluster.kubectl("delete", "pod", name, "--timeout=120s", timeout_s=180)


def drain(cluster: KubernetesCluster, name: str, node: ClusterNode) -> None:
    options = ("--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=150s")
    try:
        cluster.kubectl("drain", node.name, *options, timeout_s=200)
    finally:
        cluster.kubectl("uncordon", node.name)


@pytest.mark.parametrize("end", [delete, drain])
def test_the_last_checkpoint_of_a_pod_that_ends_is_whole(
    cluster: KubernetesCluster,
    installed: Installation,
    trainer: str,
    tmp_path: Path,
    end: Callable[[KubernetesCluster, str, ClusterNode], None],
) -> None:
    first, second = cluster.nodes
    name = f"saves-until-{end.__name__}"
    source = trainer_pod(cluster, name, trainer, first)
    with following(cluster, name, tmp_path / "log") as log:
        wait_saved(log, 5)
        end(cluster, name, first)
        wait_for(lambda: "ended at" in log.read_text(), "the trainer's last line")
    steps = saved_steps(tmp_path / "log")
    files = checkpoint_states(cluster, f"checks-{end.__name__}", trainer, source, second)
    assert_nothing_lost(files, steps)
    # The checkpoint that it saved when it was told to stop, within its grace.
    assert f"last checkpoint {steps[-1]}" in (tmp_path / "log").read_text()
    assert_nothing_on_the_disk(first)


def test_what_was_saved_before_the_power_failed_is_whole(
    cluster: KubernetesCluster, installed: Installation, trainer: str, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    source = trainer_pod(cluster, "saves-until-dark", trainer, second)
    with following(cluster, "saves-until-dark", tmp_path / "log") as log:
        wait_saved(log, 5)
        cluster.power_off(second)
        steps = saved_steps(log)
    assert_nothing_on_the_disk(second)
    # While the node is off: it may never come back.
    files = checkpoint_states(cluster, "checks-dark", trainer, source, first)
    assert_nothing_lost(files, steps)
    cluster.power_on(second)
    cluster.wait_ready()
    installed.wait_ready()
    files = checkpoint_states(cluster, "checks-again", trainer, source, second)
    assert_nothing_lost(files, steps)
    assert_nothing_on_the_disk(second)


def test_a_sidecar_keeps_the_mount_until_the_trainer_has_saved(
    cluster: KubernetesCluster, installed: Installation, trainer: str, tmp_path: Path
) -> None:
    """The documented recipe for clusters without Bootseer; its pod is deleted while it saves."""
    if cluster.release("kubelet") < (1, 29):
        raise MissingError("a kubelet before 1.29 has no init containers that go on")
    node = cluster.nodes[0]
    source = f"{cluster.hdfs.url}/checkpoints/sidecar"
    text = (REPOSITORY / "docker/kubernetes/checkpoints-sidecar.yaml").read_text()
    for said, meant in (
        ("registry.example.com/bootseer-node:latest", cluster.push(bootseer_image(), "sidecar:1")),
        ("registry.example.com/trainer:latest", trainer),
        ("hdfs://namenode:8020/checkpoints", source),
        ("[python, /job/train.py, --checkpoints, /mnt/checkpoints]", json.dumps(SAVE.split()[1:])),
    ):
        assert text.count(said) == 1, said
        text = text.replace(said, meant)
    template = yaml.safe_load(text)["spec"]["template"]
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.name}
    metadata = {"name": "sidecar", "labels": {"bed": "yes"}}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
    cluster.wait_pod("sidecar", "Running", timeout_s=300)
    with following(cluster, "sidecar", tmp_path / "log") as log:
        wait_saved(log, 3)
        delete(cluster, "sidecar", node)
        wait_for(lambda: "ended at" in log.read_text(), "the trainer's last line")
    steps = saved_steps(tmp_path / "log")
    assert f"last checkpoint {steps[-1]}" in (tmp_path / "log").read_text()
    files = checkpoint_states(cluster, "check-sidecar", trainer, source, cluster.nodes[1])
    assert_nothing_lost(files, steps)
    assert_nothing_on_the_disk(node)
