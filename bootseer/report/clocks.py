"""Brings the clocks of the nodes together at barriers. Pure (no I/O).

All processes leave a barrier within milliseconds of each other, whatever their clocks say then. The
difference of a node's clock to the others is therefore read off the ends of the barriers that it
took part in. A node that shares no barrier with the rest is named. It keeps its clock, unless that
is so far from the others' that no scheduling explains it: then it is taken to begin as the median
node does.
"""

import statistics
from collections.abc import Iterable

from msgspec import Struct

from bootseer.report.graph import StartGraph, end_of

# Barriers with nearly all nodes of the largest one compare all their clocks at once.
_NEARLY_ALL = 0.9
_FAR_S = 1800.0


class Clocks(Struct, frozen=True):
    """What was found about the clocks of a start."""

    shift_s: dict[str, float]
    """Seconds to add to the times of each node; the median node has about 0."""
    spread_s: float
    """How far the ends of one barrier lie apart after that, in the median."""
    apart: tuple[str, ...]
    """Nodes that share no barrier with the others: nothing says how far their clocks are off."""


def compare_clocks(graph: StartGraph) -> Clocks:
    """How far each node's clock is off."""
    ends = sorted(_ends(graph), key=len, reverse=True)
    largest = len(ends[0]) if ends else 0
    samples: dict[str, list[float]] = {}
    for released in ends:
        if len(released) >= _NEARLY_ALL * largest:
            middle = statistics.median(released.values())
            for node, time in released.items():
                samples.setdefault(node, []).append(middle - time)
    shift = {node: statistics.median(found) for node, found in samples.items()}
    _reach_others(shift, ends)
    spreads = [_spread(released, shift) for released in ends]
    apart = tuple(node for node in graph.nodes if node not in shift)
    _bring_near(shift, apart, graph)
    if len(graph.nodes) < 2:
        apart = ()
    return Clocks(shift, statistics.median(spreads) if spreads else 0.0, apart)


def _bring_near(shift: dict[str, float], apart: Iterable[str], graph: StartGraph) -> None:
    """Let nodes that met no other begin with the median node, where they are far from it."""
    begins: dict[str, float] = {}
    for group in graph.groups:
        for node, time in zip(group.nodes, group.times[0], strict=True):
            begins[node] = min(time, begins.get(node, time))
    if begins:
        middle = statistics.median(time + shift.get(node, 0.0) for node, time in begins.items())
        for node in apart:
            if abs(begins[node] - middle) > _FAR_S:
                shift[node] = middle - begins[node]


def _ends(graph: StartGraph) -> Iterable[dict[str, float]]:
    """For each barrier of several nodes when each node left it, by its own clock."""
    released: dict[str, dict[str, float]] = {}
    for group, span, keys in graph.barriers():
        open_rows = set(group.open_spans.get(span, ()))
        times = group.times[end_of(span)]
        for row, (key, node, time) in enumerate(zip(keys, group.nodes, times, strict=True)):
            if row not in open_rows:
                nodes = released.setdefault(key, {})
                # The first rank of a node to leave: others may have been held up afterwards.
                nodes[node] = min(time, nodes.get(node, time))
    return [nodes for nodes in released.values() if len(nodes) > 1]


def _reach_others(shift: dict[str, float], ends: list[dict[str, float]]) -> None:
    """Extend the shifts to nodes that share smaller barriers with nodes whose shift is known."""
    waiting = ends
    while waiting:
        later = []
        for released in waiting:
            known = [time + shift[node] for node, time in released.items() if node in shift]
            if not known:
                later.append(released)
                continue
            middle = statistics.median(known)
            for node, time in released.items():
                shift.setdefault(node, middle - time)
        if len(later) == len(waiting):
            return
        waiting = later


def _spread(released: dict[str, float], shift: dict[str, float]) -> float:
    times = [time + shift.get(node, 0.0) for node, time in released.items()]
    return max(times) - min(times)
