"""Writes generated starts as timelines of `bootseer run`."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from bootseer.report.graph import Track
from bootseer.report.read import in_order
from bootseer.timeline.otlp import (
    BARRIER,
    PARENT,
    PROCESS,
    ROLE,
    Stage,
    Value,
    encode_end,
    encode_start,
    trace_id_of,
)
from testbed.starts.generate import GeneratedStart, Recipe

_ZERO_NS = 1_790_000_000 * 10**9


_NODES_A_PART = 100


def write_timelines(folder: Path, recipe: Recipe, *, job: str, submission: str = "") -> None:
    """Write the start below `folder`, one timeline file for each node, on all processors."""
    place = folder / job / "0" / submission
    place.mkdir(parents=True, exist_ok=True)
    start = GeneratedStart(recipe)
    parts = [
        slice(first, first + _NODES_A_PART) for first in range(0, recipe.node_count, _NODES_A_PART)
    ]
    for _ in in_order(functools.partial(_write, place, start, job, submission), parts):
        pass


def _write(place: Path, start: GeneratedStart, job: str, submission: str, nodes: slice) -> None:
    trace = trace_id_of(job, 0, submission)
    for node, found in itertools.groupby(start.tracks(nodes), lambda track: track.node):
        name = f"20261123T{start.recipe.seed:06}Z-1-{node}-0.jsonl"
        lines = (_lines(track, trace, job, submission) for track in found)
        (place / name).write_bytes(b"".join(itertools.chain.from_iterable(lines)))


def _lines(track: Track, trace: str, job: str, submission: str) -> Iterator[bytes]:
    resource: dict[str, Value] = {
        "service.name": "bootseer",
        "bootseer.job": job,
        "bootseer.attempt": 0,
        "host.name": track.node,
        "bootseer.rank": max(track.rank, 0),
        "bootseer.boot_id": "5bf6dcd8-51fc-41f4-8d81-ebdb3508b1d6",
    }
    if submission:
        resource["bootseer.submission"] = submission
    if track.process:
        resource |= {PROCESS: track.process, PARENT: track.parent, ROLE: track.role}
    prefix = f"{track.node}{track.process}"
    for number, span in enumerate(track.spans):
        begin_ns = _ZERO_NS + round(span.begin_s * 1e9)
        begun: dict[str, Value] = {"bootseer.monotonic_ns": begin_ns - _ZERO_NS}
        if span.barrier:
            begun[BARRIER] = span.barrier
        stage = Stage(
            name=span.name,
            trace_id=trace,
            span_id=f"{prefix}{number}",
            parent_id=f"{prefix}{span.parent}" if span.parent >= 0 else "",
            start_ns=begin_ns,
            end_ns=begin_ns + round((span.end_s - span.begin_s) * 1e9),
            attributes=begun,
            resource=resource,
        )
        if not span.evidence:
            # A stage that is noted at its end has no begin event and no figures.
            yield encode_end(stage)
            continue
        yield encode_start(stage)
        yield encode_end(stage._replace(attributes={**begun, **span.evidence}))
