"""Declarations of a benchmark: the case, its variants, and the figures of a run.

The runner carries them out. Every figure of a run has a name with its unit (`wall_s`,
`server_cpu_s`, `moved_bytes`), and ratios refer to figures by that name.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeAlias

from testbed.needs import MissingError


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one run of one variant."""

    wall_s: float
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds by the process that spent them: "reader", "server", ..."""
    moved_bytes: int | None = None
    """Payload that was read, or bytes over the network, as the case says."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures for the case's tables, by name."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Folders and sizes that variants are given."""

    directory: Path
    """Folder that is empty at first and removed at the end."""
    is_quick: bool
    kept: Path
    """Folder that stays from run to run, for slow and constant preparations. May not exist yet."""
    say: Callable[[str], None] = lambda line: None
    """Called with a line for people at each event."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that the case's `prepare` and its variants pass to variants."""
    is_smoke: bool = False
    """Whether only the case itself is tried: with the least sizes, and without regard to
    figures."""

    def sized(self, full: int, quick: int, smoke: int) -> int:
        """Return the size for a run of this kind."""
        return smoke if self.is_smoke else quick if self.is_quick else full


TakeSample: TypeAlias = Callable[[], Sample]


Session: TypeAlias = Callable[[Workspace], AbstractContextManager[TakeSample]]


@dataclass(frozen=True, slots=True)
class Variant:
    """Way of doing something that is compared with others."""

    name: str
    description: str
    session: Session
    """Context manager that starts servers, mounts and so on; its value is called once per round.

    Raises: MissingError if something it needs is missing.
    """


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure of a variant, as a ratio's numerator or denominator."""

    variant: str
    name: str


class Bound(Enum):
    """Side of its limit on which a ratio must be."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Target:
    """Limit of a ratio."""

    bound: Bound
    limit: float

    def is_met(self, value: float) -> bool:
        """Return whether `value` is on the right side of the limit."""
        return value >= self.limit if self.bound is Bound.AT_LEAST else value <= self.limit

    def __str__(self) -> str:
        return f"{self.bound.value} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Comparison of two figures within each round."""

    name: str
    """Phrase for the table: "direct_io against mfusepy, throughput"."""
    top: Figure
    bottom: Figure
    target: Target | None = None


def variant(name: str, description: str, take: Callable[[Workspace], Sample]) -> Variant:
    """Return a variant that starts nothing before its rounds; each round calls `take`."""

    @contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        yield lambda: take(workspace)

    return Variant(name, description, session)


def at_least(limit: float) -> Target:
    """Return the target that a ratio is `limit` or more."""
    return Target(Bound.AT_LEAST, limit)


def at_most(limit: float) -> Target:
    """Return the target that a ratio is `limit` or less."""
    return Target(Bound.AT_MOST, limit)


def ratio(top: str, bottom: str, figure: str, what: str, target: Target | None = None) -> Ratio:
    """Return the ratio of one figure of two variants, named after both."""
    return ratio_of(f"{top} / {bottom}, {what}", (top, figure), (bottom, figure), target)


def ratio_of(
    name: str, top: tuple[str, str], bottom: tuple[str, str], target: Target | None = None
) -> Ratio:
    """Return the ratio of two figures, each given by the names of its variant and itself."""
    return Ratio(name, Figure(*top), Figure(*bottom), target)


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a case's table: a figure, scaled and named for people."""

    title: str
    figure: str
    scale: float = 1.0
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Question that numbers can answer."""

    name: str
    description: str
    """Sentence that describes the measurement."""
    prepare: Callable[[Workspace], AbstractContextManager[None]]
    """Context manager that makes what all variants share. Raises: MissingError."""
    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...]
    columns: tuple[Column, ...]
    runs: int = 7
    quick_runs: int = 3
    warmups: int = 1
    derive: Callable[[Sample], Mapping[str, float]] = lambda sample: {}
    """Function that computes further figures from a sample: a rate, CPU per GiB."""
    audience: Literal["reader", "us"] = "us"
    """Whether the answer is for readers of the documentation, or for developers of Bootseer."""


def only(case: Case, names: Collection[str]) -> Case:
    """Return the case with only these variants. Raises: MissingError if it lacks one."""
    if unknown := set(names) - {variant.name for variant in case.variants}:
        raise MissingError(f"{case.name} has no variant called {', '.join(sorted(unknown))}")
    return replace(case, variants=tuple(one for one in case.variants if one.name in names))


def figures_of(case: Case, sample: Sample) -> dict[str, float]:
    """Return every figure of a sample by name."""
    flat = {"wall_s": sample.wall_s, **sample.figures}
    if sample.cpu_s:
        flat |= {f"{who}_cpu_s": seconds for who, seconds in sample.cpu_s.items()}
        flat["cpu_s"] = sum(sample.cpu_s.values())
    if sample.moved_bytes is not None:
        flat["moved_bytes"] = float(sample.moved_bytes)
    return flat | dict(case.derive(sample))
