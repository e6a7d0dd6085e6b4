"""What a start asks of servers that all of its nodes share. Pure (no I/O)."""

import math
import statistics
from collections import defaultdict

from msgspec import Struct

from bootseer.base.requests import KINDS, PREFIX
from bootseer.report.graph import StartGraph
from bootseer.timeline.otlp import START

FANOUT = "fan-out"
"""The stage that notes what nodes got from each other."""
_STAGES = (START, "image served", FANOUT)
"""One process each: what others note lies within, or follows the start."""


class Requests(Struct, frozen=True):
    """Requests of the nodes of a start to servers of one kind."""

    kind: str
    """"namenode", "bucket" or "http"."""
    median_count: float
    """Of a node."""
    max_count: int
    max_node: str


class FanOut(Struct, frozen=True):
    """What the nodes of a start got from each other."""

    node_count: int
    received_bytes: int
    store_bytes: int
    """How much of that the store sent."""

    @property
    def copies(self) -> float:
        """Return how often the store sent what a node received on average."""
        return self.store_bytes / (self.received_bytes / self.node_count)


def requests_of(graph: StartGraph) -> tuple[Requests, ...]:
    """Return the requests by kind, those of which there were any."""
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
    """Return what nodes got from each other; None where they got nothing."""
    nodes, received, stored = 0, 0.0, 0.0
    for group, span in graph.spans(FANOUT):
        evidence = group.evidence[span]
        came = [one for one in evidence.get("bootseer.bytes", ()) if one > 0]
        nodes += len(came)
        received += sum(came)
        figures = evidence.get("bootseer.fanout.store_bytes", ())
        stored += sum(one for one in figures if not math.isnan(one))
    return FanOut(nodes, round(received), round(stored)) if received else None
