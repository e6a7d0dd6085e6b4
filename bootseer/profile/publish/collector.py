"""Sending of a node's timeline to an OpenTelemetry collector, by OTLP over HTTP.

Lines that the collector does not take stay in the timeline file and are sent in the next round: the
file is the queue. The size of a request and the time for all requests are bounded. Headers, which
may be secrets, reach neither a log nor an error. For one thread.
"""

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bootseer.errors import (
    BootseerError,
    InvalidInputError,
    UnsupportedError,
)
from bootseer.http.transport import HttpServer, Response, Transport
from bootseer.profile.publish.endpoints import Endpoint
from bootseer.profile.publish.otlp_messages import encode_groups
from bootseer.profile.publish.outgoing import TimelineLine
from bootseer.transfer.policy import Attempts, Policy

DEADLINE_S = 30.0
"""Limit for one round to one endpoint, with the waits between attempts."""
_POLICY = Policy(attempts=20, base_s=1.0, cap_s=15.0)
# The only statuses after which OTLP/HTTP, "Failures", allows another attempt.
_RETRYABLE = (429, 502, 503, 504)
_BATCH_BYTES = 1024 * 1024
_BATCH_LINES = 512
_RECORD_BYTES_MAX = 64 * 1024
"""Longer records are left out: the list of slow imports is of no use as a log record."""
_GROUPS = {"traces": "resourceSpans", "logs": "resourceLogs"}
_TYPES = {"http/protobuf": "application/x-protobuf", "http/json": "application/json"}


class SendResult(NamedTuple):
    """Result of one round to one endpoint."""

    offsets: dict[str, int]
    """End offset of the lines that the collector has, by kind of records and file."""
    problem: str = ""


class _MessageBatch(NamedTuple):
    body: bytes
    offsets: Mapping[str, int]


def send(endpoint: Endpoint, lines: Sequence[TimelineLine], sent: Mapping[str, int]) -> SendResult:
    """Send the lines that the collector does not have. A failure is in the result."""
    offsets: dict[str, int] = {}
    problem = ""
    try:
        transport = _transport(endpoint)
    except BootseerError as error:
        return SendResult({}, str(error))
    ends_s = time.monotonic() + DEADLINE_S
    try:
        for batch in _batches(endpoint, lines, sent):
            # Each request gets the time left of the round, not a deadline of its own.
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                problem = f"the collector took longer than {DEADLINE_S:g} s; the rest is sent later"
                break
            try:
                if batch.body:
                    _post(transport, endpoint, batch.body, Attempts(_POLICY, left_s))
            except InvalidInputError as error:
                # The collector refuses these records, and would again: go on with the others.
                problem = str(error)
            offsets |= batch.offsets
    except BootseerError as error:
        problem = str(error)
    finally:
        transport.close()
    return SendResult(offsets, problem)


def _transport(endpoint: Endpoint) -> Transport:
    if endpoint.protocol not in _TYPES:
        raise UnsupportedError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={endpoint.protocol[:20]} is not supported: use "
            "http/protobuf or http/json, and the collector's port for it (mostly 4318)"
        )
    try:
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        own = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        parts.port  # noqa: B018  # raises ValueError
    except ValueError:
        raise InvalidInputError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is not an http:// or https:// URL"
        ) from None
    key = Path(endpoint.client_key) if endpoint.client_key else None
    server = HttpServer(
        name=parts.netloc.rpartition("@")[2],
        base_url=own,
        ca_files=(Path(endpoint.certificate),) if endpoint.certificate else (),
        client_certificates=(
            ((Path(endpoint.client_certificate), key),) if endpoint.client_certificate else ()
        ),
        ca_advice="OTEL_EXPORTER_OTLP_CERTIFICATE names the file of its authority",
    )
    return Transport(server, endpoint.timeout_s)


def _batches(
    endpoint: Endpoint, lines: Sequence[TimelineLine], sent: Mapping[str, int]
) -> Iterator[_MessageBatch]:
    name = _GROUPS[endpoint.signal]
    is_json = endpoint.protocol == "http/json"
    bodies: list[bytes] = []
    groups: list[Any] = []
    offsets: dict[str, int] = {}

    def batch() -> _MessageBatch:
        if is_json:
            body = json.dumps({name: groups}, separators=(",", ":")).encode() if groups else b""
        else:
            body = b"".join(bodies)
        return _MessageBatch(body, dict(offsets))

    for line in lines:
        key = f"{endpoint.signal} {line.path}"
        if line.end <= sent.get(key, 0):
            continue
        found = line.document.get(name)
        if isinstance(found, list) and found:
            try:
                encoded = encode_groups(name, found)
            except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
                encoded = b""  # leave out one bad record rather than fail the request
            if 0 < len(encoded) <= _RECORD_BYTES_MAX:
                bodies.append(encoded)
                groups += found
        offsets[key] = line.end
        if sum(map(len, bodies)) >= _BATCH_BYTES or len(bodies) >= _BATCH_LINES:
            yield batch()
            bodies, groups, offsets = [], [], {}
    if offsets:
        yield batch()


def _post(transport: Transport, endpoint: Endpoint, body: bytes, attempts: Attempts) -> None:
    """Send a request until accepted. Raises: InvalidInputError if refused; BootseerError."""
    headers = {**dict(endpoint.headers), "Content-Type": _TYPES[endpoint.protocol]}
    if endpoint.compresses:
        import gzip

        body = gzip.compress(body, 6, mtime=0)
        headers["Content-Encoding"] = "gzip"

    def send() -> None:
        with transport.request("POST", endpoint.url, headers, body) as response:
            _check(response)

    attempts.repeat(send)


def _check(response: Response) -> None:
    status, server = response.status, response.server
    if 200 <= status < 300:
        return
    if status in _RETRYABLE:
        raise response.unavailable(f"{server} answered {status}")
    if status in (400, 413):
        raise InvalidInputError(
            f"{server} refused a request with status {status}: its records are left out"
        )
    raise UnsupportedError(
        f"{server} answered {status}: check OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS, and whether "
        "it accepts such records"
    )
