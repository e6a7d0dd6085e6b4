"""The breakdown of one start over all its nodes. Pure (no I/O).

Times count from the first stage of the same node, by that node's clock: clocks of nodes differ.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.profile.model.tracks import LAUNCHER
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


def _host(stage: Stage) -> str:
    return str(stage.resource.get("host.name", "?"))


def _rank(stage: Stage) -> str:
    return f"{_host(stage)}/{stage.resource.get('bootseer.rank', 0)}"


def _restart(stage: Stage) -> int:
    return int(stage.resource.get("bootseer.restart", 0))


def _row(name: str, stages: Sequence[Stage], origin_ns: dict[str, int]) -> StageRow:
    stages, everything = [*map(_merged, _by_process(stages))], stages
    finished = sorted(
        [(stage.end_ns - stage.start_ns, stage) for stage in stages if stage.end_ns],
        key=lambda pair: pair[0],
    )
    slowest = max(finished, key=lambda pair: pair[0], default=None)
    notes: dict[str, None] = {}
    for stage in everything:
        fallback = stage.attributes.get("bootseer.fallback")
        for note in (str(fallback) if fallback else "", stage.message):
            if note:
                notes[note] = None
    still_open = [_rank(stage) for stage in stages if stage.end_ns is None]
    return StageRow(
        name=name,
        node_count=len({_host(stage) for stage in stages}),
        rank_count=len({_rank(stage) for stage in stages}),
        open_count=len(still_open),
        open_on=tuple(dict.fromkeys(still_open)),
        failed_count=sum(stage.failed for stage in everything),
        begins_s=statistics.median(
            (stage.start_ns - origin_ns[_host(stage)]) / 1e9 for stage in stages
        ),
        median_s=statistics.median(ns for ns, _ in finished) / 1e9 if finished else None,
        p99_s=finished[math.ceil(0.99 * len(finished)) - 1][0] / 1e9 if finished else None,
        max_s=slowest[0] / 1e9 if slowest else None,
        slowest_node=_rank(slowest[1]) if slowest else None,
        bytes_moved=sum(int(stage.attributes.get("bootseer.bytes", 0)) for stage in everything),
        notes=tuple(notes),
    )


def _by_process(stages: Sequence[Stage]) -> Iterable[list[Stage]]:
    found: dict[tuple[str, str], list[Stage]] = {}
    for stage in stages:
        found.setdefault((_rank(stage), str(stage.resource.get(PROCESS, ""))), []).append(stage)
    return found.values()


def _merged(stages: Sequence[Stage]) -> Stage:
    """All that one process did under one name as one stage, as long as these together."""
    first, *others = sorted(stages, key=lambda stage: stage.start_ns)
    if any(stage.end_ns is None for stage in stages):
        return first._replace(end_ns=None)
    until = first.end_ns or 0
    total = until - first.start_ns
    for stage in others:
        end = stage.end_ns or 0
        total += max(0, end - max(stage.start_ns, until))
        until = max(until, end)
    return first._replace(end_ns=first.start_ns + total)


def _names(stages: Iterable[Stage]) -> dict[str, list[Stage]]:
    """The stages of each row: those of several programs are told apart where names are the same."""
    stages = list(stages)
    roles = _roles(stages)
    by_name: dict[str, dict[str, list[Stage]]] = {}
    for stage in stages:
        role = roles.get(str(stage.resource.get(PROCESS, "")), "")
        by_name.setdefault(stage.name, {}).setdefault(role, []).append(stage)
    return {
        name if len(found) == 1 else f"{name} ({role or LAUNCHER})": row
        for name, found in by_name.items()
        for role, row in found.items()
    }


def _roles(stages: Iterable[Stage]) -> dict[str, str]:
    """The program of each process that is known."""
    return {
        str(stage.resource[PROCESS]): str(stage.resource[ROLE])
        for stage in stages
        if PROCESS in stage.resource and ROLE in stage.resource
    }


def _origins(stages: Iterable[Stage]) -> dict[str, Stage]:
    """The first stage of each node."""
    origins: dict[str, Stage] = {}
    for stage in stages:
        known = origins.setdefault(_host(stage), stage)
        if stage.start_ns < known.start_ns:
            origins[_host(stage)] = stage
    return origins


def of_the_start(stages: Sequence[Stage]) -> list[Stage]:
    """The stages without those of workers that were started again in place since."""
    origins = _origins(stages)
    return [stage for stage in stages if _restart(stage) <= _restart(origins[_host(stage)])]


def break_down(stages: Iterable[Stage]) -> Breakdown | None:
    """The breakdown of the stages of one start (any number of nodes); None if there are none."""
    everything = sorted(stages, key=lambda stage: stage.start_ns)
    if not everything:
        return None
    origins = _origins(everything)
    origin_ns = {host: stage.start_ns for host, stage in origins.items()}
    by_name = _names(of_the_start(everything))
    # It says when, not how long: what is asked is how long that took.
    ready = [
        stage._replace(start_ns=origin_ns[_host(stage)], end_ns=stage.start_ns)
        for stage in by_name.pop(READY, ())
    ]
    rows = {name: _row(name, found, origin_ns) for name, found in by_name.items()}
    total = rows.pop(START, None)
    ready_row = _row(READY, ready, origin_ns) if ready else None
    first = everything[0]
    return Breakdown(
        job=str(first.resource.get("bootseer.job", "")),
        submission=str(first.resource.get("bootseer.submission", "")),
        attempt=int(first.resource.get("bootseer.attempt", 0)),
        trace_id=first.trace_id,
        node_count=len(origins),
        rank_count=max(row.rank_count for row in [*rows.values(), total, ready_row] if row),
        restart_count=max(
            _restart(stage) - _restart(origins[_host(stage)]) for stage in everything
        ),
        total=total,
        ready=ready_row,
        stages=tuple(sorted(rows.values(), key=lambda row: row.begins_s)),
    )
