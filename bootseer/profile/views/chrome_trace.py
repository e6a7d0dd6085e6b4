"""Stages as a Chrome trace (JSON object format), which Perfetto opens. Pure (no I/O).

A process is a node. A thread is a track of one rank: on one track an event may lie within another,
but two that overlap otherwise are refused, so a rank whose stages overlap has several tracks.
Source: "Trace Event Format" (Google).
"""

import math
from collections.abc import Sequence
from typing import Any

from bootseer.timeline.otlp import Stage


def to_chrome_trace(stages: Sequence[Stage]) -> dict[str, Any]:
    """Complete events ("X") for finished stages, begin events ("B") for open ones; times in us."""
    by_node: dict[str, dict[int, list[Stage]]] = {}
    for stage in stages:
        ranks = by_node.setdefault(str(stage.resource.get("host.name", "?")), {})
        ranks.setdefault(int(stage.resource.get("bootseer.rank", 0)), []).append(stage)
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (node, ranks) in enumerate(sorted(by_node.items()), start=1):
        names.append(_named("process_name", process, 0, node))
        thread = 0
        for rank, of_rank in sorted(ranks.items()):
            for number, track in enumerate(tracks(of_rank)):
                thread += 1
                title = f"rank {rank}" if number == 0 else f"rank {rank}, beside ({number})"
                names.append(_named("thread_name", process, thread, title))
                events += [_event(stage, process, thread) for stage in track]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def tracks(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages, shared out among as few tracks as this takes in order of their start: two of one
    track follow each other, or one lies within the other. An open stage never ends."""
    found: list[tuple[list[Stage], list[float]]] = []
    for stage in sorted(stages, key=lambda stage: (stage.start_ns, -_end(stage))):
        track, ends = next(filter(lambda one: _fits(stage, one[1]), found), ([], []))
        if not track:
            found.append((track, ends))
        track.append(stage)
        ends.append(_end(stage))
    return [track for track, _ in found]


def _fits(stage: Stage, ends: list[float]) -> bool:
    """Whether a stage that begins after all others lies within the innermost that has not ended;
    forgets the `ends` of those that have."""
    while ends and ends[-1] <= stage.start_ns:
        ends.pop()
    return not ends or _end(stage) <= ends[-1]


def _end(stage: Stage) -> float:
    return math.inf if stage.end_ns is None else stage.end_ns


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(stage: Stage, process: int, thread: int) -> dict[str, Any]:
    # Whole microseconds: fractions of them are rounded, and what touches would overlap.
    begin_us = stage.start_ns // 1000
    event: dict[str, Any] = {
        "name": stage.name,
        "pid": process,
        "tid": thread,
        "ts": begin_us,
        "args": dict(stage.attributes),
    }
    if stage.end_ns is None:
        event["ph"] = "B"
    else:
        event.update(ph="X", dur=stage.end_ns // 1000 - begin_us)
    return event
