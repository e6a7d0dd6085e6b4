"""Starts of pods as users make them, and checks of their checkpoints."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

from testbed.containers.chart import NAMESPACE
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.machine import ClusterNode
from testbed.kubernetes.objects import pod
from testbed.processes import killed_with_parent
from testbed.waiting import wait_for

REPLAY = {"bootseer.io/replay": "auto"}
TRAIN = "exec python3 -u /job/train.py"
# A start is recorded for two minutes.
_RECORDED_S = 240.0
CHECK = """import os, sys, torch
for name in sorted(os.listdir(sys.argv[1])):
    try:
        found = torch.load(os.path.join(sys.argv[1], name))
        is_whole = bool((found["weights"] == found["step"]).all())
    except Exception as error:
        is_whole = False
        print(name, error, file=sys.stderr)
    print("whole" if is_whole else "broken", name)
"""


@dataclass(frozen=True)
class PodStart:
    """Pod that has run, and the seconds from before its creation to its first line."""

    pod: dict[str, Any]
    first_line_s: float


def start(
    cluster: KubernetesCluster, name: str, image: str, node: ClusterNode, **given: Any
) -> PodStart:
    """Run a trainer once on a node."""
    began_s = time()
    cluster.apply(pod(name, image, TRAIN, node=node.name, **given))
    ended = cluster.wait_pod(name, "Succeeded", timeout_s=400)
    stamp = cluster.kubectl("logs", "--timestamps", name).split()[0]
    # The stamp has nanoseconds; Python parses six digits.
    printed = datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00")
    return PodStart(ended, printed.timestamp() - began_s)


def index(installation: Installation, image: str) -> None:
    """Index an image into the store, as an administrator does."""
    where = ("--namespace", NAMESPACE, installation.pod_of("node"), "--container", "snapshotter")
    command = ("bootseer", "image", "index", f"registry://{image}")
    installation.cluster.kubectl("exec", *where, "--", *command, timeout_s=400)


@contextmanager
def following(
    cluster: KubernetesCluster, name: str, path: Path, namespace: str = "default"
) -> Iterator[Path]:
    """Yield a file with a pod's output as it comes, which outlives the pod and its node."""
    command = ["kubectl", "logs", "--follow", name, "--namespace", namespace]
    with path.open("wb") as sink:
        process = subprocess.Popen(
            killed_with_parent(cluster.lan.entering(command)), env=cluster.environment,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        yield path
    finally:
        process.kill()
        process.wait()


def saved_steps(path: Path) -> list[int]:
    """Return the steps that a trainer has reported as saved."""
    lines = path.read_text(errors="replace").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("saved ")]


def wait_saved(path: Path, count: int) -> None:
    """Wait until `count` more steps are saved."""
    goal = len(saved_steps(path)) + count
    wait_for(
        lambda: len(saved_steps(path)) >= goal, f"{goal} steps saved", timeout_s=180, interval_s=0.2
    )


def checkpoint_states(
    cluster: KubernetesCluster, name: str, image: str, source: str, node: ClusterNode
) -> dict[str, str]:
    """Return for each checkpoint in a folder whether a pod reads it "whole" or "broken"."""
    script = f"python3 -c '{CHECK.replace(chr(39), chr(34))}' /mnt/checkpoints"
    given = pod(name, image, script, node=node.name)
    # The volume is in the pod itself, since a webhook on a node without power cannot add it.
    attributes = {"kind": "checkpoint", "source": source}
    volume = {"driver": "csi.bootseer.io", "volumeAttributes": attributes}
    given["spec"]["volumes"] = [{"name": "checkpoints", "csi": volume}]
    given["spec"]["containers"][0] |= {
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/mnt/checkpoints"}],
        # Where a node serves an image lazily, containerd lacks its layers for other pods, and
        # fetches them only with this policy.
        "imagePullPolicy": "Always",
    }
    cluster.apply(given)
    cluster.wait_pod(name, "Succeeded", timeout_s=300)
    lines = cluster.kubectl("logs", name).splitlines()
    cluster.kubectl("delete", "pod", name)
    return {file: state for state, _, file in (line.partition(" ") for line in lines)}


def assert_nothing_lost(files: dict[str, str], steps: Sequence[int]) -> None:
    """Assert that each saved step has a checkpoint, and that every checkpoint is whole."""
    broken = [name for name, state in files.items() if state != "whole"]
    assert not broken, files
    missing = [step for step in steps if f"step-{step:06d}.pt" not in files]
    assert not missing, (missing, files)


def assert_nothing_on_the_disk(node: ClusterNode) -> None:
    """Assert that no checkpoint lies on a node's own disk."""
    kept = node.disk / "lib"
    assert not list(kept.glob("kubelet/pods/*/volumes/**/step-*"))
    found = subprocess.run(
        ["find", kept, "-xdev", "-name", "step-*.pt"], capture_output=True, text=True, timeout=120
    )
    assert not found.stdout, found.stdout


def image_server_logs(node: ClusterNode) -> str:
    """Return the logs of the image servers on a node."""
    return node.run("sh", "-c", "cat /run/bootseer/logs/*", check=False).stdout


def wait_logged(node: ClusterNode, text: str, count: int) -> None:
    """Wait until the image servers of a node have logged `text` `count` times."""
    wait_for(
        lambda: image_server_logs(node).count(text) >= count, f"{text!r} on {node.name}",
        timeout_s=_RECORDED_S, interval_s=1.0,
    )  # fmt: skip
