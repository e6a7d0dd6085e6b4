"""Replay of a start: computes all event times for changed interval lengths. Pure (no I/O).

The replay of the unchanged graph reproduces the measured times; the remaining difference is printed
as the error of the what-ifs. Events are computed column by column. Each group runs until a barrier
that it must wait at, and goes on when the barrier's last process has arrived.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from bootseer.report.graph import (
    BEFORE_LAUNCHER,
    LAUNCHER,
    ORIGIN,
    Group,
    Label,
    StartGraph,
    end_of,
)
from bootseer.timeline.otlp import READY, START


class Arrivals:
    """State of the barriers, and of the stages that other nodes wait for, during a replay."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._missing: dict[str, int] = {}
        for _, _, keys in graph.barriers():
            for key, count in Counter(keys).items():
                self._missing[key] = self._missing.get(key, 0) + count
        self._last: dict[str, tuple[float, float]] = {}
        """Last arrival at each barrier, measured and replayed."""
        self._ended: dict[tuple[str, str], tuple[float, float]] = {}
        self._leaders = {
            (node, parent)
            for group in graph.groups
            for span, nodes in group.waited_for.items()
            for parent in [group.shape.waited_stage(span)]
            for node in nodes
        }
        self._moved = False
        self._gave_up = False

    def has_moved(self) -> bool:
        moved, self._moved = self._moved, False
        return moved

    def give_up(self) -> None:
        self._gave_up = True

    def arrive(
        self, group: Group, span: int, measured: Sequence[float], replayed: Sequence[float]
    ) -> None:
        keys = group.barriers.get(span, [])
        if (key := _only(keys)) is not None:
            self._arrive(key, max(measured), max(replayed), len(keys))
            return
        for key, one, other in zip(keys, measured, replayed, strict=False):
            self._arrive(key, one, other, 1)

    def _arrive(self, key: str, measured_s: float, replayed_s: float, count: int) -> None:
        known = self._last.get(key, (measured_s, replayed_s))
        self._last[key] = max(known[0], measured_s), max(known[1], replayed_s)
        self._missing[key] -= count
        self._moved = True

    def end(self, group: Group, span: int, replayed: Sequence[float]) -> None:
        if group.role != LAUNCHER:
            return
        name = group.shape.names[span]
        for row, node in enumerate(group.nodes):
            if (node, name) in self._leaders:
                measured = group.times[end_of(span)][row]
                self._ended.setdefault((node, name), (measured, replayed[row]))
                self._moved = True

    def released(
        self, group: Group, span: int, arrived: Sequence[float], ready: Sequence[float]
    ) -> "tuple[array[float], array[float]] | None":
        """Return when each process could go on, measured and replayed; None if not known yet."""
        if span in group.barriers:
            keys = group.barriers[span]
            if (key := _only(keys)) is not None:
                if self._missing[key] and not self._gave_up:
                    return None
                both = self._last[key]
                return array("d", both[:1]) * len(keys), array("d", both[1:]) * len(keys)
            if not self._gave_up and any(self._missing[key] for key in keys):
                return None
            pairs = [self._last[key] for key in keys]
        else:
            stage = group.shape.waited_stage(span)
            leaders = [(node, stage) for node in group.waited_for[span]]
            missing = [node for node, stage in leaders if (node, stage) not in self._ended]
            if not self._gave_up and any(map(self._graph.launcher, missing)):
                return None
            nothing = (float("-inf"), float("-inf"))
            pairs = [
                (max(begin, found[0]), max(now, found[1]))
                for begin, now, one in zip(arrived, ready, leaders, strict=True)
                for found in [self._ended.get(one, nothing)]
            ]
        return array("d", [one for one, _ in pairs]), array("d", [other for _, other in pairs])


def _only(keys: Sequence[str]) -> str | None:
    """Return the key that all of `keys` are; None if they differ, or there are none."""
    return keys[0] if keys and keys.count(keys[0]) == len(keys) else None


Change = Callable[["Interval"], "array[float] | None"]
"""Function from an interval to its changed seconds, or to None to keep them."""


class Interval(NamedTuple):
    """Seconds between an event and the one before it, in each process of a group.

    Time spent waiting for other processes is not an interval: the replay computes it.
    """

    label: Label
    group: Group
    event: int
    seconds: "array[float]"


def intervals_of(graph: StartGraph) -> dict[tuple[Group, int], Interval]:
    """Return all intervals of a start by group and event."""
    found = {}
    for group in graph.groups:
        for step in group.shape.steps:
            span, is_end = divmod(step.event, 2)
            if is_end and (span in group.barriers or span in group.waited_for):
                continue
            before = started(graph, group) if step.after == ORIGIN else group.times[step.after]
            seconds = _minus(group.times[step.event], before)
            found[group, step.event] = Interval(step.label, group, step.event, seconds)
    return found


class StartReplay:
    """Event times of a start, computed with or without a change of its intervals."""

    def __init__(
        self,
        graph: StartGraph,
        intervals: Mapping[tuple[Group, int], Interval],
        change: Change | None = None,
    ) -> None:
        self.graph = graph
        self._intervals = intervals
        self._change = change
        self.times: dict[Group, list[array[float]]] = {}
        self._arrivals = Arrivals(graph)
        running = {group: self._run(group) for group in graph.groups}
        while running:
            blocked = {group: steps for group, steps in running.items() if next(steps, False)}
            if len(blocked) == len(running) and not self._arrivals.has_moved():
                # Processes wait for each other in a cycle, or for one that never arrived.
                self._arrivals.give_up()
            running = blocked

    def _run(self, group: Group) -> Iterator[bool]:
        """Compute all events of a group; yield True whenever it must wait for another group."""
        measured = group.times
        found: list[array[float]] = [array("d")] * len(measured)
        self.times[group] = found
        for step in group.shape.steps:
            if step.after == ORIGIN:
                while not self._are_started(group):
                    yield True
                start = started(self.graph, group, self.times)
            else:
                start = found[step.after]
            # The interval was measured from `step.after`; in the replay others may end later.
            start = _latest(start, [found[event] for event in step.others])
            span, is_end = divmod(step.event, 2)
            interval = self._intervals.get((group, step.event))
            if interval is not None:
                found[step.event] = _plus(start, self._changed(interval))
            else:
                arrived = measured[step.after]
                self._arrivals.arrive(group, span, arrived, start)
                while (released := self._arrivals.released(group, span, arrived, start)) is None:
                    yield True
                latency = _minus(measured[step.event], released[0])
                found[step.event] = _plus(released[1], latency)
            if is_end:
                self._arrivals.end(group, span, found[step.event])

    def _are_started(self, group: Group) -> bool:
        places = self.graph.started_by(group)
        needed = {(one[0].group, one[1]) for one in places if one is not None}
        return all(other in self.times and self.times[other][event] for other, event in needed)

    def _changed(self, interval: Interval) -> "array[float]":
        if self._change is None:
            return interval.seconds
        return self._change(interval) or interval.seconds

    def ready_s(self) -> float:
        """Return the replayed time at which the last process was ready."""
        return ready_s(self.graph, self.times)


def ready_spans(graph: StartGraph) -> list[tuple[Group, int]]:
    """Return the spans whose last end is the end of the start.

    These are the `ready` spans if there are any, else all spans of processes below the launchers,
    else the launchers' `start` spans.
    """
    if found := graph.spans(READY):
        return found
    below = [group for group in graph.groups if group.role not in (LAUNCHER, *BEFORE_LAUNCHER)]
    if not below and (found := graph.spans(START)):
        return found
    return [
        (group, span) for group in below or graph.groups for span in range(len(group.shape.names))
    ]


def ready_s(graph: StartGraph, times: "dict[Group, list[array[float]]] | None" = None) -> float:
    """Return when the last of `ready_spans` ended; 0 for an empty graph.

    `times` are the event times by group; default: as measured.
    """
    return max(
        (max(_columns(group, times)[end_of(span)]) for group, span in ready_spans(graph)),
        default=0.0,
    )


def started(
    graph: StartGraph,
    group: Group,
    times: "dict[Group, list[array[float]]] | None" = None,
) -> "array[float]":
    """Return when each process of a group could begin: at its parent's last event before it.

    `times` are the event times by group; default: as measured.
    """
    return array(
        "d",
        [
            0.0 if one is None else _columns(one[0].group, times)[one[1]][one[0].row]
            for one in graph.started_by(group)
        ],
    )


def _columns(group: Group, times: "dict[Group, list[array[float]]] | None") -> "list[array[float]]":
    return group.times if times is None else times[group]


def _minus(later: Sequence[float], earlier: Sequence[float]) -> "array[float]":
    return array("d", map(sub, later, earlier))


def _plus(time: Sequence[float], seconds: Sequence[float]) -> "array[float]":
    return array("d", map(add, time, seconds))


def _latest(column: "array[float]", others: "list[array[float]]") -> "array[float]":
    return array("d", map(max, column, *others)) if others else column
