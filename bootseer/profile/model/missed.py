"""Barriers at which processes gave up, and who did not come to them. Pure (no I/O).

A rendezvous that fails leaves nobody together: each process leaves when its own patience ends, so
nothing can be read off these ends but that somebody was missing.
"""

import math
from collections.abc import Iterator

from msgspec import Struct

from bootseer.profile.model.graph import Group, StartGraph
from bootseer.profile.model.shape import begin_of, end_of
from bootseer.profile.model.tracks import BEFORE_LAUNCHER, LAUNCHER, NO_RANK
from bootseer.timeline.otlp import BARRIER_COUNT


class MissedBarrier(Struct, frozen=True):
    """A barrier at which at least one process gave up."""

    barrier: str
    gave_up: tuple[str, ...]
    """The processes that waited in vain, as NODE or NODE/RANK, in order of their arrival."""
    expected_count: int
    """How many processes the barrier waited for; 0 if nobody noted that."""
    came_count: int
    """How many came, at whatever time: those that gave up, and those that met without them."""
    absent: tuple[str, ...]
    """Nodes and processes of this start that did not come. Empty where `expected_count` is not
    known: of a barrier for some processes only, nothing says which ones."""
    spread_s: float
    """Time between the first and the last arrival of those that gave up, by clocks that this
    barrier could not compare."""
    waited_s: float
    """The longest time that one of them waited."""


def missed_barriers(graph: StartGraph) -> list[MissedBarrier]:
    """Return the barriers at which processes gave up, in order of the first arrival."""
    waits: dict[str, list[_Wait]] = {}
    for group in graph.groups:
        for span, keys in group.missed_barriers.items():
            for row, key in enumerate(keys):
                waits.setdefault(key, []).append(_Wait(group, span, row))
    found = [(min(one.begin_s for one in same), key) for key, same in waits.items()]
    return [_missed(graph, key, waits[key]) for _, key in sorted(found)]


class _Wait(Struct, frozen=True):
    """One process at a barrier at which it gave up."""

    group: Group
    span: int
    row: int

    @property
    def begin_s(self) -> float:
        return self.group.times[begin_of(self.span)][self.row]

    @property
    def end_s(self) -> float:
        return self.group.times[end_of(self.span)][self.row]

    @property
    def expected_count(self) -> int:
        figures = self.group.evidence[self.span].get(BARRIER_COUNT, ())
        value = figures[self.row] if self.row < len(figures) else math.nan
        return 0 if math.isnan(value) else max(0, int(value))


def _missed(graph: StartGraph, key: str, waits: list[_Wait]) -> MissedBarrier:
    waits = sorted(waits, key=lambda one: one.begin_s)
    came = {_process(one.group, one.row) for one in waits}
    came |= set(_met(graph, key))
    expected_count = max(one.expected_count for one in waits)
    absent: list[str] = []
    if expected_count:
        roles = {one.group.role for one in waits}
        absent = [_shown(*one) for one in _candidates(graph, roles) if one not in came]
    return MissedBarrier(
        barrier=key,
        gave_up=tuple(_shown(*_process(one.group, one.row)) for one in waits),
        expected_count=expected_count,
        came_count=len(came),
        absent=tuple(absent),
        spread_s=waits[-1].begin_s - waits[0].begin_s,
        waited_s=max(one.end_s - one.begin_s for one in waits),
    )


def _met(graph: StartGraph, key: str) -> Iterator[tuple[str, int]]:
    """Yield the processes that did not give up at this barrier."""
    for group, _, keys in graph.barriers():
        for row, own in enumerate(keys):
            if own == key:
                yield _process(group, row)


def _candidates(graph: StartGraph, roles: set[str]) -> list[tuple[str, int]]:
    """Return the processes of these roles, and the nodes that have none of them."""
    found = dict.fromkeys(
        _process(group, row)
        for group in graph.groups
        if group.role in roles
        for row in range(len(group))
    )
    nodes_with_one = {node for node, _ in found}
    began = [
        node
        for group in graph.groups
        if group.role == LAUNCHER or group.role in BEFORE_LAUNCHER
        for node in group.nodes
    ]
    without = [(node, NO_RANK) for node in dict.fromkeys(began) if node not in nodes_with_one]
    return [*found, *without]


def _process(group: Group, row: int) -> tuple[str, int]:
    return group.nodes[row], group.ranks[row]


def _shown(node: str, rank: int) -> str:
    return node if rank == NO_RANK else f"{node}/{rank}"
