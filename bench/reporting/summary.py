"""Order of runs, and medians and ratios of their figures. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.model import Case, Ratio


@dataclass(frozen=True, slots=True)
class Turn:
    """Run in the schedule."""

    round_number: int
    """Number from 0; below 0 for a warm-up, which is not recorded."""
    variant: str


@dataclass(frozen=True, slots=True)
class Run:
    """Recorded run."""

    round_number: int
    variant: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some values."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class RatioResult:
    """Ratio as measured: one value for each round in which both sides ran."""

    ratio: Ratio
    per_round: tuple[float, ...]

    @property
    def spread(self) -> Spread | None:
        """Median and range of the values; None if there are none."""
        return Spread.of(self.per_round) if self.per_round else None

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target; None without a target or a value."""
        if self.ratio.target is None or not self.per_round:
            return None
        return self.ratio.target.is_met(Spread.of(self.per_round).median)


def schedule(variants: Sequence[str], rounds: int, warmups: int) -> list[Turn]:
    """Return warm-up rounds, then recorded ones; in each, every variant once in declared order.

    Runs are interleaved, so that drifts (clock speed, other processes) affect all variants alike.
    """
    return [Turn(number, variant) for number in range(-warmups, rounds) for variant in variants]


def spreads(runs: Iterable[Run]) -> dict[str, dict[str, Spread]]:
    """Return the spread of each figure by variant, over the runs that have the figure."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, value in run.figures.items():
            values.setdefault(run.variant, {}).setdefault(name, []).append(value)
    return {
        variant: {name: Spread.of(listed) for name, listed in figures.items()}
        for variant, figures in values.items()
    }


def measure_ratio(ratio: Ratio, runs: Iterable[Run]) -> RatioResult:
    """Return `ratio` within each round that has both sides and no zero below."""
    by_round: dict[int, dict[str, Mapping[str, float]]] = {}
    for run in runs:
        by_round.setdefault(run.round_number, {})[run.variant] = run.figures
    per_round: list[float] = []
    for _, figures in sorted(by_round.items()):
        top = figures.get(ratio.top.variant, {}).get(ratio.top.name)
        bottom = figures.get(ratio.bottom.variant, {}).get(ratio.bottom.name)
        if top is not None and bottom:
            per_round.append(top / bottom)
    return RatioResult(ratio, tuple(per_round))


def problems(case: Case) -> list[str]:
    """Return the faults of a declaration."""
    names = [variant.name for variant in case.variants]
    found = []
    if len(set(names)) != len(names):
        found.append("two variants have the same name")
    if not names:
        found.append("there is no variant")
    for ratio in case.ratios:
        for side in (ratio.top, ratio.bottom):
            if side.variant not in names:
                found.append(f"ratio {ratio.name!r} names an unknown variant {side.variant!r}")
    if case.runs < 1 or case.quick_runs < 1 or case.warmups < 0:
        found.append("runs must be at least 1 and warmups at least 0")
    if not case.description.endswith("."):
        found.append("the description is not a sentence")
    return found
