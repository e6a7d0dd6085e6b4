"""Volumes of a job's pods on four nodes that feed each other, and one store."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from bootseer.checkpoints import copy_in, open_checkpoints
from bootseer.cli.command_tree import cli
from bootseer.demo.limited import read_account
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.trees import Trees
from bootseer.kubernetes.csi.fanout import pod_number
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.report.sources import StoredTimelines
from bootseer.store import TEST_NETWORK, open_store
from bootseer.timeline.otlp import Stage
from testbed.mounts.image_mounts import checksums_in_child, index, mounted, settings_at
from testbed.noted_store import noted_paths
from testbed.servers.registry import free_port
from testbed.waiting import wait_for
from tests.bootseer.kubernetes.csi.conftest import Kubelet, refused

pytestmark = pytest.mark.needs("mount", "fuse")

COUNT = 4
TREES = Trees(COUNT)
ROOTS = {TREES.root(0), TREES.root(1)}
ORDINARY = set(range(COUNT)) - ROOTS
"""Nodes that are fed by nodes in both trees. All others read the store."""
HOT = os.urandom(3_000_000)
START = {"job": "llm", "nodes": str(COUNT)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with an image, the bundle of a mount of it, and an environment."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image/hot").write_bytes(HOT)
    (tmp_path / "image/cold").write_bytes(HOT[::-1])
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/module.py").write_bytes(b"value = 1\n")
    maker = settings_at(tmp_path / "maker")
    index(maker, tmp_path / "image", "app:1")
    with mounted(maker, "app:1", tmp_path / "mnt") as image:
        checksums_in_child([image.directory / "hot"])
    assert wait_published(maker, 30)
    assert list((tmp_path / "maker/store/bundles").rglob("header"))
    return tmp_path / "maker/store"


@pytest.fixture
def nodes(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kubelet]]:
    """Yield nodes of a cluster at addresses of this machine."""
    variables = {
        TEST_NETWORK: "testbed.noted_store",
        "BOOTSEER_FANOUT_PORT": str(free_port()),
        "BOOTSEER_FILL": "0",
        "BOOTSEER_RECORD": "never",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (store.parent / "checkpoints").mkdir()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(COUNT) as pool:
        yield [
            stack.enter_context(one)
            for one in pool.map(lambda number: _node(store, number), range(COUNT))
        ]


def _checkpoints(store: Path) -> str:
    """Return the URL of a folder of checkpoints that counts the bytes read."""
    return f"limit+{(store.parent / 'checkpoints').as_uri()}?tally={store.parent / 'counted'}"


def _pod(number: int) -> dict[str, str]:
    """Return what a kubelet says of a pod of an Indexed Job."""
    return {
        "csi.storage.k8s.io/pod.name": f"llm-{number}-x7k2p",
        "csi.storage.k8s.io/pod.namespace": "team",
    }


def _node(store: Path, number: int) -> Kubelet:
    url = f"limit+{store.as_uri()}?tally={store.parent / str(number)}"
    options = ("--fanout-address", f"127.0.0.{number + 2}", "--source", _checkpoints(store))
    return Kubelet(*options, store_url=url, node=f"node-{number}")


def test_images_and_environments_leave_the_store_once(store: Path, nodes: list[Kubelet]) -> None:
    nodes[0].make_environment("packages", {"module.py": HOT[:1_000_000]})
    paths = [store.parent / f"{number}.paths" for number in range(COUNT)]
    for path in paths:
        path.unlink(missing_ok=True)
    volumes = (
        {"kind": "image", "image": "app:1"},
        {"kind": "environment", "environment": "packages"},
    )

    def start(number: int) -> None:
        for volume in volumes:
            kind = volume["kind"]
            context = {**volume, **START, **_pod(number), "submission": "s1"}
            target = nodes[number].publish(f"{kind}-{number}", context)
            if kind == "image":
                assert (target / "hot").read_bytes() == HOT
            else:
                assert (target / "module.py").read_bytes() == HOT[:1_000_000]

    noted = store / "leases/nodes"
    with ThreadPoolExecutor(COUNT) as pool:
        # The nodes that read the store begin first, so that no other one finds them missing.
        started = [pool.submit(start, number) for number in sorted(ROOTS)]
        wait_for(
            lambda: len([path for path in noted.rglob("*") if path.is_file()]) == len(ROOTS),
            "the fan-out of the first nodes",
        )
        started += [pool.submit(start, number) for number in sorted(ORDINARY)]
        for one in started:
            one.result()
    asked = [noted_paths(store.parent / str(number)) for number in range(COUNT)]
    # Not the pages that a mount needs before the bundle comes, nor the search for a similar tree's
    # record, nor addresses.
    shared = ("bundles/", "images/", "indexes/", "snapshots/")
    read = [[path for path in found if path.startswith(shared)] for found in asked]
    assert all(any("bundles/" in path for path in read[number]) for number in ROOTS), asked
    # As with `bootseer run`: on a machine that is so busy that a node says nothing for a second,
    # another one takes an object from the store.
    assert len([path for number in ORDINARY for path in read[number]]) <= 2, asked
    # The stages of the fan-out are in the start's timelines as soon as all has come.
    wait_for(
        lambda: len({one.resource["host.name"] for one in _fanout_stages(store)}) == COUNT,
        "the stages of all nodes",
    )
    told = _fanout_stages(store)
    assert {stage.attributes["bootseer.fanout.nodes"] for stage in told} == {COUNT}
    sources = [str(stage.attributes["bootseer.fanout.sources"]) for stage in told]
    assert any("was fed by node-" in text for text in sources), sources
    document = _reported(store)
    fan_out = document["analysis"]["fan_out"]
    assert fan_out["node_count"] == COUNT
    assert fan_out["store_bytes"] < 2 * fan_out["received_bytes"] / COUNT


def _fanout_stages(store: Path) -> list[Stage]:
    with open_store(store.as_uri()) as opened:
        starts = StoredTimelines(opened).starts("llm")
        return [one for start in starts for one in start.stages() if one.name == "fan-out"]


def _reported(store: Path) -> dict[str, Any]:
    """Return the document of `bootseer report` on a machine that has only the store."""
    folders = ("--store", store.as_uri(), "--timeline-dir", str(store.parent / "none"))
    done = CliRunner().invoke(cli, [*folders, "report", "llm", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_read_ahead_of_checkpoints_leaves_the_storage_once(
    store: Path, nodes: list[Kubelet]
) -> None:
    local = store.parent / "model.pt"
    local.write_bytes(HOT)
    with open_checkpoints((store.parent / "checkpoints").as_uri(), stripe_unit_bytes=1 << 20) as to:
        copy_in(to, local, "step-1/model.pt")
    volume = {"kind": "checkpoint", "source": _checkpoints(store), "read_newest": "true", **START}

    def start(number: int) -> None:
        target = nodes[number].publish("a", {**volume, **_pod(number)})
        assert (target / "step-1/model.pt").read_bytes() == HOT

    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(start, range(COUNT)))
    # A node that is silent for a second, on a busy machine, costs another copy.
    assert read_account(store.parent / "counted").bytes_read < (COUNT - 1) * len(HOT)


def test_a_node_that_reaches_no_other_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that blocks the port has the same effect as a full queue of connections."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.9", 0), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        monkeypatch.setenv("BOOTSEER_FANOUT_PORT", str(port))
        number = min(ORDINARY)
        with open_store((tmp_path / "store").as_uri()) as store:
            others = NotedAddresses(store, ("team.llm", "pods", "0"), port)
            for node in set(range(COUNT)) - {number}:
                others.note(node, "127.0.0.9", f"node-{node}")
        address = ("--fanout-address", "127.0.0.2")
        kubelet = stack.enter_context(Kubelet(*address, store_url=store.url))
        kubelet.make_environment("packages", {"module.py": b"value = 1\n"})
        volume = {"kind": "environment", "environment": "packages", **START, **_pod(number)}
        assert (kubelet.publish("a", volume) / "module.py").read_bytes() == b"value = 1\n"
        logs = kubelet.settings.run_dir / "logs"
        wait_for(lambda: any("may be blocked" in one.read_text() for one in logs.iterdir()))


def test_a_pod_without_a_number_reads_the_store(tmp_path: Path) -> None:
    with Kubelet("--fanout-address", "127.0.0.2") as node:
        node.make_environment("packages", {"module.py": b"value = 1\n"})
        volume = {"kind": "environment", "environment": "packages", **START}
        pod = {"csi.storage.k8s.io/pod.name": "llm-x7k2p", "csi.storage.k8s.io/pod.namespace": "t"}
        assert (node.publish("a", {**volume, **pod}) / "module.py").read_bytes() == b"value = 1\n"
        assert "the pod t/llm-x7k2p has no number below 4" in node.log()
        beyond = {**pod, "csi.storage.k8s.io/pod.name": "llm-4-x7k2p"}
        assert (node.publish("c", {**volume, **beyond}) / "module.py").is_file()
        assert "the pod t/llm-4-x7k2p has no number below 4" in node.log()
        checkpoint = {"kind": "checkpoint", "source": "hdfs://namenode/a", **START}
        for wrong in (
            *({**volume, "nodes": nodes} for nodes in ("many", "-1", "99999999")),
            {**volume, "job": ""},
            checkpoint,
        ):
            code, said = refused(node.publish, "b", {**wrong, **pod})
            assert code is grpc.StatusCode.INVALID_ARGUMENT, said
            assert "nodes" in said


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("llm-3-x7k2p", 3),  # Indexed Job
        ("llm-3", 3),  # StatefulSet
        ("llm-workers-0-12-x7k2p", 12),  # JobSet
        ("llm-master-0", 0),  # Kubeflow
        ("llm-worker-0", 1),
        ("llm-x7k2p", None),
        ("llm-03", None),
        ("llm", None),
        ("", None),
    ],
)
def test_numbers_of_pods(name: str, number: int | None) -> None:
    assert pod_number(name) == number
