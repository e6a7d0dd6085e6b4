"""Computes when each event of a start would have come had some pieces of time been others. Pure.

The replay of the unchanged graph gives back the measured times; how far it does not is the error
that is printed beside each what-if. Events are computed column by column, each group as far as the
barrier that it waits at; a barrier is left when its last process has arrived.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from bootseer.profile.model.arrivals import Arrivals
from bootseer.profile.model.graph import Group, StartGraph
from bootseer.profile.model.shape import ORIGIN, Label, end_of
from bootseer.profile.model.tracks import BEFORE_LAUNCHER, LAUNCHER
from bootseer.timeline.otlp import READY, START

Change = Callable[["Piece"], "array[float] | None"]
"""Gets one piece of time of the processes of a group; returns other seconds, or None to leave
them."""


class Piece(NamedTuple):
    """The time between an event and the one before it, in all processes of a group.

    Time spent waiting for other processes is no piece: it is computed.
    """

    label: Label
    group: Group
    event: int
    seconds: "array[float]"


def pieces_of(graph: StartGraph) -> dict[tuple[Group, int], Piece]:
    """All pieces of time of a start, by group and event."""
    found = {}
    for group in graph.groups:
        for step in group.shape.steps:
            span, is_end = divmod(step.event, 2)
            if is_end and (span in group.barriers or span in group.waited_for):
                continue
            before = started(graph, group) if step.after == ORIGIN else group.times[step.after]
            seconds = _minus(group.times[step.event], before)
            found[group, step.event] = Piece(step.label, group, step.event, seconds)
    return found


class Replay:
    """The times of all events of a start, as measured or as they would have been."""

    def __init__(
        self,
        graph: StartGraph,
        pieces: Mapping[tuple[Group, int], Piece],
        change: Change | None = None,
    ) -> None:
        self.graph = graph
        self._pieces = pieces
        self._change = change
        self.times: dict[Group, list[array[float]]] = {}
        self._arrivals = Arrivals(graph)
        running = {group: self._run(group) for group in graph.groups}
        while running:
            blocked = {group: steps for group, steps in running.items() if next(steps, False)}
            if len(blocked) == len(running) and not self._arrivals.has_moved():
                # Processes wait for each other in a circle, or for one that never arrived.
                self._arrivals.give_up()
            running = blocked

    def _run(self, group: Group) -> Iterator[bool]:
        """Compute all events of a group; yields where it must wait for another one."""
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
            # What was measured against the one event before; against others it may wait.
            start = _latest(start, [found[event] for event in step.others])
            span, is_end = divmod(step.event, 2)
            piece = self._pieces.get((group, step.event))
            if piece is not None:
                found[step.event] = _plus(start, self._changed(piece))
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

    def _changed(self, piece: Piece) -> "array[float]":
        if self._change is None:
            return piece.seconds
        return self._change(piece) or piece.seconds

    def ready_s(self) -> float:
        """As `ready_s` of the module, by the times of this replay."""
        return ready_s(self.graph, self.times)


def ready_spans(graph: StartGraph) -> list[tuple[Group, int]]:
    """The spans that end a start: `ready` where a process said so; else all that the processes
    below the launchers noted; else the launchers' starts of their command."""
    if found := graph.spans(READY):
        return found
    below = [group for group in graph.groups if group.role not in (LAUNCHER, *BEFORE_LAUNCHER)]
    if not below and (found := graph.spans(START)):
        return found
    return [
        (group, span) for group in below or graph.groups for span in range(len(group.shape.names))
    ]


def ready_s(graph: StartGraph, times: "dict[Group, list[array[float]]] | None" = None) -> float:
    """When the last of `ready_spans` ended, by the measured times or by others; 0 of no start."""
    return max(
        (max(_columns(group, times)[end_of(span)]) for group, span in ready_spans(graph)),
        default=0.0,
    )


def started(
    graph: StartGraph,
    group: Group,
    times: "dict[Group, list[array[float]]] | None" = None,
) -> "array[float]":
    """When each process of a group could begin, by the measured times or by others."""
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
