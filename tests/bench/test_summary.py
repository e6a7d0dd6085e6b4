"""Order of runs, medians and ratios: the pure parts of the benchmarks."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.model import Bound, Figure, Ratio, Target
from bench.reporting.summary import Run, Spread, Turn, measure_ratio, schedule, spreads

RATIO = Ratio("a / b", Figure("a", "wall_s"), Figure("b", "wall_s"), Target(Bound.AT_LEAST, 2))


def run(round_number: int, variant: str, wall_s: float) -> Run:
    return Run(round_number, variant, {"wall_s": wall_s})


@given(
    variants=st.lists(st.text(min_size=1), unique=True, max_size=5),
    rounds=st.integers(1, 5),
    warmups=st.integers(0, 3),
)
def test_schedule_interleaves(variants: list[str], rounds: int, warmups: int) -> None:
    turns = schedule(variants, rounds, warmups)
    assert len(turns) == len(variants) * (rounds + warmups)
    assert [turn.variant for turn in turns] == variants * (rounds + warmups)
    assert len({(turn.round_number, turn.variant) for turn in turns}) == len(turns)
    assert sum(turn.round_number < 0 for turn in turns) == len(variants) * warmups


def test_schedule_reads_a_b_a_b() -> None:
    assert schedule(["a", "b"], 2, 1) == [
        Turn(-1, "a"), Turn(-1, "b"), Turn(0, "a"), Turn(0, "b"), Turn(1, "a"), Turn(1, "b"),
    ]  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_is_median_and_range(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread == Spread(statistics.median(values), min(values), max(values))


def test_spreads_are_by_variant_and_figure() -> None:
    runs = [run(0, "a", 1), run(1, "a", 3), Run(1, "b", {"moved_bytes": 5})]
    assert spreads(runs) == {
        "a": {"wall_s": Spread(2, 1, 3)},
        "b": {"moved_bytes": Spread(5, 5, 5)},
    }


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine became ten times slower in between: the ratio does not change.
    runs = [run(0, "a", 4), run(0, "b", 2), run(1, "a", 60), run(1, "b", 20)]
    measured = measure_ratio(RATIO, runs)
    assert measured.per_round == (2, 3)
    assert measured.spread == Spread(2.5, 2, 3)
    assert measured.is_met


def test_rounds_without_both_sides_are_left_out() -> None:
    runs = [run(0, "a", 4), run(1, "b", 2), run(2, "a", 1), run(2, "b", 0), run(3, "a", 1)]
    measured = measure_ratio(RATIO, [*runs, run(3, "b", 1)])
    assert measured.per_round == (1,)
    assert measured.is_met is False
    nothing = measure_ratio(RATIO, runs)
    assert (nothing.per_round, nothing.spread, nothing.is_met) == ((), None, None)


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target(Bound.AT_LEAST, 2), 2.0, True),
        (Target(Bound.AT_LEAST, 2), 1.99, False),
        (Target(Bound.AT_MOST, 0.5), 0.5, True),
        (Target(Bound.AT_MOST, 0.5), 0.51, False),
    ],
)
def test_a_target_is_met_at_its_bound(target: Target, value: float, met: bool) -> None:
    assert target.is_met(value) is met
