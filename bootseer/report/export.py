"""A start for programs: a document of JSON, a trace that Perfetto opens, rows for DuckDB. Pure.

docs/json.md lists the members of the document. The trace is of Chrome's JSON format ("Trace Event
Format"), clocks corrected. A process of it is a node, and a thread a process of the job; stages
that overlap lie on further threads, since two slices of one thread must follow each other or lie
within each other. The rows are lines of JSON, one a stage (docs/timelines.md).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from bootseer.report.explain import Analysis
from bootseer.report.graph import Group, StartGraph, begin_of, end_of
from bootseer.report.path import Segment
from bootseer.report.sources import StartFiles
from bootseer.timeline.otlp import IMPORTS_EVENT, PROCESS, ROLE, Stage


class Slice(NamedTuple):
    """A stage on the trace. Nanoseconds since the begin of the start."""

    name: str
    begin_ns: int
    end_ns: int | None
    """None: it never ended."""
    figures: tuple[tuple[str, float], ...] = ()

    @property
    def until(self) -> float:
        """Its end, or infinity."""
        return math.inf if self.end_ns is None else self.end_ns


def to_trace(graph: StartGraph) -> bytes:
    """Return all processes of a start as a trace in Chrome's JSON format."""
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": [*_events(graph)]})


def to_rows(start: StartFiles) -> Iterator[bytes]:
    """Return each stage of a start, and each node's slowest imports, as a line of JSON.

    Raises: BootseerError.
    """
    for node in start.parts(1):
        stages = node.stages()
        for stage in stages:
            yield _row(stage, "stage")
        for body in node.events(IMPORTS_EVENT) if stages else ():
            event = stages[0]._replace(name=IMPORTS_EVENT, message=body, end_ns=None)
            yield _row(event, "event")


def _row(stage: Stage, kind: str) -> bytes:
    resource = stage.resource
    row = {
        "job": str(resource.get("bootseer.job", "")),
        "submission": str(resource.get("bootseer.submission", "")),
        "attempt": resource.get("bootseer.attempt", 0),
        "node": str(resource.get("host.name", "")),
        "rank": resource.get("bootseer.rank", 0),
        "role": str(resource.get(ROLE, "")),
        "process": str(resource.get(PROCESS, "")),
        "kind": kind,
        "name": stage.name,
        "began_ns": stage.start_ns,
        "ended_ns": stage.end_ns,
        "seconds": None if stage.end_ns is None else (stage.end_ns - stage.start_ns) / 1e9,
        "failed": stage.failed,
        "message": stage.message,
        "trace_id": stage.trace_id,
        "span_id": stage.span_id,
        "parent_span_id": stage.parent_id,
        "attributes": stage.attributes,
        "resource": resource,
    }
    return msgspec.json.encode(row) + b"\n"


def _events(graph: StartGraph) -> Iterator[dict[str, Any]]:
    nodes: dict[str, int] = {}
    thread = 0
    for group in graph.groups:
        for row, node in enumerate(group.nodes):
            if node not in nodes:
                nodes[node] = len(nodes) + 1
                yield _named("process_name", nodes[node], 0, node)
            for number, track in enumerate(share_out(list(_slices(group, row)))):
                thread += 1
                beside = f", beside ({number})" if number else ""
                yield _named("thread_name", nodes[node], thread, _title(group, row) + beside)
                for one in track:
                    yield _event(one, nodes[node], thread)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(one: Slice, process: int, thread: int) -> dict[str, Any]:
    event = {
        "ph": "B" if one.end_ns is None else "X",
        "name": one.name,
        "pid": process,
        "tid": thread,
        "ts": one.begin_ns / 1e3,
        "args": dict(one.figures),
    }
    if one.end_ns is not None:
        event["dur"] = (one.end_ns - one.begin_ns) / 1e3
    return event


def share_out(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Share slices out among as few tracks as this takes in order of their begin.

    Two of one track follow each other, or one lies within the other. An open one never ends.
    """
    found: list[tuple[list[Slice], list[float]]] = []
    for one in sorted(slices, key=lambda one: (one.begin_ns, -one.until)):
        track, ends = next(filter(lambda pair: _fits(one, pair[1]), found), ([], []))
        if not track:
            found.append((track, ends))
        track.append(one)
        ends.append(one.until)
    return [track for track, _ in found]


def _fits(one: Slice, ends: list[float]) -> bool:
    """Return whether a slice that begins after all others lies within the innermost that has not
    ended, and forget the `ends` of those that have."""
    while ends and ends[-1] <= one.begin_ns:
        ends.pop()
    return not ends or one.until <= ends[-1]


def _slices(group: Group, row: int) -> Iterator[Slice]:
    for span, name in enumerate(group.shape.names):
        begin, end = (round(group.times[of(span)][row] * 1e9) for of in (begin_of, end_of))
        is_open = row in group.open_spans.get(span, ())
        yield Slice(name, begin, None if is_open else end, tuple(_figures(group, span, row)))


def _figures(group: Group, span: int, row: int) -> Iterator[tuple[str, float]]:
    for name, column in group.evidence[span].items():
        if row < len(column) and not math.isnan(column[row]):
            yield name, column[row]


def _title(group: Group, row: int) -> str:
    rank = group.ranks[row]
    return group.role if rank < 0 else f"rank {rank}, {group.role}"


def analysis_document(analysis: Analysis) -> dict[str, Any]:
    """The members of `bootseer report --json` that the model adds."""
    return {
        "is_ready": analysis.is_ready,
        "ready_s": analysis.ready_s,
        "before_s": analysis.before_s,
        "since_submission_s": analysis.before_s + analysis.ready_s if analysis.before_s else None,
        "node_count": analysis.node_count,
        "rank_count": analysis.rank_count,
        "replay_error_s": analysis.replay_error_s,
        "requests": [
            {
                "kind": one.kind,
                "median_count": one.median_count,
                "max_count": one.max_count,
                "max_node": one.max_node,
            }
            for one in analysis.requests
        ],
        "fan_out": None
        if analysis.fan_out is None
        else {
            "node_count": analysis.fan_out.node_count,
            "received_bytes": analysis.fan_out.received_bytes,
            "store_bytes": analysis.fan_out.store_bytes,
        },
        "critical_path": [_segment(one) for one in analysis.path],
        "blame": [
            {
                "barrier": one.barrier,
                "node": one.node,
                "rank": one.rank,
                "arrived_s": one.arrived_s,
                "late_s": one.late_s,
                "lost": [{"stage": str(label), "seconds": seconds} for label, seconds in one.lost],
            }
            for one in analysis.blame
        ],
        "missed_barriers": [
            {
                "barrier": one.barrier,
                "gave_up": list(one.gave_up),
                "expected_count": one.expected_count or None,
                "came_count": one.came_count,
                "absent": list(one.absent),
                "spread_s": one.spread_s,
                "waited_s": one.waited_s,
            }
            for one in analysis.missed
        ],
        "stragglers": [
            {
                "node": one.node,
                "cause": one.cause.name,
                "evidence": one.cause.evidence,
                "lost_s": one.lost_s,
                "stages": [
                    {
                        "stage": str(outlier.label),
                        "role": outlier.role,
                        "seconds": outlier.seconds,
                        "median_s": outlier.peers_s,
                        "sigmas": outlier.sigmas,
                    }
                    for outlier in one.outliers
                ],
            }
            for one in analysis.stragglers
        ],
        "what_ifs": [
            {
                "name": one.name,
                "ready_s": one.ready_s,
                "saved_s": one.saved_s,
                "saved_gpu_hours": one.saved_gpu_hours,
            }
            for one in analysis.what_ifs
        ],
        "clocks": {
            "shift_s": analysis.clocks.shift_s,
            "spread_s": analysis.clocks.spread_s,
            "apart": list(analysis.clocks.apart),
        },
    }


def _segment(one: Segment) -> dict[str, Any]:
    return {
        "node": one.node,
        "rank": one.rank,
        "role": one.role,
        "stage": str(one.label),
        "begin_s": one.begin_s,
        "seconds": one.seconds,
        "is_wait": one.is_wait,
    }
