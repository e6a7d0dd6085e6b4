"""The breakdown of one start over all its nodes. Pure (no I/O)."""

import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.timeline.otlp import Stage

# The span that covers a whole start on one node; its children are the stages.
START = "start"


class StageRow(Struct, frozen=True):
    """One stage over all nodes. Seconds; `None` where no node has finished the stage."""

    name: str
    node_count: int
    open_count: int
    """Nodes on which the stage began and never ended."""
    failed_count: int
    begins_s: float
    """Median offset from the node's own start."""
    median_s: float | None
    max_s: float | None
    slowest_node: str | None
    bytes_moved: int
    """Sum of `bootseer.bytes` over the nodes."""
    notes: tuple[str, ...]
    """Distinct fallbacks and errors."""

    @property
    def max_over_median(self) -> float | None:
        """Straggler ratio; None with fewer than two finished nodes."""
        if self.median_s is None or self.max_s is None or self.node_count - self.open_count < 2:
            return None
        return self.max_s / self.median_s if self.median_s > 0 else None


class Breakdown(Struct, frozen=True):
    """One start: its stages in the order in which they began, and the whole."""

    job: str
    attempt: int
    trace_id: str
    node_count: int
    total: StageRow | None
    stages: tuple[StageRow, ...]


def _node(stage: Stage) -> str:
    return f"{stage.resource.get('host.name', '?')}/{stage.resource.get('bootseer.rank', 0)}"


def _row(name: str, stages: Sequence[Stage], origin_ns: dict[str, int]) -> StageRow:
    finished = [(stage.end_ns - stage.start_ns, stage) for stage in stages if stage.end_ns]
    slowest = max(finished, key=lambda pair: pair[0], default=None)
    notes: dict[str, None] = {}
    for stage in stages:
        fallback = stage.attributes.get("bootseer.fallback")
        for note in (str(fallback) if fallback else "", stage.message):
            if note:
                notes[note] = None
    return StageRow(
        name=name,
        node_count=len({_node(stage) for stage in stages}),
        open_count=len(stages) - len(finished),
        failed_count=sum(stage.failed for stage in stages),
        begins_s=statistics.median(
            (stage.start_ns - origin_ns.get(_node(stage), stage.start_ns)) / 1e9 for stage in stages
        ),
        median_s=statistics.median(ns for ns, _ in finished) / 1e9 if finished else None,
        max_s=slowest[0] / 1e9 if slowest else None,
        slowest_node=_node(slowest[1]) if slowest else None,
        bytes_moved=sum(int(stage.attributes.get("bootseer.bytes", 0)) for stage in stages),
        notes=tuple(notes),
    )


def break_down(stages: Iterable[Stage]) -> Breakdown | None:
    """The breakdown of the stages of one start (any number of nodes); None if there are none."""
    everything = sorted(stages, key=lambda stage: stage.start_ns)
    if not everything:
        return None
    origin_ns: dict[str, int] = {}
    for stage in everything:
        origin_ns.setdefault(_node(stage), stage.start_ns)
    by_name: dict[str, list[Stage]] = {}
    for stage in everything:
        by_name.setdefault(stage.name, []).append(stage)
    rows = {name: _row(name, found, origin_ns) for name, found in by_name.items()}
    first = everything[0]
    return Breakdown(
        job=str(first.resource.get("bootseer.job", "")),
        attempt=int(first.resource.get("bootseer.attempt", 0)),
        trace_id=first.trace_id,
        node_count=len(origin_ns),
        total=rows.pop(START, None),
        stages=tuple(sorted(rows.values(), key=lambda row: row.begins_s)),
    )
