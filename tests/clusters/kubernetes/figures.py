"""Figures of the cluster as JSON: `python -m tests.clusters.kubernetes.figures > FILE`.

Measured side by side in one run: from one command to Bootseer ready; from a pod that is asked for
to its first line, pulled by containerd and replayed, each on a node with an empty disk; memory and
CPU of each component, idle and with twenty pods. Nothing shapes the network, which is
this machine's memory.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from bench.model import SkippedError
from tests.clusters.kubernetes.bed.cluster import Cluster
from tests.clusters.kubernetes.bed.images import bootseer_image, trainer_image
from tests.clusters.kubernetes.bed.installation import Installation
from tests.clusters.kubernetes.bed.machine import Node
from tests.clusters.kubernetes.objects import pod
from tests.clusters.kubernetes.starts import REPLAY, TRAIN, start, wait_said

ROUND_COUNT = 3
POD_COUNT = 20
_WATCHED_S = 60.0
_COMPONENTS = {
    "spawner": "bootseer kubernetes spawner",
    "snapshotter": "bootseer -v snapshotter",
    "csi": "bootseer -v kubernetes csi",
    "webhook": "bootseer kubernetes webhook",
    "servers of images": "bootseer.prefetch.serve",
    "servers of checkpoints": "bootseer.fuse.striped.mounted.server",
}
# Command line, proportional share of the memory, and clock ticks of each process of the node.
_SHARES = r"""for each in /proc/[0-9]*; do
  line=$(tr '\0\n' '  ' < $each/cmdline 2>/dev/null) || continue
  case $line in *bootseer*) ;; *) continue ;; esac
  memory=$(awk '/^Pss:/ {print $2}' $each/smaps_rollup 2>/dev/null)
  ticks=$(sed 's/.*) //' $each/stat 2>/dev/null | awk '{print $12 + $13}')
  echo "${memory:-0} ${ticks:-0} $line"
done"""


def measured(say: Callable[[str], None]) -> dict[str, Any]:
    """All figures."""
    with Cluster(say=say) as cluster:
        image = cluster.push(bootseer_image(), "bootseer-node:test")
        trainer = cluster.push(trainer_image(say), "team/trainer:1")
        installation = Installation(cluster, image)
        installed_s = installation.apply()
        say(f"installed in {installed_s:.1f} s")
        starts = _starts(cluster, installation, trainer, say)
        idle = _components(cluster)
        busy = _with_pods(cluster, trainer, say)
    medians = {name: round(statistics.median(found), 2) for name, found in starts.items()}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "install_to_ready_s": round(installed_s, 1),
        "first_line_s": {name: [round(one, 2) for one in found] for name, found in starts.items()},
        "first_line_median_s": medians,
        "replayed_is_faster": round(medians["pulled"] / medians["replayed"], 2),
        "idle": idle,
        f"with_{POD_COUNT}_pods": busy,
    }


def _starts(
    cluster: Cluster, installation: Installation, trainer: str, say: Callable[[str], None]
) -> dict[str, list[float]]:
    first, second = cluster.nodes
    start(cluster, "indexed", trainer, first, annotations=REPLAY)
    wait_said(first, "indexed the image", 2)
    found: dict[str, list[float]] = {"pulled": [], "recorded": [], "replayed": []}
    for number in range(ROUND_COUNT):
        for kind, annotations in (("pulled", {}), ("replayed", REPLAY)):
            cluster.wipe(second)
            installation.wait_ready()
            if kind == "replayed" and number == 0:
                given = start(cluster, "recorded", trainer, second, annotations=REPLAY)
                found["recorded"].append(given.first_line_s)
                wait_said(second, "published a bundle", 1)
                cluster.wipe(second)
                installation.wait_ready()
            given = start(cluster, f"{kind}-{number}", trainer, second, annotations=annotations)
            found[kind].append(given.first_line_s)
            say(f"{kind}: {given.first_line_s:.2f} s")
            cluster.kubectl("delete", "pods", "--selector=bed=yes")
    return found


def _with_pods(cluster: Cluster, trainer: str, say: Callable[[str], None]) -> dict[str, Any]:
    source = f"{cluster.hdfs.url}/checkpoints/many"
    annotations = {**REPLAY, "bootseer.io/checkpoint": source}
    names = [f"one-of-many-{number}" for number in range(POD_COUNT)]
    for number, name in enumerate(names):
        node = cluster.nodes[number % len(cluster.nodes)]
        script = f"{TRAIN} --checkpoints /mnt/checkpoints --steps 100000 --every 1000000 --pause 1"
        cluster.apply(pod(name, trainer, script, node=node.name, annotations=annotations))
    for name in names:
        cluster.wait_pod(name, "Running", timeout_s=400)
    say(f"{POD_COUNT} pods run")
    return _components(cluster)


def _components(cluster: Cluster) -> dict[str, Any]:
    """What each component has of the memory and the CPU of its node, the larger of the nodes'."""
    found: dict[str, Any] = {}
    before = [_shares(node) for node in cluster.nodes]
    time.sleep(_WATCHED_S)
    for node, old in zip(cluster.nodes, before, strict=True):
        for name, (memory_kib, ticks) in _shares(node).items():
            cpu = max(0, ticks - old.get(name, (0, 0))[1]) / os.sysconf("SC_CLK_TCK") / _WATCHED_S
            one = {"memory_mib": round(memory_kib / 1024, 1), "cpu_percent": round(100 * cpu, 2)}
            known = found.get(name, one)
            found[name] = {key: max(known[key], one[key]) for key in one}
    return found


def _shares(node: Node) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for line in node.run("sh", "-c", _SHARES).stdout.splitlines():
        memory, ticks, command = line.split(" ", 2)
        for name, pattern in _COMPONENTS.items():
            if pattern in command:
                known = found.get(name, (0, 0))
                found[name] = (known[0] + int(memory), known[1] + int(ticks))
    return found


def main() -> int:
    """Print the figures; what is going on goes to standard error."""
    try:
        figures = measured(lambda line: print(line, file=sys.stderr, flush=True))
    except SkippedError as reason:
        print(f"no Kubernetes here: {reason}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
