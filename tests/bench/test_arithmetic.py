"""Arithmetic of single cases: placement, checked content, scores, the demo's document."""

import pytest

from bench.cases.launch import sample_of
from bench.checkpoint.content import BLOCK_BYTES, Check, Content
from bench.checkpoint.measure import derive
from bench.checkpoint.placement import Moved, allowed_s, even_s, placement_figures
from bench.model import Sample
from bench.profile.score import Score, score
from testbed.starts.generate import InjectedFault, Recipe, node_name


def test_the_busiest_link_says_what_the_placement_allows() -> None:
    moved = Moved((300, 100, 0, 0), (0, 0, 50, 0))
    rates = [100.0, 100.0, 10.0, 100.0]
    assert allowed_s(moved, rates) == 5.0  # 50 bytes into the slow one
    assert allowed_s(moved, [100.0] * 4) == 3.0
    assert allowed_s(moved, [None] * 4) == 0.0
    assert even_s(moved, [100.0] * 4) == 1.0
    assert even_s(moved, [None] * 4) == 0.0


def test_moved_bytes_are_a_difference_of_counters() -> None:
    moved = Moved((30, 10), (5, 7)) - Moved((10, 10), (5, 0))
    assert moved == Moved((20, 0), (0, 7))
    figures = placement_figures(moved, [10.0, 10.0])
    assert (figures["allowed_s"], figures["network_bytes"]) == (2.0, 27)
    assert (figures["busiest_bytes"], figures["datanode_1_bytes"]) == (20, 7)


def test_shares_are_of_the_time_taken() -> None:
    taken = Sample(4.0, {"client": 1.0, "server": 2.0}, 2**30, {"allowed_s": 3.0, "even_s": 1.0})
    derived = derive(taken)
    assert (derived["allowed_share"], derived["even_share"]) == (0.75, 0.25)
    assert derived["cpu_s_per_gib"] == 3.0
    assert "allowed_share" not in derive(Sample(1.0, moved_bytes=0))


@pytest.mark.parametrize("step_bytes", [4096, BLOCK_BYTES, 3 * BLOCK_BYTES // 2])
def test_content_is_accepted_only_where_it_belongs(step_bytes: int) -> None:
    content = Content()
    data = b"".join(content.block(index) for index in range(4))
    check = Check()
    for offset in range(0, len(data), step_bytes):
        check.feed(offset, memoryview(data)[offset : offset + step_bytes])
    assert check.read_bytes == len(data)
    with pytest.raises(RuntimeError, match="bytes of block 7"):
        Check().feed(BLOCK_BYTES - 100, bytes(100) + content.block(7))


def test_scores_of_several_starts_add_up() -> None:
    total = Score(named=3, missed=1, right=2, one_of=3) + Score(named=1, false=1, once=2, right=1)
    assert total == Score(named=4, missed=1, false=1, once=2, right=3, one_of=3)
    figures = total.figures()
    assert figures["f1"] == pytest.approx(8 / 10)
    assert figures["f1_strict"] == pytest.approx(8 / 12)
    assert figures["right_share"] == pytest.approx(3 / 4)
    assert Score().figures()["f1"] == 1


def test_a_plain_start_is_explained_wholly() -> None:
    faults = (
        InjectedFault(node_name(3), "slow disk", 4.0),
        InjectedFault(node_name(9), "cold cache", 4.0),
    )
    assert score(Recipe(50, 4, faults))[0] == Score(named=2, right=2, one_of=2)


def test_launch_reads_the_demo_document() -> None:
    stage = {"first_s": 8.0, "second_s": 2.0, "first_bytes": 300, "second_bytes": 30, "ratio": 4}
    document = {
        "stages": {"image": stage, "environment": stage, "checkpoint": stage},
        "total": {"first_s": 24.0, "second_s": 6.0, "first_cpu_s": 9.0, "second_cpu_s": 4.0},
        "image": {"bytes": 1000, "touched_share": 0.1},
    }
    second = sample_of(document, "second")
    assert (second.wall_s, second.moved_bytes) == (6.0, 90)
    assert (second.figures["image_moved_bytes"], second.figures["image_s"]) == (30, 2.0)
    assert sample_of(document, "first").wall_s == 24.0
