"""The processes of a start as columns of times, those of one shape side by side. Pure (no I/O).

A *track* has the spans of one process: the launcher of a node and each Python process below it have
one. Times are seconds by the node's clock, counted from an instant that the caller chooses for the
whole start.

A *shape* has the spans of a process without their times. The processes of a start run one program,
so most have the same spans in the same order. Dependencies are found once for a shape, and all its
processes are computed as columns. Every span has two events, its begin and its end. The rules:

- a span begins after the siblings that had ended by then; the time since the last of them ended (or
  since the parent began) is its *lag*, work that no span names;
- a span that encloses others ends after them, and a lag;
- a span without others inside ends when its own duration is over;
- a barrier ends for all when the last process has arrived at it;
- a process that gives up at a barrier waits for as long as it is willing to: no other process
  decides that.

So what overlapped in the measured start may overlap in a replay, and what came after stays after.

A column holds one figure of all processes of a group as an array of doubles: four million spans
take 64 MB for their times, where four million objects would take a gigabyte.
"""

import itertools
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from bootseer.timeline.otlp import (
    BARRIER,
    PARENT,
    PROCESS,
    ROLE,
    START,
    WAITED_FOR,
    Stage,
    Value,
)

LAUNCHER = "launcher"
"""The role of `bootseer run` itself."""
UNWATCHED = "python"
"""The role of training code that is not watched, and calls `bootseer.stage()` by itself."""
CONTROL_PLANE, KUBELET = "control plane", "kubelet"
BEFORE_LAUNCHER = (KUBELET, CONTROL_PLANE)
"""Roles of those that a node's launcher waited for, the last one first; also the names of their
processes. The times of the control plane are of its own clock."""
ADAPTER = "bootseer.adapter"
"""Resource attribute of stages that other programs noted: the adapter that took them in."""
NO_RANK = -1

_NOTHING: Mapping[str, Value] = MappingProxyType({})


# Millions of them come and go, and none is part of a circle.
class Span(Struct, frozen=True, gc=False):
    """One stage of one process."""

    name: str
    begin_s: float
    end_s: float
    parent: int = -1
    """Index of the span of the same track that this one lies within; -1 where there is none."""
    barrier: str = ""
    """Spans of one start with the same barrier end together, after the last of them began."""
    missed_barrier: str = ""
    """The barrier at which this process gave up waiting. The span's end compares no clocks and
    releases no other process."""
    waited_for: str = ""
    """The node whose stage with the name of this span's parent was waited for: the node holds the
    lease, or publishes what this node uses."""
    is_open: bool = False
    """The stage never ended: `end_s` is the last instant that its process noted anything."""
    evidence: Mapping[str, Value] = _NOTHING
    """What was noted with the stage; of it the graph keeps the numbers: pressure, faults, bytes."""
    notes: tuple[str, ...] = ()
    """What went wrong, and which way was taken instead of the ordinary one."""
    has_failed: bool = False


class Track(Struct, frozen=True):
    """The spans of one process in order of their begin; an enclosing span precedes the enclosed."""

    node: str
    spans: Sequence[Span]
    role: str = LAUNCHER
    """What the process is: processes are compared with those of the same role."""
    rank: int = NO_RANK
    process: str = ""
    parent: str = ""
    """The process that started this one; empty: the launcher."""
    task: int = 0
    """The rank that the process was given: a launcher's, too, is one of the tasks of the job."""


class Heading(Struct, frozen=True):
    """What a start is called, by its earliest stage."""

    began_ns: int
    job: str
    submission: str
    attempt: int
    trace_id: str
    restart_count: int
    """How often workers were started again in place since; their later stages are left out."""


def tracks_of(stages: Iterable[Stage], origin_ns: int) -> list[Track]:
    """The tracks of all processes that the stages come from.

    `origin_ns` is the instant that counts as zero, in nanoseconds since 1970.
    """
    by_writer: dict[int, list[Stage]] = {}
    launchers: dict[str, int] = {}
    for stage in stages:
        by_writer.setdefault(id(stage.resource), []).append(stage)
        if stage.name == START:
            launchers[node_of(stage)] = rank_of(stage)
    by_process: dict[tuple[str, str], list[Stage]] = {}
    for same in by_writer.values():
        node, rank = node_of(same[0]), rank_of(same[0])
        resource = same[0].resource
        is_launcher = ROLE not in resource and launchers.get(node, rank) == rank
        process = str(resource.get(PROCESS, "" if is_launcher else f"rank {rank}"))
        by_process.setdefault((node, process), []).extend(same)
    return [
        _track(node, process, found, origin_ns) for (node, process), found in by_process.items()
    ]


def of_the_start(stages: Sequence[Stage]) -> tuple[Sequence[Stage], Heading]:
    """The stages of one node without those of workers that were started again in place since.

    There must be at least one.
    """
    restarts = {id(stage.resource): _whole(stage, "bootseer.restart") for stage in stages}
    # What others know of the time before is no part of it.
    ours = [stage for stage in stages if ADAPTER not in stage.resource]
    first = min(ours or stages, key=lambda stage: stage.start_ns)
    before = restarts[id(first.resource)]
    since = max(restarts.values()) - before
    if since:
        stages = [stage for stage in stages if restarts[id(stage.resource)] <= before]
    heading = Heading(
        first.start_ns,
        str(first.resource.get("bootseer.job", "")),
        str(first.resource.get("bootseer.submission", "")),
        _whole(first, "bootseer.attempt"),
        first.trace_id,
        since,
    )
    return stages, heading


def node_of(stage: Stage) -> str:
    """The node that a stage was noted on."""
    return str(stage.resource.get("host.name", "?"))


def rank_of(stage: Stage) -> int:
    """The rank of the process that noted a stage; `NO_RANK` where it has none."""
    rank = stage.resource.get("bootseer.rank", NO_RANK)
    return rank if isinstance(rank, int) else NO_RANK


def _whole(stage: Stage, name: str) -> int:
    """A count of who wrote the stage; 0 where there is none."""
    value = stage.resource.get(name, 0)
    return value if isinstance(value, int) else 0


def _track(node: str, process: str, stages: list[Stage], origin_ns: int) -> Track:
    spans = _spans(stages, origin_ns)
    task = _whole(stages[0], "bootseer.rank")
    if not process:
        return Track(node, spans, task=task)
    # What the program itself notes says only which process it is.
    resource = max((stage.resource for stage in stages), key=len)
    return Track(
        node=node,
        spans=spans,
        role=str(resource.get(ROLE, UNWATCHED)),
        rank=rank_of(stages[0]),
        process=process,
        parent=str(resource.get(PARENT, "")),
        task=task,
    )


def _spans(stages: list[Stage], origin_ns: int) -> list[Span]:
    last_ns = max(stage.end_ns or stage.start_ns for stage in stages)
    # The longer one first where two begin together: it encloses the other.
    stages.sort(key=lambda one: (one.start_ns, -(one.end_ns or last_ns)))
    places = {stage.span_id: number for number, stage in enumerate(stages)}
    spans = []
    for number, stage in enumerate(stages):
        attributes = stage.attributes
        parent = places.get(stage.parent_id, -1)
        fallback = attributes.get("bootseer.fallback")
        barrier = str(attributes.get(BARRIER, ""))
        spans.append(
            Span(
                stage.name,
                (stage.start_ns - origin_ns) / 1e9,
                ((stage.end_ns or last_ns) - origin_ns) / 1e9,
                parent if parent < number else -1,
                "" if stage.failed else barrier,
                barrier if stage.failed else "",
                str(attributes.get(WAITED_FOR, "")),
                stage.end_ns is None,
                attributes,
                tuple(str(one) for one in (fallback, stage.message) if one),
                stage.failed,
            )
        )
    return spans


# A begin is read off one clock and a duration off another: what follows may begin a little before.
_TOLERANCE_S = 0.001
ORIGIN = -1
"""Stands for the event that a process's first span begins after: one of who started it, or zero."""


def begin_of(span: int) -> int:
    """The number of the event at which a span begins."""
    return 2 * span


def end_of(span: int) -> int:
    """The number of the event at which a span ends."""
    return 2 * span + 1


class Label(NamedTuple):
    """Names a piece of time so that it can be compared among processes."""

    name: str
    """The stage; with `kind` "before" or "after" the stage next to the unnamed time."""
    kind: str = "in"
    """`in` the stage, `before` it began, or `after` the last stage inside it had ended."""
    occurrence: int = 0
    """How many stages of this name the process had had before."""

    def __str__(self) -> str:
        if self == SCHEDULING:
            return "scheduling"
        name = f"{self.name} ({self.occurrence + 1})" if self.occurrence else self.name
        return name if self.kind == "in" else f"{self.kind} {name}"


SCHEDULING = Label(START, "before")
"""From the begin of the start as a whole until the launcher of a node ran."""


class Step(NamedTuple):
    """One event, and what it waited for."""

    event: int
    after: int
    """The event that it directly followed; `ORIGIN` for a process's first one."""
    others: tuple[int, ...]
    """Events of the same process that must have come before, too."""
    label: Label
    """Of the time between `after` and the event."""


class Shape:
    """The spans of a process without their times: names, nesting and the order of events."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.names = tuple(span.name for span in spans)
        self.parents = tuple(span.parent for span in spans)
        self.is_barrier = tuple(bool(span.barrier) for span in spans)
        self.is_missed = tuple(bool(span.missed_barrier) for span in spans)
        self.waits = tuple(bool(span.waited_for) for span in spans)
        self.order = _order(spans)
        barriers = self.is_barrier, self.is_missed
        self._key = (self.names, self.parents, *barriers, self.waits, self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def occurrences(self) -> tuple[int, ...]:
        """For each span how many earlier ones have its name."""
        counts: dict[str, int] = {}
        found = []
        for name in self.names:
            found.append(counts.get(name, 0))
            counts[name] = found[-1] + 1
        return tuple(found)

    def label(self, span: int, kind: str = "in") -> Label:
        """The label of a span of this shape."""
        return Label(self.names[span], kind, self.occurrences[span])

    def waited_stage(self, span: int) -> str:
        """The stage of the other node that a span of this shape waits for: its parent's name."""
        parent = self.parents[span]
        return self.names[parent if parent >= 0 else span]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All events in an order in which each comes after those that it waited for."""
        # Ends that nothing else of the same parent has begun after: what comes next waits for them.
        ended: dict[int, list[int]] = {}
        waited: dict[int, list[int]] = {}
        steps = []
        for event in self.order:
            span, is_end = divmod(event, 2)
            parent = self.parents[span]
            if not is_end:
                before = ended.setdefault(parent, [])
                waited[span] = list(before)
                start = begin_of(parent) if parent >= 0 else ORIGIN
                steps.append(_step(event, before, start, self.label(span, "before")))
                continue
            inside = ended.get(span, [])
            kind = "after" if inside else "in"
            steps.append(_step(event, inside, begin_of(span), self.label(span, kind)))
            siblings = ended.setdefault(parent, [])
            siblings[:] = [one for one in siblings if one not in waited[span]]
            siblings.append(event)
        return tuple(steps)


def _step(event: int, before: list[int], start: int, label: Label) -> Step:
    if not before:
        return Step(event, start, (), label)
    return Step(event, before[-1], tuple(before[:-1]), label)


def _order(spans: Sequence[Span]) -> tuple[int, ...]:
    events = []
    for number, span in enumerate(spans):
        # At one instant: ends first, inner before outer; then begins; then ends of empty spans.
        end_s = span.end_s - _TOLERANCE_S
        events.append((span.begin_s, 1, number, begin_of(number)))
        end = (span.begin_s, 2, number) if end_s <= span.begin_s else (end_s, 0, -number)
        events.append((*end, end_of(number)))
    events.sort()
    return tuple(event for *_, event in events)


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
