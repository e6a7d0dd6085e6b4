"""Volumes of the CSI driver in pods without privileges, and a daily warm-up of their content."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from testbed.containers.chart import NAMESPACE
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.objects import pod
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

_USER = {"runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True}


class _Site:
    """Cluster with Bootseer, and an environment in its store."""

    def __init__(self, installed: Installation, shell: str, folder: Path) -> None:
        self.cluster, self.installed, self.shell = installed.cluster, installed, shell
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
        """Return a pod on the first node with these volumes, each at /NAME."""
        found = pod(
            name,
            self.shell,
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

    def remove(self, *names: str) -> None:
        """Delete the pods of this file, and wait until nothing is mounted for them."""
        self.cluster.kubectl("delete", "pod", *names, timeout_s=180)
        wait_for(lambda: not self.volumes(), "the end of the volumes")

    def trees(self) -> list[str]:
        """Return the paths of the driver's trees of images and environments on the first node."""
        found = self.installed.mounts(self.cluster.nodes[0])
        return [one for one in found if "/csi.bootseer.io/trees/" in one]

    def volumes(self) -> list[str]:
        """Return the mount points of pods' volumes on the first node."""
        found = self.installed.mounts(self.cluster.nodes[0])
        return [one for one in found if "kubernetes.io~csi" in one]


@pytest.fixture(scope="module")
def site(installed: Installation, shell: str, tmp_path_factory: pytest.TempPathFactory) -> _Site:
    """Site that all tests of this file share."""
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
    site.remove("trainer", "other")


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
        lambda: "is not the URL of a remote storage" in cluster.events("hostile"),
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


READ = "cat /data/etc/nsswitch.conf && ! echo x > /data/x && ls -l /data/bin/busybox"


def test_an_image_is_a_volume_of_a_pod_without_a_runtime_class(site: _Site) -> None:
    volume = {"kind": "image", "image": f"registry://{site.shell}"}
    site.cluster.apply(site.pod("reader", READ, data=volume))
    found = site.cluster.wait_pod("reader", "Succeeded", timeout_s=300)
    assert "runtimeClassName" not in found["spec"]
    assert "hosts: files" in site.cluster.kubectl("logs", "reader")
    site.remove("reader")
    wait_for(lambda: not site.trees(), "the end of the tree", timeout_s=300, interval_s=1.0)


def test_an_image_is_a_volume_that_an_administrator_makes(site: _Site) -> None:
    cluster = site.cluster
    attributes = {"kind": "image", "image": f"registry://{site.shell}"}
    shared: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    csi = {"driver": "csi.bootseer.io", "volumeHandle": "data", "volumeAttributes": attributes}
    room = {"storage": "1Gi"}
    for kind, spec in (
        ("PersistentVolume", {"capacity": room, "csi": {**csi, "readOnly": True}}),
        ("PersistentVolumeClaim", {"resources": {"requests": room}, "volumeName": "data"}),
    ):
        metadata = {"name": "data"}
        spec = {**shared, **spec}
        cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec})
    try:
        for name in ("first", "second"):
            given = site.pod(name, READ, data={})
            claim = {"claimName": "data", "readOnly": True}
            given["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": claim}]
            cluster.apply(given)
        for name in ("first", "second"):
            cluster.wait_pod(name, "Succeeded", timeout_s=300)
            assert "hosts: files" in cluster.kubectl("logs", name)
        site.remove("first", "second")
    finally:
        cluster.kubectl("delete", "pvc,pv", "data", "--wait=false")


def warming(site: _Site) -> dict[str, Any]:
    """Documented recipe with the images of this cluster, and with the current minute."""
    version = "batch/v1" if site.cluster.serves("batch/v1/CronJob") else "batch/v1beta1"
    text = (REPOSITORY / "docker/kubernetes/warm-cronjob.yaml").read_text()
    for said, meant in (
        ("registry.example.com/bootseer-node:0.1.0", site.installed.image),
        ("registry.example.com/team/trainer:v7", site.shell),
        ("train-env", "torch"),
        ("0-600", "0-1"),
        ("apiVersion: batch/v1", f"apiVersion: {version}"),
    ):
        assert text.count(said) == 1
        text = text.replace(said, meant)
    found: dict[str, Any] = yaml.safe_load(text)
    count = len(site.cluster.nodes)
    found["spec"]["schedule"] = "* * * * *"
    found["spec"]["jobTemplate"]["spec"] |= {"completions": count, "parallelism": count}
    return found


def test_each_node_is_warmed_at_a_time_of_the_day_and_when_asked(site: _Site) -> None:
    cluster, where = site.cluster, ("--namespace", NAMESPACE)
    # The node's cache holds nothing of earlier tests.
    cluster.wipe(cluster.nodes[1])
    site.installed.wait_ready()
    job = warming(site)
    cluster.apply(job)
    name = job["metadata"]["name"]

    def pods_of(job: str) -> list[dict[str, Any]]:
        """Return the pods of a Job that have warmed their nodes."""
        found = cluster.list("pods", *where, f"--selector=job-name={job}")
        return [one for one in found if one["status"]["phase"] == "Succeeded"]

    def by_the_clock() -> list[str]:
        """Return the complete Jobs of the CronJob."""
        found = cluster.list("jobs", *where)
        return [
            one["metadata"]["name"] for one in found
            if one["metadata"]["name"].startswith(name) and one["status"].get("succeeded") == 2
        ]  # fmt: skip

    try:
        wait_for(by_the_clock, "the Job of this minute", timeout_s=240, interval_s=1.0)
        made = by_the_clock()[0]
        cluster.kubectl("patch", "cronjob", name, *where, "--patch", '{"spec": {"suspend": true}}')
        cluster.kubectl("create", "job", *where, f"--from=cronjob/{name}", "warm-now")
        wait_for(
            lambda: len(pods_of("warm-now")) == 2, "the warm-up", timeout_s=240, interval_s=1.0
        )
        for each in (made, "warm-now"):
            hosts = {one["spec"]["nodeName"] for one in pods_of(each)}
            assert hosts == {node.name for node in cluster.nodes}
    finally:
        cluster.kubectl("delete", "cronjob", name, *where)
        cluster.kubectl("delete", "job", "warm-now", *where, "--ignore-not-found")
    # Both are here completely: the image's layers, and the environment's.
    shown = cluster.kubectl(
        "exec", *where, site.installed.pod_of("node", cluster.nodes[1]),
        "--container", "csi", "--", "bootseer", "image", "cache", "--json",
    )  # fmt: skip
    streams = json.loads(shown)["streams"]
    assert len(streams) >= 2
    # An image that was pulled as a whole has neither.
    assert all(one.get("present_bytes") == one.get("stream_bytes") for one in streams), streams
