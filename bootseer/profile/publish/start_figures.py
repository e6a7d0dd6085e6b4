"""Metrics of a job's last start on this node, for Prometheus (docs/operations.md). Pure.

No label has a new value at each start, so neither the submission nor a process is a label.
"""

from collections.abc import Iterator, Mapping, Sequence

from bootseer.base.exposition import Family, Sample, render, single
from bootseer.timeline.otlp import PROCESS, READY, ROLE, START, Stage

_START, _ENVIRONMENT = "bootseer_start_", "bootseer_environment_"
_MOVED = "bootseer.bytes"
_STAGES_MAX = 50
"""Limit on series, since programs name stages as they like."""
_ENVIRONMENTS_MAX = 10
_Key = tuple[str, str]


def render_start(stages: Sequence[Stage], job: str, slot: int) -> str:
    """Return the text of the metrics file for the stages of a start on one node."""
    own = (("job_name", job), ("slot", str(slot)))
    return render((*_of_start(stages), *_of_stages(stages), *_of_environments(stages)), own)


def _of_start(stages: Sequence[Stage]) -> Iterator[Family]:
    starts = [stage for stage in stages if stage.name == START]
    ready_ns = max((stage.start_ns for stage in stages if stage.name == READY), default=0)
    began_ns = min((stage.start_ns for stage in starts or stages), default=0)
    command_ns = max((stage.end_ns or 0 for stage in starts), default=0)
    processes = {stage.resource.get(PROCESS, "") for stage in stages} - {""}
    for name, text, value in (
        ("time_seconds", "When the start began, in seconds since the epoch.", began_ns / 1e9),
        ("ready", "1 once a process of the start is ready.", int(ready_ns > 0)),
        ("failed", "1 if the launcher failed.", any(stage.failed for stage in starts)),
        ("processes", "Processes of the start that noted stages.", len(processes)),
    ):
        yield single(_START + name, "gauge", text, value)
    if command_ns:
        text = "From the begin of the start until the command began."
        yield single(_START + "command_seconds", "gauge", text, (command_ns - began_ns) / 1e9)
    if ready_ns:
        text = "From the begin of the start until the last process was ready."
        yield single(_START + "ready_seconds", "gauge", text, (ready_ns - began_ns) / 1e9)


def _of_stages(stages: Sequence[Stage]) -> Iterator[Family]:
    by_name: dict[_Key, list[Stage]] = {}
    for stage in stages:
        if stage.name not in (START, READY):
            by_name.setdefault((stage.name, str(stage.resource.get(ROLE, ""))), []).append(stage)
    # Only the longest stages get a series.
    chosen = sorted(by_name, key=lambda key: -_longest_s(by_name[key]))[:_STAGES_MAX]
    found = {key: by_name[key] for key in sorted(chosen)}
    figures: tuple[tuple[str, str, dict[_Key, float]], ...] = (
        (
            "stage_seconds",
            "Duration of a stage, on the process where it took longest.",
            {key: _longest_s(same) for key, same in found.items() if _ended(same)},
        ),
        (
            "stage_open",
            "Processes on which a stage has begun and not ended.",
            {key: len(same) - len(_ended(same)) for key, same in found.items()},
        ),
        (
            "stage_failures",
            "Processes on which a stage failed.",
            {key: sum(stage.failed for stage in same) for key, same in found.items()},
        ),
        (
            "stage_bytes",
            "Bytes that a stage moved over the network.",
            {
                key: sum(map(_bytes, same))
                for key, same in found.items()
                if any(_MOVED in stage.attributes for stage in same)
            },
        ),
    )
    for name, text, values in figures:
        samples = [
            Sample(value, (("stage", stage), ("role", role)))
            for (stage, role), value in values.items()
        ]
        yield Family(_START + name, "gauge", text, samples)


def _of_environments(stages: Sequence[Stage]) -> Iterator[Family]:
    last: dict[str, Stage] = {}
    for stage in stages:
        if stage.name.partition(" ")[0] == "environment" and stage.end_ns is not None:
            last[stage.name] = stage
    found: Mapping[str, Stage] = dict(sorted(last.items())[:_ENVIRONMENTS_MAX])
    for name, text, values in (
        (
            "seconds",
            "Time until an environment was in place.",
            {key: _longest_s([stage]) for key, stage in found.items()},
        ),
        (
            "restored",
            "1 if an environment came from the store or was here, 0 if its set-up ran.",
            {key: stage.attributes.get("bootseer.hit") is True for key, stage in found.items()},
        ),
        (
            "bytes",
            "Bytes that came over the network for an environment.",
            {key: _bytes(stage) for key, stage in found.items()},
        ),
        (
            "failed",
            "1 if an environment could not be set up.",
            {key: stage.failed for key, stage in found.items()},
        ),
    ):
        samples = [Sample(value, (("environment", key),)) for key, value in values.items()]
        yield Family(_ENVIRONMENT + name, "gauge", text, samples)


def _ended(stages: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in stages if stage.end_ns is not None]


def _longest_s(stages: Sequence[Stage]) -> float:
    return max(((stage.end_ns or 0) - stage.start_ns for stage in _ended(stages)), default=0) / 1e9


def _bytes(stage: Stage) -> int:
    value = stage.attributes.get(_MOVED, 0)
    return value if isinstance(value, int) else 0
