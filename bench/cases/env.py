"""How long until a new node can import from an environment of tens of thousands of files?"""

import contextlib
from collections.abc import Callable, Iterator

from bench.env.measure import take
from bench.env.recipe import IMPORTS, REQUIREMENTS
from bench.env.site import RATE_MBIT, Site, open_site
from bench.env.ways import ALL, Way
from bench.machine.environment import file_system_of
from bench.model import Bound, Case, Column, Figure, Ratio, TakeSample, Target, Variant, Workspace
from testbed.needs import MissingError


@contextlib.contextmanager
def prepare(workspace: Workspace) -> Iterator[None]:
    """A `Site`, shared as "site"; also of the case with many nodes."""
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


def _session(way: Way) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        site: Site = workspace.shared["site"]
        site.line.set_rate(None)
        try:
            way.prepare(site)
        except RuntimeError as error:
            raise MissingError(str(error)) from error
        yield lambda: take(site, way)

    return session


def _ratio(name: str, top: str, bottom: str, limit: float, bound: Bound = Bound.AT_MOST) -> Ratio:
    """`top` and `bottom`: "variant.figure"."""
    figures = [Figure(*text.split(".")) for text in (top, bottom)]
    return Ratio(name, figures[0], figures[1], Target(bound, limit))


def _times(top: str, bottom: str, limit: float) -> Ratio:
    name = f"{top} / {bottom}, until imported"
    return _ratio(name, f"{top}.wall_s", f"{bottom}.wall_s", limit, Bound.AT_LEAST)


CASE = Case(
    name="env",
    description=(
        f"A new node restores an environment of 1.7 GB and runs `{IMPORTS.partition(';')[0]}`."
    ),
    prepare=prepare,
    variants=tuple(Variant(way.name, way.description, _session(way)) for way in ALL),
    ratios=(
        _ratio("mount, until ready / 0.3 s", "mount.restore_s", "mount.wanted_ready_s", 1),
        _ratio("mount / local, import", "mount.import_s", "local.import_s", 1.3),
        _ratio("mount, bytes / stored snapshot", "mount.moved_bytes", "mount.stored_bytes", 0.25),
        _ratio("extract near / C floor", "extract near.restore_s", "C floor.restore_s", 1.2),
        _ratio(
            "zstd tar / extract near", "zstd tar.restore_s", "extract near.restore_s", 1.3,
            Bound.AT_LEAST,
        ),
        _ratio("hardlink / cp -al", "hardlink.restore_s", "cp -al.restore_s", 1.5),
        _ratio("link / cp -al", "link.restore_s", "cp -al.restore_s", 1.5),
        _times("uv", "mount", 4),
        _times("uv line", "mount", 4),
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
)  # fmt: skip
