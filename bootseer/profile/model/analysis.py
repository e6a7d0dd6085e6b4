"""Everything that is said of one start, from its tracks. Pure (no I/O)."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Protocol

from msgspec import Struct
from msgspec.structs import asdict

from bootseer.profile.model.causes import Cause, Evidence, cause_of
from bootseer.profile.model.clocks import Clocks, compare_clocks
from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.missed import MissedBarrier, missed_barriers
from bootseer.profile.model.path import Blame, Segment, Walker
from bootseer.profile.model.peers import (
    Outlier,
    Peers,
    Who,
    as_its_peers,
    compare,
    find_outliers,
    times_as_fast,
    without_stragglers,
)
from bootseer.profile.model.replay import Change, Replay, pieces_of, ready_s
from bootseer.profile.model.services import FanOut, Requests, fan_out_of, requests_of
from bootseer.profile.model.tracks import BEFORE_LAUNCHER, CONTROL_PLANE, NO_RANK
from bootseer.timeline.otlp import READY

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
