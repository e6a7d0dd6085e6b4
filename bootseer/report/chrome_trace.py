"""Stages as a Chrome trace (JSON object format), which Perfetto opens. Pure (no I/O).

A process is a node, a thread is a rank. Source: "Trace Event Format" (Google).
"""

from collections.abc import Sequence
from typing import Any

from bootseer.timeline.otlp import Stage


def to_chrome_trace(stages: Sequence[Stage]) -> dict[str, Any]:
    """Complete events ("X") for finished stages, begin events ("B") for open ones; times in us."""
    nodes = sorted({str(stage.resource.get("host.name", "?")) for stage in stages})
    number = {node: index + 1 for index, node in enumerate(nodes)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number[node], "args": {"name": node}}
        for node in nodes
    ]
    for stage in stages:
        event: dict[str, Any] = {
            "name": stage.name,
            "pid": number[str(stage.resource.get("host.name", "?"))],
            "tid": int(stage.resource.get("bootseer.rank", 0)),
            "ts": stage.start_ns / 1000,
            "args": dict(stage.attributes),
        }
        if stage.end_ns is None:
            event["ph"] = "B"
        else:
            event.update(ph="X", dur=(stage.end_ns - stage.start_ns) / 1000)
        events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}
