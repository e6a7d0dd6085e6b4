"""Volumes of the CSI driver on a cluster, in pods without privileges."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.kubernetes.bed.installation import Installation
from tests.clusters.kubernetes.objects import pod
from tests.support.containers.chart import NAMESPACE
from tests.support.mounts.fuse_mount import REPOSITORY
from tests.support.waiting import wait_for

_USER = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}


class _Site:
    """A cluster with Bootseer, and an environment in its store."""

    def __init__(self, installed: Installation, shell: str, folder: Path) -> None:
        self.cluster, self.installed, self._shell = installed.cluster, installed, shell
        self.checkpoints = f"{self.cluster.hdfs.url}/checkpoints"
        (folder / "torch").mkdir()
        (folder / "torch/version").write_text("2.6\n")
        command = ["snapshot", "create", "--target", str(folder / "torch"), "--name", "torch"]
        self.cluster.lan.run(
            sys.executable, "-m", "bootseer", "--store", installed.store,
            "--cache-dir", str(folder / "cache"), "--run-dir", str(folder / "run"), *command,
            timeout_s=120, env={"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip

    def pod(self, name: str, script: str, **volumes: dict[str, str]) -> dict[str, Any]:
        """A pod on the first node with these volumes, each at /NAME."""
        found = pod(
            name,
            self._shell,
            script,
            node=self.cluster.nodes[0].name,
            securityContext=_USER,
            volumes=[
                {"name": key, "csi": {"driver": "csi.bootseer.io", "volumeAttributes": attributes}}
                for key, attributes in volumes.items()
            ],
        )
        (container,) = found["spec"]["containers"]
        container["volumeMounts"] = [{"name": key, "mountPath": f"/{key}"} for key in volumes]
        return found

    def volumes(self) -> list[str]:
        """Where pods' volumes are mounted on the first node."""
        found = self.installed.mounts(self.cluster.nodes[0])
        return [one for one in found if "kubernetes.io~csi" in one]


@pytest.fixture(scope="module")
def site(installed: Installation, shell: str, tmp_path_factory: pytest.TempPathFactory) -> _Site:
    """The site that all tests of this file share."""
    return _Site(installed, shell, tmp_path_factory.mktemp("site"))


def test_volumes_in_pods_while_the_driver_is_replaced(site: _Site) -> None:
    cluster = site.cluster
    script = """
        cat /env/version && echo mine > /private/mine && cat /private/version /private/mine
        ! echo x > /env/x
        echo 1 > /ckpt/step-1
        while [ ! -e /ckpt/go ]; do sleep 0.2; done
        cat /env/version /private/mine && echo 2 > /ckpt/step-2
    """
    environment = {"kind": "environment", "environment": "torch"}
    volumes = {
        "env": environment,
        "private": {**environment, "writable": "true", "size": "16MiB", "uid": "1000"},
        "ckpt": {"kind": "checkpoint", "source": site.checkpoints},
    }
    cluster.apply(site.pod("trainer", script, **volumes))
    cluster.wait_pod("trainer", "Running")
    wait_for(lambda: "mine" in cluster.kubectl("logs", "trainer").split())
    old = _driver_of(site)
    cluster.kubectl("delete", "pod", old, "--namespace", NAMESPACE, timeout_s=180)
    cluster.apply(site.pod("other", "echo > /ckpt/go; cat /ckpt/step-1", ckpt=volumes["ckpt"]))
    cluster.wait_pod("other", "Succeeded", timeout_s=180)
    cluster.wait_pod("trainer", "Succeeded")
    said = cluster.kubectl("logs", "trainer").split("\n")
    assert [one for one in said if "Read-only" not in one] == [
        "2.6",
        "2.6",
        "mine",
        "2.6",
        "mine",
        "",
    ]
    cluster.kubectl("delete", "pod", "trainer", "other", timeout_s=180)
    wait_for(lambda: not site.volumes(), "the end of the volumes", timeout_s=60)


def _driver_of(site: _Site) -> str:
    for one in site.cluster.list("pods", "--namespace", NAMESPACE):
        names = [container["name"] for container in one["spec"]["containers"]]
        if "csi" in names and one["spec"]["nodeName"] == site.cluster.nodes[0].name:
            return str(one["metadata"]["name"])
    raise AssertionError("no driver runs")


def test_what_may_not_be_mounted_is_said_in_the_pods_events(site: _Site) -> None:
    cluster = site.cluster
    volume = {"kind": "checkpoint", "source": "file:///etc"}
    cluster.apply(site.pod("hostile", "ls /etc2", etc2=volume))
    wait_for(
        lambda: "is no URL of a storage that nodes share" in cluster.events("hostile"),
        "the event",
        timeout_s=60,
    )
    cluster.kubectl("delete", "pod", "hostile", timeout_s=120)


def test_a_pod_that_is_deleted_while_it_saves_leaves_whole_files(site: _Site) -> None:
    script = """
        echo whole > /ckpt/model; i=0
        while :; do i=$((i+1)); echo $i > /ckpt/save-$i; done
    """
    volume = {"kind": "checkpoint", "source": f"{site.checkpoints}/deleted"}
    cluster = site.cluster
    cluster.apply(site.pod("saver", script, ckpt=volume))
    cluster.wait_pod("saver", "Running")
    wait_for(site.volumes, "the volume")
    cluster.kubectl("delete", "pod", "saver", timeout_s=180)
    look = "cat /ckpt/model; for f in /ckpt/save-*; do [ -s $f ] || echo empty $f; done"
    cluster.apply(site.pod("reader", look, ckpt=volume))
    cluster.wait_pod("reader", "Succeeded")
    said = cluster.kubectl("logs", "reader").split()
    assert said[0] == "whole"
    assert "empty" not in said
    cluster.kubectl("delete", "pod", "reader", timeout_s=120)
