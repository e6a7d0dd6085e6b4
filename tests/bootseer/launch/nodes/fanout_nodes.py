"""Nodes of a start with fan-out: addresses of this machine, and a store that notes its requests."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bootseer.demo.limited import Account, read_account
from bootseer.fanout.trees import Trees
from bootseer.store import TEST_NETWORK
from testbed.node import Node, node_at
from testbed.noted_store import noted_paths
from testbed.servers.registry import free_port
from testbed.waiting import wait_for

COUNT = 4
TREES = Trees(COUNT)
ORDINARY = set(range(COUNT)) - {TREES.root(0), TREES.root(1)}
"""Nodes that are fed by nodes in both trees. All others read the store."""


class FanoutNodes:
    """Nodes that share a store, which counts the requests and bytes of each."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        self.base = base
        self.store = base / "store"
        hosts = [f"127.0.0.{number + 2}" for number in range(COUNT)]
        self.variables = {
            TEST_NETWORK: "testbed.noted_store",
            # As srun gives them to each task of a step.
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "127.0.0.[1-9]",
            "SLURM_STEP_NODELIST": f"127.0.0.[2-{COUNT + 1}]",
            "BOOTSEER_FANOUT_PORT": str(free_port()),
            "BOOTSEER_FANOUT_KEY": secrets.token_hex(32),
            "BOOTSEER_FILL": "0",
            # A record is published, or not, by what the start happens to read.
            "BOOTSEER_RECORD": "never",
        }
        self.nodes = [
            stack.enter_context(
                node_at(
                    base / host,
                    f"limit+{self.store.as_uri()}?tally={base / host}.tally",
                    variables={**self.variables, "SLURMD_NODENAME": host},
                )
            )
            for host in hosts
        ]

    def start(self, *words: object, absent: Sequence[int] = ()) -> str:
        """Start nodes at once, and wait until all processes of the start have ended.

        Return what they said.
        """
        nodes = [node for number, node in enumerate(self.nodes) if number not in absent]
        return self._finish([node.start("run", *words) for node in nodes], nodes)

    def start_in_order(self, *words: object, of_ordinary: Sequence[object] = ()) -> None:
        """Start the nodes that read the store before the others; no node is ready before all are.

        However busy this machine is, no node finds another one missing. `of_ordinary`: further
        options of the nodes that are fed by others.
        """
        gate = self.base / "gate"
        gate.mkdir()
        os.mkfifo(gate / "go")
        for path in (gate, gate / "go"):
            path.chmod(0o777)
        words = ("--bind", f"{gate}:/gate", *words)
        started = []
        for number in sorted(range(COUNT), key=lambda number: number in ORDINARY):
            options = of_ordinary if number in ORDINARY else ()
            started.append(self.nodes[number].start("run", *options, *words))
            if number not in ORDINARY:
                wait_for(partial(self.nodes[number].count_begun, "image"), "a fan-out")
        wait_for(lambda: len(list(gate.iterdir())) == COUNT + 1, "all nodes")
        with (gate / "go").open("r+b", buffering=0) as go:
            go.write(bytes(COUNT))
            self._finish(started, self.nodes)

    def _finish(self, started: Sequence["subprocess.Popen[str]"], nodes: Sequence[Node]) -> str:
        told = ""
        for process in started:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
            told += said
        for node in nodes:
            node.wait_clean()
        return told

    def paths(self, number: int) -> list[str]:
        """Return the paths of all that a node read of the store, or looked for."""
        return noted_paths(Path(f"{self.nodes[number].base}.tally"))

    def moved(self) -> list[Account]:
        """Return what each node asked of the store."""
        return [read_account(Path(f"{node.base}.tally")) for node in self.nodes]


def fanout_figures(node: Node) -> dict[str, Any]:
    """Return the attributes of a node's stage "fan-out"."""
    span = node.spans()["fan-out"]
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}
