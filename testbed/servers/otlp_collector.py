"""A collector of OpenTelemetry that decodes requests by OpenTelemetry's own schema."""

import base64
import gzip
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from testbed.waiting import pause

MESSAGES: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


def by_schema(path: str, document: Any) -> Any:
    """Return the message of an OTLP-JSON request; fields that are not in the schema are errors."""

    def ids_in_base64(value: Any) -> Any:
        if isinstance(value, list):
            return [ids_in_base64(one) for one in value]
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(one)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else ids_in_base64(one)
                for key, one in value.items()
            }
        return value

    return json_format.ParseDict(ids_in_base64(document), MESSAGES[path]())


class OtlpCollector:
    """Server that decodes requests, after the answers that the test has put into `answers`."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.headers: list[Mapping[str, str]] = []
        self.messages: list[tuple[str, Any]] = []
        self.is_silent = threading.Event()
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                mine.headers.append(dict(self.headers.items()))
                if mine.is_silent.is_set():
                    pause(600)
                status, more = mine.answers.pop(0) if mine.answers else (200, {})
                if status == 200:
                    mine.take(self.path, dict(self.headers), body)
                self.send_response(status)
                for name, value in {**more, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if headers["Content-Type"] == "application/json":
            self.messages.append((path, by_schema(path, json.loads(body))))
        else:
            assert headers["Content-Type"] == "application/x-protobuf"
            self.messages.append((path, MESSAGES[path].FromString(body)))

    def spans(self) -> list[Any]:
        return [
            span
            for path, message in self.messages
            if path == "/v1/traces"
            for group in message.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def running_collector(context: ssl.SSLContext | None = None) -> Iterator[OtlpCollector]:
    made = OtlpCollector(context)
    try:
        yield made
    finally:
        made.close()
