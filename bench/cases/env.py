"""Restoring an environment of many files on one new node, or on eight at once."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.env.measure import take, take_many
from bench.env.recipe import IMPORTS, REQUIREMENTS
from bench.env.site import RATE_MBIT, EnvironmentSite, open_site
from bench.env.ways import ALL, EXTRACT, IMPORT, MOUNT, UV_LINE, RestoreMethod, first_start
from bench.machine.environment import file_system_of
from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Session,
    TakeSample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio,
    ratio_of,
    variant,
)
from testbed.needs import MissingError

_NODE_COUNT = 8
_FIRST = "first start"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    with open_site(workspace) as site:
        workspace.shared["site"] = site
        names = ", ".join(requirement.partition("=")[0] for requirement in REQUIREMENTS)
        content_bytes = sum(site.tree.columns.extent_length)
        workspace.shared["notes"] = [
            f"A virtual environment with {names}: {site.tree.name_count} names, "
            f"{content_bytes / 1e6:.0f} MB, stored as {site.stored_bytes / 1e6:.0f} MB; "
            f"`{IMPORTS.partition(';')[0]}` is the first thing that is done with it",
            f"Nodes' disks are new ext4s in files on {file_system_of(site.scratch)}; archives, "
            "wheels and stores that a node has are in memory, those behind the line, an HDFS of "
            "one DataNode and a plain HTTP server, too; the line is a loopback shaped to "
            f"{RATE_MBIT} Mbit/s by a token bucket",
            "Nothing is flushed to disk while it is timed; the page cache is dropped before",
        ]
        yield


def _session(
    way: RestoreMethod, take_one: Callable[[EnvironmentSite, RestoreMethod], Sample]
) -> Session:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        site: EnvironmentSite = workspace.shared["site"]
        site.line.set_rate(None)
        try:
            way.prepare(site)
        except RuntimeError as error:
            raise MissingError(str(error)) from error
        yield lambda: take_one(site, way)

    return session


def _take_eight(site: EnvironmentSite, way: RestoreMethod) -> Sample:
    return take_many(site, lambda node: [way.restore(site, node), IMPORT], _NODE_COUNT)


def _take_first(workspace: Workspace) -> Sample:
    site: EnvironmentSite = workspace.shared["site"]
    commands, ran = first_start(site)
    taken = take_many(site, lambda node: commands, _NODE_COUNT)
    count = float(len(ran.read_text().splitlines()))
    return replace(taken, figures={**taken.figures, "set_up_count": count, "one": 1.0})


def _within(name: str, top: str, bottom: str, limit: float) -> Ratio:
    """Return a ratio with an upper limit; `top` and `bottom` are "variant.figure"."""
    above, below = (tuple(text.split(".")) for text in (top, bottom))
    return ratio_of(name, (above[0], above[1]), (below[0], below[1]), at_most(limit))


def _times(top: str, bottom: str, limit: float) -> Ratio:
    return ratio(top, bottom, "wall_s", "until imported", at_least(limit))


def _slowest(name: str) -> Ratio:
    return ratio_of(
        f"{name}, slowest node / fastest",
        (name, "wall_s"),
        (name, "first_s"),
        at_most(1.5),
    )


_ENV = Case(
    name="env",
    description=(
        f"A new node restores an environment of 1.7 GB and runs `{IMPORTS.partition(';')[0]}`."
    ),
    prepare=_prepare,
    variants=tuple(Variant(way.name, way.description, _session(way, take)) for way in ALL),
    ratios=(
        _within("mount, until ready / 0.3 s", "mount.restore_s", "mount.wanted_ready_s", 1),
        _within("mount / local, import", "mount.import_s", "local.import_s", 1.03),
        _within("mount, bytes / stored snapshot", "mount.moved_bytes", "mount.stored_bytes", 0.25),
        _within("extract near / C floor", "extract near.restore_s", "C floor.restore_s", 1.2),
        ratio_of(
            "zstd tar / extract near", ("zstd tar", "restore_s"), ("extract near", "restore_s"),
            at_least(1.3),
        ),
        _within("link / cp -al", "link.restore_s", "cp -al.restore_s", 1.5),
        _times("uv", "mount", 5),
        _times("uv line", "mount", 5),
        _times("uv", "extract", 1.5),
        _times("uv", "extract near", 1.5),
        _times("uv line", "extract", 1.5),
        _times("pip", "mount", 1),
    ),
    columns=(
        Column("restore s", "restore_s"),
        Column("import s", "import_s"),
        Column("both s", "wall_s"),
        Column("MB over the line", "moved_bytes", scale=1e-6, digits=1),
        Column("names/s", "files_per_s", digits=0),
        Column("restore CPU s", "restore_cpu_s"),
        Column("CPU s", "node_cpu_s"),
    ),
    runs=2,
    quick_runs=1,
    warmups=0,
    audience="reader",
)  # fmt: skip

_NODES = Case(
    name="env-nodes",
    description="Eight new nodes restore the environment at once and import from it.",
    prepare=_prepare,
    variants=(
        *(
            Variant(way.name, way.description, _session(way, _take_eight))
            for way in (UV_LINE, EXTRACT, MOUNT)
        ),
        variant(
            _FIRST,
            "`bootseer run --setup` with uv; nobody has run the set-up before",
            _take_first,
        ),
    ),
    ratios=(
        _slowest(EXTRACT.name),
        _slowest(MOUNT.name),
        _slowest(_FIRST),
        ratio_of(
            f"{_FIRST}, set-ups run / 1",
            (_FIRST, "set_up_count"),
            (_FIRST, "one"),
            at_most(1),
        ),
        ratio_of(
            "uv line / mount, all nodes",
            (UV_LINE.name, "wall_s"),
            (MOUNT.name, "wall_s"),
        ),
        ratio_of(
            "uv line / extract, all nodes",
            (UV_LINE.name, "wall_s"),
            (EXTRACT.name, "wall_s"),
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

CASES = (_ENV, _NODES)
