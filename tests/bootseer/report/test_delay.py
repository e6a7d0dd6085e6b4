"""The longest delay of a start: node, stage, seconds and cause."""

import pytest
from msgspec.structs import replace

from bootseer.report.explain import Analysis, Delay, StartModel, break_down
from bootseer.report.graph import StartGraph, Track, TrackSpan
from bootseer.report.text import explain
from bootseer.timeline.otlp import Stage, Value
from testbed.starts.generate import InjectedFault, Recipe, node_name, tracks

_S = 10**9


def _analysis(*found: Track) -> Analysis:
    return StartModel(StartGraph(found)).analyse()


def _ranks(node: str, load_s: float, *, rank_count: int = 2, is_open: bool = False) -> list[Track]:
    """Return a launcher and ranks that load, and meet the others when the slowest has loaded."""
    first = 2 * "ab".index(node)
    spans = [TrackSpan("load", 2, 2 + load_s, is_open=is_open)]
    if not is_open:
        spans += [TrackSpan("meet", 2 + load_s, 12, barrier="all"), TrackSpan("ready", 12, 12)]
    ranks = [
        Track(node, spans, "train.py", first + rank, f"{node}{rank}") for rank in range(rank_count)
    ]
    return [Track(node, [TrackSpan("start", 0, 1)]), *ranks]


def test_of_two_nodes_the_slower_one_is_named() -> None:
    """A named fault: compared with the median of both, neither of two nodes was slow."""
    analysis = _analysis(*_ranks("a", 3), *_ranks("b", 9))
    assert analysis.delay is not None
    assert (analysis.delay.node, analysis.delay.rank, analysis.delay.stage) == ("b", -1, "load")
    assert analysis.delay.seconds == 6
    assert analysis.delay.gpu_hours == 6 * 4 / 3600
    assert [one.node for one in analysis.stragglers] == ["b"]
    assert "held by b in load: 6.0 s, 24.0 GPU-seconds (unknown)" in list(explain(analysis))


def test_a_rank_tells_what_it_costs_alone() -> None:
    """The node of a single slow rank is no slow node, and has no what-if of its own."""

    def rank(node: str, number: int, load_s: float) -> Track:
        spans = [TrackSpan("load", 2, 2 + load_s), TrackSpan("meet", 2 + load_s, 12, barrier="all")]
        spans.append(TrackSpan("ready", 12, 12))
        return Track(node, spans, "train.py", number, f"{node}{number}")

    slow = {2: 9.0, 5: 8.0}
    ranks = [rank("abc"[number // 4], number, slow.get(number, 3.0)) for number in range(12)]
    launchers = [Track(node, [TrackSpan("start", 0, 1)]) for node in "abc"]
    analysis = _analysis(*launchers, *ranks)
    assert not analysis.stragglers
    assert analysis.delay is not None
    found = analysis.delay
    assert (found.node, found.rank, found.seconds, found.alone_s) == ("a", 2, 6, 1)
    line = "held by a/2 in load: 6.0 s, 72.0 GPU-seconds (unknown); "
    assert line + "other nodes are slow, too: alone it costs 1.0 s" in list(explain(analysis))


def test_seconds_that_nobody_waited_for_are_not_lost() -> None:
    """A named fault of the stop-watch of `truth`: a node made up for a part of a slow load."""

    def rank(node: str, number: int, load_s: float, import_s: float) -> Track:
        loaded_s, came_s = 2 + load_s, 2 + load_s + import_s
        spans = [TrackSpan("load", 2, loaded_s), TrackSpan("import x", loaded_s, came_s)]
        spans += [TrackSpan("meet", came_s, 12, barrier="all"), TrackSpan("ready", 12, 12)]
        return Track(node, spans, "train.py", number, f"{node}{number}")

    ranks = [rank("a", 0, 0.1, 2.5), rank("a", 1, 0.1, 2.5)]
    ranks += [rank("b", 2, 5.0, 1.2), rank("b", 3, 7.1, 1.2)]
    model = StartModel(StartGraph([Track(one, [TrackSpan("start", 0, 1)]) for one in "ab"] + ranks))
    analysis = model.analyse()
    assert analysis.delay is not None
    assert (analysis.delay.node, analysis.delay.stage) == ("b", "load")
    assert analysis.delay.seconds == pytest.approx(5.7)
    assert analysis.delay.alone_s == pytest.approx(5.7)
    alone = next(one for one in analysis.what_ifs if one.name == "b as its peers")
    assert alone.saved_s == pytest.approx(5.7)


def test_the_cause_is_that_of_the_stage() -> None:
    recipe = Recipe(2, 4, (InjectedFault(node_name(1), "slow disk", 3.0),))
    delay = _analysis(*tracks(recipe)).delay
    assert delay is not None
    found = (delay.node, delay.stage, delay.cause.name)
    assert found == (node_name(1), "load checkpoint", "slow disk")


def test_no_node_is_named_where_all_are_alike() -> None:
    assert _analysis(*tracks(Recipe(8, 2))).delay is None
    assert _analysis().delay is None


def test_a_stage_that_never_ended_is_named() -> None:
    waiting = TrackSpan("meet", 5, 5, barrier="all", is_open=True)
    node = Track("a", [TrackSpan("load", 2, 5), waiting], "train.py", 0, "a0")
    analysis = _analysis(node, *_ranks("b", 1, is_open=True))
    assert not analysis.is_ready
    assert analysis.delay is not None
    assert (analysis.delay.node, analysis.delay.stage) == ("b", "load")
    assert analysis.delay.cause.name == "not ended"
    assert analysis.delay.cause.evidence == "1 processes wait at barriers"


def test_a_node_that_never_came_is_named() -> None:
    def node(name: str) -> list[Track]:
        meeting = TrackSpan("rendezvous", 2, 62, missed_barrier="rendezvous x", has_failed=True,
                            evidence={"bootseer.barrier_count": 3})  # fmt: skip
        launcher = Track(name, [TrackSpan("start", 0, 1)])
        return [launcher, Track(name, [meeting], "run", process=f"p{name}")]

    delay = _analysis(*node("a"), *node("b"), Track("c", [TrackSpan("start", 0, 1)])).delay
    assert delay is not None
    assert (delay.node, delay.stage, delay.seconds) == ("c", "before rendezvous x", 60)


def _stage(
    name: str, begin_s: float, end_s: float | None, rank: int, restart: int, process_number: int = 0
) -> Stage:
    process = {
        "bootseer.process": f"{rank}-{restart}-{process_number}",
        "bootseer.parent_process": "agent",
        "bootseer.role": "train.py",
    }
    worker: dict[str, Value] = {"bootseer.restart": restart, **process} if rank >= 0 else {}
    return Stage(
        name=name,
        trace_id="ab" * 16,
        span_id=f"{name}{rank}{restart}",
        parent_id="",
        start_ns=int(begin_s * _S),
        end_ns=None if end_s is None else int(end_s * _S),
        failed=name == "fails",
        message="OSError: damaged" if name == "fails" else "",
        attributes={"bootseer.barrier": "m"} if name == "meet" else {},
        resource={"host.name": "a", "bootseer.rank": max(rank, 0), "bootseer.job": "j", **worker},
    )


@pytest.mark.parametrize("second_round", [1, 0])
def test_workers_that_failed_before_they_were_ready_are_told_of(second_round: int) -> None:
    """Named faults: such a start was "not ready", although it was after a restart.

    An agent that restarts its workers for another node's failure does not count that: stages of
    both rounds were taken for one start.
    """
    stages = [_stage("start", 0, 1, -1, 0)]
    for rank in (0, 1):
        stages.append(_stage("meet", 20, 21, rank, second_round, 1))
        stages.append(_stage("ready", 25, 25, rank, second_round, 1))
    stages += [_stage("meet", 3, None, 0, 0), _stage("fails", 2, 5, 1, 0)]
    graph = StartGraph()
    graph.add_node(stages, 0)
    breakdown = break_down(graph)
    assert breakdown is not None
    assert [row.name for row in breakdown.stages] == ["meet"]
    analysis = StartModel(graph).analyse()
    assert (analysis.is_ready, analysis.ready_s) == (True, 25)
    delay = analysis.delay
    assert isinstance(delay, Delay)
    assert (delay.node, delay.rank, delay.stage, delay.seconds) == ("a", 1, "fails", 18)
    assert (delay.cause.name, delay.cause.evidence) == ("restarted workers", "OSError: damaged")


def test_agents_of_torchrun_are_no_ranks() -> None:
    """A named fault: on two nodes the GPU-hours of four ranks were those of five."""
    found = []
    for node, load_s in (("a", 3.0), ("b", 9.0)):
        agent = Track(node, [TrackSpan("import torch", 1, 2)], "run", 0, f"run-{node}")
        found += [replace(one, parent=agent.process if one.process else "")
                  for one in _ranks(node, load_s)]  # fmt: skip
        found.append(agent)
    analysis = _analysis(*found)
    assert analysis.rank_count == 4
    assert analysis.delay is not None
    assert analysis.delay.gpu_hours == 6 * 4 / 3600
