"""A start that is under way: who is where, and what takes too long. Pure (no I/O)."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.profile.model.tracks import node_of, rank_of
from bootseer.timeline.otlp import PROCESS, READY, START, Stage

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
