"""The processes of a start, those of one shape side by side in columns. Pure (no I/O).

A column holds one figure of all processes of a group as an array of doubles: four million spans
take 64 MB for their times, where four million objects would take a gigabyte.
"""

import itertools
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from bootseer.profile.model.shape import Shape
from bootseer.profile.model.tracks import (
    BEFORE_LAUNCHER,
    CONTROL_PLANE,
    LAUNCHER,
    Heading,
    Track,
    of_the_start,
    tracks_of,
)
from bootseer.timeline.otlp import Stage

NOTES_MAX = 20


class Place(NamedTuple):
    """Where a process stands: its group and its row in the columns."""

    group: "Group"
    row: int


class Group:
    """All processes of one shape and role."""

    def __init__(self, shape: Shape, role: str) -> None:
        self.shape = shape
        self.role = role
        self.nodes: list[str] = []
        self.ranks: array[int] = array("q")
        self.times: list[array[float]] = [array("d") for _ in range(2 * len(shape.names))]
        """One column an event: seconds."""
        self.barriers: dict[int, list[str]] = {
            span: [] for span, found in enumerate(shape.is_barrier) if found
        }
        self.missed_barriers: dict[int, list[str]] = {
            span: [] for span, found in enumerate(shape.is_missed) if found
        }
        self.waited_for: dict[int, list[str]] = {
            span: [] for span, found in enumerate(shape.waits) if found
        }
        self.open_spans: dict[int, list[int]] = {}
        """Rows of the processes in which a span never ended, by span."""
        self.evidence: list[dict[str, array[float]]] = [{} for _ in shape.names]
        """Figures of each span by name; rows that have none are NaN, or missing at the end."""
        self.failed_counts: dict[int, int] = {}
        """In how many processes a span failed, by span."""
        self.notes: dict[int, dict[str, None]] = {}
        """What was noted of failures and of ways around them, by span: some of it, each once."""
        self.tasks: array[int] = array("q")
        """The ranks that the processes were given, those of launchers too."""
        self.parents: list[tuple[str, str]] = []
        """Node and process of those that started these."""

    def __len__(self) -> int:
        return len(self.nodes)

    def append(self, track: Track) -> None:
        """Add a process of this shape."""
        row = len(self.nodes)
        self.nodes.append(track.node)
        self.ranks.append(track.rank)
        self.tasks.append(track.task)
        self.parents.append((track.node, track.parent))
        times = self.times
        for number, (span, evidence) in enumerate(zip(track.spans, self.evidence, strict=True)):
            begin_s, end_s = span.begin_s, span.end_s
            times[2 * number].append(begin_s)
            times[2 * number + 1].append(end_s if end_s > begin_s else begin_s)
            if span.barrier:
                self.barriers[number].append(sys.intern(span.barrier))
            if span.missed_barrier:
                self.missed_barriers[number].append(sys.intern(span.missed_barrier))
            if span.waited_for:
                self.waited_for[number].append(sys.intern(span.waited_for))
            if span.is_open:
                self.open_spans.setdefault(number, []).append(row)
            if span.has_failed:
                self.failed_counts[number] = self.failed_counts.get(number, 0) + 1
            if span.notes:
                self._note(number, span.notes)
            for name, value in span.evidence.items():
                if value.__class__ is float or value.__class__ is int:
                    column = evidence.get(name)
                    if column is None:
                        column = evidence[name] = array("d")
                    if len(column) != row:
                        column.extend(_missing(row - len(column)))
                    column.append(value)

    def _note(self, span: int, notes: Iterable[str]) -> None:
        known = self.notes.setdefault(span, {})
        known.update(dict.fromkeys(itertools.islice(notes, NOTES_MAX - len(known))))

    def extend(self, other: "Group") -> None:
        """Add the processes of a group of the same shape and role."""
        rows = len(self)
        self.nodes += other.nodes
        self.ranks += other.ranks
        self.tasks += other.tasks
        self.parents += other.parents
        for column, more in zip(self.times, other.times, strict=True):
            column += more
        for own, others in (
            (self.barriers, other.barriers),
            (self.missed_barriers, other.missed_barriers),
            (self.waited_for, other.waited_for),
        ):
            for span, names in others.items():
                own[span] += names
        for span, found in other.open_spans.items():
            self.open_spans.setdefault(span, []).extend(row + rows for row in found)
        for span, count in other.failed_counts.items():
            self.failed_counts[span] = self.failed_counts.get(span, 0) + count
        for span, notes in other.notes.items():
            self._note(span, notes)
        for known, evidence in zip(self.evidence, other.evidence, strict=True):
            for name, more in evidence.items():
                figures = known.setdefault(name, array("d"))
                if len(figures) != rows:
                    figures.extend(_missing(rows - len(figures)))
                figures += more


def _missing(count: int) -> "array[float]":
    return array("d", [math.nan]) * count


class StartGraph:
    """One start: its groups, and where each process of it stands."""

    def __init__(self, tracks: Iterable[Track] = ()) -> None:
        self._groups: dict[tuple[Shape, str], Group] = {}
        self._places: dict[tuple[str, str], Place] = {}
        self._started: dict[Group, list[tuple[Place, int] | None]] = {}
        self.heading: Heading | None = None
        """None where no node was added."""
        for track in tracks:
            self.add(track)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups."""
        return tuple(self._groups.values())

    @property
    def nodes(self) -> list[str]:
        """The nodes that took part, each once, in the order in which they were added."""
        return list(dict.fromkeys(node for group in self._groups.values() for node in group.nodes))

    @property
    def stage_count(self) -> int:
        """Of all processes."""
        return sum(len(group) * len(group.shape.names) for group in self._groups.values())

    def add(self, track: Track) -> None:
        """Add what one process did."""
        if not track.spans:
            return
        shape = Shape(track.spans)
        key = (shape, track.role)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(shape, track.role)
        self._places.setdefault((track.node, track.process), Place(group, len(group)))
        group.append(track)

    def add_node(self, stages: Sequence[Stage], origin_ns: int) -> None:
        """Add all that one node noted; see `tracks_of`."""
        if stages:
            stages, heading = of_the_start(stages)
            self._head(heading)
            for track in tracks_of(stages, origin_ns):
                self.add(track)

    def _head(self, heading: Heading) -> None:
        known = self.heading
        if known is not None:
            restart_count = max(known.restart_count, heading.restart_count)
            first = min(known, heading, key=lambda one: one.began_ns)
            heading = replace(first, restart_count=restart_count)
        self.heading = heading

    def merge(self, other: "StartGraph") -> None:
        """Add the nodes of another graph, which is given up for it: no node is in both."""
        if other.heading is not None:
            self._head(other.heading)
        rows: dict[Group, tuple[Group, int]] = {}
        for key, group in other._groups.items():
            own = self._groups.setdefault(key, group)
            rows[group] = own, len(own) if own is not group else 0
            if own is not group:
                own.extend(group)
        for process, (group, row) in other._places.items():
            own, before = rows[group]
            self._places.setdefault(process, Place(own, before + row))

    def launcher(self, node: str) -> Place | None:
        """Where the launcher of a node stands."""
        return self._places.get((node, ""))

    def started_by(self, group: Group) -> "list[tuple[Place, int] | None]":
        """For each process of a group who started it, and the last event of that one before.

        None: nobody who is known; the process began with the start as a whole. Call it when all
        processes have been added.
        """
        if group not in self._started:
            # Of a node of which nobody knows the time before: that of another one is the nearest.
            others = self._one_before if group.role == LAUNCHER else []
            self._started[group] = [
                self._event_before([*_starters(group.role, *parent), *others], begin)
                for parent, begin in zip(group.parents, group.times[0], strict=True)
            ]
        return self._started[group]

    @cached_property
    def _one_before(self) -> list[tuple[str, str]]:
        found = (one for one in self._groups.values() if one.role in BEFORE_LAUNCHER)
        first = min(found, key=lambda one: BEFORE_LAUNCHER.index(one.role), default=None)
        return [(first.nodes[0], first.role)] if first is not None else []

    def _event_before(
        self, starters: Iterable[tuple[str, str]], begin: float
    ) -> tuple[Place, int] | None:
        for starter in starters:
            place = self._places.get(starter)
            if place is not None:
                group, row = place
                events = [event for event in group.shape.order if group.times[event][row] <= begin]
                if events:
                    return place, events[-1]
        return None

    def shift(self, seconds_by_node: Mapping[str, float]) -> None:
        """Correct the clocks of the nodes that are named by so many seconds."""
        for group in self._groups.values():
            if group.role == CONTROL_PLANE:
                continue
            shifts = [seconds_by_node.get(node, 0.0) for node in group.nodes]
            if any(shifts):
                for number, column in enumerate(group.times):
                    group.times[number] = array(
                        "d", [time + shift for time, shift in zip(column, shifts, strict=True)]
                    )

    def count_from(self, origin_s: float) -> None:
        """Make an instant the zero of all times."""
        for group in self._groups.values():
            group.times = [array("d", [time - origin_s for time in one]) for one in group.times]

    def barriers(self) -> Iterator[tuple[Group, int, list[str]]]:
        """Each span that is a barrier, with the key that each process of its group had."""
        for group in self.groups:
            for span, keys in group.barriers.items():
                yield group, span, keys

    def spans(self, name: str) -> list[tuple[Group, int]]:
        """All spans of this name."""
        return [
            (group, span)
            for group in self.groups
            for span, found in enumerate(group.shape.names)
            if found == name
        ]


def _starters(role: str, node: str, parent: str) -> list[tuple[str, str]]:
    """The processes of which the first that is there has started one of this role."""
    if role == LAUNCHER:
        return [(node, name) for name in BEFORE_LAUNCHER]
    if role in BEFORE_LAUNCHER:
        return [(node, name) for name in BEFORE_LAUNCHER[BEFORE_LAUNCHER.index(role) + 1 :]]
    return [(node, parent), (node, "")]
