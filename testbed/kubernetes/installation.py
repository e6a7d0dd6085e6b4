"""Bootseer on the cluster: installs its chart by Helm, waits for it, removes it."""

import json
import time
from collections.abc import Mapping
from typing import Any

from testbed.containers.chart import CHART, NAMESPACE
from testbed.containers.helm import helm_program
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.machine import ClusterNode
from testbed.waiting import wait_for

_DEADLINE_S = 300.0


class Installation:
    """Release of the chart on a cluster, with a store on the cluster's HDFS."""

    def __init__(self, cluster: KubernetesCluster, image: str) -> None:
        """Prepare a release of an image in the cluster's registry. Raises: MissingError."""
        self.cluster, self.image = cluster, image
        self._helm = helm_program()
        repository, _, tag = image.rpartition(":")
        self.store = f"{cluster.hdfs.url}/bootseer"
        self._values: dict[str, Any] = {
            "image": {"repository": repository, "tag": tag},
            "settings": {"store": self.store},
            # The nodes have no systemd: the loop that runs containerd restarts it.
            "containerd": {"restartCommand": "kill {pid}"},
            "metrics": {"dashboard": False},
        }

    def apply(self, values: Mapping[str, Any] | None = None) -> float:
        """Install or upgrade with further values; return the seconds until everything was ready."""
        began_s = time.monotonic()
        where = ("upgrade", "--install", "bootseer", str(CHART), "--create-namespace")
        text = json.dumps({**self._values, **(values or {})})
        self.helm(*where, "--values", "-", text=text)
        self.wait_ready()
        return time.monotonic() - began_s

    def helm(self, *arguments: str, text: str | None = None) -> str:
        """Run Helm and return its output. Raises: AssertionError with its stderr if it fails."""
        where, environment = ("--namespace", NAMESPACE), self.cluster.environment
        done = self.cluster.lan.run(
            self._helm, *arguments, *where, text=text, timeout_s=_DEADLINE_S, env=environment
        )
        return done.stdout

    def wait_ready(self) -> None:
        """Wait until every pod of Bootseer is ready, on every node that is on."""
        try:
            wait_for(
                lambda: not self.unready(), "Bootseer ready", timeout_s=_DEADLINE_S, interval_s=0.5
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.unready()}\n{self.logs()}") from None

    def unready(self) -> list[str]:
        """Return the DaemonSets and Deployments that are not ready, with their counts."""
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
        """Return the name of a pod of a component, on a node if one is given."""
        label = f"--selector=app.kubernetes.io/component={component}"
        for pod in self.cluster.list("pods", label, "--namespace", NAMESPACE):
            is_there = node is None or pod["spec"].get("nodeName") == node.name
            if is_there and "deletionTimestamp" not in pod["metadata"]:
                return str(pod["metadata"]["name"])
        raise AssertionError(f"no pod of {component} on {node and node.name}")

    def logs(self) -> str:
        """Return the ends of all logs of Bootseer's pods, and the pods' events."""
        said = []
        for pod in self.cluster.list("pods", "--namespace", NAMESPACE):
            name = pod["metadata"]["name"]
            log = ("logs", name, "--namespace", NAMESPACE, "--all-containers", "--tail=60")
            done = self.cluster.try_kubectl(*log)
            events = self.cluster.events(name, NAMESPACE)
            said.append(f"==== {name} {pod['status'].get('phase')}\n{done.stdout}{events}")
        return "\n".join(said)

    def remove(self) -> None:
        """Uninstall the chart, and wait until no pod is left."""
        self.helm("uninstall", "bootseer")
        wait_for(
            lambda: not self.cluster.list("pods", "--namespace", NAMESPACE),
            "the end of all pods",
            timeout_s=_DEADLINE_S,
            interval_s=0.5,
        )

    def mounts(self, node: ClusterNode) -> list[str]:
        """Return the mount points of Bootseer on the node, dead ones included."""
        shown = node.run("cat", "/proc/self/mountinfo").stdout
        found = []
        for line in shown.splitlines():
            place, _, kind = line.partition(" - ")
            if kind.startswith("fuse") or "bootseer" in place.split()[4]:
                found.append(place.split()[4])
        return found
