"""From an empty cluster: one command, one annotation, and a wiped node replays the image."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.images.layout import OciLayout
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.images import shell_image, trainer_image
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.machine import ClusterNode
from testbed.kubernetes.objects import pod
from testbed.kubernetes.starts import REPLAY, image_server_logs, index, start, wait_logged
from testbed.waiting import wait_for


@pytest.fixture(autouse=True)
def emptied(cluster: KubernetesCluster) -> Iterator[None]:
    """Remove the test's pods."""
    yield
    cluster.kubectl("delete", "pods", "--selector=bed=yes")


def test_an_unmodified_image_is_recorded_and_replays_on_a_wiped_node(
    cluster: KubernetesCluster, installed: Installation, trainer: str, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    pulled = start(cluster, "pulled", trainer, second)
    assert pulled.pod["spec"].get("runtimeClassName") is None
    assert layers_on(cluster, second) == layers_of_the_trainer()

    start(cluster, "indexed", trainer, first, annotations=REPLAY)
    wait_logged(first, "indexed the image", 2)
    cluster.wipe(second)
    installed.wait_ready()
    start(cluster, "recorded", trainer, second, annotations=REPLAY)
    assert not layers_on(cluster, second)
    wait_logged(second, "published a bundle", 1)
    cluster.wipe(second)
    installed.wait_ready()

    replayed = start(cluster, "replayed", trainer, second, annotations=REPLAY)
    assert replayed.pod["spec"]["runtimeClassName"] == "bootseer"
    assert not layers_on(cluster, second)
    assert "no bundle" not in image_server_logs(second)
    # In one trace: the times of the scheduler, containerd's pull, the mount and the kubelet's
    # start.
    text = cluster.kubectl("get", "pods,events", "--namespace", "default", "--output", "json")
    (tmp_path / "events.json").write_text(text)
    report = (sys.executable, "-m", "bootseer", "--store", installed.store, "report", "replayed")
    known = f"kubernetes={tmp_path / 'events.json'}"
    wanted = {"pod scheduling", "pod set-up", "image pull", "image mount", "container start"}

    def names() -> set[str]:
        document = json.loads(cluster.lan.run(*report, "--with", known, "--json").stdout)
        return {stage["name"] for stage in document["stages"]}

    # The snapshotter publishes its part by itself.
    wait_for(lambda: wanted <= names(), f"{wanted}", interval_s=1.0)


def test_a_pod_without_the_class_waits_until_some_pod_has_pulled_the_image(
    cluster: KubernetesCluster, installed: Installation
) -> None:
    """containerd knows an image whichever snapshotter it was pulled for.

    It unpacks the image for another snapshotter from its own content, which lacks the layers.
    """
    image = cluster.push(shell_image(), "team/shared:1")
    index(installed, image)
    node = cluster.nodes[1]
    cluster.wipe(node)
    installed.wait_ready()
    cluster.apply(pod("lazy", image, "echo lazy", node=node.name, annotations=REPLAY))
    cluster.wait_pod("lazy", "Succeeded")
    cluster.apply(pod("waits", image, "echo waited", node=node.name))
    wait_for(
        lambda: "content digest" in cluster.events("waits"), "what it waits for", interval_s=1.0
    )
    pulls = pod("pulls", image, "echo pulled", node=node.name)
    pulls["spec"]["containers"][0]["imagePullPolicy"] = "Always"
    cluster.apply(pulls)
    for name in ("pulls", "waits"):
        cluster.wait_pod(name, "Succeeded", timeout_s=180)


def layers_of_the_trainer() -> set[str]:
    """Return the digests of the image's layers."""
    layout, tag = trainer_image(print)
    index = json.loads((layout / "index.json").read_bytes())
    (digest,) = (
        one["digest"]
        for one in index["manifests"]
        if one["annotations"]["org.opencontainers.image.ref.name"] == tag
    )
    manifest = json.loads(OciLayout(layout).blob(digest).read_bytes())
    return {layer["digest"] for layer in manifest["layers"]}


def layers_on(cluster: KubernetesCluster, node: ClusterNode) -> set[str]:
    """Return the layers of the trainer that containerd has on a node."""
    return layers_of_the_trainer() & set(cluster.ctr(node, "content", "list", "-q").split())
