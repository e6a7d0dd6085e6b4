"""Sends a node's timeline to a collector, by OTLP over HTTP.

What is not taken stays in the timeline, and is sent at the next look: the file is the queue.
Requests are bounded, as is the time that all of them take. No header reaches a log or an error. For
one thread.
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
from bootseer.http.transport import Response, Server, Transport
from bootseer.profile.publish.endpoints import Endpoint
from bootseer.profile.publish.otlp_messages import encode_groups
from bootseer.profile.publish.outgoing import Line
from bootseer.transfer.policy import Attempts, Policy

DEADLINE_S = 30.0
"""For all that is sent at one look to one endpoint, with the waits between attempts."""
_POLICY = Policy(attempts=20, base_s=1.0, cap_s=15.0)
# OTLP/HTTP, "Failures": no others.
_RETRYABLE = (429, 502, 503, 504)
_BATCH_BYTES = 1024 * 1024
_BATCH_LINES = 512
_RECORD_BYTES_MAX = 64 * 1024
"""The list of slow imports is no log record that anybody wants to read."""
_GROUPS = {"traces": "resourceSpans", "logs": "resourceLogs"}
_TYPES = {"http/protobuf": "application/x-protobuf", "http/json": "application/json"}


class Sent(NamedTuple):
    """How far one look has come."""

    offsets: dict[str, int]
    """By kind of records and file, what the collector has of it."""
    problem: str = ""


class _Batch(NamedTuple):
    body: bytes
    offsets: Mapping[str, int]


def send(endpoint: Endpoint, lines: Sequence[Line], sent: Mapping[str, int]) -> Sent:
    """Send what is new in `lines`. Never raises for what the collector or its name does."""
    offsets: dict[str, int] = {}
    problem = ""
    try:
        transport = _transport(endpoint)
    except BootseerError as error:
        return Sent({}, str(error))
    ends_s = time.monotonic() + DEADLINE_S
    try:
        for batch in _batches(endpoint, lines, sent):
            # Of what is left for the whole look: a request that is taken gives the next no more.
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                problem = f"the collector took longer than {DEADLINE_S:g} s; the rest is sent later"
                break
            try:
                if batch.body:
                    _post(transport, endpoint, batch.body, Attempts(_POLICY, left_s))
            except InvalidInputError as error:
                # Not ours to mend, and no better the next time: others go on.
                problem = str(error)
            offsets |= batch.offsets
    except BootseerError as error:
        problem = str(error)
    finally:
        transport.close()
    return Sent(offsets, problem)


def _transport(endpoint: Endpoint) -> Transport:
    """Raises: UnsupportedError, InvalidInputError."""
    if endpoint.protocol not in _TYPES:
        raise UnsupportedError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={endpoint.protocol[:20]} is not spoken here: use "
            "http/protobuf or http/json, and the collector's port for it (mostly 4318)"
        )
    try:
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        own = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        parts.port  # noqa: B018  # it raises
    except ValueError:
        raise InvalidInputError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is no http:// or https:// URL"
        ) from None
    key = Path(endpoint.client_key) if endpoint.client_key else None
    server = Server(
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
    endpoint: Endpoint, lines: Sequence[Line], sent: Mapping[str, int]
) -> Iterator[_Batch]:
    """The records of the endpoint's kind that it does not have, a bounded request at a time."""
    name = _GROUPS[endpoint.signal]
    is_json = endpoint.protocol == "http/json"
    bodies: list[bytes] = []
    groups: list[Any] = []
    offsets: dict[str, int] = {}

    def batch() -> _Batch:
        if is_json:
            body = json.dumps({name: groups}, separators=(",", ":")).encode() if groups else b""
        else:
            body = b"".join(bodies)
        return _Batch(body, dict(offsets))

    for line in lines:
        key = f"{endpoint.signal} {line.path}"
        if line.end <= sent.get(key, 0):
            continue
        found = line.document.get(name)
        if isinstance(found, list) and found:
            try:
                encoded = encode_groups(name, found)
            except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
                encoded = b""  # one record that is none would cost all others
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
    """Send one request until it is taken.

    Raises: InvalidInputError where the collector does not want it; BootseerError where nothing goes
    on.
    """
    headers = {**dict(endpoint.headers), "Content-Type": _TYPES[endpoint.protocol]}
    if endpoint.compresses:
        import gzip

        body = gzip.compress(body, 6, mtime=0)
        headers["Content-Encoding"] = "gzip"
    while True:
        try:
            with transport.request("POST", endpoint.url, headers, body) as response:
                _check(response)
            return
        except BootseerError as error:
            pause_s = attempts.pause_s(error)
            if pause_s is None:
                raise
            time.sleep(pause_s)


def _check(response: Response) -> None:
    status, server = response.status, response.server
    if 200 <= status < 300:
        return
    if status in _RETRYABLE:
        raise response.unavailable(f"{server} answered {status}")
    if status in (400, 413):
        raise InvalidInputError(f"{server} refused a request with {status}: it is left out")
    raise UnsupportedError(
        f"{server} answered {status}: OTEL_EXPORTER_OTLP_ENDPOINT or _HEADERS are wrong, or it "
        "takes no such records"
    )
