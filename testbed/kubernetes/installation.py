"""Bootseer on the cluster: its chart installed by Helm with values, waited for, removed."""

import json
import time
from collections.abc import Mapping
from typing import Any

from testbed.containers.chart import CHART, NAMESPACE
from testbed.containers.helm import helm_program
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.machine import ClusterNode
from testbed.waiting import wait_for

_DEADLINE_S = 300.0


class Installation:
    """A release of the chart, on a cluster with a store on its HDFS."""

    def __init__(self, cluster: Cluster, image: str) -> None:
        """From an image in its registry. Raises: MissingError where Helm cannot be had."""
        self.cluster, self.image = cluster, image
        self._helm = helm_program()
        repository, _, tag = image.rpartition(":")
        self.store = f"{cluster.hdfs.url}/bootseer"
        self._values: dict[str, Any] = {
            "image": {"repository": repository, "tag": tag},
            "settings": {"store": self.store},
            # The nodes have no systemd: what runs containerd starts it again.
            "containerd": {"restartCommand": "kill {pid}"},
            "metrics": {"dashboard": False},
        }

    def apply(self, values: Mapping[str, Any] | None = None) -> float:
        """Install it or upgrade to it, with further values; returns the seconds until all of it
        was ready."""
        began_s = time.monotonic()
        where = ("upgrade", "--install", "bootseer", str(CHART), "--create-namespace")
        text = json.dumps({**self._values, **(values or {})})
        self.helm(*where, "--values", "-", text=text)
        self.wait_ready()
        return time.monotonic() - began_s

    def helm(self, *arguments: str, text: str | None = None) -> str:
        """What Helm prints. Raises: AssertionError with its words when it fails."""
        where, environment = ("--namespace", NAMESPACE), self.cluster.environment
        done = self.cluster.lan.run(
            self._helm, *arguments, *where, text=text, timeout_s=_DEADLINE_S, env=environment
        )
        return done.stdout

    def wait_ready(self) -> None:
        """Wait until every pod of ours is ready, on every node that is on."""
        try:
            wait_for(
                lambda: not self.unready(), "Bootseer ready", timeout_s=_DEADLINE_S, look_s=0.5
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.unready()}\n{self.logs()}") from None

    def unready(self) -> list[str]:
        """What is not as it should be, by name."""
        found = []
        for one in self.cluster.list("daemonsets,deployments", "--namespace", NAMESPACE):
            status, name = one["status"], one["metadata"]["name"]
            if one["kind"] == "DaemonSet":
                wanted = sum(node.is_on for node in self.cluster.nodes)
                ready = status.get("numberReady", 0)
            else:
                wanted, ready = one["spec"]["replicas"], status.get("readyReplicas", 0)
            is_seen = status.get("observedGeneration") == one["metadata"]["generation"]
            if ready != wanted or not is_seen:
                found.append(f"{name}: {ready} of {wanted}")
        return found

    def pod_of(self, component: str, node: ClusterNode | None = None) -> str:
        """The name of a pod of ours, on a node."""
        label = f"--selector=app.kubernetes.io/component={component}"
        for pod in self.cluster.list("pods", label, "--namespace", NAMESPACE):
            is_there = node is None or pod["spec"].get("nodeName") == node.name
            if is_there and "deletionTimestamp" not in pod["metadata"]:
                return str(pod["metadata"]["name"])
        raise AssertionError(f"no pod of {component} on {node and node.name}")

    def logs(self) -> str:
        """The ends of all logs of ours, and what was said of the pods."""
        said = []
        for pod in self.cluster.list("pods", "--namespace", NAMESPACE):
            name = pod["metadata"]["name"]
            log = ("logs", name, "--namespace", NAMESPACE, "--all-containers", "--tail=60")
            done = self.cluster.try_kubectl(*log)
            events = self.cluster.events(name, NAMESPACE)
            said.append(f"==== {name} {pod['status'].get('phase')}\n{done.stdout}{events}")
        return "\n".join(said)

    def remove(self) -> None:
        """Uninstall it, and wait until no pod is left."""
        self.helm("uninstall", "bootseer")
        wait_for(
            lambda: not self.cluster.list("pods", "--namespace", NAMESPACE),
            "the end of all pods",
            timeout_s=_DEADLINE_S,
            look_s=0.5,
        )

    def mounts(self, node: ClusterNode) -> list[str]:
        """Mount points on the node that are ours, or that ours left dead."""
        shown = node.run("cat", "/proc/self/mountinfo").stdout
        found = []
        for line in shown.splitlines():
            place, _, kind = line.partition(" - ")
            if kind.startswith("fuse") or "bootseer" in place.split()[4]:
                found.append(place.split()[4])
        return found
