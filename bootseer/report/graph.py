"""Graph of a start: its processes, grouped by shape, with their times in columns. Pure (no I/O).

A *track* holds the spans of one process. The launcher of a node and each Python process below it
have one track each. Times are seconds by the node's clock, counted from an origin that the caller
chooses for the whole start.

A *shape* is the spans of a process without their times. The processes of a start run the same
program, so most have the same spans in the same order. Dependencies are computed once per shape,
and times for all processes of the shape at once, column by column. Every span has two events, its
begin and its end. The rules:

- a span begins after the siblings that had ended by then; the time since the last of them ended (or
  since the parent began) is its *lag*, work that no span names;
- a span with children ends after they have ended, plus a lag;
- a span without children ends after its own duration;
- a barrier ends for all processes when the last one has arrived;
- a process that gives up at a barrier waits until its own timeout, whatever other processes do.

So spans that overlapped in the measured start may overlap in a replay, and order is kept otherwise.

A column holds one figure of all processes of a group as an array of doubles: the times of four
million spans take 64 MB, where four million objects would take a gigabyte.
"""

import itertools
import math
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter, ge, le, sub
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from bootseer.timeline.otlp import (
    BARRIER,
    MONOTONIC,
    PARENT,
    PROCESS,
    READY,
    ROLE,
    START,
    WAITED_FOR,
    Stage,
    Value,
)

LAUNCHER = "launcher"
"""The role of `bootseer run` itself."""
UNWATCHED = "python"
"""The role of training code that calls `bootseer.stage()` but whose imports are not watched."""
CONTROL_PLANE, KUBELET = "control plane", "kubelet"
BEFORE_LAUNCHER = (KUBELET, CONTROL_PLANE)
"""Roles, and process names, of programs that run before a node's launcher, the last one first. The
control plane's times are by its own clock."""
ADAPTER = "bootseer.adapter"
"""Resource attribute of stages from another program: the adapter that parsed them."""
NO_RANK = -1
_RESTART = "bootseer.restart"

_NOTHING: Mapping[str, Value] = MappingProxyType({})


# gc=False: millions are made, and none is part of a reference cycle.
class TrackSpan(Struct, frozen=True, gc=False):
    """Stage of one process, with times in seconds."""

    name: str
    begin_s: float
    end_s: float
    parent: int = -1
    """Index of the enclosing span in the same track; -1 if there is none."""
    barrier: str = ""
    """Key of the barrier: spans of a start with the same key end together, after the last began."""
    missed_barrier: str = ""
    """Key of the barrier at which this process gave up. The span's end neither compares clocks nor
    releases other processes."""
    waited_for: str = ""
    """Node that this span waits for: it holds the lease or publishes what this node uses. The
    span ends after that node's stage of the same name as this span's parent."""
    is_open: bool = False
    """Whether the stage never ended; `end_s` is then the time of its process's last event."""
    evidence: Mapping[str, Value] = _NOTHING
    """Attributes of the stage; the graph keeps the numbers: pressure, faults, bytes."""
    notes: tuple[str, ...] = ()
    """Error messages and fallbacks."""
    has_failed: bool = False


class Track(Struct, frozen=True):
    """Spans of one process in order of their begin; parents precede their children."""

    node: str
    spans: Sequence[TrackSpan]
    role: str = LAUNCHER
    """Program of the process; only processes of the same role are compared."""
    rank: int = NO_RANK
    process: str = ""
    parent: str = ""
    """Process that started this one; empty for the launcher."""
    task: int = 0
    """Rank in the job's environment; a launcher has one too, although its `rank` is `NO_RANK`."""


class Heading(Struct, frozen=True):
    """Job, attempt and other identifiers of a start, from its earliest stage."""

    began_ns: int
    job: str
    submission: str
    attempt: int
    trace_id: str
    restart_count: int
    """Number of in-place restarts of the workers."""
    failure: "Failure | None" = None
    """Failure for which workers were restarted before they were ready."""
    failure_order: tuple[int, int, int] = (0, 0, 0)
    """Sort key of the failure: the smallest of several is the likeliest cause of the restart."""


class Failure(Struct, frozen=True):
    """First failure of workers that were restarted in place before they were ready."""

    node: str
    rank: int
    stage: str
    message: str
    lost_s: float
    """Time from the begin of the node's first workers to that of the workers that became ready."""


def tracks_of(stages: Iterable[Stage], origin_ns: int) -> list[Track]:
    """Return one track per process; `origin_ns` (since 1970) becomes time 0."""
    by_writer: defaultdict[int, list[Stage]] = defaultdict(list)
    launchers: dict[str, int] = {}
    for stage in stages:
        by_writer[id(stage.resource)].append(stage)
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


def without_restarts(stages: Sequence[Stage]) -> tuple[Sequence[Stage], Heading]:
    """Return the stages of one round of restarted workers, and the heading of the start.

    The first round that became ready is kept; if none did, the first round. `stages` are those of
    one node, at least one.
    """
    resources = {id(stage.resource): stage.resource for stage in stages}
    rounds = _rounds_of(stages, resources)
    # Stages of schedulers and kubelets precede the start and have no heading.
    foreign = {key for key, resource in resources.items() if ADAPTER in resource}
    ours = [stage for stage in stages if id(stage.resource) not in foreign] if foreign else stages
    first = min(ours or stages, key=attrgetter("start_ns"))
    first_round = rounds[id(first.resource)]
    since = max(rounds.values()) - first_round
    order, failure = (0, 0, 0), None
    if since:
        ready = [rounds[id(stage.resource)] for stage in stages if stage.name == READY]
        kept = max(first_round, min(ready, default=first_round))
        order, failure = _failure([one for one in stages if _RESTART in one.resource], rounds, kept)
        stages = [
            stage
            for stage in stages
            if rounds[id(stage.resource)] == kept or _RESTART not in stage.resource
        ]
    heading = Heading(
        first.start_ns,
        str(first.resource.get("bootseer.job", "")),
        str(first.resource.get("bootseer.submission", "")),
        _whole(first.resource, "bootseer.attempt"),
        first.trace_id,
        since,
        failure,
        order,
    )
    return stages, heading


def _rounds_of(
    stages: Sequence[Stage], resources: Mapping[int, Mapping[str, Value]]
) -> Mapping[int, int]:
    """Return the number of the round of restarted workers that wrote each of `resources`.

    An agent of torchrun that restarts its workers because those of another node have failed does
    not count the restart. So of several processes with one rank, each is of a later round than the
    one before.
    """
    counts = {key: _whole(resource, _RESTART) for key, resource in resources.items()}
    workers: dict[Value, Mapping[str, Value]] = {}
    for resource in resources.values():
        # The program's own stages lack the parent, and are in a resource of their own.
        if _RESTART in resource and PROCESS in resource and PARENT in resource:
            workers[resource[PROCESS]] = resource
    by_rank: dict[Value, list[Value]] = {}
    for process, resource in workers.items():
        if resource[PARENT] not in workers:  # a worker, not a program that it started
            by_rank.setdefault(resource["bootseer.rank"], []).append(process)
    if all(len(same) == 1 for same in by_rank.values()):
        return counts
    begins: dict[Value, int] = {}
    for stage in stages:
        process = stage.resource.get(PROCESS, "")
        begins[process] = min(stage.start_ns, begins.get(process, stage.start_ns))
    rounds: dict[Value, int] = {}
    for same in by_rank.values():
        number = -1
        for process in sorted(same, key=begins.__getitem__):
            number = max(number + 1, _whole(workers[process], _RESTART))
            rounds[process] = number
    found = {}
    for key, resource in resources.items():
        process = resource.get(PROCESS, "")
        for _ in range(len(workers)):
            if process in rounds or process not in workers:
                break
            process = workers[process][PARENT]
        found[key] = rounds.get(process, counts[key])
    return found


def _failure(
    workers: Sequence[Stage], rounds: Mapping[int, int], kept: int
) -> tuple[tuple[int, int, int], Failure | None]:
    """Return the likeliest first failure of workers of rounds before `kept`, and its sort key."""
    by_process: dict[tuple[int, int], list[Stage]] = {}
    for stage in workers:
        if rounds[id(stage.resource)] < kept:
            by_process.setdefault((rounds[id(stage.resource)], rank_of(stage)), []).append(stage)
    candidates = []
    for (number, rank), stages in by_process.items():
        last = max(stages, key=lambda one: one.end_ns or one.start_ns)
        still = [one for one in stages if one.end_ns is None]
        failed = next((one for one in stages if one.failed), None)
        # The other workers fail at barriers, or are ended by torchrun while they wait there.
        if failed is not None:
            likelihood = 3 if BARRIER in failed.attributes else 0
            name, message = failed.name, failed.message
        elif not still:
            likelihood, name, message = 1, f"after {last.name}", "the process ended"
        else:
            likelihood = 3 if BARRIER in still[-1].attributes else 2
            name, message = still[-1].name, "the process ended"
        order = number, likelihood, last.end_ns or last.start_ns
        candidates.append((order, last, rank, name, message))
    if not candidates:
        return (0, 0, 0), None
    order, last, rank, name, message = min(candidates, key=lambda one: one[0])
    began = {
        is_kept: min(
            (one.start_ns for one in workers if (rounds[id(one.resource)] == kept) is is_kept),
            default=0,
        )
        for is_kept in (False, True)
    }
    lost_s = (began[True] - began[False]) / 1e9
    return order, Failure(node_of(last), rank, name, message, lost_s)


def node_of(stage: Stage) -> str:
    """Return the node of a stage."""
    return str(stage.resource.get("host.name", "?"))


def process_name(node: str, rank: int) -> str:
    """Return NODE/RANK, as reports name a process; NODE for a process without a rank."""
    return f"{node}/{rank}" if rank >= 0 else node


def rank_of(stage: Stage) -> int:
    """Return the rank of the process that wrote a stage, or `NO_RANK`."""
    rank = stage.resource.get("bootseer.rank", NO_RANK)
    return rank if isinstance(rank, int) else NO_RANK


def _whole(resource: Mapping[str, Value], name: str) -> int:
    value = resource.get(name, 0)
    return value if isinstance(value, int) else 0


def _track(node: str, process: str, stages: list[Stage], origin_ns: int) -> Track:
    spans = _spans(stages, origin_ns)
    task = _whole(stages[0].resource, "bootseer.rank")
    if not process:
        return Track(node, spans, task=task)
    # Stages written by the program itself lack the attributes that the collector adds.
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


def _spans(stages: list[Stage], origin_ns: int) -> list[TrackSpan]:
    last_ns = max([stage.end_ns or stage.start_ns for stage in stages])
    begins = [stage.start_ns for stage in stages]
    if any(map(ge, begins, begins[1:])):
        # Of two that begin together, the longer one encloses the other.
        stages.sort(key=lambda one: (one.start_ns, -(one.end_ns or last_ns)))
    places = {stage.span_id: number for number, stage in enumerate(stages)}
    spans = []
    for number, stage in enumerate(stages):
        name, _, _, parent_id, start_ns, end_ns, has_failed, message, attributes, _ = stage
        parent = places.get(parent_id, -1) if parent_id else -1
        begin_s = (start_ns - origin_ns) / 1e9
        # Most stages are noted at their end only, with no attribute but the clock's time.
        is_plain = len(attributes) < 2 and (not attributes or MONOTONIC in attributes)
        if is_plain and end_ns is not None and not has_failed and not message:
            end_s = (end_ns - origin_ns) / 1e9
            spans.append(TrackSpan(name, begin_s, end_s, parent if parent < number else -1))
            continue
        barrier = str(attributes[BARRIER]) if BARRIER in attributes else ""
        notes: tuple[str, ...] = (message,) if message else ()
        if fallback := attributes.get("bootseer.fallback"):
            notes = (str(fallback), *notes)
        spans.append(
            TrackSpan(
                name,
                begin_s,
                ((end_ns or last_ns) - origin_ns) / 1e9,
                parent if parent < number else -1,
                "" if has_failed else barrier,
                barrier if has_failed else "",
                str(attributes[WAITED_FOR]) if WAITED_FOR in attributes else "",
                end_ns is None,
                attributes,
                notes,
                has_failed,
            )
        )
    return spans


# Begins come from the wall clock and durations from the monotonic one, so a span may seem to begin
# slightly before its predecessor ended.
_TOLERANCE_S = 0.001
ORIGIN = -1
"""Stands for the event after which a process began: an event of its parent process, or time 0."""


def begin_of(span: int) -> int:
    """Return the event at which a span begins."""
    return 2 * span


def end_of(span: int) -> int:
    """Return the event at which a span ends."""
    return 2 * span + 1


class Label(NamedTuple):
    """Name of an interval, the same in all processes that can be compared."""

    name: str
    """Stage; with `kind` "before" or "after" the stage next to the unnamed time."""
    kind: str = "in"
    """`in` the stage, `before` its begin, or `after` the end of its last child."""
    occurrence: int = 0
    """Number of earlier stages of this name in the process."""

    def __str__(self) -> str:
        if self == SCHEDULING:
            return "scheduling"
        name = f"{self.name} ({self.occurrence + 1})" if self.occurrence else self.name
        return name if self.kind == "in" else f"{self.kind} {name}"


SCHEDULING = Label(START, "before")
"""Time from the begin of the start until a node's launcher ran."""


class Step(NamedTuple):
    """Event with its dependencies."""

    event: int
    after: int
    """Event that directly precedes this one; `ORIGIN` for the first of a process."""
    others: tuple[int, ...]
    """Further events of the process that must come before."""
    label: Label
    """Label of the interval between `after` and the event."""


class Shape:
    """Spans of a process without their times: names, nesting and the order of events."""

    def __init__(self, spans: Sequence[TrackSpan]) -> None:
        # Lists, not generators: there is one shape per process, and this takes half the time.
        self.names = tuple([span.name for span in spans])
        self.parents = tuple([span.parent for span in spans])
        self.is_barrier = tuple([span.barrier != "" for span in spans])
        self.is_missed = tuple([span.missed_barrier != "" for span in spans])
        self.waits = tuple([span.waited_for != "" for span in spans])
        self.order = _order(spans)
        barriers = self.is_barrier, self.is_missed
        self._key = (self.names, self.parents, *barriers, self.waits, self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def occurrences(self) -> tuple[int, ...]:
        """Number of earlier spans of the same name, for each span."""
        counts: dict[str, int] = {}
        found = []
        for name in self.names:
            found.append(counts.get(name, 0))
            counts[name] = found[-1] + 1
        return tuple(found)

    def label(self, span: int, kind: str = "in") -> Label:
        """Return the label of a span."""
        return Label(self.names[span], kind, self.occurrences[span])

    def waited_stage(self, span: int) -> str:
        """Return the stage of the other node that a span waits for: its parent's name."""
        parent = self.parents[span]
        return self.names[parent if parent >= 0 else span]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Events in topological order."""
        # By parent: ends after which no sibling has begun yet. The next sibling waits for them.
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


def _order(spans: Sequence[TrackSpan]) -> tuple[int, ...]:
    # Order at one instant: ends, inner before outer; then begins; then ends of empty spans. Events
    # are put into that order first, since the sort by time is stable.
    begins = [span.begin_s for span in spans]
    ends = [span.end_s - _TOLERANCE_S for span in spans]
    is_empty = list(map(le, ends, begins))
    times = [0.0] * (2 * len(spans))
    times[0::2] = begins
    times[1::2] = map(max, begins, ends)
    events = [
        *[end_of(span) for span in range(len(spans) - 1, -1, -1) if not is_empty[span]],
        *range(0, len(times), 2),
        *[end_of(span) for span, found in enumerate(is_empty) if found],
    ]
    events.sort(key=times.__getitem__)
    return tuple(events)


NOTES_MAX = 20


class ProcessRow(NamedTuple):
    """Group of a process, and its row in the group's columns."""

    group: "Group"
    row: int


class Group:
    """Columns of all processes with the same shape and role."""

    def __init__(self, shape: Shape, role: str) -> None:
        self.shape = shape
        self.role = role
        self.nodes: list[str] = []
        self.ranks: array[int] = array("q")
        self._rows: array[float] = array("d")
        """Times of one process after the other, until `times` is read."""
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
        """Rows in which a span never ended, by span."""
        self.evidence: list[dict[str, array[float]]] = [{} for _ in shape.names]
        """Columns of figures by name, for each span. A row without the figure is NaN or missing at
        the end."""
        self.failed_counts: dict[int, int] = {}
        """Number of processes in which a span failed, by span."""
        self.notes: dict[int, dict[str, None]] = {}
        """Distinct error messages and fallbacks by span, at most `NOTES_MAX`."""
        self.tasks: array[int] = array("q")
        """`Track.task` of each process."""
        self.parents: list[tuple[str, str]] = []
        """Node and name of each process's parent process."""

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def times(self) -> "list[array[float]]":
        """One column per event, in seconds. No process can be added once this was read."""
        rows, self._rows = self._rows, array("d")
        width = 2 * len(self.shape.names)
        return [rows[event::width] for event in range(width)]

    def append(self, track: Track) -> None:
        """Add a process, whose spans must have this shape."""
        assert "times" not in self.__dict__
        row = len(self.nodes)
        self.nodes.append(track.node)
        self.ranks.append(track.rank)
        self.tasks.append(track.task)
        self.parents.append((track.node, track.parent))
        spans = track.spans
        begins = [span.begin_s for span in spans]
        times = [0.0] * (2 * len(spans))
        times[0::2] = begins
        times[1::2] = map(max, begins, [span.end_s for span in spans])
        self._rows.extend(times)
        for number, span in enumerate(spans):
            if not (
                span.evidence
                or span.barrier
                or span.missed_barrier
                or span.waited_for
                or span.is_open
                or span.has_failed
                or span.notes
            ):
                continue
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
            evidence = self.evidence[number]
            for name, value in span.evidence.items():
                if value.__class__ is float or (value.__class__ is int and name != MONOTONIC):
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
        """Add the processes of another group of the same shape and role."""
        rows = len(self)
        self.nodes += other.nodes
        self.ranks += other.ranks
        self.tasks += other.tasks
        self.parents += other.parents
        assert "times" not in self.__dict__
        assert "times" not in other.__dict__
        self._rows += other._rows
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
    """Groups of a start, with an index of its processes."""

    def __init__(self, tracks: Iterable[Track] = ()) -> None:
        self._groups: dict[tuple[Shape, str], Group] = {}
        self._places: dict[tuple[str, str], ProcessRow] = {}
        self._started: dict[Group, list[tuple[ProcessRow, int] | None]] = {}
        self.heading: Heading | None = None
        """None until a node is added by `add_node`."""
        for track in tracks:
            self.add(track)

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(self._groups.values())

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, in the order in which they were added."""
        return list(dict.fromkeys(node for group in self._groups.values() for node in group.nodes))

    @property
    def stage_count(self) -> int:
        return sum(len(group) * len(group.shape.names) for group in self._groups.values())

    def add(self, track: Track) -> None:
        """Add one process."""
        if not track.spans:
            return
        shape = Shape(track.spans)
        key = (shape, track.role)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(shape, track.role)
        self._places.setdefault((track.node, track.process), ProcessRow(group, len(group)))
        group.append(track)

    def add_node(self, stages: Sequence[Stage], origin_ns: int) -> None:
        """Add all stages of one node; `origin_ns` (since 1970) becomes time 0."""
        if stages:
            stages, heading = without_restarts(stages)
            self._update_heading(heading)
            for track in tracks_of(stages, origin_ns):
                self.add(track)

    def _update_heading(self, heading: Heading) -> None:
        known = self.heading
        if known is not None:
            restart_count = max(known.restart_count, heading.restart_count)
            first = min(known, heading, key=lambda one: one.began_ns)
            failed = [one for one in (known, heading) if one.failure is not None]
            worst = min(failed, key=lambda one: one.failure_order, default=first)
            heading = replace(
                first,
                restart_count=restart_count,
                failure=worst.failure,
                failure_order=worst.failure_order,
            )
        self.heading = heading

    def merge(self, other: "StartGraph") -> None:
        """Move the nodes of another graph into this one. The graphs must share no node."""
        if other.heading is not None:
            self._update_heading(other.heading)
        rows: dict[Group, tuple[Group, int]] = {}
        for key, group in other._groups.items():
            own = self._groups.setdefault(key, group)
            rows[group] = own, len(own) if own is not group else 0
            if own is not group:
                own.extend(group)
        for process, (group, row) in other._places.items():
            own, before = rows[group]
            self._places.setdefault(process, ProcessRow(own, before + row))

    def launcher(self, node: str) -> ProcessRow | None:
        """Return the row of a node's launcher, or None."""
        return self._places.get((node, ""))

    def parents(self) -> set[ProcessRow]:
        """Return the processes that started others, without launchers."""
        found = {
            self._places.get(parent)
            for group in self._groups.values()
            for parent in group.parents
            if parent[1]
        }
        return {place for place in found if place is not None}

    def started_by(self, group: Group) -> "list[tuple[ProcessRow, int] | None]":
        """Return each process's parent, and the parent's last event before the process began.

        An entry is None if the parent is unknown; the process then began at time 0. Call this only
        after all processes have been added.
        """
        if group not in self._started:
            # A launcher without a known kubelet or scheduler counts as started by another node's.
            others = self._assumed_starters if group.role == LAUNCHER else []
            self._started[group] = [
                self._event_before([*_starters(group.role, *parent), *others], begin)
                for parent, begin in zip(group.parents, group.times[0], strict=True)
            ]
        return self._started[group]

    @cached_property
    def _assumed_starters(self) -> list[tuple[str, str]]:
        """Node and role of the process that is assumed to start launchers without a known one."""
        found = (one for one in self._groups.values() if one.role in BEFORE_LAUNCHER)
        first = min(found, key=lambda one: BEFORE_LAUNCHER.index(one.role), default=None)
        return [(first.nodes[0], first.role)] if first is not None else []

    def _event_before(
        self, starters: Iterable[tuple[str, str]], begin: float
    ) -> tuple[ProcessRow, int] | None:
        for starter in starters:
            place = self._places.get(starter)
            if place is not None:
                group, row = place
                events = [event for event in group.shape.order if group.times[event][row] <= begin]
                if events:
                    return place, events[-1]
        return None

    def align(self, shift_s: Mapping[str, float], origin_s: float) -> None:
        """Add each node's clock correction to all of its times but the control plane's.

        Then subtract `origin_s` from all times.
        """
        for group in self._groups.values():
            is_shifted = group.role != CONTROL_PLANE
            offsets = [
                origin_s - shift_s.get(node, 0.0) if is_shifted else origin_s
                for node in group.nodes
            ]
            group.times = [array("d", map(sub, column, offsets)) for column in group.times]

    def barriers(self) -> Iterator[tuple[Group, int, list[str]]]:
        """Yield each barrier span with its group and the barrier key of each row."""
        for group in self.groups:
            for span, keys in group.barriers.items():
                yield group, span, keys

    def spans(self, name: str) -> list[tuple[Group, int]]:
        """Return all spans of this name, each with its group."""
        return [
            (group, span)
            for group in self.groups
            for span, found in enumerate(group.shape.names)
            if found == name
        ]


def _starters(role: str, node: str, parent: str) -> list[tuple[str, str]]:
    """Return candidates for the parent of a process of this role; the first known one counts."""
    if role == LAUNCHER:
        return [(node, name) for name in BEFORE_LAUNCHER]
    if role in BEFORE_LAUNCHER:
        return [(node, name) for name in BEFORE_LAUNCHER[BEFORE_LAUNCHER.index(role) + 1 :]]
    return [(node, parent), (node, "")]
