"""What do eight nodes cost that start at once, with one store behind one line?"""

import contextlib
from collections.abc import Callable, Iterator

from bench.cases.env import prepare
from bench.env.measure import take_many
from bench.env.site import Site
from bench.env.ways import EXTRACT, IMPORT, MOUNT, UV_LINE, Way, first_start
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

_NODE_COUNT = 8
_FIRST = "first start"


def _session(way: Way) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        site: Site = workspace.shared["site"]
        site.line.set_rate(None)
        try:
            way.prepare(site)
        except RuntimeError as error:
            raise MissingError(str(error)) from error

        def take() -> Sample:
            return take_many(site, lambda node: [way.restore(site, node), IMPORT], _NODE_COUNT)

        yield take

    return session


@contextlib.contextmanager
def _first_session(workspace: Workspace) -> Iterator[TakeSample]:
    site: Site = workspace.shared["site"]

    def take() -> Sample:
        commands, ran = first_start(site)
        sample = take_many(site, lambda node: commands, _NODE_COUNT)
        count = float(len(ran.read_text().splitlines()))
        return Sample(
            sample.wall_s,
            sample.cpu_s,
            sample.moved_bytes,
            {**sample.figures, "set_up_count": count, "one": 1.0},
        )

    yield take


def _slowest(name: str) -> Ratio:
    return Ratio(
        f"{name}, slowest node / fastest",
        Figure(name, "wall_s"),
        Figure(name, "first_s"),
        Target(Bound.AT_MOST, 1.5),
    )


CASE = Case(
    name="env-nodes",
    description="Eight new nodes restore the environment at once and import from it.",
    prepare=prepare,
    variants=(
        *(Variant(way.name, way.description, _session(way)) for way in (UV_LINE, EXTRACT, MOUNT)),
        Variant(
            _FIRST,
            "`bootseer run --setup` with uv; nobody has run the set-up before",
            _first_session,
        ),
    ),
    ratios=(
        _slowest(EXTRACT.name),
        _slowest(MOUNT.name),
        _slowest(_FIRST),
        Ratio(
            f"{_FIRST}, set-ups run / 1",
            Figure(_FIRST, "set_up_count"),
            Figure(_FIRST, "one"),
            Target(Bound.AT_MOST, 1),
        ),
        Ratio(
            "uv line / mount, all nodes",
            Figure(UV_LINE.name, "wall_s"),
            Figure(MOUNT.name, "wall_s"),
        ),
        Ratio(
            "uv line / extract, all nodes",
            Figure(UV_LINE.name, "wall_s"),
            Figure(EXTRACT.name, "wall_s"),
        ),
    ),
    columns=(
        Column("slowest s", "wall_s"),
        Column("fastest s", "first_s"),
        Column("MB over the line", "moved_bytes", scale=1e-6, digits=0),
        Column("machine's CPU s", "machine_cpu_s"),
        Column("set-ups", "set_up_count", digits=0),
    ),
    runs=1,
    quick_runs=1,
    warmups=0,
)
