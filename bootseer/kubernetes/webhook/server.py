"""The webhook's HTTPS server: bounded in connections, in what it reads, and in time.

Whoever reaches the port may connect: a connection is for one request, has a few seconds for all of
it, and beyond so many of them new ones are closed at once, which an API server takes as it takes a
webhook that is down. Each connection has a thread.
"""

import http
import http.server
import logging
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from bootseer.errors import BootseerError
from bootseer.kubernetes.webhook.certificate import Pair
from bootseer.kubernetes.webhook.pods import BODY_BYTES_MAX

_log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 32
_CONNECTION_S = 8.0
"""For handshake, request and answer: an API server waits three seconds (timeoutSeconds)."""
_BODIES_AT_ONCE = 2
"""That are taken apart: each may be many times its size in memory meanwhile."""


class WebhookServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves until `shutdown`. `answer` takes a request's body, and raises BootseerError where
    that is no question; `is_ready` is what the readiness probe is told."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        port: int,
        answer: Callable[[bytes], bytes],
        is_ready: Callable[[], bool],
        *,
        connection_s: float = _CONNECTION_S,
        connections_max: int = _CONNECTIONS_MAX,
    ) -> None:
        """Listens on all addresses. Raises: OSError."""
        super().__init__(("", port), _Handler, bind_and_activate=False)
        both = socket.has_dualstack_ipv6()
        self.socket.close()
        self.socket = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=self.request_queue_size,
        )
        self.server_port = self.socket.getsockname()[1]
        self.answer = answer
        self.is_ready = is_ready
        self.parsing = threading.BoundedSemaphore(_BODIES_AT_ONCE)
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._connection_s = connection_s
        self._connections_max = connections_max
        self._ends_s: dict[socket.socket, float] = {}

    def use(self, pair: Pair) -> None:
        """Serve new connections with this pair. Any thread."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL reads files; the key is never on a disk.
        file = os.memfd_create("pair")
        try:
            with open(file, "wb", closefd=False) as out:
                out.write(pair.key + b"\n" + pair.certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        self._context = context

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._ends_s) >= self._connections_max
            if not is_full:
                self._ends_s[request] = time.monotonic() + self._connection_s
        if is_full:
            _log.warning("too many connections at once: one from %s is closed", client_address[0])
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        context = self._context
        if context is None:
            return
        try:
            request.settimeout(self._connection_s)
            # A duplicate: whoever is late is ended by the plain socket, in any state.
            plain = request.dup()
            with context.wrap_socket(plain, server_side=True) as secure:
                super().finish_request(secure, client_address)
        except OSError as error:
            _log.debug("a connection from %s ended: %s", client_address[0], error)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that take too long; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection, end in self._ends_s.items():
                if now > end:
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.warning("a request from %s failed", client_address[0], exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request. Only what API servers and kubelets ask is answered."""

    server: WebhookServer
    protocol_version = "HTTP/1.1"
    server_version = "bootseer"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._send(http.HTTPStatus.OK, b"ok\n", "text/plain")
        elif self.path == "/readyz":
            is_ready = self.server.is_ready()
            status = http.HTTPStatus.OK if is_ready else http.HTTPStatus.SERVICE_UNAVAILABLE
            self._send(status, b"ok\n" if is_ready else b"not yet\n", "text/plain")
        else:
            self._send(http.HTTPStatus.NOT_FOUND, b"", "text/plain")

    def do_POST(self) -> None:
        # With ?timeout=3s behind it.
        if self.path.partition("?")[0] != "/pods":
            self._send(http.HTTPStatus.NOT_FOUND, b"", "text/plain")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            self._send(http.HTTPStatus.LENGTH_REQUIRED, b"", "text/plain")
            return
        if int(length) > BODY_BYTES_MAX:
            self._send(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"", "text/plain")
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            # It went away, or took too long.
            self.close_connection = True
            return
        try:
            with self.server.parsing:
                answer = self.server.answer(body)
        except BootseerError as error:
            self._send(http.HTTPStatus.BAD_REQUEST, f"{error}\n".encode(), "text/plain")
            return
        self._send(http.HTTPStatus.OK, answer, "application/json")

    def _send(self, status: http.HTTPStatus, body: bytes, content_type: str) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s: " + format, self.client_address[0], *args)
