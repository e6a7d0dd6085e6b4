"""Brings the clocks of the nodes together at barriers. Pure (no I/O).

All processes leave a barrier within milliseconds of each other, whatever their clocks say then. The
difference of a node's clock to the others is therefore read off the ends of the barriers that it
took part in. A node that shares no barrier with the rest keeps its clock, and is named.
"""

import statistics
from collections.abc import Iterable

from msgspec import Struct

from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.shape import end_of

# Barriers with nearly all nodes of the largest one compare all their clocks at once.
_NEARLY_ALL = 0.9


class Clocks(Struct, frozen=True):
    """What was found about the clocks of a start."""

    shift_s: dict[str, float]
    """Seconds to add to the times of each node; the median node has about 0."""
    spread_s: float
    """How far the ends of one barrier lie apart after that, in the median."""
    apart: tuple[str, ...]
    """Nodes that share no barrier with the others: their clocks are taken as they are."""


def compare_clocks(graph: StartGraph) -> Clocks:
    """How far each node's clock is off."""
    ends = sorted(_ends(graph), key=len, reverse=True)
    nodes = graph.nodes
    if not ends:
        return Clocks({}, 0.0, tuple(nodes) if len(nodes) > 1 else ())
    largest = len(ends[0])
    samples: dict[str, list[float]] = {}
    for released in ends:
        if len(released) >= _NEARLY_ALL * largest:
            middle = statistics.median(released.values())
            for node, time in released.items():
                samples.setdefault(node, []).append(middle - time)
    shift = {node: statistics.median(found) for node, found in samples.items()}
    _reach_others(shift, ends)
    spreads = [_spread(released, shift) for released in ends]
    return Clocks(shift, statistics.median(spreads), tuple(set(nodes) - shift.keys()))


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
