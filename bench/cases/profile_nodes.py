"""Does `bootseer report` blame the right nodes, and foretell the start without their faults?"""

import contextlib
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
    variant,
)
from bootseer.report.explain import StartModel
from bootseer.report.peers import as_its_peers
from testbed.starts.experiment import FAULTS, Experiment, Scale
from testbed.starts.nodes import nodes

_NODES = 8
_ALL = "three faults"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = [
        f"{_NODES} nodes with a network and control groups of their own on one machine; each reads "
        "24 MB from a disk of 6 MB/s and downloads 18 MB by a line of 48 Mbit/s, and all meet "
        "before, between and after; of three nodes one begins 8 s late, one has a disk of "
        "2.2 MB/s, one a line of 14 Mbit/s; starts are of real `bootseer run`s; a what-if is that "
        "of the report, 'as its peers', from the start with all faults",
    ]
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(nodes(_NODES))
        # Control groups limit no disk that is memory.
        folder = tempfile.mkdtemp(prefix="nodes-", dir=workspace.directory)
        workspace.shared["experiment"] = stack.enter_context(
            Experiment(site, Path(folder), Scale())
        )
        yield


def sample_of(model: StartModel, faults: Collection[str]) -> Sample:
    """Compare the report's analysis of a start with its faults."""
    analysis = model.analyse()
    truth = dict(FAULTS[name] for name in faults)
    found = {one.node: one.cause.name for one in analysis.stragglers}
    what_ifs = {
        f"without {name}": model.what_if("", as_its_peers(model.peers, frozenset([node]))).ready_s
        for name, (node, _) in FAULTS.items()
    }
    return Sample(
        analysis.ready_s,
        figures={
            **what_ifs,
            "right": float(len(truth.items() & found.items())),
            "wrong": float(len(found.items() - truth.items())),
            "replay_error_s": abs(analysis.replay_error_s),
        },
    )


def _starts(name: str, description: str, faults: Collection[str]) -> Variant:
    def take(workspace: Workspace) -> Sample:
        experiment: Experiment = workspace.shared["experiment"]
        return sample_of(experiment.start(faults), faults)

    return variant(name, description, take)


def _ratios(name: str) -> Iterator[Ratio]:
    foretold, measured = (_ALL, f"without {name}"), (f"without {name}", "wall_s")
    for target in (at_most(1.05), at_least(0.95)):
        yield ratio_of(f"without {name}: what-if / start", foretold, measured, target)


CASE = Case(
    name="profile-nodes",
    description="Real starts with faults: what the report says without one, and how it was.",
    prepare=_prepare,
    variants=(
        _starts(_ALL, "one node late, one with a slow disk, one with a slow line", FAULTS),
        *(_starts(f"without {name}", "the two others", FAULTS.keys() - {name}) for name in FAULTS),
    ),
    ratios=tuple(ratio for name in FAULTS for ratio in _ratios(name)),
    columns=(
        Column("ready s", "wall_s"),
        *(Column(f"what-if {name} s", f"without {name}") for name in FAULTS),
        Column("right", "right", digits=0),
        Column("wrong", "wrong", digits=0),
        Column("replay error s", "replay_error_s", digits=4),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
)
