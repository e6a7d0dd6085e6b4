"""The breakdown of one start over all its nodes. Pure (no I/O).

Times count from the first stage of the same node, by that node's clock: clocks of nodes differ.
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import sub
from typing import NamedTuple

from msgspec import Struct

from bootseer.profile.model.graph import NOTES_MAX, Group, StartGraph
from bootseer.profile.model.shape import begin_of, end_of
from bootseer.profile.model.tracks import BEFORE_LAUNCHER, LAUNCHER, UNWATCHED
from bootseer.timeline.otlp import READY, START


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
