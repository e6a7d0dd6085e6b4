"""Reads timeline files: OTLP-JSON lines as stages and events. Pure (no I/O).

Jobs write their own timelines, so each line may be anything: torn, hostile, or another program's.
What is not ours is left out, line by line. `bootseer.timeline.otlp` writes the lines; it is apart,
since training code must load nothing but the standard library for that.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from bootseer.timeline.otlp import PARENT_SPAN, START_EVENT, STATUS_ERROR, Stage, Value

_LINE_BYTES_MAX = 1024 * 1024
"""Larger than any line of ours."""
_NUMBER_MAX = 2**63 - 1
_COUNTS = frozenset(("bootseer.rank", "bootseer.attempt", "bootseer.restart", "bootseer.bytes"))
_RESOURCES_MAX = 10_000


class _AnyValue(Struct, rename="camel"):
    string_value: str | None = None
    int_value: str | int | None = None
    double_value: float | None = None
    bool_value: bool | None = None


class _Attribute(Struct, rename="camel"):
    key: str
    value: _AnyValue


class _Resource(Struct, rename="camel"):
    attributes: list[_Attribute] = []


class _Status(Struct, rename="camel"):
    code: int = 0
    message: str = ""


class _Span(Struct, rename="camel"):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: str | int
    end_time_unix_nano: str | int
    parent_span_id: str = ""
    attributes: list[_Attribute] = []
    status: _Status = msgspec.field(default_factory=_Status)


class _Record(Struct, rename="camel"):
    time_unix_nano: str | int
    event_name: str = ""
    body: _AnyValue = msgspec.field(default_factory=_AnyValue)
    trace_id: str = ""
    span_id: str = ""
    attributes: list[_Attribute] = []


class _Scope(Struct, rename="camel"):
    spans: list[_Span] = []
    log_records: list[_Record] = []


class _Group(Struct, rename="camel"):
    resource: Raw = Raw(b"{}")
    scope_spans: list[_Scope] = []
    scope_logs: list[_Scope] = []


class _Request(Struct, rename="camel"):
    resource_spans: list[_Group] = []
    resource_logs: list[_Group] = []


_requests = msgspec.json.Decoder(_Request)
_resources = msgspec.json.Decoder(_Resource)


def decode(data: bytes) -> list[Stage]:
    """The stages of a timeline file, in order of their start, finished ones once."""
    stages: dict[str, Stage] = {}
    resources: dict[bytes, Mapping[str, Value]] = {}
    for line in _lines(data):
        try:
            for found in _stages(_requests.decode(line), resources):
                known = stages.get(found.span_id)
                if known is None or known.end_ns is None:
                    stages[found.span_id] = found
        except (ValueError, OverflowError, RecursionError):
            continue
    return sorted(stages.values(), key=lambda stage: stage.start_ns)


def decode_events(data: bytes, event: str) -> list[str]:
    """The bodies of the events of this name in a timeline file."""
    marker = msgspec.json.encode(event)
    found = []
    for line in _lines(data):
        if marker not in line:
            continue
        try:
            request = _requests.decode(line)
        except (ValueError, RecursionError):
            continue
        records = (record for group in request.resource_logs for record in _records(group))
        found += [one.body.string_value or "" for one in records if one.event_name == event]
    return found


def _lines(data: bytes) -> Iterator[bytes]:
    return (line for line in data.splitlines() if len(line) <= _LINE_BYTES_MAX)


def _records(group: _Group) -> Iterator[_Record]:
    return (record for scope in group.scope_logs for record in scope.log_records)


def _stages(request: _Request, resources: dict[bytes, Mapping[str, Value]]) -> Iterator[Stage]:
    for group in request.resource_logs:
        for record in _records(group):
            if record.event_name == START_EVENT:
                attributes = _attributes(record.attributes)
                yield Stage(
                    name=record.body.string_value or "",
                    trace_id=record.trace_id,
                    span_id=record.span_id,
                    parent_id=str(attributes.pop(PARENT_SPAN, "")),
                    start_ns=_number(record.time_unix_nano, 0),
                    end_ns=None,
                    attributes=attributes,
                    resource=_resource(group.resource, resources),
                )
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Stage(
                    name=span.name,
                    trace_id=span.trace_id,
                    span_id=span.span_id,
                    parent_id=span.parent_span_id,
                    start_ns=_number(span.start_time_unix_nano, 0),
                    end_ns=_number(span.end_time_unix_nano, 0),
                    failed=span.status.code == STATUS_ERROR,
                    message=span.status.message,
                    attributes=_attributes(span.attributes),
                    resource=_resource(group.resource, resources),
                )


def _resource(raw: Raw, known: dict[bytes, Mapping[str, Value]]) -> Mapping[str, Value]:
    """What a line says of its writer; the same for most lines of a file."""
    key = bytes(raw)
    found = known.get(key)
    if found is None:
        found = _attributes(_resources.decode(raw).attributes)
        if len(known) < _RESOURCES_MAX:
            known[key] = found
    return found


def _attributes(items: Sequence[_Attribute]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for item in items:
        value = item.value
        if value.int_value is not None or item.key in _COUNTS:
            found[item.key] = _number(value.int_value, -_NUMBER_MAX)
        elif value.string_value is not None:
            found[item.key] = value.string_value
        elif value.double_value is not None:
            found[item.key] = value.double_value
        elif value.bool_value is not None:
            found[item.key] = value.bool_value
    return found


def _number(value: str | int | None, least: int) -> int:
    """A number of 64 bits; OTLP has it as a text. Raises: ValueError, TypeError."""
    number = int(value) if value is not None else least - 1
    if not least <= number <= _NUMBER_MAX:
        raise ValueError("a number is out of range")
    return number
