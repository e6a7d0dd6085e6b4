"""Volumes of the pods of a StatefulSet on four nodes that feed each other, and one store.

The kubelets of this Kubernetes know no Indexed Jobs (they came with 1.21); the pods of both have a
number in their names.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.objects import pod
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

COUNT = 4
SIZE_BYTES = 24 << 20
WORKLOAD = "train"
# On the machine of the control plane, which reaches the store.
_PUBLISH = """
import sys
from pathlib import Path
from bootseer.prefetch.publish.publishing import wait_published
from testbed.mounts.image_mounts import checksums_in_child, index, mounted, settings_at
folder, store, name = Path(sys.argv[1]), *sys.argv[2:]
maker = settings_at(folder / "maker", store_url=store)
index(maker, folder / "made", name)
with mounted(maker, name, folder / "mnt") as image:
    checksums_in_child([image.directory / "weights"])
assert wait_published(maker, 60)
"""


@pytest.fixture(scope="module")
def site(cluster: KubernetesCluster, installed: Installation) -> Iterator[Installation]:
    """Yield Bootseer on four nodes."""
    with cluster.more_nodes(COUNT):
        installed.wait_ready()
        yield installed
    installed.wait_ready()


def _make_image(site: Installation, name: str, folder: Path) -> str:
    """Publish an image that no node has, and the record of a start that has read all of it.

    Returns the SHA-256 of its file `weights`.
    """
    data = os.urandom(SIZE_BYTES)
    (folder / "made").mkdir()
    (folder / "made/weights").write_bytes(data)
    site.cluster.lan.run(
        *(sys.executable, "-c", _PUBLISH, folder, site.store, name),
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    return hashlib.sha256(data).hexdigest()


def _make_environment(site: Installation, name: str, folder: Path) -> str:
    """Publish an environment that no node has; return the SHA-256 of its file `weights`."""
    data = os.urandom(1 << 20)
    (folder / "made").mkdir()
    (folder / "made/weights").write_bytes(data)
    site.cluster.lan.run(
        *(sys.executable, "-m", "bootseer", "--store", site.store),
        *("--cache-dir", folder / "cache", "--run-dir", folder / "run"),
        *("snapshot", "create", "--target", folder / "made", "--name", name),
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    return hashlib.sha256(data).hexdigest()


def _stateful_set(name: str, template: dict[str, Any]) -> dict[str, Any]:
    """Return a StatefulSet whose pods start together, each on a node of its own."""
    labels = template["metadata"]["labels"]
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    template["spec"] |= {"restartPolicy": "Always", "affinity": apart}
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name},
        "spec": {
            "serviceName": name, "replicas": COUNT, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": template["metadata"], "spec": template["spec"]},
        },
    }  # fmt: skip


def _run(site: Installation, name: str, template: dict[str, Any], digest: str) -> set[str]:
    """Run a StatefulSet until each pod has printed the digest; return the pods' nodes."""
    cluster = site.cluster
    cluster.apply(_stateful_set(name, template))
    names = [f"{name}-{number}" for number in range(COUNT)]
    nodes = set()

    def is_made(pod: str) -> bool:
        return cluster.try_kubectl("get", "pod", pod).returncode == 0

    def has_read(pod: str) -> bool:
        return digest in cluster.try_kubectl("logs", pod).stdout

    try:
        for one in names:
            wait_for(partial(is_made, one), f"the pod {one}", timeout_s=60)
            found = cluster.wait_pod(one, "Running", timeout_s=180)
            nodes.add(found["spec"]["nodeName"])
            wait_for(partial(has_read, one), f"the environment of {one}", timeout_s=60)
    finally:
        cluster.kubectl("delete", "statefulset", name)
        cluster.kubectl("delete", "pods", "--ignore-not-found", *names, timeout_s=180)
    assert len(nodes) == COUNT
    return nodes


def _assert_fed(
    site: Installation, job: str, nodes: set[str], folder: Path, bytes_min: int = 1
) -> None:
    """Assert that the report of the start tells who fed whom, and of about one copy.

    Each node has received `bytes_min` bytes at least.
    """
    rows = folder / "rows"
    command: list[str | Path] = [
        *(sys.executable, "-m", "bootseer", "--store", site.store),
        *("--timeline-dir", folder / "none", "report", job, "--json", "--rows", rows),
    ]

    def fan_out() -> dict[str, Any]:
        done = site.cluster.lan.run(*command, check=False, env={"PYTHONPATH": str(REPOSITORY)})
        found = json.loads(done.stdout)["analysis"]["fan_out"] if done.returncode == 0 else None
        return found or {"node_count": 0}

    wait_for(lambda: fan_out()["node_count"] == COUNT, "the figures", timeout_s=90, interval_s=1.0)
    found = fan_out()
    each = found["received_bytes"] / COUNT
    assert each >= bytes_min
    # Every node for itself would be four. On a busy machine a node may be silent for a second, and
    # another one then reads a part of the store.
    assert found["store_bytes"] < 2 * each, found
    stages = [json.loads(line) for line in rows.read_text().splitlines()]
    told = {one["node"]: one["attributes"] for one in stages if one["name"] == "fan-out"}
    assert told.keys() == nodes
    said = {node: one["bootseer.fanout.sources"] for node, one in told.items()}
    fed = [node for node in nodes if any(f"was fed by {other} at" in said[node] for other in nodes)]
    assert len(fed) >= COUNT - 1, said


def test_what_a_start_reads_of_an_image_leaves_the_store_about_once(
    site: Installation, shell: str, tmp_path: Path
) -> None:
    digest = _make_image(site, "fed:1", tmp_path)
    template = pod("fed", shell, "sha256sum /data/weights; exec sleep 3600")
    attributes = {
        "kind": "image", "image": "fed:1", "workload": WORKLOAD,
        "job": "fed", "submission": "s1", "nodes": str(COUNT),
    }  # fmt: skip
    volume = {"driver": "csi.bootseer.io", "readOnly": True, "volumeAttributes": attributes}
    template["spec"]["volumes"] = [{"name": "data", "csi": volume}]
    (container,) = template["spec"]["containers"]
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    _assert_fed(site, "fed", _run(site, "fed", template, digest), tmp_path, SIZE_BYTES)


def test_an_annotation_makes_volumes_that_feed_each_other(
    site: Installation, shell: str, tmp_path: Path
) -> None:
    # No earlier start has read it, so that its manifest and index travel alone.
    digest = _make_environment(site, "annotated", tmp_path)
    annotations = {"bootseer.io/environment": "annotated", "bootseer.io/fanout-hosts": "auto"}
    script = "sha256sum /opt/environment/weights; exec sleep 3600"
    template = pod("annotated", shell, script, annotations=annotations)
    # torchrun's number of nodes.
    template["spec"]["containers"][0]["env"] = [{"name": "PET_NNODES", "value": str(COUNT)}]
    _assert_fed(site, "annotated", _run(site, "annotated", template, digest), tmp_path)
