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


@pytest.fixture(scope="module")
def site(cluster: KubernetesCluster, installed: Installation) -> Iterator[Installation]:
    """Yield Bootseer on four nodes."""
    with cluster.more_nodes(COUNT):
        installed.wait_ready()
        yield installed
    installed.wait_ready()


def _make_environment(site: Installation, name: str, folder: Path) -> str:
    """Publish an environment that no node has; return the SHA-256 of its file `weights`."""
    data = os.urandom(SIZE_BYTES)
    (folder / "made").mkdir()
    (folder / "made/weights").write_bytes(data)
    site.cluster.lan.run(
        sys.executable, "-m", "bootseer", "--store", site.store,
        "--cache-dir", folder / "cache", "--run-dir", folder / "run",
        "snapshot", "create", "--target", folder / "made", "--name", name,
        env={"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
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


def _assert_fed(site: Installation, job: str, nodes: set[str], folder: Path) -> None:
    """Assert that the report of the start tells who fed whom, and of about one copy."""
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
    assert each >= SIZE_BYTES
    # Every node for itself would be four. On a busy machine a node may be silent for a second, and
    # another one then reads a part of the store.
    assert found["store_bytes"] < 2 * each, found
    stages = [json.loads(line) for line in rows.read_text().splitlines()]
    told = {one["node"]: one["attributes"] for one in stages if one["name"] == "fan-out"}
    assert told.keys() == nodes
    said = {node: one["bootseer.fanout.sources"] for node, one in told.items()}
    fed = [node for node in nodes if any(f"was fed by {other} at" in said[node] for other in nodes)]
    assert len(fed) >= COUNT - 1, said


def test_an_environment_leaves_the_store_about_once(
    site: Installation, shell: str, tmp_path: Path
) -> None:
    digest = _make_environment(site, "fed", tmp_path)
    template = pod("fed", shell, "sha256sum /env/weights; exec sleep 3600")
    attributes = {
        "kind": "environment", "environment": "fed",
        "job": "fed", "submission": "s1", "nodes": str(COUNT),
    }  # fmt: skip
    volume = {"driver": "csi.bootseer.io", "readOnly": True, "volumeAttributes": attributes}
    template["spec"]["volumes"] = [{"name": "env", "csi": volume}]
    (container,) = template["spec"]["containers"]
    container["volumeMounts"] = [{"name": "env", "mountPath": "/env"}]
    _assert_fed(site, "fed", _run(site, "fed", template, digest), tmp_path)


def test_an_annotation_makes_volumes_that_feed_each_other(
    site: Installation, shell: str, tmp_path: Path
) -> None:
    digest = _make_environment(site, "annotated", tmp_path)
    annotations = {"bootseer.io/environment": "annotated", "bootseer.io/fanout": "auto"}
    script = "sha256sum /opt/environment/weights; exec sleep 3600"
    template = pod("annotated", shell, script, annotations=annotations)
    # torchrun's number of nodes.
    template["spec"]["containers"][0]["env"] = [{"name": "PET_NNODES", "value": str(COUNT)}]
    _assert_fed(site, "annotated", _run(site, "annotated", template, digest), tmp_path)
