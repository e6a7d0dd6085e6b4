"""Nodes of a job that feed each other: four nodes of a real Slurm, one image, one store."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fanout.trees import Trees
from bootseer.store import TEST_NETWORK
from testbed.node import node_at
from testbed.noted_store import noted_paths
from testbed.paths import REPOSITORY
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.pages import give_to_user, simple_cluster
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import IMAGE_PATH, Image
from tests.clusters.slurm.test_faults import assert_clean, script

pytestmark = pytest.mark.needs("mount", "fuse")

COUNT = 4
TREES = Trees(COUNT)
ROOTS = {TREES.root(0), TREES.root(1)}
"""Nodes that read the store; all others are fed by nodes in both trees."""
# No node is ready, and so ends its fan-out, before all have read what they need.
PROGRAM = """
import sys
sys.path.insert(0, "/source")
import bootseer, decimal, email.message, http.client, json, os, time
count = int(sys.argv[1])
open(f"/gate/begun-{os.urandom(8).hex()}", "w").close()
until = time.monotonic() + 90
while len([one for one in os.listdir("/gate") if one.startswith("begun-")]) < count:
    assert time.monotonic() < until, "the other nodes do not begin"
    time.sleep(0.05)
bootseer.ready()
"""


@pytest.fixture(scope="module")
def cluster(small_root: Path) -> Iterator[SlurmCluster]:
    """Slurm of four nodes with an image in the folder that its machines share."""
    with simple_cluster(node_count=COUNT) as running:
        Image(running.home / "image", small_root).build(Env=[f"PATH={IMAGE_PATH}"])
        yield running


def _run(image: Path | str, gate: Path | str, count: int) -> list[str]:
    binds = ["--bind", f"{REPOSITORY}:/source:ro", "--bind", f"{gate}:/gate"]
    program = ["python3", "-c", PROGRAM, str(count)]
    return ["run", "--image", f"oci:{image}:train", *binds, "--", *program]


def _begun(cluster: SlurmCluster, number: int) -> bool:
    """Return whether the fan-out of a node listens: the stage after it has begun."""
    lines = (cluster.home / f"alice/n{number + 1}").rglob("*.jsonl")
    return any('"image"' in path.read_text() for path in lines)


def test_the_nodes_of_a_step_feed_each_other(cluster: SlurmCluster, tmp_path: Path) -> None:
    shared = cluster.home / "shared"
    # One start beforehand publishes the image and the bundle of what it reads.
    (tmp_path / "gate").mkdir()
    with node_at(tmp_path / "node", (shared / "store").as_uri()) as node:
        done = node.run(*_run(cluster.home / "image", tmp_path / "gate", 1))
        assert done.returncode == 0, done.stderr
        node.wait_clean()
    assert list((shared / "store/bundles").rglob("header"))
    give_to_user(shared / "store", "alice")
    (cluster.home / "alice/gate").mkdir()
    give_to_user(cluster.home / "alice", "alice")
    # Each node counts its own requests. Those that are fed begin once the others listen.
    roots = "|".join(f"n{number + 1}" for number in sorted(ROOTS))
    task = [
        'export BOOTSEER_STORE="limit+file:///home/shared/store?tally=/home/alice/$SLURMD_NODENAME.tally"',
        'export BOOTSEER_TIMELINE_DIR="/home/alice/$SLURMD_NODENAME"',
        f'case "$SLURMD_NODENAME" in {roots}) ;; *)',
        "until test -e /home/alice/go; do sleep 0.1; done;; esac",
        shlex.join(["exec", "bootseer", *_run("/home/image", "/home/alice/gate", COUNT)]),
    ]
    variables = {
        TEST_NETWORK: "testbed.noted_store",
        "PYTHONPATH": str(REPOSITORY),
        "BOOTSEER_FILL": "0",
        "BOOTSEER_RECORD": "never",
        "BOOTSEER_PUBLISH_TIMELINES": "off",
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines = [*exports, f"srun sh -c {shlex.quote(chr(10).join(task))}"]
    words = ("-J", "fed", f"-N{COUNT}", f"-n{COUNT}", "-o", "fed.out")
    job = cluster.submit(*words, script=script(*lines))
    said = cluster.home / "alice/fed.out"
    wait_for(
        lambda: (
            all(_begun(cluster, number) for number in ROOTS)
            or cluster.state(job) in ("FAILED", "COMPLETED")
        ),
        "the nodes that read the store",
        timeout_s=120,
        interval_s=0.2,
    )
    (cluster.home / "alice/go").touch()
    state = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert state == "COMPLETED", said.read_text() + cluster.logs()
    assert "warning" not in said.read_text()
    assert_clean(cluster)
    paths = {
        number: noted_paths(cluster.home / f"alice/n{number + 1}.tally") for number in range(COUNT)
    }
    big = ("bundles/", "indexes/")
    fed = {number: [one for one in found if one.startswith(big)] for number, found in paths.items()}
    assert all(fed[number] for number in ROOTS), paths
    # Where a node of a busy machine says nothing for a second, another one reads the store.
    assert sum(len(fed[number]) for number in set(range(COUNT)) - ROOTS) <= 2, paths
