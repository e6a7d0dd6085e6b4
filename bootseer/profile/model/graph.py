"""The processes of a start, those of one shape side by side in columns. Pure (no I/O).

A column holds one figure of all processes of a group as an array of doubles: four million spans
take 64 MB for their times, where four million objects would take a gigabyte.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bootseer.profile.model.shape import Shape
from bootseer.profile.model.tracks import LAUNCHER, Track


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
        self.waited_for: dict[int, list[str]] = {
            span: [] for span, found in enumerate(shape.waits) if found
        }
        self.open_spans: dict[int, list[int]] = {}
        """Rows of the processes in which a span never ended, by span."""
        self.evidence: dict[tuple[int, str], array[float]] = {}
        """Figures by span and name; rows that have none are NaN, or missing at the end."""
        self.parents: list[tuple[str, str]] = []
        """Node and process of those that started these."""

    def __len__(self) -> int:
        return len(self.nodes)

    def append(self, track: Track) -> None:
        """Add a process of this shape."""
        row = len(self.nodes)
        self.nodes.append(track.node)
        self.ranks.append(track.rank)
        self.parents.append((track.node, track.parent))
        for number, span in enumerate(track.spans):
            self.times[2 * number].append(span.begin_s)
            self.times[2 * number + 1].append(max(span.begin_s, span.end_s))
            if span.barrier:
                self.barriers[number].append(span.barrier)
            if span.waited_for:
                self.waited_for[number].append(span.waited_for)
            if span.is_open:
                self.open_spans.setdefault(number, []).append(row)
            for name, value in span.evidence.items():
                column = self.evidence.setdefault((number, name), array("d"))
                if missing := row - len(column):
                    column.extend([math.nan] * missing)
                column.append(value)


class StartGraph:
    """One start: its groups, and where each process of it stands."""

    def __init__(self, tracks: Iterable[Track] = ()) -> None:
        self._groups: dict[tuple[Shape, str], Group] = {}
        self._places: dict[tuple[str, str], Place] = {}
        self._started: dict[Group, list[tuple[Place, int] | None]] = {}
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

    def launcher(self, node: str) -> Place | None:
        """Where the launcher of a node stands."""
        return self._places.get((node, ""))

    def started_by(self, group: Group) -> "list[tuple[Place, int] | None]":
        """For each process of a group who started it, and the last event of that one before.

        None: nobody who is known; the process began with the start as a whole. Call it when all
        processes have been added.
        """
        if group not in self._started:
            self._started[group] = [
                self._event_before(parent, begin) if group.role != LAUNCHER else None
                for parent, begin in zip(group.parents, group.times[0], strict=True)
            ]
        return self._started[group]

    def _event_before(self, parent: tuple[str, str], begin: float) -> tuple[Place, int] | None:
        place = self._places.get(parent) or self._places.get((parent[0], ""))
        if place is None:
            return None
        group, row = place
        events = [event for event in group.shape.order if group.times[event][row] <= begin]
        return (place, events[-1]) if events else None

    def shift(self, seconds_by_node: Mapping[str, float]) -> None:
        """Move all times of the nodes that are named by so many seconds."""
        for group in self._groups.values():
            shifts = [seconds_by_node.get(node, 0.0) for node in group.nodes]
            if any(shifts):
                for number, column in enumerate(group.times):
                    group.times[number] = array(
                        "d", [time + shift for time, shift in zip(column, shifts, strict=True)]
                    )

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
