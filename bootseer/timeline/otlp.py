"""Stages as OTLP-JSON lines; `bootseer.report.decoding` reads them. Pure (no I/O).

Each line is one export request as the OpenTelemetry Collector's file exporter writes it, so its
`otlpjsonfile` receiver reads our files. OTLP has no record for a span that has only begun; the
start of a stage is therefore a *log record* that carries the span's ids, and the end is the span
itself. A start without its span is a stage that is still open, or hung, or was killed.
Source: opentelemetry-proto, "OTLP JSON" (64-bit integers are decimal strings, ids are hex).
"""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

Value: TypeAlias = str | int | float | bool

# Longer values (a command line, an error) are cut: the timeline is no place for payload.
_MAX_TEXT = 1000
START_EVENT = "bootseer.stage.start"
IMPORTS_EVENT = "bootseer.imports"
# The stage that covers a whole start on one node, and the one that says that a rank trains now.
START, READY = "start", "ready"
# How a stage is done (bootseer.how) of which all is there since the last start.
LIVE = "live"
# What the profiler reads beside times; docs/format/timeline.md says what each means.
BARRIER, WAITED_FOR = "bootseer.barrier", "bootseer.waited_for"
BARRIER_COUNT = "bootseer.barrier_count"
PROCESS, PARENT, ROLE = "bootseer.process", "bootseer.parent_process", "bootseer.role"
PARENT_SPAN = "bootseer.parent_span_id"
_SEVERITY_INFO = 9
_STATUS_OK = 1
STATUS_ERROR = 2
_KIND_INTERNAL = 1
_NOTHING: Mapping[str, Value] = MappingProxyType({})


# Not a struct: training code writes stages in images that have nothing but our sources.
class Stage(NamedTuple):
    """One stage as read back from a timeline. Times: ns since 1970, by the node's clock."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int | None
    """None: no end was recorded."""
    failed: bool = False
    message: str = ""
    attributes: Mapping[str, Value] = _NOTHING
    resource: Mapping[str, Value] = _NOTHING


def trace_id_of(job: str, attempt: int, submission: str = "") -> str:
    """The same 16 bytes (hex) on every node of a start, without anybody talking. Pure."""
    parts = ["bootseer", job, str(attempt), *filter(None, [submission])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def parse_traceparent(text: str) -> tuple[str, str] | None:
    """(trace id, parent span id) of a W3C `traceparent` header; None if malformed."""
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
    """The line that says a stage has begun."""
    attributes = {**stage.attributes, PARENT_SPAN: stage.parent_id}
    return encode_event(START_EVENT, stage, stage.name, attributes)


def encode_event(
    event: str, stage: Stage, body: str, attributes: Mapping[str, Value] = _NOTHING
) -> bytes:
    """The line of something that happened when the stage began. The body is not cut."""
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
    """The line that holds a finished stage: an ordinary OTLP span."""
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
