"""The text of a start's report: one screen that names node, cause and gain."""

import re

from bootseer.report.explain import StartModel
from bootseer.report.export import analysis_document
from bootseer.report.graph import StartGraph, Track, TrackSpan
from bootseer.report.text import explain, headline
from testbed.starts.generate import InjectedFault, Recipe, node_name, some_faults, tracks


def test_a_start_with_a_slow_disk_is_explained_on_one_screen() -> None:
    recipe = Recipe(64, 4, (InjectedFault(node_name(7), "slow disk", 3.0),))
    analysis = StartModel(StartGraph(tracks(recipe))).analyse()
    text = "\n".join(explain(analysis))
    assert "load checkpoint on node00007/" in text
    assert "first collective:world: node00007/" in text
    assert "slow disk" in text
    assert "node00007 as its peers" in text
    assert text.count("\n") < 40
    assert headline(analysis).startswith("ready after ")


def test_a_thousand_slow_nodes_are_one_screen() -> None:
    analysis = StartModel(StartGraph(tracks(Recipe(300, 1, tuple(some_faults(60, 300)))))).analyse()
    lines = list(explain(analysis))
    assert len(lines) < 60
    assert any("and 52 more nodes" in line for line in lines)


def test_a_start_that_is_not_ready_says_so() -> None:
    analysis = StartModel(StartGraph([Track("a", [TrackSpan("start", 0, 5)])])).analyse()
    assert headline(analysis) == (
        "not ready: no process took an optimizer step or called bootseer.ready(); the last stage "
        "noted ended after 5.0 s"
    )
    assert analysis_document(analysis)["is_ready"] is False


def test_small_gains_are_told_in_gpu_seconds() -> None:
    """A named fault: the report of a small start said "-0.00 GPU-hours"."""
    recipe = Recipe(4, 1, (InjectedFault(node_name(1), "slow disk", 3.0),))
    analysis = StartModel(StartGraph(tracks(recipe))).analyse()
    text = "\n".join(explain(analysis))
    gains = re.findall(r"-([\d.]+) GPU-(seconds|hours)", text)
    assert gains
    assert all(float(number) > 0 for number, _ in gains)


def test_a_rendezvous_that_failed_compares_no_clocks_and_names_who_is_missing() -> None:
    """A named fault: two nodes gave up after 99.7 and 127.6 s.

    The report took both ends for one moment, and reported clocks that differ and a node that is
    late.
    """

    def node(name: str, arrived_s: float, gave_up_s: float) -> list[Track]:
        launcher = Track(name, [TrackSpan("start", 0.0, 1.0)])
        evidence = {"bootseer.barrier_count": 3}
        meeting = TrackSpan(
            "rendezvous",
            arrived_s,
            gave_up_s,
            missed_barrier="rendezvous x",
            evidence=evidence,
            has_failed=True,
        )
        return [launcher, Track(name, [meeting], "run", process=f"p-{name}")]

    late = Track("node-c", [TrackSpan("start", 0.0, 1.0)])
    found = [*node("node-a", 30.0, 129.7), *node("node-b", 2.0, 129.6), late]
    analysis = StartModel(StartGraph(found)).analyse()
    assert not any(analysis.clocks.shift_s.values())
    assert not analysis.blame
    assert not analysis.stragglers
    assert analysis.replay_error_s == 0.0
    (missed,) = analysis.missed
    assert (missed.gave_up, missed.absent) == (("node-b", "node-a"), ("node-c",))
    assert (missed.came_count, missed.expected_count, missed.spread_s) == (2, 3, 28.0)
    text = "\n".join(explain(analysis))
    assert (
        "rendezvous x: 2 of 3 came 28.0 s apart; node-b, node-a gave up after up to 127.6 s; "
        "never came: node-c" in text
    )
    assert "clocks of" not in text
    unseen = StartModel(StartGraph(found[:-1])).analyse()
    assert "1 more noted no start" in "\n".join(explain(unseen))


def test_a_node_that_gave_up_is_no_part_of_the_meeting_of_the_others() -> None:
    def launcher(name: str) -> Track:
        return Track(name, [TrackSpan("start", 0.0, 1.0)])

    def met(name: str, arrived_s: float) -> Track:
        return Track(
            name, [TrackSpan("rendezvous", arrived_s, 20.0, barrier="rendezvous x")], "run"
        )

    alone = TrackSpan(
        "rendezvous",
        1.0,
        6.0,
        missed_barrier="rendezvous x",
        evidence={"bootseer.barrier_count": 2},
        has_failed=True,
    )
    tracks_found = [*map(launcher, "abc"), met("a", 2.0), met("b", 19.0)]
    graph = StartGraph([*tracks_found, Track("c", [alone], "run")])
    analysis = StartModel(graph).analyse()
    assert analysis.replay_error_s == 0.0
    assert set(analysis.clocks.shift_s) == {"a", "b"}
    assert [(one.barrier, one.node) for one in analysis.blame] == [("rendezvous x", "b")]
    (missed,) = analysis.missed
    assert (missed.gave_up, missed.came_count, missed.absent) == (("c",), 3, ())


def test_what_nodes_asked_of_shared_servers_is_told_by_node() -> None:
    def node(name: str, asked: int, received: int, stored: int) -> Track:
        fed = {
            "bootseer.bytes": received,
            "bootseer.fanout.store_bytes": stored,
            "requests.bucket": 0,
        }
        spans = [
            TrackSpan("start", 0.0, 5.0, evidence={"requests.bucket": asked, "requests.http": 0.0}),
            TrackSpan("image served", 4.0, 4.0, parent=0, evidence={"requests.bucket": 1}),
            TrackSpan("fan-out", 4.5, 4.5, parent=0, evidence=fed),
        ]
        return Track(name, spans)

    nodes = [node(f"n{number}", 4 + number, 5_000_000, 0) for number in range(3)]
    nodes.append(node("n3", 40, 5_000_000, 21_000_000))
    analysis = StartModel(StartGraph(nodes)).analyse()
    text = "\n".join(explain(analysis))
    assert "bucket: 6.5 requests of a node (median), at most 41 (n3)" in text
    assert "4 nodes received 5.0 MB each, of which the store sent 4.20 copies" in text
    assert "registry" not in text
    document = analysis_document(analysis)
    assert document["requests"][0]["max_node"] == "n3"
    assert document["fan_out"] == {
        "node_count": 4,
        "received_bytes": 20_000_000,
        "store_bytes": 21_000_000,
    }
