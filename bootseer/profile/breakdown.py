"""The breakdown of one start over all its nodes. Pure (no I/O).

Times count from the first stage of the same node, by that node's clock: clocks of nodes differ.
"""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.profile.model.tracks import LAUNCHER, node_of
from bootseer.timeline.otlp import PROCESS, READY, ROLE, START, Stage


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
    """Median offset from the node's own start."""
    median_s: float | None
    p99_s: float | None
    max_s: float | None
    slowest_node: str | None
    """As NODE/RANK."""
    bytes_moved: int
    """Sum of `bootseer.bytes` over the nodes."""
    notes: tuple[str, ...]
    """Distinct fallbacks and errors."""

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


class BreakdownBuilder:
    """Takes in a start node by node, and keeps of each stage what its row needs."""

    def __init__(self) -> None:
        self._first: Stage | None = None
        self._node_count = 0
        self._restart_count = 0
        self._rows: dict[tuple[str, str], _RowBuilder] = {}

    def add(self, stages: Sequence[Stage]) -> None:
        """Take in all stages of one node. Those of workers that were started again are left out."""
        if not stages:
            return
        first = min(stages, key=lambda stage: stage.start_ns)
        if self._first is None or first.start_ns < self._first.start_ns:
            self._first = first
        self._node_count += 1
        restarts = max(map(_restart, stages)) - _restart(first)
        self._restart_count = max(self._restart_count, restarts)
        stages = of_the_start(stages)
        roles = _roles(stages)
        by_process: dict[tuple[str, str, str], list[Stage]] = {}
        for stage in stages:
            if stage.name == READY:
                # It says when, not how long: what is asked is how long that took.
                stage = stage._replace(start_ns=first.start_ns, end_ns=stage.start_ns)
            process = str(stage.resource.get(PROCESS, ""))
            by_process.setdefault((stage.name, process, _rank(stage)), []).append(stage)
        for (name, process, rank), same in by_process.items():
            # The start as a whole and its end are one row each, whoever says so.
            role = "" if name in (READY, START) else roles.get(process, "")
            row = self._rows.setdefault((name, role), _RowBuilder())
            row.add(same, rank, first.start_ns)

    def build(self) -> Breakdown | None:
        """The breakdown; None if there was no stage."""
        first = self._first
        if first is None:
            return None
        names = Counter(name for name, _ in self._rows)
        # Programs are told apart where several have a stage of one name.
        rows = {
            key: row.build(key[0] if names[key[0]] == 1 else f"{key[0]} ({key[1] or LAUNCHER})")
            for key, row in self._rows.items()
        }
        total, ready = rows.pop((START, ""), None), rows.pop((READY, ""), None)
        return Breakdown(
            job=str(first.resource.get("bootseer.job", "")),
            submission=str(first.resource.get("bootseer.submission", "")),
            attempt=_whole(first, "bootseer.attempt"),
            trace_id=first.trace_id,
            node_count=self._node_count,
            rank_count=max(row.rank_count for row in [*rows.values(), total, ready] if row),
            restart_count=self._restart_count,
            total=total,
            ready=ready,
            stages=tuple(sorted(rows.values(), key=lambda row: row.begins_s)),
        )


class _RowBuilder:
    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._ranks: set[str] = set()
        self._open_on: dict[str, None] = {}
        self._begins: array[float] = array("d")
        self._finished: array[float] = array("d")
        self._slowest = (-1.0, "")
        self._failed_count = 0
        self._moved = 0
        self._notes: dict[str, None] = {}

    def add(self, stages: Sequence[Stage], rank: str, origin_ns: int) -> None:
        """Take in all that one process did under one name, as one stage."""
        self._nodes.add(node_of(stages[0]))
        self._ranks.add(rank)
        self._begins.append((min(stage.start_ns for stage in stages) - origin_ns) / 1e9)
        for stage in stages:
            self._failed_count += stage.failed
            self._moved += _whole(stage, "bootseer.bytes")
            fallback = str(stage.attributes.get("bootseer.fallback", ""))
            self._notes.update(dict.fromkeys(filter(None, (fallback, stage.message))))
        seconds = _together_s(stages)
        if seconds is None:
            self._open_on[rank] = None
            return
        self._finished.append(seconds)
        self._slowest = max(self._slowest, (seconds, rank), key=lambda one: one[0])

    def build(self, name: str) -> StageRow:
        ordered = sorted(self._finished)
        return StageRow(
            name=name,
            node_count=len(self._nodes),
            rank_count=len(self._ranks),
            open_count=len(self._open_on),
            open_on=tuple(self._open_on),
            failed_count=self._failed_count,
            begins_s=statistics.median(self._begins),
            median_s=statistics.median(ordered) if ordered else None,
            p99_s=ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None,
            max_s=ordered[-1] if ordered else None,
            slowest_node=self._slowest[1] if ordered else None,
            bytes_moved=self._moved,
            notes=tuple(self._notes),
        )


def break_down(stages: Iterable[Stage]) -> Breakdown | None:
    """The breakdown of the stages of one start (any number of nodes); None if there are none."""
    by_node: dict[str, list[Stage]] = {}
    for stage in stages:
        by_node.setdefault(node_of(stage), []).append(stage)
    builder = BreakdownBuilder()
    for node in by_node.values():
        builder.add(node)
    return builder.build()


def of_the_start(stages: Sequence[Stage]) -> list[Stage]:
    """The stages of one node without those of workers that were started again in place since."""
    first = min(stages, key=lambda stage: stage.start_ns)
    return [stage for stage in stages if _restart(stage) <= _restart(first)]


def _together_s(stages: Sequence[Stage]) -> float | None:
    """For how long any of the stages ran; None where one never ended."""
    total = until = 0
    for stage in sorted(stages, key=lambda stage: stage.start_ns):
        if stage.end_ns is None:
            return None
        total += max(0, stage.end_ns - max(stage.start_ns, until))
        until = max(until, stage.end_ns)
    return total / 1e9


def _roles(stages: Iterable[Stage]) -> dict[str, str]:
    """The program of each process that is known."""
    return {
        str(stage.resource[PROCESS]): str(stage.resource[ROLE])
        for stage in stages
        if PROCESS in stage.resource and ROLE in stage.resource
    }


def _rank(stage: Stage) -> str:
    return f"{node_of(stage)}/{stage.resource.get('bootseer.rank', 0)}"


def _restart(stage: Stage) -> int:
    return _whole(stage, "bootseer.restart")


def _whole(stage: Stage, name: str) -> int:
    """A count of a stage, or of its writer; 0 where there is none."""
    value = stage.attributes.get(name, stage.resource.get(name, 0))
    return value if isinstance(value, int) else 0
