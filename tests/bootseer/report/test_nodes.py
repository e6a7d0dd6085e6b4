"""Real starts on several nodes with networks and control groups of their own on this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.explain import StartModel
from bootseer.report.graph import LAUNCHER, tracks_of
from bootseer.report.read import read_graph
from bootseer.report.sources import StartFiles, TimelineFolder, find_start
from bootseer.timeline.otlp import READY
from testbed.starts.experiment import FAULTS, Experiment, Scale
from testbed.starts.nodes import NamespaceNode, Nodes, nodes

pytestmark = [pytest.mark.needs("mount"), pytest.mark.timeout(400)]

# Nothing of Bootseer in it; it only tells the test when its first step was done.
_TRAIN = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
torch.save(model.state_dict(), f"model{os.environ['RANK']}.pt")
model.load_state_dict(torch.load(f"model{os.environ['RANK']}.pt"))
optimizer = torch.optim.SGD(model.parameters())
for batch in torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=8):
    model(batch).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    path = f"stepped-{os.environ['RANK']}"
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write(str(time.time()))
dist.destroy_process_group()
# Threads of torch may abort the interpreter at its end, whoever started it.
os._exit(0)
"""


@pytest.fixture
def two_nodes() -> Iterator[Nodes]:
    with nodes(2) as site:
        yield site


def _start(
    node: NamespaceNode, folder: Path, *command: object, **variables: str
) -> "subprocess.Popen[bytes]":
    """Start `bootseer run` on one of the nodes."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER")},
        "BOOTSEER_TIMELINE_DIR": str(folder / "timelines"),
        "BOOTSEER_CACHE_DIR": str(folder / node.name / "cache"),
        "BOOTSEER_RUN_DIR": str(folder / node.name / "run"),
        "BOOTSEER_PUBLISH_TIMELINES": "off",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    words = [sys.executable, "-m", "bootseer", "--job", "j", "run", "--", *map(str, command)]
    return node.run(words, environ, folder, folder / f"{node.name}.log")


def _end(started: Mapping[str, "subprocess.Popen[bytes]"], folder: Path) -> None:
    try:
        for name, process in started.items():
            assert process.wait(300) == 0, (folder / f"{name}.log").read_text()[-3000:]
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _found(folder: Path) -> StartFiles:
    return find_start(TimelineFolder(folder / "timelines"), "j")


def _report(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "report", "j", "--json"],
        env={**os.environ, "BOOTSEER_TIMELINE_DIR": str(folder / "timelines")},
        capture_output=True, check=True, timeout=100,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.needs(modules=["torch"])
def test_a_torchrun_job_on_two_nodes_is_explained(two_nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    first = two_nodes.nodes[0]
    began = time.time()
    started = {}
    for node in two_nodes.nodes:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        group = ["--nnodes", 2, "--nproc-per-node", 1, "--local-addr", node.address]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "7"]
        meeting += ["--rdzv-endpoint", f"{first.address}:29400"]
        meeting += ["--rdzv-conf", f"is_host={node is first}"]
        started[node.name] = _start(node, tmp_path, *torchrun, *group, *meeting, "train.py")
    _end(started, tmp_path)
    stepped = [float((tmp_path / f"stepped-{rank}").read_text()) for rank in range(2)]
    watch_s = max(stepped) - began

    document = _report(tmp_path)
    assert (document["node_count"], document["rank_count"]) == (2, 2)
    names = {row["name"] for row in document["stages"]}
    assert {"rendezvous", "init_process_group", "first collective", "first batch"} <= names
    _check_tracks(tmp_path)
    analysis = StartModel(read_graph(_found(tmp_path), 0)).analyse()
    assert analysis.is_ready
    named_s = sum(one.seconds for one in analysis.path if one.is_wait or one.label.kind == "in")
    assert analysis.ready_s == pytest.approx(watch_s, rel=0.02)
    # On a quiet machine it is more than 0.95; a busy one lengthens what lies between two stages.
    assert named_s >= 0.75 * analysis.ready_s
    assert abs(analysis.replay_error_s) <= 0.02 * analysis.ready_s
    assert {one.barrier for one in analysis.blame} == {
        "rendezvous 7",
        "init_process_group 1",
        "first collective of group 0",
    }
    # From the launcher by way of torchrun to the last rank.
    roles = list(dict.fromkeys(segment.role for segment in analysis.path))
    assert roles == [LAUNCHER, "run", "train.py"]


def _check_tracks(folder: Path) -> None:
    """Assert that each process's stages were noted, and that ranks began behind the rendezvous."""
    tracks = tracks_of(_found(folder).stages(), 0)
    ranks = [track for track in tracks if track.role == "train.py"]
    assert sorted(track.rank for track in ranks) == [0, 1]
    meetings = {}
    for agent in (track for track in tracks if track.role == "run"):
        start, meeting = [one for one in agent.spans if not one.name.startswith("import ")]
        assert (start.name, meeting.name) == ("python start", "rendezvous")
        meetings[agent.node] = meeting.end_s
    for track in ranks:
        assert [one.name for one in track.spans if not one.name.startswith("import ")] == [
            "python start",
            "init_process_group",
            "torch.load",
            "first batch",
            "first collective",
            READY,
        ]
        assert track.spans[0].begin_s >= meetings[track.node]


def test_three_slow_nodes_are_blamed_for_what_was_slow(tmp_path: Path) -> None:
    scale = Scale(
        read_bytes=8_000_000,
        download_bytes=17_000_000,
        slow_disk_bytes_per_s=1_500_000,
        line_mbit_per_s=96.0,
        slow_line_mbit_per_s=24.0,
        late_s=6.0,
    )
    with nodes(5) as site, Experiment(site, tmp_path, scale) as experiment:
        analysis = experiment.start(FAULTS).analyse()
    found = {one.node: one.cause.name for one in analysis.stragglers}
    assert found == dict(FAULTS.values())
    blamed = [(one.barrier, one.node) for one in analysis.blame]
    assert blamed == [("begin", "node-1"), ("data", "node-2"), ("model", "node-3")]
    assert abs(analysis.replay_error_s) <= 0.02 * analysis.ready_s
