"""What a person reads of a start: one screen that names node, cause and gain."""

from bench.profile.generate import Fault, Recipe, node_name, some_faults, tracks
from bootseer.profile.model.analysis import StartModel
from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.tracks import Span, Track
from bootseer.profile.views.document import analysis_document
from bootseer.profile.views.text import explain, headline


def test_a_start_with_a_slow_disk_is_explained_on_one_screen() -> None:
    recipe = Recipe(64, 4, (Fault(node_name(7), "slow disk", 3.0),))
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
    analysis = StartModel(StartGraph([Track("a", [Span("start", 0, 5)])])).analyse()
    assert headline(analysis) == "not ready; the last stage noted ended after 5.0 s"
    assert analysis_document(analysis)["is_ready"] is False
