"""From runs to what is said about them: order of runs, medians, ratios. Pure (no I/O)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.model import Case, Ratio


@dataclass(frozen=True, slots=True)
class Turn:
    """One run in the schedule."""

    round_number: int
    """From 0; below 0: a warm-up, not recorded."""
    variant: str


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run."""

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
        """Of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class RatioResult:
    """A ratio as measured: one value per round in which both sides ran."""

    ratio: Ratio
    per_round: tuple[float, ...]

    @property
    def spread(self) -> Spread | None:
        """None: never measured."""
        return Spread.of(self.per_round) if self.per_round else None

    @property
    def is_met(self) -> bool | None:
        """Whether the median satisfies the target; None: no target, or not measured."""
        if self.ratio.target is None or not self.per_round:
            return None
        return self.ratio.target.is_met(Spread.of(self.per_round).median)


def schedule(variants: Sequence[str], rounds: int, warmups: int) -> list[Turn]:
    """Warm-up rounds, then recorded ones; in each, every variant once, in the order declared.

    Interleaved, so that what drifts (clock speed, neighbours on the machine) hits all alike.
    """
    return [Turn(number, variant) for number in range(-warmups, rounds) for variant in variants]


def spreads(runs: Iterable[Run]) -> dict[str, dict[str, Spread]]:
    """By variant and figure. A figure that some runs lack is summed up over those that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, value in run.figures.items():
            values.setdefault(run.variant, {}).setdefault(name, []).append(value)
    return {
        variant: {name: Spread.of(listed) for name, listed in figures.items()}
        for variant, figures in values.items()
    }


def measure_ratio(ratio: Ratio, runs: Iterable[Run]) -> RatioResult:
    """`ratio` within each round; rounds that lack a side, or divide by zero, are left out."""
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
    """What is wrong with a declaration; empty: nothing."""
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
