"""Timelines of nodes with a fan-out: one object, and none is lost with another node."""

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.timeline.stored import decode_gathered
from testbed.node import Node, node_at
from testbed.servers.registry import free_port
from testbed.waiting import wait_for

COUNT = 4
TRAIN = """
import bootseer
bootseer.ready()
input()
bootseer.stage("late").end()
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    hosts = [f"127.0.0.{number + 2}" for number in range(COUNT)]
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": f"127.0.0.[2-{COUNT + 1}]",
        "BOOTSEER_FANOUT_PORT": str(free_port()),
        "BOOTSEER_FANOUT_KEY": secrets.token_hex(32),
        "BOOTSEER_PUBLISH_TIMELINES": "on",
    }
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                node_at(
                    tmp_path / host,
                    (tmp_path / "store").as_uri(),
                    variables={**variables, "SLURMD_NODENAME": host, "BOOTSEER_NODE": f"n{number}"},
                )
            )
            for number, host in enumerate(hosts)
        ]


def _report(tmp_path: Path) -> Any:
    words = ["--store", (tmp_path / "store").as_uri(), "--timeline-dir", str(tmp_path / "none")]
    done = CliRunner().invoke(cli, [*words, "report", "job", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.output)


def _stage_counts(document: Any) -> dict[str, int]:
    return {stage["name"]: stage["node_count"] for stage in document["stages"]}


def test_a_node_that_is_killed_takes_no_other_nodes_timeline(
    nodes: list[Node], tmp_path: Path
) -> None:
    stored = tmp_path / "store/starts/job/7-0"
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = [
        node.start("run", "--", sys.executable, "-c", TRAIN, stdin=subprocess.PIPE, **silent)
        for node in nodes
    ]
    try:

        def are_gathered() -> bool:
            return any(
                len(list(decode_gathered(path.read_bytes()))) == COUNT
                for path in stored.glob("*.tar")
            )

        wait_for(are_gathered, "one object with the timelines of all nodes")
        # A node that had no answer for three seconds, on a busy machine, published its own as well.
        assert len(list(stored.glob("*.tar"))) == 1
        document = _report(tmp_path)
        assert (document["node_count"], document["ready"]["rank_count"]) == (COUNT, COUNT)

        gatherer, *others = nodes
        gatherer.sweep()
        for job in jobs:
            with contextlib.suppress(BrokenPipeError):
                job.communicate("\n", timeout=60)
        for node in others:
            node.wait_clean()
    finally:
        for job in jobs:
            job.kill()
            job.wait(60)
    assert len(list(stored.glob("*.jsonl.zst"))) == COUNT - 1
    document = _report(tmp_path)
    assert document["node_count"] == COUNT
    counts = _stage_counts(document)
    assert (counts["fan-out"], counts["late"]) == (COUNT, COUNT - 1)
