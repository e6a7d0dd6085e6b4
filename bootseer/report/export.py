"""Export of a start: a JSON document, a trace for Perfetto, and rows of JSON. Pure (no I/O).

docs/json.md lists the document's members. The trace is in Chrome's JSON format ("Trace Event
Format") with corrected clocks. Its processes are nodes, and its threads are processes of the job;
stages that overlap go to further threads, since two slices of a thread must not overlap unless one
contains the other. Rows are lines of JSON, one per stage (docs/timelines.md).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from bootseer.report.explain import Analysis
from bootseer.report.graph import Group, Label, StartGraph, begin_of, end_of
from bootseer.report.sources import StartFiles
from bootseer.report.stragglers import Cause
from bootseer.timeline.otlp import IMPORTS_EVENT, PROCESS, ROLE, Stage


class Slice(NamedTuple):
    """Stage in the trace. Times are in ns since the begin of the start."""

    name: str
    begin_ns: int
    end_ns: int | None
    """End; None if the stage never ended."""
    figures: tuple[tuple[str, float], ...] = ()

    @property
    def until(self) -> float:
        """End; infinity if the stage never ended."""
        return math.inf if self.end_ns is None else self.end_ns


def to_trace(graph: StartGraph) -> bytes:
    """Return a start as a trace in Chrome's JSON format."""
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": [*_events(graph)]})


def to_rows(start: StartFiles) -> Iterator[bytes]:
    """Yield each stage of a start, and each node's slowest imports, as a line of JSON."""
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
    """Distribute slices over tracks, each to the first track in which it fits.

    Two slices of a track do not overlap unless one contains the other.
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
    """Return whether a slice fits into a track whose slices all began before.

    `ends` is the stack of the track's nested ends; ends before the slice are removed.
    """
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
    """Return the member `analysis` of `bootseer report --json`."""
    document: dict[str, Any] = _plain(analysis)
    del document["peers"]
    submitted_s = analysis.before_s + analysis.ready_s
    document["since_submission_s"] = submitted_s if analysis.before_s else None
    for missed in document["missed_barriers"]:
        missed["expected_count"] = missed["expected_count"] or None
    return document


def _plain(value: Any) -> Any:
    """Return structs as dicts with the names of their JSON members, and labels as text."""
    if isinstance(value, Label):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not isinstance(value, Struct):
        return value
    found: dict[str, Any] = {}
    names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    for field, name in names:
        member = getattr(value, field)
        if isinstance(member, Cause):
            found |= {"cause": member.name, "evidence": member.evidence}
        else:
            found[name] = _plain(member)
    return found
