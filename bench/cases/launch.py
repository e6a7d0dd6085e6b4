"""What does the second launch of a job save? The numbers of `bootseer demo`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from testbed.processes import python_command, run_json

_DEADLINE_S = 300.0
_STAGES = ("image", "environment", "checkpoint")


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = [
        "Both launches on one machine behind one rate limit that stands for a shared network; "
        "every cache is dropped between them; moved bytes are those through the limit; CPU is the "
        "whole machine's until the job has ended (it also saves a checkpoint)",
    ]
    yield


def sample_of(document: Mapping[str, Any], which: str) -> Sample:
    """The first or second launch of one `bootseer demo --json` (`which`: "first" or "second")."""
    figures: dict[str, float] = {"image_bytes": float(document["image"]["bytes"])}
    moved_bytes = 0
    for name, stage in document["stages"].items():
        figures[f"{name}_s"] = float(stage[f"{which}_s"])
        stage_bytes = stage.get(f"{which}_bytes")
        if stage_bytes is not None:
            figures[f"{name}_moved_bytes"] = float(stage_bytes)
            moved_bytes += int(stage_bytes)
    return Sample(
        float(document["total"][f"{which}_s"]),
        cpu_s={"machine": float(document["total"][f"{which}_cpu_s"])},
        moved_bytes=moved_bytes,
        figures=figures,
    )


def _launch(which: str) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    """One demo yields both launches: the variant "first" runs it, "second" takes its other half."""

    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        def take() -> Sample:
            if which == "first":
                command = python_command("-m", "bootseer", "demo", "--json")
                workspace.shared["demo"] = run_json(command, timeout_s=_DEADLINE_S)
            return sample_of(workspace.shared["demo"], which)

        yield take

    return session


CASE = Case(
    name="launch",
    description="First and second launch of the same job: image, environment and checkpoint.",
    prepare=_prepare,
    variants=(
        Variant("first", "nothing recorded yet", _launch("first")),
        Variant("second", "replayed, with every cache dropped", _launch("second")),
    ),
    ratios=(
        Ratio(
            "first / second, whole launch",
            Figure("first", "wall_s"),
            Figure("second", "wall_s"),
            Target(Bound.AT_LEAST, 5),
        ),
        *(
            Ratio(
                f"first / second, {stage}",
                Figure("first", f"{stage}_s"),
                Figure("second", f"{stage}_s"),
                Target(Bound.AT_LEAST, 2),
            )
            for stage in _STAGES
        ),
        Ratio(
            "bytes moved by the second image stage / image",
            Figure("second", "image_moved_bytes"),
            Figure("second", "image_bytes"),
            Target(Bound.AT_MOST, 0.2),
        ),
    ),
    columns=(
        Column("launch s", "wall_s"),
        *(Column(f"{stage} s", f"{stage}_s") for stage in _STAGES),
        Column("CPU s", "machine_cpu_s"),
        Column("MB moved", "moved_bytes", scale=1e-6, digits=0),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
)
