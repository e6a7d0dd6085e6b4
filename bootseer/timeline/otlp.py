"""Encoding of stages as OTLP-JSON lines; `bootseer.report.decoding` reads them. Pure (no I/O).

Each line is one export request as the OpenTelemetry Collector's file exporter writes it, so that
its `otlpjsonfile` receiver reads our files. OTLP has no record for a span that has only begun: the
begin of a stage is a *log record* with the span's ids, and its end is the span itself. A begin
without a span is a stage that is still open, or that hung or was killed.

Source: opentelemetry-proto, "OTLP JSON" (64-bit integers are decimal strings, ids are hex).
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from bootseer.base.short_digest import short_digest

Value: TypeAlias = str | int | float | bool

# Longer values (a command line, an error) are cut.
_MAX_TEXT = 1000
START_EVENT = "bootseer.stage.start"
IMPORTS_EVENT = "bootseer.imports"
# Names of two stages: a whole start on one node, and the moment when a rank begins to train.
START, READY = "start", "ready"
# Value of bootseer.how for a stage whose result was still mounted from the last start.
LIVE = "live"
# Attributes that the profiler reads; docs/format/timeline.md defines each.
BARRIER, WAITED_FOR = "bootseer.barrier", "bootseer.waited_for"
BARRIER_COUNT = "bootseer.barrier_count"
PROCESS, PARENT, ROLE = "bootseer.process", "bootseer.parent_process", "bootseer.role"
PARENT_SPAN = "bootseer.parent_span_id"
MONOTONIC = "bootseer.monotonic_ns"
_SEVERITY_INFO = 9
_STATUS_OK = 1
STATUS_ERROR = 2
_KIND_INTERNAL = 1
_NOTHING: Mapping[str, Value] = MappingProxyType({})


# Not a msgspec struct: training code uses it in images that have only the standard library.
class Stage(NamedTuple):
    """A stage of a timeline. Times are in ns since 1970, by the node's clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int | None
    """None if no end was recorded."""
    failed: bool = False
    message: str = ""
    attributes: Mapping[str, Value] = _NOTHING
    resource: Mapping[str, Value] = _NOTHING


def trace_id_of(job: str, attempt: int, submission: str = "") -> str:
    """Return a trace id (16 bytes, in hex) that all nodes of a start compute alike. Pure."""
    parts = ["bootseer", job, str(attempt), *filter(None, [submission])]
    return short_digest("\0".join(parts).encode())[:32]


def parse_traceparent(text: str) -> tuple[str, str] | None:
    """Return (trace id, parent span id) of a W3C `traceparent` header; None if it is malformed."""
    parts = text.strip().lower().split("-")
    if len(parts) < 4 or (len(parts[0]), len(parts[1]), len(parts[2])) != (2, 32, 16):
        return None
    try:
        trace, span = int(parts[1], 16), int(parts[2], 16)
    except ValueError:
        return None
    return (parts[1], parts[2]) if trace and span else None


def _encode_value(value: Value) -> dict[str, Value]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)[:_MAX_TEXT]}


def _encode_attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _encode_value(value)} for key, value in attributes.items()]


def _line(kind: str, scope_kind: str, records: str, record: Any, resource: Any) -> bytes:
    request = {
        kind: [
            {
                "resource": {"attributes": _encode_attributes(resource)},
                scope_kind: [{"scope": {"name": "bootseer"}, records: [record]}],
            }
        ]
    }
    return json.dumps(request, separators=(",", ":")).encode() + b"\n"


def encode_start(stage: Stage) -> bytes:
    """Return the line for the begin of a stage."""
    attributes = {**stage.attributes, PARENT_SPAN: stage.parent_id}
    return encode_event(START_EVENT, stage, stage.name, attributes)


def encode_event(
    event: str, stage: Stage, body: str, attributes: Mapping[str, Value] = _NOTHING
) -> bytes:
    """Return the line for an event at the begin of the stage. The body is not cut."""
    record = {
        "timeUnixNano": str(stage.start_ns),
        "observedTimeUnixNano": str(stage.start_ns),
        "severityNumber": _SEVERITY_INFO,
        "severityText": "INFO",
        "eventName": event,
        "body": {"stringValue": body},
        "attributes": _encode_attributes(attributes),
        "traceId": stage.trace_id,
        "spanId": stage.span_id,
    }
    return _line("resourceLogs", "scopeLogs", "logRecords", record, stage.resource)


def encode_end(stage: Stage) -> bytes:
    """Return the line for a finished stage: an ordinary OTLP span."""
    record = {
        "traceId": stage.trace_id,
        "spanId": stage.span_id,
        "parentSpanId": stage.parent_id,
        "name": stage.name,
        "kind": _KIND_INTERNAL,
        "startTimeUnixNano": str(stage.start_ns),
        "endTimeUnixNano": str(stage.end_ns),
        "attributes": _encode_attributes(stage.attributes),
        "status": {
            "code": STATUS_ERROR if stage.failed else _STATUS_OK,
            **({"message": stage.message[:_MAX_TEXT]} if stage.message else {}),
        },
    }
    return _line("resourceSpans", "scopeSpans", "spans", record, stage.resource)
