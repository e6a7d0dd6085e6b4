"""Analysis of a start, comparison of several, and progress of a running one. Pure (no I/O).

`StartModel` analyses a start, `largest_delay` finds the node that held the others, `break_down`
makes the table of stages, `compare_starts` and `history_of` compare starts, and `progress`
summarises a start that is under way. Times of the table count from the first stage of the same
node, by that node's clock.
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from operator import sub
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from bootseer.report.clocks import Clocks, compare_clocks
from bootseer.report.graph import (
    BEFORE_LAUNCHER,
    CONTROL_PLANE,
    LAUNCHER,
    NO_RANK,
    NOTES_MAX,
    UNWATCHED,
    Failure,
    Group,
    ProcessRow,
    StartGraph,
    begin_of,
    end_of,
    node_of,
    rank_of,
)
from bootseer.report.path import Blame, MissedBarrier, PathSegment, Walker, missed_barriers
from bootseer.report.peers import (
    Comparison,
    Outlier,
    PeerGroup,
    Peers,
    as_its_peers,
    compare,
    compare_nodes,
    least_excess_s,
    may_stand_out,
    twice_as_fast,
    without_stragglers,
)
from bootseer.report.replay import Change, StartReplay, intervals_of, ready_s
from bootseer.report.services import FanOut, Requests, fan_out_of, requests_of
from bootseer.report.stragglers import Cause, Evidence, Straggler, cause_of, find_stragglers
from bootseer.timeline.otlp import PROCESS, READY, START, Stage

# What-ifs are computed only for the few nodes and stages that would save most.
_WHAT_IF_NODES = 3
_WHAT_IF_STAGES = 4
# A smaller delay is noise of a start in which nobody held the others.
_DELAY_MIN_S, _SHARE_MIN = 1.0, 0.05


Apply = Callable[
    [Callable[["tuple[str, Change]"], "WhatIf"], "list[tuple[str, Change]]"], Iterable["WhatIf"]
]
"""Signature of `map`."""
Beside = Callable[[Callable[[], "WhatIf"]], AbstractContextManager[Callable[[], "WhatIf"]]]
"""Signature of a function that computes something while the caller does something else."""


class Delay(Struct, frozen=True):
    """Node and stage that held the others, and the time that was lost by it."""

    node: str
    rank: int
    """Rank that was slow; `NO_RANK` if all of the node's ranks were."""
    stage: str
    seconds: float
    """Seconds that the median process of the other nodes waited."""
    alone_s: float
    """Seconds that the last process of the other nodes waited: the start would save so much if
    only this node were as its peers."""
    cause: Cause
    gpu_hours: float = 0.0
    """`seconds` times the number of ranks, all of which waited."""


class WhatIf(Struct, frozen=True):
    """Result of a replay with one change."""

    name: str
    ready_s: float
    """Time until ready; counts from the submission, unlike `Summary.ready_s`."""
    saved_s: float
    saved_gpu_hours: float


class Summary(Struct, frozen=True, kw_only=True):
    """Facts of a start that are compared with other starts."""

    node_count: int
    rank_count: int
    ready_s: float
    """Seconds from the begin of the first launcher until the last process was ready."""
    before_s: float
    """Seconds from the submission until the first launcher began; 0 if the submission is unknown.
    The times of `path` count from the submission."""
    is_ready: bool
    """Whether a process said that it was ready. If not, `ready_s` is the time of the last event."""
    path: tuple[PathSegment, ...] = field(name="critical_path")
    stragglers: tuple[Straggler, ...]


class Analysis(Summary, frozen=True, kw_only=True):
    """Complete analysis of a start."""

    replay_error_s: float
    """Difference of the unchanged replay's `ready_s` from the measured one."""
    clocks: Clocks
    peers: dict[PeerGroup, Peers]
    delay: Delay | None
    """Largest delay; None if no node held the others."""
    blame: tuple[Blame, ...]
    missed: tuple[MissedBarrier, ...] = field(name="missed_barriers")
    """Barriers at which processes gave up."""
    what_ifs: tuple[WhatIf, ...]
    requests: tuple[Requests, ...]
    """Requests to shared servers."""
    fan_out: FanOut | None
    """Bytes received by the fan-out; None if there were none."""


class StartModel:
    """Graph of a start with corrected clocks, and the statistics that its analysis needs.

    Times count from the first event: the submission if it is known, else the begin of the first
    launcher.
    """

    def __init__(self, graph: StartGraph) -> None:
        self.graph = graph
        self.clocks = compare_clocks(self.graph)
        shift_s = self.clocks.shift_s
        begins = [
            (
                group.role in BEFORE_LAUNCHER,
                time + (shift_s.get(node, 0.0) if group.role != CONTROL_PLANE else 0.0),
            )
            for group in self.graph.groups
            for node, time in zip(group.nodes, group.times[0], strict=True)
        ]
        origin_s = min((begin for _, begin in begins), default=0.0)
        began_s = min((begin for is_before, begin in begins if not is_before), default=origin_s)
        self.graph.align(shift_s, origin_s)
        self.before_s = began_s - origin_s
        self.intervals = intervals_of(self.graph)
        self.peers = compare(self.intervals.values())
        self.measured_s = ready_s(self.graph)
        self.is_ready = bool(self.graph.spans(READY))

    @property
    def ready_s(self) -> float:
        """Seconds from the begin of the first launcher until the last process was ready."""
        return self.measured_s - self.before_s

    def what_if(self, name: str, change: Change) -> WhatIf:
        """Replay the start with a change of its intervals."""
        replayed_s = StartReplay(self.graph, self.intervals, change).ready_s()
        saved = self.measured_s - replayed_s
        return WhatIf(name, replayed_s, saved, saved * self.rank_count / 3600)

    @cached_property
    def rank_count(self) -> int:
        """Number of training processes; the number of nodes if none of them wrote a stage."""
        # torchrun's agents have a rank too, but are no training processes.
        parents = self.graph.parents()
        found = {
            (node, rank)
            for group in self.graph.groups
            for row, (node, rank) in enumerate(zip(group.nodes, group.ranks, strict=True))
            if rank != NO_RANK and ProcessRow(group, row) not in parents
        }
        return len(found) or len(self.graph.nodes)

    @cached_property
    def _even_start(self) -> WhatIf:
        return self._replay_even_start()

    def _replay_even_start(self) -> WhatIf:
        return self.what_if("no stragglers", without_stragglers(self.peers))

    def gather(self, beside: Beside) -> None:
        """Compute what `summary` needs, the replay without stragglers by `beside`.

        Optional: `summary` computes it otherwise, one after the other.
        """
        with beside(self._replay_even_start) as even_start:
            self.evidence.gather(self._comparisons)
            _ = self._walker
            self._even_start = even_start()

    @cached_property
    def evidence(self) -> Evidence:
        """The figures of the start's stages."""
        return Evidence(self.graph)

    @cached_property
    def _comparisons(self) -> Sequence[Comparison]:
        """Intervals in which a node may stand out by the smallest excess that any start reports.

        `_stragglers` raises this excess for a long start.
        """
        return list(compare_nodes(self.intervals.values(), self.peers, least_excess_s(0.0)))

    @cached_property
    def _walker(self) -> Walker:
        return Walker(self.graph)

    @cached_property
    def summary(self) -> Summary:
        """The facts that are compared with other starts."""
        return Summary(
            node_count=len(self.graph.nodes),
            rank_count=self.rank_count,
            ready_s=self.ready_s,
            before_s=self.before_s,
            is_ready=self.is_ready,
            path=tuple(self._walker.critical_path()),
            stragglers=tuple(self._stragglers()),
        )

    def analyse(self, apply: Apply = map) -> Analysis:
        """Return the complete analysis. `apply` is `map`, or runs calls in several processes."""
        changes = list(self._changes(self.summary))
        # The replay without a change measures the error of the others.
        same, *others = apply(self._what_if, [("", lambda interval: None), *changes])
        blame = self._walker.blame(self.intervals, self.peers)
        missed = missed_barriers(self.graph)
        return Analysis(
            **asdict(self.summary),
            replay_error_s=-same.saved_s,
            clocks=self.clocks,
            peers=self.peers,
            delay=largest_delay(self, blame, missed),
            blame=tuple(blame),
            missed=tuple(missed),
            what_ifs=(self._even_start, *others),
            requests=requests_of(self.graph),
            fan_out=fan_out_of(self.graph),
        )

    def _what_if(self, change: tuple[str, Change]) -> WhatIf:
        return self.what_if(*change)

    @cached_property
    def waiting(self) -> Counter[str]:
        """Number of nodes that waited for each node's lease or publication."""
        return Counter(
            node
            for group in self.graph.groups
            for leaders in group.waited_for.values()
            for node in leaders
        )

    def _stragglers(self) -> list[Straggler]:
        least_s = least_excess_s(self._even_start.ready_s)
        comparisons = [
            one
            for one in self._comparisons
            if may_stand_out(self.peers[one.label, one.role], least_s)
        ]
        return find_stragglers(comparisons, self.evidence, self.waiting, least_s)

    def _changes(self, summary: Summary) -> Iterable[tuple[str, Change]]:
        path, stragglers = summary.path, summary.stragglers
        peers = self.peers
        if len(stragglers) > 1:
            all_nodes = frozenset(one.node for one in stragglers)
            change = as_its_peers(peers, all_nodes)
            yield f"the {len(all_nodes)} named nodes as their peers", change
        on_path = dict.fromkeys(one.node for one in sorted(path, key=lambda one: -one.seconds))
        named = {one.node for one in stragglers}
        for node in [node for node in on_path if node in named][:_WHAT_IF_NODES]:
            yield f"{node} as its peers", as_its_peers(peers, frozenset([node]))
        stages: dict[str, float] = {}
        for segment in path:
            # A queue cannot be made twice as fast.
            is_queue = segment.role == CONTROL_PLANE
            if segment.label.kind == "in" and not segment.is_wait and not is_queue:
                name = segment.label.name
                stages[name] = stages.get(name, 0.0) + segment.seconds
        for name in sorted(stages, key=lambda name: -stages[name])[:_WHAT_IF_STAGES]:
            yield f"{name} twice as fast", twice_as_fast(name)


# ---- the largest delay ------------------------------------------------------------------------

# Three kinds of delay are compared, and the one that cost most counts: a stage in which a node was
# late at barriers, workers that failed and were restarted, and a process that never came to a
# barrier. In a start that is not ready, a stage that has not ended while other processes wait
# counts before all of these.


def largest_delay(
    model: StartModel, blame: Iterable[Blame], missed: Sequence[MissedBarrier]
) -> Delay | None:
    """Return the largest delay of a start, or None if no node held the others."""
    graph, delays = model.graph, [_delay_of_absence(one) for one in missed if one.absent]
    late = max(_late_stages(blame, model.peers), key=lambda one: one[0].excess_s, default=None)
    if late is not None:
        one, alone_s = late
        cause = cause_of(one, model.evidence, model.waiting)
        delays.append(Delay(one.node, one.rank, str(one.label), one.excess_s, alone_s, cause))
    if graph.heading is not None and (failure := graph.heading.failure) is not None:
        cause = Cause("restarted workers", failure.message)
        lost_s = failure.lost_s
        delays.append(Delay(failure.node, failure.rank, failure.stage, lost_s, lost_s, cause))
    least_s = max(_DELAY_MIN_S, _SHARE_MIN * model.ready_s)
    delays = [one for one in delays if one.seconds >= least_s]
    if not model.is_ready and not missed and (hanging := _delay_of_hanging(graph)) is not None:
        delays = [hanging]
    if not delays:
        return None
    worst = max(delays, key=lambda one: one.seconds)
    return replace(worst, gpu_hours=worst.seconds * model.rank_count / 3600)


def _late_stages(
    blame: Iterable[Blame], peers: Mapping[PeerGroup, Peers]
) -> Iterable[tuple[Outlier, float]]:
    """Yield the stages in which nodes were late, and what each cost alone, in seconds.

    The excess of a stage is its lateness at all barriers.
    """
    found: dict[tuple[str, PeerGroup], list[tuple[float, float, Blame]]] = {}
    for one in blame:
        for lost in one.lost:
            late = min(one.late_s, lost.seconds), min(one.alone_s, lost.seconds), one
            found.setdefault((one.node, (lost.label, lost.role)), []).append(late)
    for (node, (label, role)), same in found.items():
        worst = max(same, key=lambda late: late[0])[2]
        rank = NO_RANK if worst.is_whole_node else worst.rank
        median_s = peers[label, role].median_s
        seconds = median_s + sum(late_s for late_s, _, _ in same)
        alone_s = sum(alone_s for _, alone_s, _ in same)
        yield Outlier(node, label, role, seconds, median_s, 0.0, rank), alone_s


def _delay_of_absence(missed: MissedBarrier) -> Delay:
    count = f"{missed.came_count} of {missed.expected_count} came"
    cause = Cause("never came", count)
    stage, waited_s = f"before {missed.barrier}", missed.waited_s
    return Delay(missed.absent[0], NO_RANK, stage, waited_s, waited_s, cause)


def _delay_of_hanging(graph: StartGraph) -> Delay | None:
    """Return the oldest open stage that waits for no other process, if other processes wait."""
    last_s = max((max(column) for group in graph.groups for column in group.times), default=0.0)
    found: list[tuple[float, Group, int, int]] = []
    waiting_count = 0
    for group in graph.groups:
        for span, rows in group.open_spans.items() if group.role not in BEFORE_LAUNCHER else ():
            if _waits(group, span):
                waiting_count += len(rows)
                continue
            begins = group.times[begin_of(span)]
            found += [
                (begins[row], group, span, row)
                for row in rows
                if not _has_open_child(group, span, row)
            ]
    if not found or not waiting_count:
        return None
    begin_s, group, span, row = min(found, key=lambda one: one[0])
    cause = Cause("not ended", f"{waiting_count} processes wait at barriers")
    label = str(group.shape.label(span))
    open_s = last_s - begin_s
    return Delay(group.nodes[row], group.ranks[row], label, open_s, open_s, cause)


def _waits(group: Group, span: int) -> bool:
    shape = group.shape
    return shape.is_barrier[span] or shape.is_missed[span] or shape.waits[span]


def _has_open_child(group: Group, span: int, row: int) -> bool:
    return any(
        parent == span and row in group.open_spans.get(child, ())
        for child, parent in enumerate(group.shape.parents)
    )


# ---- the table of stages ----------------------------------------------------------------------


class StageRow(Struct, frozen=True):
    """Row of the table: one stage over all nodes. Seconds are None if no node has finished it."""

    name: str
    node_count: int
    rank_count: int
    """Number of processes with the stage: launchers (one per node) or training processes."""
    open_count: int
    """Ranks on which the stage began and never ended."""
    open_on: tuple[str, ...]
    """Ranks on which the stage is open, as NODE/RANK."""
    failed_count: int
    begins_s: float
    """Median offset from the node's own start; negative before the launcher began."""
    median_s: float | None
    p99_s: float | None
    max_s: float | None
    slowest_node: str | None
    """Slowest process, as NODE/RANK."""
    bytes_moved: int
    """Sum of `bootseer.bytes` over the nodes."""
    notes: tuple[str, ...]
    """Distinct fallbacks and errors, at most `NOTES_MAX`."""

    @property
    def max_over_median(self) -> float | None:
        """Straggler ratio; None with fewer than two finished ranks."""
        if self.median_s is None or self.max_s is None or self.rank_count - self.open_count < 2:
            return None
        return self.max_s / self.median_s if self.median_s > 0 else None


class Breakdown(Struct, frozen=True):
    """Table of a start: its stages in order of their begin, and two rows for the whole."""

    job: str
    submission: str
    attempt: int
    trace_id: str
    node_count: int
    rank_count: int
    """Largest number of ranks of a stage: a launcher counts once, not once per worker."""
    restart_count: int
    """Number of in-place restarts of the workers. The stages are those of the first workers that
    became ready."""
    failure: Failure | None
    """Failure for which workers were restarted before they were ready."""
    total: StageRow | None
    """Time until the command started."""
    ready: StageRow | None
    """Time until the training code was ready; None if it never was."""
    stages: tuple[StageRow, ...]


def break_down(graph: StartGraph) -> Breakdown | None:
    """Return the table of a start, or None if it has no stage."""
    heading = graph.heading
    if heading is None:
        return None
    origins: dict[str, float] = {}
    for group in graph.groups:
        if group.role not in BEFORE_LAUNCHER:
            for node, begin in zip(group.nodes, group.times[0], strict=True):
                origins[node] = min(begin, origins.get(node, begin))
    parts: dict[tuple[str, str], list[_Part]] = {}
    began = min(origins.values(), default=0.0)
    for group in graph.groups:
        # A node whose launcher has not begun has only stages of schedulers and kubelets.
        origin = array("d", [origins.get(node, began) for node in group.nodes])
        role = "" if group.role in (LAUNCHER, UNWATCHED) else group.role
        by_name: dict[str, list[int]] = {}
        for span, name in enumerate(group.shape.names):
            by_name.setdefault(name, []).append(span)
        for name, spans in by_name.items():
            # The whole start and its end are one row each, whichever program wrote them.
            key = name, "" if name in (READY, START) else role
            parts.setdefault(key, []).append(_Part(group, spans, origin))
    names = Counter(name for name, _ in parts)
    # The role is part of the name only if several programs have a stage of this name.
    counts: dict[frozenset[Group], tuple[int, int]] = {}
    rows = {}
    for (name, role), found in parts.items():
        shown = name if names[name] == 1 else f"{name} ({role or LAUNCHER})"
        # Most stages are those of the same groups.
        groups = frozenset(part.group for part in found)
        if groups not in counts:
            counts[groups] = _node_and_rank_count(groups)
        rows[name, role] = _row(shown, found, counts[groups])
    total, ready = rows.pop((START, ""), None), rows.pop((READY, ""), None)
    return Breakdown(
        job=heading.job,
        submission=heading.submission,
        attempt=heading.attempt,
        trace_id=heading.trace_id,
        node_count=len(origins),
        rank_count=max(row.rank_count for row in [*rows.values(), total, ready] if row),
        restart_count=heading.restart_count,
        failure=heading.failure,
        total=total,
        ready=ready,
        stages=tuple(sorted(rows.values(), key=lambda row: row.begins_s)),
    )


def _node_and_rank_count(groups: Iterable[Group]) -> tuple[int, int]:
    ranks: set[tuple[str, int]] = set()
    for group in groups:
        ranks.update(zip(group.nodes, group.tasks, strict=True))
    return len({node for node, _ in ranks}), len(ranks)


class _Part(NamedTuple):
    """Spans of one name in a group: together one stage of each process."""

    group: Group
    spans: list[int]
    origin: "array[float]"
    """Begin of each process's node."""

    @property
    def is_ready(self) -> bool:
        """Whether the stage is `ready`, an instant: its row counts from the node's begin."""
        return self.group.shape.names[self.spans[0]] == READY

    def begins(self) -> Iterable[float]:
        first = self.origin if self.is_ready else self.group.times[begin_of(self.spans[0])]
        return map(sub, first, self.origin)

    def seconds(self) -> Iterable[float]:
        """Return each process's time in the stage; for open stages until the last event."""
        begins = [self.group.times[begin_of(span)] for span in self.spans]
        if self.is_ready:
            return map(sub, begins[0], self.origin)
        ends = [self.group.times[end_of(span)] for span in self.spans]
        if len(begins) == 1:
            return map(sub, ends[0], begins[0])
        return map(_union_s, zip(*begins, strict=True), zip(*ends, strict=True))

    def open_rows(self) -> set[int]:
        return {row for span in self.spans for row in self.group.open_spans.get(span, ())}


def _row(name: str, parts: Sequence[_Part], counts: tuple[int, int]) -> StageRow:
    open_on: dict[str, None] = {}
    begins: array[float] = array("d")
    finished: array[float] = array("d")
    slowest = (-1.0, "")
    failed_count, moved = 0, 0.0
    notes: dict[str, None] = {}
    for part in parts:
        group = part.group
        begins.extend(part.begins())
        still = part.open_rows()
        open_on.update(dict.fromkeys(_rank(group, row) for row in sorted(still)))
        seconds = array("d", part.seconds())
        done = [one for row, one in enumerate(seconds) if row not in still] if still else seconds
        finished.extend(done)
        longest = max(done, default=-1.0)
        if longest > slowest[0]:
            row = next(r for r, one in enumerate(seconds) if one == longest and r not in still)
            slowest = longest, _rank(group, row)
        for span in part.spans:
            failed_count += group.failed_counts.get(span, 0)
            notes.update(group.notes.get(span, {}))
            figures = group.evidence[span].get("bootseer.bytes", ())
            moved += sum(one for one in figures if not math.isnan(one))
    ordered = sorted(finished)
    node_count, rank_count = counts
    return StageRow(
        name=name,
        node_count=node_count,
        rank_count=rank_count,
        open_count=len(open_on),
        open_on=tuple(open_on),
        failed_count=failed_count,
        begins_s=statistics.median(begins),
        median_s=statistics.median(ordered) if ordered else None,
        p99_s=ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None,
        max_s=ordered[-1] if ordered else None,
        slowest_node=slowest[1] if ordered else None,
        bytes_moved=round(moved),
        notes=tuple(itertools.islice(notes, NOTES_MAX)),
    )


def _rank(group: Group, row: int) -> str:
    return f"{group.nodes[row]}/{group.tasks[row]}"


def _union_s(begins: Iterable[float], ends: Iterable[float]) -> float:
    total, until = 0.0, -math.inf
    for begin, end in sorted(zip(begins, ends, strict=True)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


_SEEN_MIN = 3
# A stage is slower when it takes this much more than the median of the earlier starts.
_SLOWER_RATIO, _SLOWER_MIN_S = 1.3, 1.0


class StageChange(Struct, frozen=True):
    """Seconds of one stage on the critical paths of two starts; 0 if not on the path."""

    stage: str
    before_s: float
    after_s: float

    @property
    def more_s(self) -> float:
        """Seconds that the later start spent more than the earlier one."""
        return self.after_s - self.before_s


def on_path(summary: Summary) -> dict[str, float]:
    """Return the seconds of the critical path by stage; they add up to the time until ready.

    Time before the first launcher is left out, since not every start's submission is known.
    """
    found: dict[str, float] = {}
    for segment in summary.path:
        name = f"wait at {segment.label}" if segment.is_wait else str(segment.label)
        since_s = segment.begin_s + segment.seconds - summary.before_s
        if since_s > 0:
            found[name] = found.get(name, 0.0) + min(segment.seconds, since_s)
    return found


def compare_starts(before: Summary, after: Summary) -> list[StageChange]:
    """Return the changes by stage; they add up to the difference of the times until ready."""
    first, second = on_path(before), on_path(after)
    changes = [
        StageChange(stage, first.get(stage, 0.0), second.get(stage, 0.0))
        for stage in dict.fromkeys([*first, *second])
    ]
    return sorted(changes, key=lambda change: -abs(change.more_s))


class History(Struct, frozen=True):
    """Trend and repeated problems of several starts."""

    ready_s: tuple[float, ...]
    """Times until ready, oldest start first."""
    trend_s: float
    """Median of all slopes: seconds that a start takes longer than the one before."""
    slower: tuple[StageChange, ...]
    """Stages of the newest start that take longer than the median of the others."""
    repeated: tuple["Repeated", ...]
    """Nodes that were slow in at least half of the starts."""


class Repeated(Struct, frozen=True):
    """Node that is slow again and again."""

    node: str
    start_count: int
    """Number of starts in which it was slow."""


def history_of(starts: Sequence[Summary]) -> History:
    """Return the history of starts, given oldest first."""
    ready = [start.ready_s for start in starts]
    slopes = [
        (ready[later] - ready[earlier]) / (later - earlier)
        for earlier in range(len(ready))
        for later in range(earlier + 1, len(ready))
    ]
    counts: dict[str, int] = {}
    for start in starts:
        for one in start.stragglers:
            counts[one.node] = counts.get(one.node, 0) + 1
    often = [
        Repeated(node, count)
        for node, count in counts.items()
        if count >= 2 and 2 * count >= len(starts)
    ]
    return History(
        ready_s=tuple(ready),
        trend_s=statistics.median(slopes) if slopes else 0.0,
        slower=tuple(_slower(starts)),
        repeated=tuple(sorted(often, key=lambda one: -one.start_count)),
    )


def _slower(starts: Sequence[Summary]) -> list[StageChange]:
    if len(starts) < _SEEN_MIN + 1:
        return []
    *before, newest = (on_path(start) for start in starts)
    found = []
    for stage, seconds in newest.items():
        median = statistics.median(start.get(stage, 0.0) for start in before)
        if seconds >= max(_SLOWER_RATIO * median, median + _SLOWER_MIN_S):
            found.append(StageChange(stage, median, seconds))
    return sorted(found, key=lambda change: -change.more_s)


_NAMED_MAX = 10


class Hanging(Struct, frozen=True):
    """Open stage that takes longer than it took the other processes."""

    node: str
    rank: int
    stage: str
    open_s: float
    median_s: float


class StageProgress(Struct, frozen=True):
    """Numbers of processes on which a stage is open and done."""

    name: str
    open_count: int
    done_count: int


class StartProgress(Struct, frozen=True):
    """State of a start at one instant."""

    elapsed_s: float
    node_count: int
    ready_count: int
    """Number of processes that are ready."""
    stages: tuple["StageProgress", ...]
    """Stages in order of their first begin."""
    hanging: tuple[Hanging, ...]
    expected_s: float | None
    """Median time until ready of earlier starts; None if there are none."""


def progress(
    stages: Iterable[Stage], now_ns: int, times_median: float, earlier_s: Sequence[float] = ()
) -> StartProgress:
    """Return the state of a start at `now_ns` (since 1970).

    A stage hangs if it is open for more than `times_median` times its median. `earlier_s` are the
    times until ready of earlier starts.
    """
    stages = sorted(stages, key=lambda stage: stage.start_ns)
    began_ns = stages[0].start_ns if stages else now_ns
    by_name: dict[str, list[Stage]] = {}
    for stage in stages:
        if stage.name not in (READY, START):
            by_name.setdefault(stage.name, []).append(stage)
    hanging: list[Hanging] = []
    for name, found in by_name.items():
        hanging += _hanging(name, found, now_ns, times_median)
    return StartProgress(
        elapsed_s=(now_ns - began_ns) / 1e9,
        node_count=len({node_of(stage) for stage in stages}),
        ready_count=len({_process(stage) for stage in stages if stage.name == READY}),
        stages=tuple(StageProgress(name, *_counts(found)) for name, found in by_name.items()),
        hanging=tuple(sorted(hanging, key=lambda one: -one.open_s)[:_NAMED_MAX]),
        expected_s=sorted(earlier_s)[len(earlier_s) // 2] if earlier_s else None,
    )


def _process(stage: Stage) -> tuple[str, int, str]:
    return node_of(stage), rank_of(stage), str(stage.resource.get(PROCESS, ""))


def _counts(found: Sequence[Stage]) -> tuple[int, int]:
    still = {_process(stage) for stage in found if stage.end_ns is None}
    return len(still), len({_process(stage) for stage in found} - still)


def _hanging(
    name: str, found: Sequence[Stage], now_ns: int, times_median: float
) -> Iterable[Hanging]:
    done = sorted(stage.end_ns - stage.start_ns for stage in found if stage.end_ns is not None)
    if not done:
        return
    median_s = done[len(done) // 2] / 1e9
    for stage in found:
        open_s = (now_ns - stage.start_ns) / 1e9
        if stage.end_ns is None and open_s > max(1.0, times_median * median_s):
            node, rank, _ = _process(stage)
            yield Hanging(node, rank, name, open_s, median_s)
