"""Conversion of OTLP records from JSON to protocol buffers. Pure (no I/O).

Source: opentelemetry-proto, trace/v1, logs/v1, common/v1; field numbers never change. OTLP's JSON
equals that of protocol buffers, except that ids are hexadecimal. Fields without an entry here are
left out. Two concatenated requests are one request with the records of both.
"""

import base64
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from bootseer.base.varints import delimited, varint

_Field: TypeAlias = "tuple[int, Callable[[Any], bytes] | Mapping[str, _Field]]"
_FIXED32, _FIXED64, _VARINT, _BYTES = 5, 1, 0, 2


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return delimited(value.encode())


def _id(size: int) -> Callable[[Any], bytes]:
    def encode_id(value: Any) -> bytes:
        data = bytes.fromhex(value)
        if len(data) not in (0, size):
            raise ValueError("an id of the wrong size")
        return delimited(data)

    return encode_id


def _bytes(value: Any) -> bytes:
    return delimited(base64.b64decode(value, validate=True))


def _fixed64(value: Any) -> bytes:
    return struct.pack("<Q", int(value))


def _fixed32(value: Any) -> bytes:
    return struct.pack("<I", int(value))


def _double(value: Any) -> bytes:
    return struct.pack("<d", float(value))


def _number(value: Any) -> bytes:
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number is out of range")
    return varint(number & (2**64 - 1))


_WIRE: dict[Callable[[Any], bytes], int] = {
    _fixed64: _FIXED64,
    _double: _FIXED64,
    _fixed32: _FIXED32,
    _number: _VARINT,
}

_VALUE: dict[str, _Field] = {
    "stringValue": (1, _text),
    "boolValue": (2, _number),
    "intValue": (3, _number),
    "doubleValue": (4, _double),
    "bytesValue": (7, _bytes),
}
_KEY_VALUE: dict[str, _Field] = {"key": (1, _text), "value": (2, _VALUE)}
_VALUE["arrayValue"] = (5, {"values": (1, _VALUE)})
_VALUE["kvlistValue"] = (6, {"values": (1, _KEY_VALUE)})
_ATTRIBUTES = _KEY_VALUE
_RESOURCE: dict[str, _Field] = {
    "attributes": (1, _ATTRIBUTES),
    "droppedAttributesCount": (2, _number),
}
_SCOPE: dict[str, _Field] = {
    "name": (1, _text),
    "version": (2, _text),
    "attributes": (3, _ATTRIBUTES),
}
_EVENT: dict[str, _Field] = {
    "timeUnixNano": (1, _fixed64),
    "name": (2, _text),
    "attributes": (3, _ATTRIBUTES),
}
_LINK: dict[str, _Field] = {
    "traceId": (1, _id(16)),
    "spanId": (2, _id(8)),
    "traceState": (3, _text),
    "attributes": (4, _ATTRIBUTES),
}
_SPAN: dict[str, _Field] = {
    "traceId": (1, _id(16)),
    "spanId": (2, _id(8)),
    "traceState": (3, _text),
    "parentSpanId": (4, _id(8)),
    "name": (5, _text),
    "kind": (6, _number),
    "startTimeUnixNano": (7, _fixed64),
    "endTimeUnixNano": (8, _fixed64),
    "attributes": (9, _ATTRIBUTES),
    "events": (11, _EVENT),
    "links": (13, _LINK),
    "status": (15, {"message": (2, _text), "code": (3, _number)}),
    "flags": (16, _fixed32),
}
_RECORD: dict[str, _Field] = {
    "timeUnixNano": (1, _fixed64),
    "severityNumber": (2, _number),
    "severityText": (3, _text),
    "body": (5, _VALUE),
    "attributes": (6, _ATTRIBUTES),
    "flags": (8, _fixed32),
    "traceId": (9, _id(16)),
    "spanId": (10, _id(8)),
    "observedTimeUnixNano": (11, _fixed64),
    "eventName": (12, _text),
}
_REQUEST: dict[str, _Field] = {
    "resourceSpans": (
        1,
        {
            "resource": (1, _RESOURCE),
            "scopeSpans": (2, {"scope": (1, _SCOPE), "spans": (2, _SPAN), "schemaUrl": (3, _text)}),
            "schemaUrl": (3, _text),
        },
    ),
    "resourceLogs": (
        1,
        {
            "resource": (1, _RESOURCE),
            "scopeLogs": (
                2,
                {"scope": (1, _SCOPE), "logRecords": (2, _RECORD), "schemaUrl": (3, _text)},
            ),
            "schemaUrl": (3, _text),
        },
    ),
}


def encode_groups(name: str, groups: Any) -> bytes:
    """Return an export request with the records of `resourceSpans` or `resourceLogs`.

    Raises: ValueError, TypeError, OverflowError, RecursionError, struct.error for malformed
    records.
    """
    return _message(_REQUEST, {name: groups})


def _message(fields: Mapping[str, _Field], document: Any) -> bytes:
    if not isinstance(document, dict):
        raise ValueError("not an object")
    data = bytearray()
    for name, value in document.items():
        if name in fields:
            number, kind = fields[name]
            for one in value if isinstance(value, list) else [value]:
                if isinstance(kind, Mapping):
                    data += varint(number << 3 | _BYTES) + delimited(_message(kind, one))
                else:
                    data += varint(number << 3 | _WIRE.get(kind, _BYTES)) + kind(one)
    return bytes(data)
