"""A pod's first line on an empty node, and Bootseer's memory and CPU time on the cluster.

The cluster is the test bed's: two nodes, each with its own namespaces, containerd and disk. The
registry and the HDFS are in this machine's memory; their network is not limited.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from bench.model import (
    Case,
    Column,
    Sample,
    Session,
    TakeSample,
    Variant,
    Workspace,
    at_least,
    ratio,
)
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.images import bootseer_image, trainer_image
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.machine import ClusterNode
from testbed.kubernetes.objects import pod
from testbed.kubernetes.starts import REPLAY, TRAIN, image_server_logs, index, start, wait_logged

_POD_COUNT = 20
_WATCHED_S = 20.0
_COMPONENTS = {
    "spawner": "bootseer kubernetes spawner",
    "snapshotter": "bootseer -v snapshotter",
    "csi": "bootseer -v kubernetes csi",
    "webhook": "bootseer kubernetes webhook",
    "image_servers": "bootseer.prefetch.serve",
    "checkpoint_servers": "bootseer.fuse.striped.mounted.server",
}
_MOVE = """import contextlib, sys
from bootseer.errors import NotFoundError
from bootseer.store import open_backend
store, source, target = sys.argv[1:]
with contextlib.closing(open_backend(store)) as backend:
    with contextlib.suppress(NotFoundError):
        backend.delete(target, recursive=True)
    backend.rename(source, target)
"""
# Command line, proportional share of the memory, and clock ticks of each process of the node.
_SHARES = r"""for each in /proc/[0-9]*; do
  line=$(tr '\0\n' '  ' < $each/cmdline 2>/dev/null) || continue
  case $line in *bootseer*) ;; *) continue ;; esac
  memory=$(awk '/^Pss:/ {print $2}' $each/smaps_rollup 2>/dev/null)
  ticks=$(sed 's/.*) //' $each/stat 2>/dev/null | awk '{print $12 + $13}')
  echo "${memory:-0} ${ticks:-0} $line"
done"""
# Nanoseconds of CPU of all processes of the node, pods included, and bytes that it received.
_SPENT = """cat /sys/fs/cgroup/cpuacct/cpuacct.usage
awk '$1 == "eth0:" {print $2}' /proc/net/dev"""


class _Bed:
    """Cluster with Bootseer, and an image with a recorded start."""

    def __init__(self, cluster: KubernetesCluster, installation: Installation, image: str):
        self.cluster = cluster
        self.installation = installation
        self._image = image
        self._count = 0

    def start(self, variant: str) -> Sample:
        """Start a pod on a node with an empty disk, and measure the time to its first line."""
        node = self.cluster.nodes[1]
        self.cluster.wipe(node)
        self.installation.wait_ready()
        self._count += 1
        annotations = {} if variant == "pulled" else REPLAY
        records = self._without_records() if variant == "lazy" else contextlib.nullcontext()
        with records:
            cpu_ns, received = _spent(node)
            name = f"{variant}-{self._count}"
            given = start(self.cluster, name, self._image, node, annotations=annotations)
            cpu_end_ns, received_end = _spent(node)
        if annotations and ("no bundle" in image_server_logs(node)) != (variant == "lazy"):
            raise RuntimeError(f"the start was not {variant}: {image_server_logs(node)[-500:]}")
        self.clear()
        return Sample(
            given.first_line_s,
            cpu_s={"node": (cpu_end_ns - cpu_ns) / 1e9},
            moved_bytes=received_end - received,
        )

    @contextlib.contextmanager
    def _without_records(self) -> Iterator[None]:
        """Hide the records in the store, and drop those made meanwhile."""
        self._move_records("hot", "away")
        try:
            yield
        finally:
            self._move_records("away", "hot")

    def _move_records(self, source: str, target: str) -> None:
        words = (self.installation.store, source, target)
        self.cluster.lan.run(sys.executable, "-c", _MOVE, *words)

    def install(self) -> Sample:
        """Install Bootseer on empty nodes; measure the time, and memory and CPU time afterwards."""
        self.installation.remove()
        for node in self.cluster.nodes:
            self.cluster.wipe(node)
        installed_s = self.installation.apply()
        idle = self._taken("idle")
        source = f"{self.cluster.hdfs.url}/checkpoints/many"
        annotations = {**REPLAY, "bootseer.io/checkpoint": source}
        script = f"{TRAIN} --checkpoints /mnt/checkpoints --steps 100000 --every 1000000 --pause 1"
        names = [f"one-of-many-{number}" for number in range(_POD_COUNT)]
        for number, name in enumerate(names):
            node = self.cluster.nodes[number % len(self.cluster.nodes)]
            self.cluster.apply(
                pod(name, self._image, script, node=node.name, annotations=annotations)
            )
        for name in names:
            self.cluster.wait_pod(name, "Running", timeout_s=400)
        busy = self._taken(f"{_POD_COUNT}_pods")
        self.clear()
        return Sample(installed_s, figures={**idle, **busy})

    def clear(self) -> None:
        """Delete all pods that were measured."""
        self.cluster.kubectl("delete", "pods", "--selector=bed=yes", timeout_s=300)

    def _taken(self, when: str) -> dict[str, float]:
        """Return each component's memory and CPU time on the node where it is larger."""
        found: dict[str, float] = {}
        before = [_shares(node) for node in self.cluster.nodes]
        time.sleep(_WATCHED_S)
        for node, old in zip(self.cluster.nodes, before, strict=True):
            for name, (memory_kib, ticks) in _shares(node).items():
                spent_s = (ticks - old.get(name, (0, 0))[1]) / os.sysconf("SC_CLK_TCK")
                for figure, value in (
                    (f"{name}_{when}_mib", memory_kib / 1024),
                    (f"{name}_{when}_cpu_percent", max(0.0, 100 * spent_s / _WATCHED_S)),
                ):
                    found[figure] = max(found.get(figure, 0.0), round(value, 2))
        return found


def _spent(node: ClusterNode) -> tuple[int, int]:
    cpu_ns, received = map(int, node.run("sh", "-c", _SPENT).stdout.split())
    return cpu_ns, received


def _shares(node: ClusterNode) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for line in node.run("sh", "-c", _SHARES).stdout.splitlines():
        memory, ticks, command = line.split(" ", 2)
        for name, pattern in _COMPONENTS.items():
            if pattern in command:
                known = found.get(name, (0, 0))
                found[name] = (known[0] + int(memory), known[1] + int(ticks))
    return found


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    with KubernetesCluster(say=workspace.say) as cluster:
        node_image = cluster.push(bootseer_image(), "bootseer-node:bench")
        trainer = cluster.push(trainer_image(workspace.say), "team/trainer:1")
        installation = Installation(cluster, node_image)
        workspace.say(f"installed in {installation.apply():.1f} s")
        index(installation, trainer)
        node = cluster.nodes[1]
        start(cluster, "recorded", trainer, node, annotations=REPLAY)
        wait_logged(node, "published a bundle", 1)
        bed = workspace.shared["bed"] = _Bed(cluster, installation, trainer)
        bed.clear()
        workspace.shared["notes"] = [
            "seconds of a start: from before `kubectl apply` of a pod to the time stamp of its "
            "first line, on a node whose disk was emptied before, with Bootseer ready on it; "
            "nothing limits the network, which is this machine's memory",
            "CPU: of all processes of the node, pods included; MB moved: what came to it over the "
            "network; both from before the pod is asked for until it has succeeded",
            "the image has torch, pandas, transformers, scipy, scikit-learn, pyarrow and OpenCV; "
            "its program imports torch",
            "memory: proportional share of the processes on the node that has more of them; CPU "
            f"of one core over {_WATCHED_S:g} s; the {_POD_COUNT} pods have one image and one "
            "folder of checkpoints",
        ]
        yield


def _session(
    take: Callable[[_Bed], Sample],
) -> Session:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        def sample() -> Sample:
            try:
                return take(workspace.shared["bed"])
            except AssertionError as error:
                raise RuntimeError(str(error)) from None

        yield sample

    return session


CASE = Case(
    name="kubernetes",
    description="A pod's first line on an empty node of a real Kubernetes; what Bootseer takes.",
    prepare=_prepare,
    variants=(
        Variant("pulled", "pulled by containerd 1.7", _session(lambda bed: bed.start("pulled"))),
        Variant("replayed", "served and replayed", _session(lambda bed: bed.start("replayed"))),
        Variant("lazy", "served, nothing recorded", _session(lambda bed: bed.start("lazy"))),
        Variant("install", "from one command until all is ready", _session(_Bed.install)),
    ),
    ratios=(
        ratio("pulled", "replayed", "wall_s", "time", at_least(3)),
        ratio("pulled", "replayed", "cpu_s", "CPU"),
        ratio("pulled", "replayed", "moved_bytes", "bytes"),
        ratio("pulled", "lazy", "wall_s", "time"),
    ),
    columns=(
        Column("s", "wall_s"),
        Column("CPU s", "cpu_s"),
        Column("MB moved", "moved_bytes", scale=1e-6, digits=0),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
