"""Pods while parts of Bootseer are removed, as by `helm upgrade`, or down on one node.

Pods without annotations notice nothing. The others start without Bootseer, or their events have the
reason why not. For the webhook's absence see `test_webhook`. These tests run last, since they wipe
nodes.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.containers.chart import NAMESPACE
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.objects import pod
from testbed.waiting import wait_for

REPLAY = {"bootseer.io/replay": "auto"}
ENVIRONMENT = {"bootseer.io/environment": "none-such"}


@pytest.fixture(autouse=True)
def restored(cluster: KubernetesCluster, installed: Installation) -> Iterator[None]:
    """Give the test a first node that has served nothing; install all of Bootseer afterwards."""
    cluster.wipe(cluster.nodes[0])
    installed.wait_ready()
    yield
    cluster.kubectl("delete", "pods", "--selector=bed=yes", "--timeout=120s", timeout_s=180)
    installed.apply()


class _Pods:
    """Pods on the first node."""

    def __init__(self, cluster: KubernetesCluster, image: str) -> None:
        self.cluster, self._image = cluster, image
        self.checkpoint = {"bootseer.io/checkpoint": f"{cluster.hdfs.url}/checkpoints/without"}

    def apply(self, name: str, annotations: dict[str, str]) -> None:
        node = self.cluster.nodes[0].name
        script = "echo ran; ls /mnt/checkpoints /opt/environment"
        self.cluster.apply(
            pod(name, self._image, f"{script}; true", node=node, annotations=annotations)
        )

    def run(self, name: str, annotations: dict[str, str], warning: str = "") -> dict[str, Any]:
        """Run a pod whose creation gave this warning; return it.

        Retried, since the webhook knows changes of the cluster a moment later.
        """
        wait_for(lambda: self._is_warned(name, annotations, warning), warning, interval_s=0.5)
        return self.cluster.wait_pod(name, "Succeeded", timeout_s=300)

    def _is_warned(self, name: str, annotations: dict[str, str], warning: str) -> bool:
        self.apply(name, annotations)
        found = self.cluster.get("pod", name)["metadata"]["annotations"]
        if warning in found.get("bootseer.io/warnings", ""):
            return True
        self.cluster.kubectl("delete", "pod", name)
        return False

    def wait_event(self, name: str, words: str) -> None:
        """Wait until a pod that has not started has an event with these words."""
        wait_for(lambda: words in self.cluster.events(name), f"{words!r} of {name}", interval_s=0.5)
        assert self.cluster.get("pod", name)["status"]["phase"] == "Pending"


@pytest.fixture
def pods(cluster: KubernetesCluster, shell: str) -> _Pods:
    """Pods of a small image."""
    return _Pods(cluster, shell)


def test_without_the_driver(installed: Installation, pods: _Pods) -> None:
    installed.apply({"csi": {"enabled": False}})
    pods.run("plain", {})
    pods.run("environment", ENVIRONMENT, "no CSI driver")
    pods.apply("saves", pods.checkpoint)
    pods.wait_event("saves", "csi.bootseer.io")
    pods.run("replayed", REPLAY)
    installed.apply()
    pods.cluster.wait_pod("saves", "Succeeded", timeout_s=300)


def test_without_the_snapshotter(installed: Installation, pods: _Pods) -> None:
    installed.apply({"snapshotter": {"enabled": False}})
    pods.run("plain", {})
    pods.run("saves", pods.checkpoint)
    found = pods.run("replayed", REPLAY, "no runtime class")
    assert found["spec"].get("runtimeClassName") is None


def test_on_a_node_without_driver_and_snapshotter(installed: Installation, pods: _Pods) -> None:
    """The cluster has the runtime class, the CSIDriver and the webhook, for its other nodes."""
    cluster = installed.cluster
    select = {"kubernetes.io/hostname": cluster.nodes[1].name}
    spec = {"spec": {"template": {"spec": {"nodeSelector": select}}}}
    where = ("daemonset", "bootseer-node", "--namespace", NAMESPACE)
    cluster.kubectl("patch", *where, "--patch", json.dumps(spec))
    first = cluster.nodes[0].name
    wait_for(
        lambda: first not in [
            one["spec"].get("nodeName")
            for one in cluster.list("pods", "--namespace", NAMESPACE,
                                    "--selector=app.kubernetes.io/component=node")
        ],
        "the end of driver and snapshotter", timeout_s=180, interval_s=0.5,
    )  # fmt: skip
    pods.run("plain", {})
    pods.apply("saves", pods.checkpoint)
    pods.apply("replayed", REPLAY)
    pods.wait_event("saves", "csi.bootseer.io")
    pods.wait_event("replayed", "bootseer")
    remove = [{"op": "remove", "path": "/spec/template/spec/nodeSelector"}]
    cluster.kubectl("patch", *where, "--type=json", "--patch", json.dumps(remove))
    installed.wait_ready()
    cluster.wait_pod("saves", "Succeeded", timeout_s=300)
    cluster.wait_pod("replayed", "Succeeded", timeout_s=300)


def test_without_all_of_it(installed: Installation, pods: _Pods) -> None:
    """After the chart's removal, annotations have no effect."""
    installed.remove()
    for name, annotations in (("plain", {}), ("replayed", REPLAY), ("saves", pods.checkpoint)):
        spec = pods.run(name, annotations)["spec"]
        assert "runtimeClassName" not in spec
        assert [volume for volume in spec["volumes"] if "csi" in volume] == []
