"""`KubernetesCluster`: a real Kubernetes on this machine, with a registry and an HDFS.

The control plane runs on the machine `lan`, each kubelet on a node. Tests talk to it by kubectl. A
cluster whose test was killed is removed by the next one (see `machine`).
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.base.closing import Closing
from testbed.hdfs.cluster import MiniHdfs
from testbed.kubernetes import settings
from testbed.kubernetes.images import build_image
from testbed.kubernetes.machine import (
    ADDRESS,
    CGROUPS,
    GROUP,
    ClusterNode,
    Lan,
    hierarchies,
    remove_folder,
    remove_group,
)
from testbed.kubernetes.programs import (
    cache_folder,
    given_programs,
    programs,
    release,
)
from testbed.needs import MissingError
from testbed.waiting import polling, wait_for

_PREFIX = "bootseer-kubernetes-"
_READY_DEADLINE_S = 120.0
_NODES_MAX = 8
_TOOLS = ("dpkg-source", "docker-registry", "gcc", "iptables", "java", "runc", "skopeo", "umoci")


def missing_reason() -> str:
    """Return the reason why no cluster can run here, or ""."""
    if os.geteuid() != 0:
        return "a cluster needs root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if "memory" not in hierarchies():
        return "the nodes need the cgroups of version 1"
    return ""


class KubernetesCluster(Closing):
    """A Kubernetes of `node_count` nodes until closed; `folder` is removed at the end."""

    def __init__(self, *, node_count: int = 2, say: Callable[[str], None] = print) -> None:
        """Start all programs, and return when every node is ready.

        Raises: MissingError; AssertionError with the ends of the logs.
        """
        reason = missing_reason()
        if reason:
            raise MissingError(reason)
        sweep()
        self.say = say
        self.programs = programs(cache_folder(), say)
        # Sockets below it have short names.
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        found = (given_programs(), self.programs, os.environ["PATH"])
        search_path = ":".join(str(each) for each in found if each)
        self.environment = {
            "PATH": search_path,
            "KUBECONFIG": str(settings.kubeconfig(self.folder, "admin")),
            # Go programs must not use a proxy for the cluster.
            "HTTP_PROXY": "", "HTTPS_PROXY": "", "http_proxy": "", "https_proxy": "",
            "OTEL_TRACES_EXPORTER": "none",
        }  # fmt: skip
        init = self.programs / "init"
        self.lan = Lan("lan", self.folder / "lan", init)
        self._all_nodes = [
            ClusterNode(self.lan, number, self.folder / f"node{number}", init)
            for number in range(1, _NODES_MAX + 1)
        ]
        self.nodes = self._all_nodes[:node_count]
        self._hdfs: MiniHdfs | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # ---- start and end -------------------------------------------------------------------------

    def _start(self) -> None:
        lan, folder = self.lan, self.folder
        lan.start()
        # The API server reads them once.
        settings.write_tokens(folder / "tokens.csv", self._all_nodes)
        key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
        subprocess.run(key, capture_output=True, check=True, timeout=60)
        self._control("etcd", settings.etcd(folder / "etcd"))
        registry = ["docker-registry", "serve", str(settings.registry(folder))]
        self._control("docker-registry", registry)
        self._control("kube-apiserver", settings.api_server(folder))
        self._wait("the API server", lambda: self._answers("get", "--raw", "/readyz"))
        self._control("kube-controller-manager", settings.controllers(folder))
        self._control("kube-scheduler", settings.scheduler(folder))
        self._push_pause_image()
        for node in self.nodes:
            self.power_on(node)
        self.wait_ready()
        self._wait(
            "the service account",
            lambda: self._answers("get", "serviceaccount", "default", "--namespace", "default"),
        )

    def _control(self, name: str, command: Sequence[str]) -> None:
        self.lan.daemon(name, *command, env=self.environment)

    def power_on(self, node: ClusterNode) -> None:
        """Switch a node on; `wait_ready` waits for its kubelet."""
        settings.write_node_files(node, self.programs)
        node.start([other for other in self.nodes if other is not node])
        # Each program is restarted after its end, as by systemd's `Restart=always`.
        forever = ("sh", "-c", 'while :; do "$@"; sleep 1; done', "sh")
        for name, command in (
            ("containerd", ["containerd"]),
            ("kubelet", settings.kubelet(self.folder, node, self.release("kubelet"))),
            ("kube-proxy", settings.proxy(self.folder, node, self.release("kube-proxy"))),
        ):
            node.daemon(name, *forever, *command, env=self.environment)

    def release(self, program: str) -> tuple[int, int]:
        """Return major and minor number of one of the cluster's programs."""
        return release(program, self.environment["PATH"])

    @contextlib.contextmanager
    def more_nodes(self, node_count: int) -> Iterator[list[ClusterNode]]:
        """Have so many nodes in all for a while; yield them."""
        first = list(self.nodes)
        added = self._all_nodes[len(first) : node_count]
        try:
            for node in added:
                self.power_on(node)
                for other in self.nodes:
                    other.run("ip", "route", "replace", node.pods, "via", node.address)
                self.nodes.append(node)
            self.wait_ready()
            yield self.nodes
        finally:
            self.nodes = first
            for node in added:
                node.kill()
                node.wipe()
                self.try_kubectl("delete", "node", node.name)

    def power_off(self, node: ClusterNode) -> None:
        """Kill everything on the node at once, as a power failure does."""
        node.kill()

    def wipe(self, node: ClusterNode) -> None:
        """Replace a node by a new one of the same name with an empty disk, and wait for it."""
        node.kill()
        node.wipe()
        self.kubectl("delete", "node", node.name)
        self.power_on(node)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until each node that is on is ready."""
        on = [node for node in self.nodes if node.is_on]
        self._wait("all nodes ready", lambda: all(map(self.is_ready, on)))

    def is_ready(self, node: ClusterNode) -> bool:
        """Return whether the API server considers the node ready."""
        done = self.try_kubectl("get", "node", node.name, "--output", "json")
        if done.returncode != 0:
            return False
        found = json.loads(done.stdout)["status"].get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in found)

    def close(self) -> None:
        """End all programs, and remove all their files. Idempotent."""
        if self._hdfs is not None:
            with contextlib.suppress(Exception):
                self._hdfs.stop()
        for node in self._all_nodes:
            node.close()
        self.lan.close()
        _remove(self.folder)
        self._lock.close()

    def logs(self) -> str:
        """Return the ends of all programs' logs, for the message of a failed test."""
        parts = []
        for machine in (self.lan, *self.nodes):
            for path in sorted(machine.logs.glob("*.log")):
                parts.append(f"==== {machine.name} {path.stem}\n{machine.log(path.stem)}")
        return "\n".join(parts)

    # ---- kubectl -------------------------------------------------------------------------------

    def try_kubectl(
        self, *arguments: str | Path, text: str | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as an administrator, and return its result."""
        command = ("kubectl", "--request-timeout=60s", *arguments)
        return self.lan.run(
            *command, text=text, timeout_s=timeout_s, check=False, env=self.environment
        )

    def _answers(self, *arguments: str) -> bool:
        return self.try_kubectl(*arguments).returncode == 0

    def kubectl(
        self, *arguments: str | Path, text: str | None = None, timeout_s: float = 120.0
    ) -> str:
        """Run kubectl and return its output. Raises: AssertionError with its stderr if it fails."""
        done = self.try_kubectl(*arguments, text=text, timeout_s=timeout_s)
        words = f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}"
        assert done.returncode == 0, words
        return done.stdout

    def apply(self, *documents: Mapping[str, Any] | str | Path) -> None:
        """Apply objects, their YAML, or a file of YAML."""
        for document in documents:
            if isinstance(document, Path):
                self.kubectl("apply", "--filename", document)
            else:
                text = document if isinstance(document, str) else json.dumps(document)
                self.kubectl("apply", "--filename", "-", text=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """Return one object."""
        arguments = ("get", kind, name, "--namespace", namespace, "--output", "json")
        return json.loads(self.kubectl(*arguments))  # type: ignore[no-any-return]

    def serves(self, api: str) -> bool:
        """Return whether the API server has a kind of objects, such as `batch/v1/CronJob`."""
        version, _, kind = api.rpartition("/")
        done = self.try_kubectl("get", "--raw", f"/apis/{version}")
        found = json.loads(done.stdout)["resources"] if done.returncode == 0 else []
        return any(one["kind"] == kind for one in found)

    def list(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """Return objects, of all namespaces unless the options name one."""
        options = options or ("--all-namespaces",)
        found = json.loads(self.kubectl("get", kind, *options, "--output", "json"))
        return found["items"]  # type: ignore[no-any-return]

    def events(self, name: str, namespace: str = "default") -> str:
        """Return the events of an object, a line for each."""
        option = f"--field-selector=involvedObject.name={name}"
        found = self.list("events", option, "--namespace", namespace)
        return "\n".join(f"{each['reason']}: {each['message']}" for each in found)

    def wait_pod(
        self, name: str, *phases: str, namespace: str = "default", timeout_s: float = 120.0
    ) -> dict[str, Any]:
        """Wait until the pod is in one of `phases`, and return it; fail if it ends in another."""
        for _ in polling(timeout_s, 0.2):
            pod = self.get("pod", name, namespace)
            phase = pod["status"].get("phase")
            if phase in phases:
                return pod
            if phase in ("Succeeded", "Failed"):
                break
        log = self.try_kubectl("logs", name, "--namespace", namespace).stdout
        said = f"{log}\n{self.events(name, namespace)}"
        raise AssertionError(f"{name} is not {phases} but {pod['status']}\n{said}")

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        try:
            wait_for(condition, what, timeout_s=_READY_DEADLINE_S, interval_s=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def ctr(self, node: ClusterNode, *arguments: str) -> str:
        """Run `ctr` on a node in Kubernetes' namespace, and return its output."""
        return node.run("ctr", "-n", "k8s.io", *arguments, env=self.environment).stdout

    # ---- registry and HDFS ---------------------------------------------------------------------

    def push(self, image: tuple[Path, str], name: str) -> str:
        """Copy an image, a tag of an OCI layout, to the registry; return its name for pods."""
        layout, tag = image
        where = f"{settings.REGISTRY}/{name}"
        copy = ("skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests")
        self.lan.run(*copy, "--dest-tls-verify=false", f"oci:{layout}:{tag}", f"docker://{where}",
                     timeout_s=600, env=self.environment)  # fmt: skip
        return where

    def _push_pause_image(self) -> None:
        layout, tree = self.folder / "pause", self.folder / "pause-tree"
        tree.mkdir()
        shutil.copy(self.programs / "init", tree / "pause")
        build_image(layout, "1", {tree: "/"}, ["--config.entrypoint=/pause"])
        self.push((layout, "1"), "pause:1")

    @property
    def hdfs(self) -> MiniHdfs:
        """HDFS that nodes and pods reach, started at its first use, with a folder `checkpoints`."""
        if self._hdfs is None:
            launcher = self.lan.entering(["env"])
            self._hdfs = MiniHdfs(
                self.folder / "hdfs", datanode_count=1, address=ADDRESS, launcher=launcher
            )
            self._hdfs.start()
            make = "import sys; from bootseer.store import open_backend; "
            make += "open_backend(sys.argv[1], deadline_s=60.0).mkdir('checkpoints')"
            self.lan.run(sys.executable, "-c", make, self._hdfs.url)
        return self._hdfs


def sweep() -> None:
    """Remove the files of clusters whose test was killed; their processes ended with the test."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)


def _remove(folder: Path) -> None:
    for hierarchy in hierarchies():
        remove_group(CGROUPS / hierarchy / GROUP / folder.name)
        with contextlib.suppress(OSError):
            (CGROUPS / hierarchy / GROUP).rmdir()
    remove_folder(folder)
