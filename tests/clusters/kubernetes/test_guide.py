"""docs/kubernetes.md as it is: every command, in order, on a cluster without Bootseer.

The reader's own names are replaced: registry, store, node. `docker` builds nothing, since the image
is built by the tests' own recipe. Helm is the older major version; all other tests of this folder
use the newer one.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from testbed.containers.helm import HELM_3, helm_program
from testbed.containers.node_image import NAME
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.images import bootseer_image
from testbed.kubernetes.machine import ClusterNode
from testbed.kubernetes.settings import REGISTRY
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

GUIDE = REPOSITORY / "docs" / "kubernetes.md"
TRAINER = "team/trainer:v7"
WARM_LOG = "kubectl logs --namespace bootseer-system daemonset/bootseer-warm"
# A difference of the tests' nodes from a reader's: they have no systemd.
INSTALL = "helm install bootseer docker/kubernetes/chart"
RESTART = "--set containerd.restartCommand='kill {pid}'"


def blocks() -> list[str]:
    text = GUIDE.read_text()
    found = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(found), "blocks of another kind"
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    """Cluster of its own: the shared one has Bootseer."""
    helm_program(HELM_3)
    running = KubernetesCluster()
    with running:
        image = bootseer_image()
        running.push(image, f"{NAME}:0.1.0")
        running.push(image, TRAINER)
        yield running


class Reader:
    """Runs the commands of the guide."""

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        self._cluster = cluster
        programs = folder / "programs"
        programs.mkdir()
        (programs / "helm").symlink_to(helm_program(HELM_3))
        (programs / "docker").write_text("#!/bin/sh\n")
        (programs / "docker").chmod(0o755)
        self._environment = {
            **cluster.environment,
            "PATH": f"{programs}:{cluster.environment['PATH']}",
        }
        self._names = {
            "registry.example.com": REGISTRY,
            "hdfs://namenode:8020": cluster.hdfs.url,
            "gpu-1": cluster.nodes[0].name,
            INSTALL: f"{INSTALL} {RESTART}",
        }

    def do(self, block: str) -> str:
        for name, ours in self._names.items():
            block = block.replace(name, ours)
        script = f"set -euo pipefail; cd {REPOSITORY}\n{block}"
        lan = self._cluster.lan
        done = lan.run("bash", "-c", script, timeout_s=900, check=False, env=self._environment)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout


def test_every_command_of_the_guide(cluster: KubernetesCluster, tmp_path: Path) -> None:
    before = {node.name: files(node.disk / "etc/containerd") for node in cluster.nodes}
    reader = Reader(cluster, tmp_path)
    printed = {}
    for block in blocks():
        printed[block] = reader.do(block)
        if "warm.images" in block:
            wait_for(lambda: f"{TRAINER} is here" in reader.do(WARM_LOG), "the image on the node")
    said = "\n".join(printed.values())
    for words in ("trained", "step 1", "bootseer", "containerd runs with the snapshotter"):
        assert words in said, words
    # Nothing runs, nothing is mounted, and containerd is unchanged. Once a minute a kubelet looks
    # for pods that it has missed, such as during a restart of containerd.
    wait_for(
        lambda: not cluster.list("pods", "--namespace", "bootseer-system"),
        "the end of all pods",
        timeout_s=180,
    )
    for node in cluster.nodes:
        wait_for(partial(is_as_before, node, before[node.name]), "containerd's old file")
        for line in node.run("cat", "/proc/self/mounts").stdout.splitlines():
            _, place, kind, *_ = line.split()
            assert not kind.startswith("fuse"), line
            assert "bootseer" not in place, line


def is_as_before(node: ClusterNode, before: dict[str, str]) -> bool:
    return files(node.disk / "etc/containerd") == before


def files(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}
