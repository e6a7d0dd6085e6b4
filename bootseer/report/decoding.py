"""Decoder of timelines: OTLP-JSON lines to stages and events. Pure (no I/O).

Jobs write their own timelines, so a line may be torn, hostile, or another program's; each line that
does not decode is skipped. The encoder is `bootseer.timeline.otlp`, a separate module because
training code may load nothing but the standard library.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from bootseer.timeline.otlp import (
    IMPORTS_EVENT,
    MONOTONIC,
    PARENT_SPAN,
    START_EVENT,
    STATUS_ERROR,
    Stage,
    Value,
)

ImportRow = tuple[str, int, int, int]
"""Module, depth, begin and duration in microseconds."""

_LINE_BYTES_MAX = 1024 * 1024
"""Longest line that is decoded; Bootseer writes shorter ones."""
_LOGS, _SPAN_ID = b'{"resourceLogs":', b'"spanId":"'
_NUMBER_MAX = 2**63 - 1
_RESOURCES_MAX = 10_000

# OTLP writes 64-bit numbers as strings; with `strict=False` the decoder takes strings and numbers.
_Nanoseconds = Annotated[int, Meta(ge=0, le=_NUMBER_MAX)]
_Whole = Annotated[int, Meta(ge=-_NUMBER_MAX, le=_NUMBER_MAX)]


# gc=False: none of these is ever part of a reference cycle.
class _AnyValue(Struct, rename="camel", gc=False):
    double_value: float | None = None
    int_value: _Whole | None = None
    string_value: str | None = None
    bool_value: bool | None = None


class _Attribute(Struct, rename="camel", gc=False):
    key: str
    value: _AnyValue


class _Resource(Struct, rename="camel", gc=False):
    attributes: list[_Attribute] = []


class _Status(Struct, rename="camel", gc=False):
    code: int = 0
    message: str = ""


# A start has millions of spans, nearly all with the same status and no attribute but the clock's
# time: these are told by their bytes, and only others are decoded.
_STATUS_OK = Raw(b'{"code":1}')
_CLOCK_BEGIN = f'[{{"key":"{MONOTONIC}","value":{{"intValue":"'.encode()
_CLOCK_END = b'"}}]'
_CLOCK_BYTES_MAX = len(_CLOCK_BEGIN) + 18 + len(_CLOCK_END)
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class _SpanRecord(Struct, rename="camel", gc=False):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: _Nanoseconds
    end_time_unix_nano: _Nanoseconds
    parent_span_id: str = ""
    attributes: Raw = Raw(b"[]")
    status: Raw = _STATUS_OK


class _Record(Struct, rename="camel", gc=False):
    time_unix_nano: _Nanoseconds
    event_name: str = ""
    body: _AnyValue = msgspec.field(default_factory=_AnyValue)
    trace_id: str = ""
    span_id: str = ""
    attributes: list[_Attribute] = []


class _Scope(Struct, rename="camel", gc=False):
    spans: list[_SpanRecord] = []
    log_records: list[_Record] = []


class _Group(Struct, rename="camel", gc=False):
    resource: Raw = Raw(b"{}")
    scope_spans: list[_Scope] = []
    scope_logs: list[_Scope] = []


class _ExportRequest(Struct, rename="camel", gc=False):
    resource_spans: list[_Group] = []
    resource_logs: list[_Group] = []


_requests = msgspec.json.Decoder(_ExportRequest, strict=False)
_resources = msgspec.json.Decoder(_Resource, strict=False)
_attribute_lists = msgspec.json.Decoder(list[_Attribute], strict=False)
_statuses = msgspec.json.Decoder(_Status, strict=False)


def decode(data: bytes, *, has_clock: bool = True) -> list[Stage]:
    """Return the stages of a timeline in order of their begin, each once.

    Without `has_clock`, most stages lack the attribute `bootseer.monotonic_ns`; this is faster.
    """
    return _decode(_lines(data), has_clock=has_clock)


def decode_any(data: bytes) -> list[Stage]:
    """Return the spans and events of another program's OTLP file as stages.

    The file has one export request per line, or is one request. An event becomes a stage of no
    length.
    """
    return [*_decode(_lines(data)), *_events(_lines(data))] or [
        *_decode([data]),
        *_events([data]),
    ]


def _events(requests: Iterable[bytes]) -> Iterator[Stage]:
    writers = _Writers()
    for line in requests:
        try:
            groups = _requests.decode(line).resource_logs
            for group in groups:
                resource = writers.of(group.resource)
                for record in _records(group):
                    if record.event_name:
                        event = _begun(record, resource)
                        yield event._replace(
                            name=record.event_name,
                            span_id="",
                            parent_id=record.span_id,
                            end_ns=event.start_ns,
                        )
        except (ValueError, RecursionError):
            continue


def _decode(requests: Iterable[bytes], *, has_clock: bool = True) -> list[Stage]:
    finished: dict[str, Stage] = {}
    begun: list[tuple[_Record, Mapping[str, Value]]] = []
    begin_lines: dict[str, bytes] = {}
    writers = _Writers()

    def take(line: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            request = _requests.decode(line)
            stages = [
                _finished(span, resource, has_clock)
                for group in request.resource_spans
                for resource in [writers.of(group.resource)]
                for scope in group.scope_spans
                for span in scope.spans
            ]
            for stage in stages:
                finished.setdefault(stage.span_id, stage)
            for group in request.resource_logs:
                resource = writers.of(group.resource)
                found = (one for one in _records(group) if one.event_name == START_EVENT)
                begun.extend((record, resource) for record in found)

    # The end of a stage repeats all that its begin says, so begins of ended stages are skipped.
    for line in requests:
        if (span_id := _span_of_begin(line)) is not None:
            begin_lines[span_id] = line
        else:
            take(line)
    for span_id, line in begin_lines.items():
        if span_id not in finished:
            take(line)
    still = {one.span_id: (one, resource) for one, resource in begun if one.span_id not in finished}
    stages = [
        *finished.values(),
        *(_begun(record, resource) for record, resource in still.values()),
    ]
    return sorted(stages, key=attrgetter("start_ns"))


def _span_of_begin(line: bytes) -> str | None:
    """Return the span id of a line that has one log record, without decoding the line.

    Inside a JSON string the quotes of the key would be escaped, so the key cannot be text.
    """
    if not line.startswith(_LOGS):
        return None
    begin = line.find(_SPAN_ID) + len(_SPAN_ID)
    end = line.find(b'"', begin)
    if begin < len(_SPAN_ID) or end < 0 or line.find(_SPAN_ID, end) >= 0:
        return None
    return line[begin:end].decode("ascii", "replace")


def decode_events(data: bytes, event: str) -> list[str]:
    """Return the bodies of all events of this name in a timeline."""
    marker = msgspec.json.encode(event)
    found = []
    end, place = 0, data.find(marker)
    while place >= 0:
        begin, end = data.rfind(b"\n", end, place) + 1, data.find(b"\n", place)
        end = end if end >= 0 else len(data)
        place = data.find(marker, end)
        if end - begin > _LINE_BYTES_MAX:
            continue
        try:
            request = _requests.decode(data[begin:end])
        except (ValueError, RecursionError):
            continue
        records = (record for group in request.resource_logs for record in _records(group))
        found += [one.body.string_value or "" for one in records if one.event_name == event]
    return found


def longest_imports(found: Iterable[Sequence[ImportRow]]) -> Sequence[ImportRow]:
    """Return the imports that took most time, of several processes'; [] if none took any."""
    return max(itertools.chain([()], found), key=_imports_us) or []


def _imports_us(rows: Sequence[ImportRow]) -> int:
    # The time of a module includes that of the modules which it imports.
    return sum(row[3] for row in rows if row[1] == 0)


def imports_of(bodies: Iterable[str]) -> Sequence[ImportRow]:
    """Return the imports of the process that spent most time in them; skip unreadable bodies."""
    return longest_imports(_readable(bodies))


def _readable(bodies: Iterable[str]) -> Iterator[list[ImportRow]]:
    for body in bodies:
        with contextlib.suppress(ValueError, RecursionError):
            yield msgspec.json.decode(body, type=list[ImportRow])


def decode_imports(data: bytes) -> Sequence[ImportRow]:
    """Return the imports of the process in a timeline that spent most time in them."""
    return imports_of(decode_events(data, IMPORTS_EVENT))


def _lines(data: bytes) -> Iterator[bytes]:
    # `splitlines` looks for five kinds of line ends, byte by byte.
    return (line for line in data.split(b"\n") if len(line) <= _LINE_BYTES_MAX)


def _records(group: _Group) -> Iterator[_Record]:
    return (record for scope in group.scope_logs for record in scope.log_records)


def _finished(span: _SpanRecord, resource: Mapping[str, Value], has_clock: bool) -> Stage:
    """Raises: ValueError."""
    has_failed, message = False, ""
    if span.status != _STATUS_OK:
        status = _statuses.decode(span.status)
        has_failed, message = status.code == STATUS_ERROR, status.message
    # Without the wrapper that `Stage` itself calls: there are millions.
    values = (
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        has_failed,
        message,
        _attributes_in(bytes(span.attributes), has_clock),
        resource,
    )
    return tuple.__new__(Stage, values)


def _attributes_in(data: bytes, has_clock: bool) -> Mapping[str, Value]:
    if len(data) <= _CLOCK_BYTES_MAX and data.startswith(_CLOCK_BEGIN):
        digits = data[len(_CLOCK_BEGIN) : -len(_CLOCK_END)]
        if digits.isdigit() and data.endswith(_CLOCK_END):
            return {MONOTONIC: int(digits)} if has_clock else _NOTHING
    return _attributes(_attribute_lists.decode(data))


def _begun(record: _Record, resource: Mapping[str, Value]) -> Stage:
    attributes = _attributes(record.attributes)
    return Stage(
        name=record.body.string_value or "",
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_id=str(attributes.pop(PARENT_SPAN, "")),
        start_ns=record.time_unix_nano,
        end_ns=None,
        attributes=attributes,
        resource=resource,
    )


class _Writers:
    """Cache of decoded resources: most lines of a file repeat the same one."""

    def __init__(self) -> None:
        self._last: tuple[Raw, Mapping[str, Value]] = (Raw(), {})
        self._known: dict[bytes, Mapping[str, Value]] = {}

    def of(self, raw: Raw) -> Mapping[str, Value]:
        if raw == self._last[0]:
            return self._last[1]
        key = bytes(raw)
        found = self._known.get(key)
        if found is None:
            found = _attributes(_resources.decode(raw).attributes)
            if len(self._known) < _RESOURCES_MAX:
                self._known[key] = found
        self._last = (raw.copy(), found)
        return found


def _attributes(items: Sequence[_Attribute]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for item in items:
        any_value = item.value
        value: Value | None = any_value.double_value
        if value is None:
            value = any_value.int_value
            if value is None:
                value = any_value.string_value
                if value is None:
                    value = any_value.bool_value
        if value is not None:
            found[item.key] = value
    return found
