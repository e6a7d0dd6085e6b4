"""A case that takes no time, for testing the framework."""

import contextlib
from collections.abc import Callable, Iterator

from bench.model import (
    Bound,
    Case,
    Column,
    Figure,
    Ratio,
    Sample,
    TakeSample,
    Target,
    Variant,
    Workspace,
)
from testbed.needs import MissingError


@contextlib.contextmanager
def prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = ["Nothing is measured"]
    workspace.shared["order"] = []
    yield


def session(
    name: str, wall_s: float
) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    @contextlib.contextmanager
    def enter(workspace: Workspace) -> Iterator[TakeSample]:
        def take() -> Sample:
            workspace.shared["order"].append(name)
            return Sample(wall_s, {"server": wall_s / 2}, moved_bytes=1000)

        yield take

    return enter


@contextlib.contextmanager
def missing(workspace: Workspace) -> Iterator[TakeSample]:
    raise MissingError("needs a moon | or two")
    yield  # unreachable; makes this a generator


@contextlib.contextmanager
def breaking(workspace: Workspace) -> Iterator[TakeSample]:
    def take() -> Sample:
        raise RuntimeError("it broke")

    yield take


CASE = Case(
    name="example",
    description="An example.",
    prepare=prepare,
    variants=(
        Variant("slow", "takes long", session("slow", 3.0)),
        Variant("fast", "takes less", session("fast", 1.0)),
        Variant("missing", "cannot run", missing),
        Variant("breaking", "fails when run", breaking),
    ),
    ratios=(
        Ratio(
            "slow / fast",
            Figure("slow", "wall_s"),
            Figure("fast", "wall_s"),
            Target(Bound.AT_LEAST, 2),
        ),
        Ratio("missing / fast", Figure("missing", "wall_s"), Figure("fast", "wall_s")),
    ),
    columns=(Column("s", "wall_s"), Column("kB/s", "rate", scale=1e-3, digits=1)),
    runs=3,
    quick_runs=2,
    derive=lambda sample: {"rate": (sample.moved_bytes or 0) / sample.wall_s},
)
