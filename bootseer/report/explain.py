"""What is said of a start, of several, and of one that is under way. Pure (no I/O).

`StartModel` explains a start whose tracks are known, `break_down` makes the table of its stages,
`compare_starts` and `look_back` set starts side by side, and `progress` says which nodes are where.
Times of the table count from the first stage of the same node, by that node's clock.
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import sub
from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import asdict

from bootseer.report.clocks import Clocks, compare_clocks
from bootseer.report.graph import (
    BEFORE_LAUNCHER,
    CONTROL_PLANE,
    LAUNCHER,
    NO_RANK,
    NOTES_MAX,
    UNWATCHED,
    Group,
    StartGraph,
    begin_of,
    end_of,
    node_of,
    rank_of,
)
from bootseer.report.path import Blame, MissedBarrier, Segment, Walker, missed_barriers
from bootseer.report.peers import (
    Cause,
    Evidence,
    Outlier,
    Peers,
    Who,
    as_its_peers,
    cause_of,
    compare,
    find_outliers,
    times_as_fast,
    without_stragglers,
)
from bootseer.report.replay import Change, Replay, pieces_of, ready_s
from bootseer.report.services import FanOut, Requests, fan_out_of, requests_of
from bootseer.timeline.otlp import PROCESS, READY, START, Stage

# What-ifs are of the few nodes and stages from which most is to be had.
_WHAT_IF_NODES = 3
_WHAT_IF_STAGES = 4
_FASTER = 2.0


class Apply(Protocol):
    """`map`, or what does the same."""

    def __call__(
        self,
        function: Callable[["tuple[str, Change]"], "WhatIf"],
        things: "list[tuple[str, Change]]",
        /,
    ) -> "Iterable[WhatIf]": ...


class WhatIf(Struct, frozen=True):
    """What the start would have been."""

    name: str
    ready_s: float
    saved_s: float
    saved_gpu_hours: float


class Straggler(Struct, frozen=True):
    """A node that was slower than the others, with the likeliest cause."""

    node: str
    cause: Cause
    lost_s: float
    """Of the piece of time that cost most."""
    outliers: tuple[Outlier, ...]


class Summary(Struct, frozen=True, kw_only=True):
    """One start, as it is listed and compared with others."""

    node_count: int
    rank_count: int
    ready_s: float
    """From the begin of the first launcher until the last process was ready; see `is_ready`."""
    before_s: float
    """From the submission until the first launcher began; 0 where nothing tells of that time. What
    follows counts from the submission."""
    is_ready: bool
    """False: no process said that it was ready; the time is that of the last event noted."""
    path: tuple[Segment, ...]
    stragglers: tuple[Straggler, ...]


class Analysis(Summary, frozen=True, kw_only=True):
    """One start, explained."""

    replay_error_s: float
    """How far the replay of the unchanged start is from the measured one."""
    clocks: Clocks
    peers: dict[Who, Peers]
    blame: tuple[Blame, ...]
    missed: tuple[MissedBarrier, ...]
    """Barriers at which processes gave up."""
    what_ifs: tuple[WhatIf, ...]
    requests: tuple[Requests, ...]
    """What the nodes asked of servers that they share."""
    fan_out: FanOut | None
    """What the nodes got from each other; None where they got nothing."""


class StartModel:
    """A start as a graph whose clocks agree, ready to be asked.

    Its times count from the first event: the submission, where other programs tell of it, else the
    begin of the first launcher.
    """

    def __init__(self, graph: StartGraph) -> None:
        self.graph = graph
        self.clocks = compare_clocks(self.graph)
        self.graph.shift(self.clocks.shift_s)
        begins = [
            (group.role in BEFORE_LAUNCHER, min(group.times[0])) for group in self.graph.groups
        ]
        origin_s = min((begin for _, begin in begins), default=0.0)
        self.graph.count_from(origin_s)
        began_s = min((begin for is_before, begin in begins if not is_before), default=origin_s)
        self.before_s = began_s - origin_s
        self.pieces = pieces_of(self.graph)
        self.peers = compare(self.pieces.values())
        self.measured_s = ready_s(self.graph)
        self.is_ready = bool(self.graph.spans(READY))

    @property
    def ready_s(self) -> float:
        """From the begin of the first launcher until the last process was ready."""
        return self.measured_s - self.before_s

    def what_if(self, name: str, change: Change) -> WhatIf:
        """How long the start would have taken with this change."""
        replayed_s = Replay(self.graph, self.pieces, change).ready_s()
        saved = self.measured_s - replayed_s
        return WhatIf(name, replayed_s, saved, saved * self.rank_count / 3600)

    @property
    def rank_count(self) -> int:
        """Training processes; nodes where none of these noted anything."""
        found = {
            (node, rank)
            for group in self.graph.groups
            for node, rank in zip(group.nodes, group.ranks, strict=True)
            if rank != NO_RANK
        }
        return len(found) or len(self.graph.nodes)

    @cached_property
    def _even(self) -> WhatIf:
        return self.what_if("no stragglers", without_stragglers(self.peers))

    @cached_property
    def _walker(self) -> Walker:
        return Walker(self.graph)

    @cached_property
    def summary(self) -> Summary:
        """What is said of it beside other starts."""
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
        """All answers. `apply` calls a function for each of several things, as `map` does, perhaps
        in several processes."""
        changes = list(self._changes(self.summary))
        # A change that changes nothing: what it gives is the error of the others.
        same, *others = apply(self._what_if, [("", lambda piece: None), *changes])
        return Analysis(
            **asdict(self.summary),
            replay_error_s=-same.saved_s,
            clocks=self.clocks,
            peers=self.peers,
            blame=tuple(self._walker.blame(self.pieces, self.peers)),
            missed=tuple(missed_barriers(self.graph)),
            what_ifs=(self._even, *others),
            requests=requests_of(self.graph),
            fan_out=fan_out_of(self.graph),
        )

    def _what_if(self, change: tuple[str, Change]) -> WhatIf:
        return self.what_if(*change)

    def _stragglers(self) -> list[Straggler]:
        evidence = Evidence(self.graph)
        waiting: dict[str, int] = {}
        for group in self.graph.groups:
            for leaders in group.waited_for.values():
                for node in leaders:
                    waiting[node] = waiting.get(node, 0) + 1
        by_node: dict[str, list[Outlier]] = {}
        for outlier in find_outliers(self.pieces.values(), self.peers, self._even.ready_s):
            by_node.setdefault(outlier.node, []).append(outlier)
        return [
            Straggler(node, cause_of(found[0], evidence, waiting), found[0].excess_s, tuple(found))
            for node, found in by_node.items()
        ]

    def _changes(self, summary: Summary) -> Iterable[tuple[str, Change]]:
        path, stragglers = summary.path, summary.stragglers
        peers = self.peers
        if stragglers:
            all_nodes = frozenset(one.node for one in stragglers)
            change = as_its_peers(peers, all_nodes)
            yield f"the {len(all_nodes)} named nodes as their peers", change
        on_path = dict.fromkeys(one.node for one in sorted(path, key=lambda one: -one.seconds))
        named = {one.node for one in stragglers}
        for node in [node for node in on_path if node in named][:_WHAT_IF_NODES]:
            yield f"{node} as its peers", as_its_peers(peers, frozenset([node]))
        stages: dict[str, float] = {}
        for segment in path:
            # Nobody makes a queue twice as fast.
            is_queue = segment.role == CONTROL_PLANE
            if segment.label.kind == "in" and not segment.is_wait and not is_queue:
                name = segment.label.name
                stages[name] = stages.get(name, 0.0) + segment.seconds
        for name in sorted(stages, key=lambda name: -stages[name])[:_WHAT_IF_STAGES]:
            yield f"{name} twice as fast", times_as_fast(name, _FASTER)


class StageRow(Struct, frozen=True):
    """One stage over all nodes. Seconds; `None` where no node has finished the stage."""

    name: str
    node_count: int
    rank_count: int
    """Processes that have the stage: a launcher's one per node, or all the training processes."""
    open_count: int
    """Ranks on which the stage began and never ended."""
    open_on: tuple[str, ...]
    """Those, as NODE/RANK."""
    failed_count: int
    begins_s: float
    """Median offset from the node's own start; negative for what came before."""
    median_s: float | None
    p99_s: float | None
    max_s: float | None
    slowest_node: str | None
    """As NODE/RANK."""
    bytes_moved: int
    """Sum of `bootseer.bytes` over the nodes."""
    notes: tuple[str, ...]
    """Distinct fallbacks and errors, some of them where there are many."""

    @property
    def max_over_median(self) -> float | None:
        """Straggler ratio; None with fewer than two finished ranks."""
        if self.median_s is None or self.max_s is None or self.rank_count - self.open_count < 2:
            return None
        return self.max_s / self.median_s if self.median_s > 0 else None


class Breakdown(Struct, frozen=True):
    """One start: its stages in the order in which they began, and the whole."""

    job: str
    submission: str
    attempt: int
    trace_id: str
    node_count: int
    rank_count: int
    """Of the stage that most have: a launcher is counted by its node, not by its workers."""
    restart_count: int
    """How often workers were started again in place since; their later stages are left out."""
    total: StageRow | None
    """Until the command started."""
    ready: StageRow | None
    """Until the training code said that it is ready; None where it did not."""
    stages: tuple[StageRow, ...]


def break_down(graph: StartGraph) -> Breakdown | None:
    """The breakdown of a start; None if there was no stage."""
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
        # Of a node whose launcher has not begun there is only what came before.
        origin = array("d", [origins.get(node, began) for node in group.nodes])
        role = "" if group.role in (LAUNCHER, UNWATCHED) else group.role
        by_name: dict[str, list[int]] = {}
        for span, name in enumerate(group.shape.names):
            by_name.setdefault(name, []).append(span)
        for name, spans in by_name.items():
            # The start as a whole and its end are one row each, whoever says so.
            key = name, "" if name in (READY, START) else role
            parts.setdefault(key, []).append(_Part(group, spans, origin))
    names = Counter(name for name, _ in parts)
    # Programs are told apart where several have a stage of one name.
    rows = {
        (name, role): _row(name if names[name] == 1 else f"{name} ({role or LAUNCHER})", found)
        for (name, role), found in parts.items()
    }
    total, ready = rows.pop((START, ""), None), rows.pop((READY, ""), None)
    return Breakdown(
        job=heading.job,
        submission=heading.submission,
        attempt=heading.attempt,
        trace_id=heading.trace_id,
        node_count=len(origins),
        rank_count=max(row.rank_count for row in [*rows.values(), total, ready] if row),
        restart_count=heading.restart_count,
        total=total,
        ready=ready,
        stages=tuple(sorted(rows.values(), key=lambda row: row.begins_s)),
    )


class _Part(NamedTuple):
    """The spans of one name of the processes of a group: together one stage of each process."""

    group: Group
    spans: list[int]
    origin: "array[float]"
    """When the node of each process began."""

    @property
    def says_ready(self) -> bool:
        """Whether it says when, not how long: what is asked is how long that took."""
        return self.group.shape.names[self.spans[0]] == READY

    def begins(self) -> Iterable[float]:
        """After the node's own start."""
        first = self.origin if self.says_ready else self.group.times[begin_of(self.spans[0])]
        return map(sub, first, self.origin)

    def seconds(self) -> Iterable[float]:
        """How long it took each process, were it not open."""
        begins = [self.group.times[begin_of(span)] for span in self.spans]
        if self.says_ready:
            return map(sub, begins[0], self.origin)
        ends = [self.group.times[end_of(span)] for span in self.spans]
        if len(begins) == 1:
            return map(sub, ends[0], begins[0])
        return map(_together_s, zip(*begins, strict=True), zip(*ends, strict=True))

    def open_rows(self) -> set[int]:
        return {row for span in self.spans for row in self.group.open_spans.get(span, ())}


def _row(name: str, parts: Sequence[_Part]) -> StageRow:
    ranks: set[tuple[str, int]] = set()
    open_on: dict[str, None] = {}
    begins: array[float] = array("d")
    finished: array[float] = array("d")
    slowest = (-1.0, "")
    failed_count, moved = 0, 0.0
    notes: dict[str, None] = {}
    for part in parts:
        group = part.group
        ranks.update(zip(group.nodes, group.tasks, strict=True))
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
    return StageRow(
        name=name,
        node_count=len({node for node, _ in ranks}),
        rank_count=len(ranks),
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


def _together_s(begins: Iterable[float], ends: Iterable[float]) -> float:
    """For how long any of the intervals ran."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(zip(begins, ends, strict=True)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


_SEEN_MIN = 3
# A stage has got slower when it takes so much more than in the median of the starts before.
_SLOWER_RATIO, _SLOWER_MIN_S = 1.3, 1.0


class StageChange(Struct, frozen=True):
    """One stage on the critical paths of two starts; 0 where it is not on one of them."""

    stage: str
    before_s: float
    after_s: float

    @property
    def more_s(self) -> float:
        """Seconds that the later start spent more."""
        return self.after_s - self.before_s


def on_path(summary: Summary) -> dict[str, float]:
    """Seconds of the critical path by stage: together the time until ready. What came before the
    first launcher is left out, since not every start tells of it."""
    found: dict[str, float] = {}
    for segment in summary.path:
        name = f"wait at {segment.label}" if segment.is_wait else str(segment.label)
        since_s = segment.begin_s + segment.seconds - summary.before_s
        if since_s > 0:
            found[name] = found.get(name, 0.0) + min(segment.seconds, since_s)
    return found


def compare_starts(before: Summary, after: Summary) -> list[StageChange]:
    """How two starts differ: the changes add up to the difference of their times until ready."""
    first, second = on_path(before), on_path(after)
    changes = [
        StageChange(stage, first.get(stage, 0.0), second.get(stage, 0.0))
        for stage in dict.fromkeys([*first, *second])
    ]
    return sorted(changes, key=lambda change: -abs(change.more_s))


class History(Struct, frozen=True):
    """What several starts say together, oldest first."""

    ready_s: tuple[float, ...]
    trend_s: float
    """Seconds by which a start takes longer than the one before: the median of all slopes."""
    slower: tuple[StageChange, ...]
    """Stages of the newest start that take longer than in the median of the others."""
    repeated: tuple["Repeated", ...]
    """Nodes that were slow in at least half of the starts."""


class Repeated(Struct, frozen=True):
    """A node that is slow again and again."""

    node: str
    start_count: int
    """In how many starts it was."""


def look_back(starts: Sequence[Summary]) -> History:
    """The history of starts, oldest first."""
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
    """A stage of one node that is open for longer than the others took for it."""

    node: str
    rank: int
    stage: str
    open_s: float
    median_s: float


class StageProgress(Struct, frozen=True):
    """On how many processes a stage is open, and done."""

    name: str
    open_count: int
    done_count: int


class Progress(Struct, frozen=True):
    """The state of a start at one instant."""

    elapsed_s: float
    node_count: int
    ready_count: int
    """Processes that are ready."""
    stages: tuple["StageProgress", ...]
    """In order of their first begin."""
    hanging: tuple[Hanging, ...]
    expected_s: float | None
    """When the start should be ready, from earlier starts; None without any."""


def progress(
    stages: Iterable[Stage], now_ns: int, times_median: float, earlier_s: Sequence[float] = ()
) -> Progress:
    """Who is where at `now_ns`, and which stages are open for `times_median` times their median.

    `earlier_s` is how long earlier starts took until they were ready.
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
    return Progress(
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
