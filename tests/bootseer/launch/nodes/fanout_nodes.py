"""Nodes of a start with fan-out: addresses of this machine, and a store that counts its bytes."""

import contextlib
import secrets
from pathlib import Path
from typing import Any

from bootseer.demo.limited import Account, read_account
from bootseer.store import TEST_NETWORK
from testbed.node import Node, node_at
from testbed.servers.registry import free_port

COUNT = 4


class FanoutNodes:
    """Nodes that share a store, which counts its bytes."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        self.base = base
        self.store = base / "store"
        self.tally = base / "tally"
        hosts = [f"127.0.0.{number + 2}" for number in range(COUNT)]
        self.variables = {
            TEST_NETWORK: "bootseer.demo.limited",
            # As srun gives them to each task of a step.
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "127.0.0.[1-9]",
            "SLURM_STEP_NODELIST": f"127.0.0.[2-{COUNT + 1}]",
            "BOOTSEER_FANOUT_PORT": str(free_port()),
            "BOOTSEER_FANOUT_KEY": secrets.token_hex(32),
            "BOOTSEER_FILL": "0",
        }
        url = f"limit+{self.store.as_uri()}?tally={self.tally}"
        self.nodes = [
            stack.enter_context(
                node_at(base / host, url, variables={**self.variables, "SLURMD_NODENAME": host})
            )
            for host in hosts
        ]

    def start(self, *words: object) -> None:
        """Start all nodes at once, and wait until all processes of the start have ended."""
        started = [node.start("run", *words) for node in self.nodes]
        for process in started:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
        for node in self.nodes:
            node.wait_clean()

    def moved(self) -> Account:
        return read_account(self.tally)


def fanout_figures(node: Node) -> dict[str, Any]:
    """Return the attributes of a node's stage "fan-out"."""
    span = node.spans()["fan-out"]
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}
