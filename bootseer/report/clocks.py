"""Clock correction: compares the nodes' clocks at barriers. Pure (no I/O).

All processes leave a barrier within milliseconds of each other, so the differences between the
barrier's end times are differences of the nodes' clocks. A node that shares no barrier with the
others is reported and keeps its clock, unless it is off by more than `_FAR_S`, which no scheduling
explains: the node is then assumed to begin at the same time as the median node.
"""

import statistics
from collections.abc import Iterable

from msgspec import Struct

from bootseer.report.graph import StartGraph, end_of

# Barriers with nearly all nodes of the largest one compare all their clocks at once.
_NEARLY_ALL = 0.9
_FAR_S = 1800.0


class Clocks(Struct, frozen=True):
    """Clock corrections of a start's nodes."""

    shift_s: dict[str, float]
    """Seconds to add to each node's times; about 0 for the median node."""
    spread_s: float
    """Median spread of a barrier's end times after the correction."""
    apart: tuple[str, ...]
    """Nodes that share no barrier with others, so that their clocks cannot be compared."""


def compare_clocks(graph: StartGraph) -> Clocks:
    """Compute the clock correction of each node."""
    ends = sorted(_ends(graph), key=len, reverse=True)
    largest = len(ends[0]) if ends else 0
    samples: dict[str, list[float]] = {}
    for released in ends:
        if len(released) >= _NEARLY_ALL * largest:
            middle = statistics.median(released.values())
            for node, time in released.items():
                samples.setdefault(node, []).append(middle - time)
    shift = {node: statistics.median(found) for node, found in samples.items()}
    _extend_to_smaller_barriers(shift, ends)
    spreads = [_spread(released, shift) for released in ends]
    apart = tuple(node for node in graph.nodes if node not in shift)
    _align_far_nodes(shift, apart, graph)
    if len(graph.nodes) < 2:
        apart = ()
    return Clocks(shift, statistics.median(spreads) if spreads else 0.0, apart)


def _align_far_nodes(shift: dict[str, float], apart: Iterable[str], graph: StartGraph) -> None:
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
    """Return when each node left each barrier that has several nodes, by the node's own clock."""
    released: dict[str, dict[str, float]] = {}
    for group, span, keys in graph.barriers():
        open_rows = set(group.open_spans.get(span, ()))
        times = group.times[end_of(span)]
        for row, (key, node, time) in enumerate(zip(keys, group.nodes, times, strict=True)):
            if row not in open_rows:
                nodes = released.setdefault(key, {})
                # The node's first rank: others may have been delayed after the barrier opened.
                nodes[node] = min(time, nodes.get(node, time))
    return [nodes for nodes in released.values() if len(nodes) > 1]


def _extend_to_smaller_barriers(shift: dict[str, float], ends: list[dict[str, float]]) -> None:
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
