"""What a benchmark is: a case, its variants, and what one run of a variant yields.

Declarations only; the runner carries them out. Every figure of a run has a name with its unit
(`wall_s`, `server_cpu_s`, `moved_bytes`), and ratios refer to figures by that name.
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
    """One run of one variant."""

    wall_s: float
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds by who spent them: "reader", "server", ..."""
    moved_bytes: int | None = None
    """Payload read, or bytes over the network, as the case says."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Whatever else the case wants in its tables, by name."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What variants get: where to put things, and how much to do."""

    directory: Path
    """Empty at first, removed at the end."""
    is_quick: bool
    kept: Path
    """Stays from run to run, for what is slow to make and always the same. May not exist yet."""
    say: Callable[[str], None] = lambda line: None
    """Gets a line per event, for people."""
    shared: dict[str, Any] = field(default_factory=dict)
    """From the case's `prepare` to its variants, and between those."""
    is_smoke: bool = False
    """Whether only the case itself is tried: the least sizes, no figure counts."""

    def sized(self, full: int, quick: int, smoke: int) -> int:
        """Return how much to do in a run of this kind."""
        return smoke if self.is_smoke else quick if self.is_quick else full


TakeSample: TypeAlias = Callable[[], Sample]


Session: TypeAlias = Callable[[Workspace], AbstractContextManager[TakeSample]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things that are compared."""

    name: str
    description: str
    session: Session
    """Entered once (it starts servers, mounts, ...); the callable is called once per round.

    Raises: MissingError when something it needs is not there.
    """


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a variant, as a ratio's numerator or denominator."""

    variant: str
    name: str


class Bound(Enum):
    """Which side of its limit a ratio must be on."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio should be."""

    bound: Bound
    limit: float

    def is_met(self, value: float) -> bool:
        """Whether `value` satisfies it."""
        return value >= self.limit if self.bound is Bound.AT_LEAST else value <= self.limit

    def __str__(self) -> str:
        return f"{self.bound.value} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Compares two figures within each round."""

    name: str
    """A phrase for the table: "direct_io against mfusepy, throughput"."""
    top: Figure
    bottom: Figure
    target: Target | None = None


def variant(name: str, description: str, take: Callable[[Workspace], Sample]) -> Variant:
    """Return a variant that starts nothing before its rounds: each one is a call of `take`."""

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
    """Return the ratio of two figures, each given as the variant's and the figure's name."""
    return Ratio(name, Figure(*top), Figure(*bottom), target)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the case's table: a figure, scaled and named for people."""

    title: str
    figure: str
    scale: float = 1.0
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A question that numbers can answer."""

    name: str
    description: str
    """One sentence: what is measured, of what."""
    prepare: Callable[[Workspace], AbstractContextManager[None]]
    """Makes what all variants share. Raises: MissingError when the case cannot run at all."""
    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...]
    columns: tuple[Column, ...]
    runs: int = 7
    quick_runs: int = 3
    warmups: int = 1
    derive: Callable[[Sample], Mapping[str, float]] = lambda sample: {}
    """Further figures computed from a sample: a rate, CPU per GiB."""
    audience: Literal["reader", "us"] = "us"
    """Whether the answer is for people who read the documentation, or for those who work on it."""


def only(case: Case, names: Collection[str]) -> Case:
    """The case with no other variants than these. Raises: MissingError where it lacks one."""
    if unknown := set(names) - {variant.name for variant in case.variants}:
        raise MissingError(f"{case.name} has no variant called {', '.join(sorted(unknown))}")
    return replace(case, variants=tuple(one for one in case.variants if one.name in names))


def figures_of(case: Case, sample: Sample) -> dict[str, float]:
    """Every figure of a sample by name."""
    flat = {"wall_s": sample.wall_s, **sample.figures}
    if sample.cpu_s:
        flat |= {f"{who}_cpu_s": seconds for who, seconds in sample.cpu_s.items()}
        flat["cpu_s"] = sum(sample.cpu_s.values())
    if sample.moved_bytes is not None:
        flat["moved_bytes"] = float(sample.moved_bytes)
    return flat | dict(case.derive(sample))
