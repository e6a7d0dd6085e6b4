"""Critical path of a start, the last process at each barrier, and missed barriers. Pure (no I/O).

At a barrier that opened, the last process to arrive held the others. At a missed barrier each
process leaves when its own timeout ends, so these ends say only that somebody did not come.
"""

import math
import statistics
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from bootseer.report.graph import (
    BEFORE_LAUNCHER,
    LAUNCHER,
    NO_RANK,
    ORIGIN,
    Group,
    Label,
    ProcessRow,
    StartGraph,
    Step,
    begin_of,
    end_of,
    process_name,
)
from bootseer.report.peers import PeerGroup, Peers
from bootseer.report.replay import Interval, ready_spans
from bootseer.timeline.otlp import BARRIER_COUNT


class PathSegment(Struct, frozen=True):
    """Part of the critical path: one interval of one process."""

    node: str
    rank: int
    role: str
    label: Label = field(name="stage")
    begin_s: float
    seconds: float
    is_wait: bool = False
    """Whether it is waiting: from the last arrival at a barrier to the barrier's end, or at a
    barrier at which the process gave up."""


class Blame(Struct, frozen=True):
    """Last process to arrive at a barrier, and the intervals in which it lost time."""

    barrier: str
    node: str
    rank: int
    arrived_s: float
    late_s: float
    """Seconds after the median arrival of the other nodes' processes."""
    alone_s: float
    """Seconds after the last process of the other nodes: the barrier would have opened so much
    earlier if this node had not been late."""
    is_whole_node: bool
    """Whether all of the node's ranks arrived late."""
    lost: tuple["LostTime", ...]
    """Intervals since the previous barrier that took longer than the median; most first."""


class LostTime(Struct, frozen=True):
    """Interval that took longer than the median."""

    label: Label = field(name="stage")
    role: str
    seconds: float
    """Seconds above the median."""


class Walker:
    """Search along the graph from an event back to the events that it waited for."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._steps: dict[Group, dict[int, Step]] = {}
        self._last: dict[str, tuple[float, Group, int, int]] = {}
        self._arrivals: dict[str, list[tuple[float, str]]] = {}
        for group, span, keys in graph.barriers():
            after = self._step(group, end_of(span)).after
            for row, (key, arrived) in enumerate(zip(keys, group.times[after], strict=True)):
                self._arrivals.setdefault(key, []).append((arrived, group.nodes[row]))
                if key not in self._last or arrived > self._last[key][0]:
                    self._last[key] = arrived, group, row, span

    def _step(self, group: Group, event: int) -> Step:
        if group not in self._steps:
            self._steps[group] = {step.event: step for step in group.shape.steps}
        return self._steps[group][event]

    def critical_path(self) -> list[PathSegment]:
        """Return the critical path from the begin of the start until the last process was ready."""
        ends = [
            (time, group, row, span)
            for group, span in ready_spans(self._graph)
            for row, time in enumerate(group.times[end_of(span)])
        ]
        if not ends:
            return []
        _, group, row, span = max(ends, key=lambda one: one[0])
        return self._back(group, row, end_of(span), stops_at_barrier=False)

    def _back(
        self, group: Group, row: int, event: int, *, stops_at_barrier: bool
    ) -> list[PathSegment]:
        found: list[PathSegment] = []
        # Timelines may contain cycles: two nodes that waited for each other.
        seen: set[tuple[Group, int, int]] = set()
        while (group, row, event) not in seen:
            seen.add((group, row, event))
            step = self._step(group, event)
            time = group.times[event][row]
            span, is_end = divmod(event, 2)
            key = group.barriers[span][row] if is_end and span in group.barriers else ""
            place: ProcessRow | None = None
            if key:
                if stops_at_barrier and found:
                    break
                before, group, row, span = self._last[key]
                event = self._step(group, end_of(span)).after
                found.append(self._segment(group, row, step.label, before, time, is_wait=True))
                continue
            if is_end and span in group.waited_for:
                place = self._leader(group, row, span)
            before = self._before(group, row, step)
            if place is not None and (time_of := _ended(place, group, span)) > before:
                found.append(self._segment(group, row, step.label, time_of, time, is_wait=True))
                name = group.shape.waited_stage(span)
                group, row = place.group, place.row
                event = end_of(group.shape.names.index(name))
                continue
            # A process that gave up at a barrier only waited until then.
            is_wait = bool(is_end) and group.shape.is_missed[span]
            found.append(self._segment(group, row, step.label, before, time, is_wait=is_wait))
            if step.after != ORIGIN:
                event = step.after
                continue
            starter = self._graph.started_by(group)[row]
            if starter is None:
                break
            (group, row), event = starter
        return [one for one in reversed(found) if one.seconds > 0]

    def _before(self, group: Group, row: int, step: Step) -> float:
        if step.after != ORIGIN:
            return group.times[step.after][row]
        starter = self._graph.started_by(group)[row]
        if starter is None:
            return 0.0
        place, event = starter
        return place.group.times[event][place.row]

    def _leader(self, group: Group, row: int, span: int) -> ProcessRow | None:
        place = self._graph.launcher(group.waited_for[span][row])
        name = group.shape.waited_stage(span)
        return place if place is not None and name in place.group.shape.names else None

    def _segment(
        self,
        group: Group,
        row: int,
        label: Label,
        begin: float,
        end: float,
        *,
        is_wait: bool = False,
    ) -> PathSegment:
        return PathSegment(
            group.nodes[row], group.ranks[row], group.role, label, begin, end - begin, is_wait
        )

    def blame(
        self, intervals: Mapping[tuple[Group, int], Interval], peers: Mapping[PeerGroup, Peers]
    ) -> list[Blame]:
        """Return the last process at each barrier of several processes, in order of arrival."""
        found = []
        for key, (arrived, group, row, span) in self._last.items():
            arrivals = self._arrivals[key]
            if len(arrivals) < 2:
                continue
            event = self._step(group, end_of(span)).after
            lost: dict[PeerGroup, float] = {}
            for segment in self._back(group, row, event, stops_at_barrier=True):
                interval = segment.label, segment.role
                known = peers.get(interval)
                if known is not None and not segment.is_wait:
                    lost[interval] = lost.get(interval, 0.0) + segment.seconds - known.median_s
            others = sorted(time for time, node in arrivals if node != group.nodes[row])
            own = sorted(time for time, node in arrivals if node == group.nodes[row])
            middle = statistics.median(others or own)
            late = arrived - middle
            most = sorted(lost.items(), key=lambda one: -one[1])
            found.append(
                Blame(
                    barrier=key,
                    node=group.nodes[row],
                    rank=group.ranks[row],
                    arrived_s=arrived,
                    late_s=late,
                    alone_s=arrived - (others or own)[-1],
                    is_whole_node=bool(others) and own[0] - middle > late / 2,
                    lost=tuple(LostTime(*interval, more) for interval, more in most if more > 0),
                )
            )
        return sorted(found, key=lambda one: one.arrived_s)


def _ended(place: ProcessRow, group: Group, span: int) -> float:
    name = group.shape.waited_stage(span)
    return place.group.times[end_of(place.group.shape.names.index(name))][place.row]


class MissedBarrier(Struct, frozen=True):
    """Barrier at which at least one process gave up."""

    barrier: str
    gave_up: tuple[str, ...]
    """Processes that gave up, as NODE or NODE/RANK, in order of their arrival."""
    expected_count: int
    """Number of processes that the barrier waited for; 0 if unknown."""
    came_count: int
    """Number of processes that arrived, whether they gave up or met the others."""
    absent: tuple[str, ...]
    """Nodes and processes of this start that did not arrive. Empty if `expected_count` is unknown:
    the barrier may have been for some processes only."""
    spread_s: float
    """Time between the first and last arrival of those that gave up, by uncorrected clocks."""
    waited_s: float
    """Longest wait of a process that gave up."""


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
    """Wait of one process at a barrier until it gave up."""

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
        absent = [process_name(*one) for one in _candidates(graph, roles) if one not in came]
    return MissedBarrier(
        barrier=key,
        gave_up=tuple(process_name(*_process(one.group, one.row)) for one in waits),
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
