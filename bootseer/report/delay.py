"""Largest delay of a start: the node that held the others, and the stage it held them in. Pure.

The answer on which the page opens. Three kinds of delay are compared, and the one that cost most
counts: a stage in which a node was late at barriers, workers that failed and were restarted, and a
process that never came to a barrier. In a start that is not ready, a stage that has not ended while
other processes wait counts before all of these.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from bootseer.report.graph import (
    BEFORE_LAUNCHER,
    NO_RANK,
    Group,
    StartGraph,
    begin_of,
)
from bootseer.report.path import Blame, MissedBarrier
from bootseer.report.peers import Outlier, PeerGroup, Peers
from bootseer.report.stragglers import Cause, cause_of

if TYPE_CHECKING:
    from bootseer.report.explain import StartModel

# A smaller delay is noise of a start in which nobody held the others.
_DELAY_MIN_S, _SHARE_MIN = 1.0, 0.05


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


def largest_delay(
    model: "StartModel", blame: Iterable[Blame], missed: Sequence[MissedBarrier]
) -> Delay | None:
    """Return the largest delay of a start, or None if no node held the others."""
    graph, delays = model.graph, [_absent(one) for one in missed if one.absent]
    late = max(_late(blame, model.peers), key=lambda one: one[0].excess_s, default=None)
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
    if not model.is_ready and not missed and (hanging := _hanging(graph)) is not None:
        delays = [hanging]
    if not delays:
        return None
    worst = max(delays, key=lambda one: one.seconds)
    return replace(worst, gpu_hours=worst.seconds * model.rank_count / 3600)


def _late(
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


def _absent(missed: MissedBarrier) -> Delay:
    count = f"{missed.came_count} of {missed.expected_count} came"
    cause = Cause("never came", count)
    stage, waited_s = f"before {missed.barrier}", missed.waited_s
    return Delay(missed.absent[0], NO_RANK, stage, waited_s, waited_s, cause)


def _hanging(graph: StartGraph) -> Delay | None:
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
