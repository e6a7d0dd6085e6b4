"""Score of the report for generated starts, whose slow nodes and causes are known."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.report.explain import StartModel
from bootseer.report.graph import StartGraph
from testbed.starts.generate import GeneratedStart, Recipe


class Score(NamedTuple):
    """Counts of nodes, which add up over several starts."""

    named: int = 0
    """Faulty nodes that were named."""
    missed: int = 0
    false: int = 0
    """Named nodes that had no fault and were not slow."""
    once: int = 0
    """Named nodes that had no fault but were slow once."""
    right: int = 0
    """Faulty nodes that were named with the cause that cost them most."""
    one_of: int = 0
    """Faulty nodes that were named with one of their causes."""

    def __add__(self, other: "Score") -> "Score":  # type: ignore[override]
        return Score(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def figures(self) -> dict[str, float]:
        """Return the figures of a sample; shares are 1 if there was nothing to find."""
        return {
            "f1": self._f1(self.false),
            "f1_strict": self._f1(self.false + self.once),
            "right_share": self.right / self.named if self.named else 1.0,
            "one_of_share": self.one_of / self.named if self.named else 1.0,
            **{f"{name}_count": float(value) for name, value in self._asdict().items()},
        }

    def _f1(self, wrong: int) -> float:
        both = 2 * self.named + self.missed + wrong
        return 2 * self.named / both if both else 1.0


_SMALL_S = (3.0, 8.0)


def score(recipe: Recipe) -> tuple[Score, Score]:
    """Score the report's analysis of the start of a recipe.

    Return the score for all faulty nodes, and for those that lost 3 to 8 s in all. Nodes that were
    named without a fault count in both.
    """
    start = GeneratedStart(recipe)
    analysis = StartModel(StartGraph(start.tracks())).analyse()
    causes = {one.node: one.cause.name for one in analysis.stragglers}
    others = causes.keys() - start.lost_s.keys()
    false = Score(false=len(others - start.hiccups), once=len(others & start.hiccups))
    least_s, most_s = _SMALL_S
    small = {
        node: lost for node, lost in start.lost_s.items() if least_s <= sum(lost.values()) <= most_s
    }
    return false + _found(start.lost_s, causes), false + _found(small, causes)


def _found(faulty: Mapping[str, Mapping[Any, float]], causes: Mapping[str, str]) -> Score:
    named = {node: lost for node, lost in faulty.items() if node in causes}
    return Score(
        named=len(named),
        missed=len(faulty) - len(named),
        right=sum(causes[node] == max(lost, key=lost.__getitem__) for node, lost in named.items()),
        one_of=sum(causes[node] in lost for node, lost in named.items()),
    )
