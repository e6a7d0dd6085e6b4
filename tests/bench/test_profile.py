"""How the answers of the profiler are held against what was injected."""

import pytest

from bench.profile.score import Score, score
from testbed.starts.generate import Fault, Recipe, Start, Unkindness, hard, node_name


def test_scores_of_several_starts_add_up() -> None:
    total = Score(named=3, missed=1, right=2, one_of=3) + Score(named=1, false=1, once=2, right=1)
    assert total == Score(named=4, missed=1, false=1, once=2, right=3, one_of=3)
    figures = total.figures()
    assert figures["f1"] == pytest.approx(8 / 10)
    assert figures["f1_strict"] == pytest.approx(8 / 12)
    assert figures["right_share"] == pytest.approx(3 / 4)
    assert Score().figures()["f1"] == 1


def test_a_plain_start_is_explained_wholly() -> None:
    faults = (Fault(node_name(3), "slow disk", 4.0), Fault(node_name(9), "cold cache", 4.0))
    assert score(Recipe(50, 4, faults)) == Score(named=2, right=2, one_of=2)


def test_what_a_node_lost_is_known_by_cause() -> None:
    faults = (Fault(node_name(1), "slow disk", 3.0), Fault(node_name(1), "late scheduling", 2.0))
    lost = Start(Recipe(3, 4, faults)).lost_s
    assert lost.keys() == {node_name(1)}
    # Of a load of 12 s 60 % wait for the disk, of the image's 8 s 30 %.
    assert lost[node_name(1)]["slow disk"] == pytest.approx(2 * (7.2 + 2.4), rel=0.2)
    assert lost[node_name(1)]["late scheduling"] == 20


def test_a_hard_start_is_hard_and_the_same_for_one_seed() -> None:
    recipe = hard(400, 12, 5)
    assert len({fault.node for fault in recipe.faults}) == 12
    assert len(recipe.faults) == 14
    tracks = list(Start(recipe).tracks())
    assert tracks == list(Start(hard(400, 12, 5)).tracks())
    with_figures = {track.node for track in tracks if "psi.io_s" in track.spans[1].evidence}
    assert 0.85 * 400 < len(with_figures) < 400


def test_a_node_that_was_slow_once_is_told_from_a_faulty_one() -> None:
    start = Start(Recipe(200, 1, unkind=Unkindness(hiccup_share=0.01)))
    assert start.hiccups
    assert not start.lost_s
    found = score(Recipe(200, 1, unkind=Unkindness(hiccup_share=0.01)))
    assert (found.false, found.named, found.missed) == (0, 0, 0)
    assert found.once > 0
