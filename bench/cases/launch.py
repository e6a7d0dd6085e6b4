"""First and second launch of a job, as `bootseer demo` measures them."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from bench.model import Case, Column, Sample, Workspace, at_least, at_most, ratio_of, variant
from testbed.needs import MissingError
from testbed.processes import python_command, run_json

# On a machine that does much else, even the quick demo takes minutes.
_DEADLINE_S = 1200.0
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
    """Return the sample of the "first" or "second" launch of a `bootseer demo --json`."""
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


def _first(workspace: Workspace) -> Sample:
    """Run the demo, which makes both launches; return the first one's sample."""
    command = python_command("-m", "bootseer", "demo", "--json")
    if workspace.is_smoke:
        command.append("--quick")
    workspace.shared["demo"] = run_json(command, timeout_s=_DEADLINE_S)
    return sample_of(workspace.shared["demo"], "first")


def _second(workspace: Workspace) -> Sample:
    if "demo" not in workspace.shared:
        raise MissingError("the first launch failed")
    return sample_of(workspace.shared["demo"], "second")


CASE = Case(
    name="launch",
    description="First and second launch of the same job: image, environment and checkpoint.",
    prepare=_prepare,
    variants=(
        variant("first", "nothing recorded yet", _first),
        variant("second", "replayed, with every cache dropped", _second),
    ),
    ratios=(
        ratio_of(
            "first / second, whole launch",
            ("first", "wall_s"),
            ("second", "wall_s"),
            at_least(5),
        ),
        *(
            ratio_of(
                f"first / second, {stage}",
                ("first", f"{stage}_s"),
                ("second", f"{stage}_s"),
                at_least(2),
            )
            for stage in _STAGES
        ),
        ratio_of(
            "bytes moved by the second image stage / image",
            ("second", "image_moved_bytes"),
            ("second", "image_bytes"),
            at_most(0.2),
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
    audience="reader",
)
