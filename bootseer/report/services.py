"""Load of a start on shared servers: requests, and bytes of the fan-out. Pure (no I/O)."""

import math
import statistics
from collections import defaultdict

from msgspec import Struct

from bootseer.base.requests import KINDS, PREFIX
from bootseer.report.graph import StartGraph
from bootseer.timeline.otlp import START

FANOUT = "fan-out"
"""Stage that counts the bytes nodes got from each other."""
_STAGES = (START, "image served", FANOUT)
"""Stages whose counts are added up: one per process, so that nothing is counted twice."""


class Requests(Struct, frozen=True):
    """Requests of a start's nodes to servers of one kind."""

    kind: str
    """"namenode", "bucket" or "http"."""
    median_count: float
    """Median over the nodes."""
    max_count: int
    max_node: str


class FanOut(Struct, frozen=True):
    """Bytes that the nodes of a start received by the fan-out."""

    node_count: int
    received_bytes: int
    store_bytes: int
    """Bytes that came from the store, the rest from other nodes."""

    @property
    def copies(self) -> float:
        """Bytes from the store, as a multiple of the bytes that a node received on average."""
        return self.store_bytes / (self.received_bytes / self.node_count)


def requests_of(graph: StartGraph) -> tuple[Requests, ...]:
    """Return the requests of each kind that the start made."""
    found: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in KINDS}
    nodes = graph.nodes
    for stage in _STAGES:
        for group, span in graph.spans(stage):
            for kind, by_node in found.items():
                figures = group.evidence[span].get(PREFIX + kind, ())
                for node, value in zip(group.nodes, figures, strict=False):
                    by_node[node] += 0 if math.isnan(value) else value
    return tuple(
        Requests(
            kind,
            statistics.median([by_node.get(node, 0.0) for node in nodes]),
            round(max(by_node.values())),
            max(by_node, key=lambda node: by_node[node]),
        )
        for kind, by_node in found.items()
        if any(by_node.values())
    )


def fan_out_of(graph: StartGraph) -> FanOut | None:
    """Return the bytes received by the fan-out, or None if there were none."""
    nodes: set[str] = set()
    received = stored = 0.0
    for group, span in graph.spans(FANOUT):
        evidence = group.evidence[span]
        for node, count in zip(group.nodes, evidence.get("bootseer.bytes", ()), strict=False):
            if count > 0:
                # A node of volumes writes a stage again for what came later.
                nodes.add(node)
                received += count
        figures = evidence.get("bootseer.fanout.store_bytes", ())
        stored += sum(one for one in figures if not math.isnan(one))
    return FanOut(len(nodes), round(received), round(stored)) if received else None
