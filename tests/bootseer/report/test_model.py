"""The graph of a start: its replay, its clocks, and its replay with a change."""

import math
import random
import statistics
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.report.explain import StartModel
from bootseer.report.graph import LAUNCHER, Shape, StartGraph, Track, TrackSpan, begin_of, end_of
from bootseer.report.peers import as_its_peers
from bootseer.report.replay import StartReplay, intervals_of
from testbed.starts.generate import InjectedFault, Recipe, node_name, some_faults, tracks


def _replay(*found: Track) -> StartReplay:
    graph = StartGraph()
    for track in found:
        graph.add(track)
    return StartReplay(graph, intervals_of(graph))


def _intervals(model: StartModel) -> dict[str, list[float]]:
    return {
        str(interval.label): [round(seconds, 6) for seconds in interval.seconds]
        for interval in model.intervals.values()
    }


def test_a_stage_waits_for_all_that_had_ended_when_it_began() -> None:
    spans = [
        TrackSpan("start", 0, 10),
        TrackSpan("mount", 1, 5, parent=0),
        TrackSpan("image", 1, 6, parent=0),
        TrackSpan("environment", 7, 9, parent=0),
    ]
    steps = {step.event: step for step in Shape(spans).steps}
    environment = steps[begin_of(3)]
    assert (environment.after, environment.others) == (end_of(2), (end_of(1),))
    assert steps[begin_of(2)].after == begin_of(0)
    assert steps[end_of(0)].after == end_of(3)


def test_what_overlapped_overlaps_when_one_of_them_is_slower() -> None:
    spans = [
        TrackSpan("start", 0, 10),
        TrackSpan("mount", 1, 5, parent=0),
        TrackSpan("image", 1, 6, parent=0),
        TrackSpan("environment", 7, 9, parent=0),
    ]
    model = StartModel(StartGraph([Track("a", spans)]))

    def slower(name: str, seconds: float) -> float:
        return model.what_if(
            "",
            lambda interval: array("d", [seconds]) if str(interval.label) == name else None,
        ).ready_s

    assert slower("mount", 4.9) == pytest.approx(10)
    # The environment waits for the mount, which ends at 8.5, and then for the lag of one second.
    assert slower("mount", 7.5) == pytest.approx(12.5)
    # Now the environment waits for the mount, which still ends at 5.
    assert slower("image", 2) == pytest.approx(9)


@st.composite
def _processes(draw: st.DrawFn) -> list[Track]:
    """Draw any nesting and overlap of spans on a few nodes, which meet at barriers."""
    times = st.integers(0, 50).map(float)
    found = []
    for node in range(draw(st.integers(1, 3))):
        spans: list[TrackSpan] = []
        for _ in range(draw(st.integers(1, 6))):
            begin, end = sorted((draw(times), draw(times)))
            spans.append(TrackSpan(draw(st.sampled_from("abc")), begin, end))
        spans.sort(key=lambda span: (span.begin_s, -span.end_s))
        nested = [
            TrackSpan(span.name, span.begin_s, span.end_s, draw(st.integers(-1, number - 1)))
            for number, span in enumerate(spans)
        ]
        met = max(span.end_s for span in spans)
        nested.append(TrackSpan("meet", met, 60.0 + draw(st.integers(0, 2)), barrier="all"))
        found.append(Track(f"node{node}", nested))
    return found


@given(_processes())
def test_the_replay_of_the_unchanged_start_gives_the_measured_times(found: list[Track]) -> None:
    replay = _replay(*found)
    for group in replay.graph.groups:
        for event, column in enumerate(group.times):
            assert list(replay.times[group][event]) == pytest.approx(list(column))


def test_ranks_begin_after_what_started_them() -> None:
    launcher = Track("a", [TrackSpan("start", 0, 4)])
    agent = Track(
        "a", [TrackSpan("import torch", 5, 6), TrackSpan("spawn", 7, 7.5)], "torchrun", process="p"
    )
    rank = Track("a", [TrackSpan("work", 8, 9)], "train.py", 0, "q", "p")
    model = StartModel(StartGraph([launcher, agent, rank]))
    assert _intervals(model)["before work"] == [0.5]
    assert _intervals(model)["before import torch"] == [1.0]
    assert model.analyse().replay_error_s == pytest.approx(0)
    path = [(one.role, str(one.label)) for one in model.analyse().path]
    assert path == [
        ("launcher", "start"),
        ("torchrun", "before import torch"),
        ("torchrun", "import torch"),
        ("torchrun", "before spawn"),
        ("torchrun", "spawn"),
        ("train.py", "before work"),
        ("train.py", "work"),
    ]


def test_a_node_that_waited_for_anothers_set_up_is_not_the_slow_one() -> None:
    def waiting(node: str) -> Track:
        spans = [
            TrackSpan("start", 0, 31),
            TrackSpan("environment", 1, 30.5, parent=0),
            TrackSpan("wait", 1.5, 30, parent=1, waited_for="holder"),
        ]
        return Track(node, spans)

    holder = Track(
        "holder", [TrackSpan("start", 0, 30.5), TrackSpan("environment", 1, 29.5, parent=0)]
    )
    model = StartModel(StartGraph([holder, *map(waiting, "abcdefg")]))
    analysis = model.analyse()
    assert [(one.node, str(one.label)) for one in analysis.path][:2] == [
        ("holder", "before environment"),
        ("holder", "environment"),
    ]
    assert analysis.replay_error_s == pytest.approx(0)
    quick = model.what_if(
        "",
        lambda interval: (
            array("d", [2.0])
            if interval.group.nodes[0] == "holder" and interval.label.kind == "in"
            else None
        ),
    )
    assert quick.ready_s == pytest.approx(31 - 26.5)


def test_processes_that_wait_for_each_other_in_a_circle_are_replayed_as_measured() -> None:
    def both(node: str, *order: str) -> Track:
        first, second = order
        return Track(
            node, [TrackSpan("m", 1, 2, barrier=first), TrackSpan("n", 3, 4, barrier=second)]
        )

    replay = _replay(both("a", "x", "y"), both("b", "y", "x"))
    assert replay.ready_s() == pytest.approx(4)


def test_a_critical_path_ends_where_timelines_go_in_a_circle() -> None:
    inside = [TrackSpan("m", 1, 4, barrier="x"), TrackSpan("m", 2, 4, parent=0, barrier="x")]
    waiting = [TrackSpan("environment", 1, 9), TrackSpan("wait", 2, 8, parent=0)]

    def waits(node: str, other: str) -> Track:
        spans = [waiting[0], replace(waiting[1], waited_for=other)]
        return Track(node, spans)

    for tracks_ in ([Track("a", inside), Track("b", inside)], [waits("a", "b"), waits("b", "a")]):
        analysis = StartModel(StartGraph(tracks_)).analyse()
        assert len(analysis.path) < 9


def test_clocks_an_hour_apart_are_brought_together_at_barriers() -> None:
    ahead = {node_name(2): 3600.0, node_name(5): -1800.0}
    truth = StartModel(StartGraph(tracks(Recipe(8, 2)))).analyse()
    model = StartModel(StartGraph(tracks(Recipe(8, 2, clock_s=ahead))))
    found = model.analyse()
    assert model.clocks.shift_s[node_name(2)] == pytest.approx(-3600, abs=0.01)
    assert found.ready_s == pytest.approx(truth.ready_s, abs=0.02)
    assert not found.stragglers
    assert not found.clocks.apart


def test_a_node_that_met_nobody_is_named() -> None:
    alone = Track("alone", [TrackSpan("start", 0, 5)])
    clocks = StartModel(StartGraph([*tracks(Recipe(3, 1)), alone])).clocks
    assert clocks.apart == ("alone",)


def test_a_node_that_met_nobody_and_is_an_hour_off_makes_no_start_of_an_hour() -> None:
    ahead = {node_name(1): 3600.0, node_name(2): -3600.0}
    met = [
        track
        for track in tracks(Recipe(8, 2, clock_s=ahead))
        if track.role == LAUNCHER or track.node not in ahead
    ]
    truth = StartModel(StartGraph(tracks(Recipe(8, 2)))).measured_s
    model = StartModel(StartGraph(met))
    assert set(model.clocks.apart) == set(ahead)
    assert model.measured_s == pytest.approx(truth, abs=3)
    assert not model.analyse().stragglers


def test_one_slow_rank_makes_no_slow_node() -> None:
    """Only this rank's import was long enough to be recorded."""

    def noting(track: Track) -> Track:
        if track.rank != 4:
            return track
        begin_s, seconds = track.spans[0].begin_s, 35.0 if track.node == node_name(3) else 0.1
        noted = TrackSpan("import pandas", begin_s - 40, begin_s - 40 + seconds)
        return replace(track, spans=[noted, *track.spans])

    found = map(noting, tracks(Recipe(50, 8)))
    assert not StartModel(StartGraph(found)).analyse().stragglers


def test_how_late_a_node_began_is_compared_with_how_late_the_others_did() -> None:
    """The begins are spread over seconds, so that no node is late."""
    assert (
        not StartModel(StartGraph(tracks(Recipe(2000, 1, noise=0.1, seed=7)))).analyse().stragglers
    )


def test_a_node_as_its_peers_gives_the_start_without_its_fault() -> None:
    healthy = StartModel(StartGraph(tracks(Recipe(8, 4, seed=3)))).analyse()
    for fault in some_faults(6, 8, seed=5, severity=3.0):
        model = StartModel(StartGraph(tracks(Recipe(8, 4, (fault,), seed=3))))
        assert model.measured_s > healthy.ready_s + 1
        change = as_its_peers(model.peers, frozenset([fault.node]))
        assert model.what_if("", change).ready_s == pytest.approx(healthy.ready_s, rel=0.05)


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_faulty_nodes_are_found_with_their_causes(noise: float) -> None:
    faults = some_faults(12, 300, seed=1, severity=3.0)
    model = StartModel(StartGraph(tracks(Recipe(300, 2, tuple(faults), noise=noise))))
    found = {one.node: one.cause.name for one in model.analyse().stragglers}
    assert found == {fault.node: fault.cause for fault in faults}


@pytest.mark.parametrize(
    ("sigmas", "figure", "is_named"),
    [
        ((4.0,), "tcp.retransmits", True),
        ((4.0,), "", False),
        ((6.0,), "", True),
        # Small delays in two stages, each by chance in one of 40 nodes, and in both with a figure.
        ((2.5, 2.5), "tcp.retransmits", True),
        ((2.5, 2.5), "", False),
        # A node that always sends segments again was slow once.
        ((4.0, 0.0, 0.0), "tcp.retransmits", False),
    ],
)
def test_less_is_enough_where_a_figure_stands_out(
    sigmas: tuple[float, ...], figure: str, is_named: bool
) -> None:
    count = 200
    normal = statistics.NormalDist()

    def track(number: int) -> Track:
        spans, begin_s = [], 0.0
        for stage in range(len(sigmas)):
            # Another order of the nodes in each stage.
            place = (number * (1, 7, 11)[stage]) % count
            own = sigmas[stage] if number == 0 else normal.inv_cdf((place + 0.5) / count)
            evidence = {figure: 50.0 if number == 0 else 1.0} if figure else {}
            seconds = 10 * math.exp(0.1 * own)
            spans.append(TrackSpan(f"s{stage}", begin_s, begin_s + seconds, evidence=evidence))
            begin_s += seconds
        return Track(node_name(number), spans)

    found = StartModel(StartGraph(map(track, range(count)))).analyse().stragglers
    cause = "slow network" if figure else "unknown"
    assert [(one.node, one.cause.name) for one in found] == [(node_name(0), cause)] * is_named


@pytest.mark.parametrize(
    ("even_s", "excess_s", "is_named"),
    [(10.0, 0.24, False), (10.0, 0.26, True), (200.0, 0.9, False), (200.0, 1.1, True)],
)
def test_a_node_is_named_if_it_is_slower_by_a_quarter_of_a_second_and_half_a_percent_of_the_start(
    even_s: float, excess_s: float, is_named: bool
) -> None:
    def track(number: int) -> Track:
        loaded_s = 1.0 + excess_s * (number == 0)
        spans = [
            TrackSpan("load", 0.0, loaded_s),
            TrackSpan("rest", loaded_s, loaded_s + even_s - 1.0),
        ]
        return Track(node_name(number), spans)

    found = StartModel(StartGraph(map(track, range(20)))).analyse().stragglers
    assert [one.node for one in found] == [node_name(0)] * is_named


def test_blame_names_the_last_at_each_barrier_and_its_slow_stage() -> None:
    late = InjectedFault(node_name(1), "late scheduling")
    disk = InjectedFault(node_name(4), "slow disk", 3.0)
    blame = StartModel(StartGraph(tracks(Recipe(8, 2, (late, disk))))).analyse().blame
    assert [(one.barrier, one.node, str(one.lost[0].label)) for one in blame[:2]] == [
        ("init_process_group:world", node_name(1), "scheduling"),
        ("first collective:world", node_name(4), "load checkpoint"),
    ]


def test_any_missing_processes_are_survived() -> None:
    everything = list(tracks(Recipe(6, 3)))
    for seed in range(20):
        found = random.Random(seed).sample(everything, seed % len(everything) + 1)
        analysis = StartModel(StartGraph(found)).analyse()
        assert analysis.replay_error_s == pytest.approx(0, abs=1e-6)
    empty = StartModel(StartGraph([])).analyse()
    assert (empty.node_count, empty.ready_s, empty.path) == (0, 0.0, ())


@pytest.mark.parametrize(
    ("figure", "cause"),
    [
        ("cpu.steal_s", "stolen CPU"),
        ("psi.io_s", "slow disk"),
        ("psi.cpu_s", "busy CPU"),
        ("psi.memory_s", "short memory"),
    ],
)
@pytest.mark.parametrize(("share", "is_named"), [(0.2, False), (0.3, True)])
def test_a_cause_is_named_for_a_quarter_of_the_lost_time(
    figure: str, cause: str, share: float, is_named: bool
) -> None:
    lost_s = 20.0
    found = [
        Track(
            node_name(number),
            [
                TrackSpan("start", 0.0, 10.0 + lost_s * (number == 0)),
                TrackSpan(
                    "load",
                    0.0,
                    10.0 + lost_s * (number == 0),
                    parent=0,
                    evidence={figure: share * lost_s * (number == 0)},
                ),
            ],
        )
        for number in range(20)
    ]
    (straggler,) = StartModel(StartGraph(found)).analyse().stragglers
    assert (straggler.node, straggler.cause.name) == (
        node_name(0),
        cause if is_named else "unknown",
    )
