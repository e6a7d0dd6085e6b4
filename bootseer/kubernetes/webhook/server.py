"""Process of the webhook: an HTTPS server, the state of the cluster, and the certificate's refresh.

Anybody who reaches the port may connect. So a connection serves one request, has a few seconds for
it and a thread of its own, and new connections beyond `_CONNECTIONS_MAX` are closed at once; API
servers treat this as a webhook that is down.

A pod's creation waits for the state of the cluster: each object is requested by one thread at a
time, with the API client's deadline, and kept for `_AGE_MAX_S`. If the API server does not answer,
the last known object is used.
"""

import functools
import http
import http.server
import logging
import os
import re
import signal
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from bootseer.errors import BootseerError, BusyError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.certificate import Certificate, Pair
from bootseer.kubernetes.webhook.plan import DRIVER, RUNTIME_CLASS, Cluster, KeySecret, answer
from bootseer.kubernetes.webhook.pods import BODY_BYTES_MAX

_log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 32
_CONNECTION_S = 8.0
"""Time for handshake, request and answer; an API server waits three seconds (timeoutSeconds)."""
_BODIES_AT_ONCE = 2
"""Bodies decoded at a time: a decoded body may need many times its size in memory."""


class WebhookServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """HTTPS server with bounded connections."""

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
        """Listen on a port of all addresses.

        Args:
            port: The port; 0 for any.
            answer: Returns the answer to a request's body; raises BootseerError for a bad one.
            is_ready: Returns whether the readiness probe succeeds.
            connection_s: Longest life of a connection.
            connections_max: Most connections at a time.

        Raises: OSError.
        """
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
        self.decoding = threading.BoundedSemaphore(_BODIES_AT_ONCE)
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._connection_s = connection_s
        self._connections_max = connections_max
        self._ends_s: dict[socket.socket, float] = {}

    def use(self, pair: Pair) -> None:
        """Serve new connections with this pair. Thread-safe."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL reads files only; a memfd keeps the key off the disk.
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
            # `service_actions` shuts the original socket down when time is over, in any TLS state.
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
        """End connections that take too long. The base class calls this twice a second."""
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
    """Handler of a request of an API server or a kubelet."""

    server: WebhookServer
    protocol_version = "HTTP/1.1"
    server_version = "bootseer"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._send(http.HTTPStatus.OK, b"ok\n")
        elif self.path == "/readyz":
            is_ready = self.server.is_ready()
            status = http.HTTPStatus.OK if is_ready else http.HTTPStatus.SERVICE_UNAVAILABLE
            self._send(status, b"ok\n" if is_ready else b"not yet\n")
        else:
            self._send(http.HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        # API servers append ?timeout=3s.
        if self.path.partition("?")[0] != "/pods":
            self._send(http.HTTPStatus.NOT_FOUND)
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            self._send(http.HTTPStatus.LENGTH_REQUIRED)
            return
        if int(length) > BODY_BYTES_MAX:
            self._send(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            # The client closed the connection or took too long.
            self.close_connection = True
            return
        try:
            with self.server.decoding:
                answer = self.server.answer(body)
        except BootseerError as error:
            self._send(http.HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
            return
        self._send(http.HTTPStatus.OK, answer, "application/json")

    def _send(
        self, status: http.HTTPStatus, body: bytes = b"", content_type: str = "text/plain"
    ) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s: " + format, self.client_address[0], *args)


ASK_S = 0.9
"""Deadline of the API client: an API server waits three seconds for an answer, which may need three
requests."""
_AGE_MAX_S = 2.0
"""Time that objects are kept: one request serves a burst of pods, and a deleted runtime class, with
which pods would be refused, is noticed soon."""


class CachedObject:
    """Object of the cluster, at most `_AGE_MAX_S` old if the API server answers."""

    def __init__(self, api: Api, path: str) -> None:
        self._api = api
        self._path = path
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._found: dict[str, Any] | None = None

    def get(self) -> dict[str, Any] | None:
        """Return the object, or None if there is none or the API server has never answered."""
        with self._lock:
            if time.monotonic() - self._asked_s > _AGE_MAX_S:
                try:
                    self._found = self._api.get(self._path)
                except BootseerError as error:
                    _log.warning("%s; using the last known state", error)
                self._asked_s = time.monotonic()
            return self._found


class ClusterView:
    """Current `Cluster` for `plan`. Thread-safe."""

    def __init__(self, api: Api, store_url: str) -> None:
        self._store_url = store_url
        self._driver = CachedObject(api, f"/apis/storage.k8s.io/v1/csidrivers/{DRIVER}")
        self._class = CachedObject(api, f"/apis/node.k8s.io/v1/runtimeclasses/{RUNTIME_CLASS}")

    def __call__(self) -> Cluster:
        runtime_class = self._class.get() or {}
        handler = runtime_class.get("handler")
        return Cluster(
            has_driver=self._driver.get() is not None,
            handler=handler if isinstance(handler, str) else "",
            store_url=self._store_url,
        )


_KEPT_COUNT_MAX = 4096
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_MADE_S, _MADE_COUNT_MAX = 60.0, 120
"""Limit of new Secrets per time, since anybody who reaches the port may request some."""


class KeySecrets:
    """Secrets with keys of fan-outs, made for jobs. Thread-safe."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._known: dict[tuple[str, KeySecret], None] = {}
        self._made_s: list[float] = []

    def ensure(self, namespace: str, secret: KeySecret) -> str:
        """Make the Secret in `namespace` unless it exists; return "" or the reason of a failure."""
        if not _NAMESPACE.fullmatch(namespace):
            return "the pod has no namespace"
        now_s = time.monotonic()
        with self._lock:
            if (namespace, secret) in self._known:
                return ""
            self._made_s = [one for one in self._made_s if one > now_s - _MADE_S]
            if len(self._made_s) >= _MADE_COUNT_MAX:
                return "too many jobs ask for a key at once"
            self._made_s.append(now_s)
        try:
            self._api.create(f"/api/v1/namespaces/{namespace}/secrets", secret.document())
        except BusyError:
            pass  # made for another pod of the job
        except BootseerError as error:
            _log.warning("%s", error)
            return f"the Secret {secret.name} cannot be made"
        with self._lock:
            self._known[namespace, secret] = None
            while len(self._known) > _KEPT_COUNT_MAX:
                del self._known[next(iter(self._known))]
        return ""


_REFRESH_S = 10.0
_LEAVE_S = 3.0
"""Time that API servers go on sending requests to a replica that is ending."""
_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))


def serve(
    api: Api,
    *,
    port: int,
    namespace: str,
    name: str,
    store_url: str,
    on_ready: Callable[[int], None],
) -> None:
    """Answer reviews until SIGTERM or SIGINT. Call this from the main thread.

    Args:
        api: Client of the API server.
        port: Port to listen on; 0 for any.
        namespace: Namespace of the webhook's Service.
        name: Name of the Service, the Secret and the webhook configuration.
        store_url: Store to set in the pods' environment; empty for none.
        on_ready: Called with the port once API servers trust this replica.

    Raises: OSError if the port is taken.
    """
    # Blocked here and so in all threads: only `sigtimedwait` receives the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    view, secrets = ClusterView(api, store_url), KeySecrets(api)
    answers = functools.partial(answer, cluster=view, ensure_secret=secrets.ensure)
    server = WebhookServer(port, answers, lambda: keys.is_ready)
    keys = Certificate(api, namespace=namespace, name=name, use=server.use)
    keys.serve_untrusted()
    serving = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    serving.start()
    is_reported = False
    while True:
        try:
            keys.refresh()
        except BootseerError as error:
            _log.warning("%s", error)
        if keys.is_ready and not is_reported:
            on_ready(server.server_port)
            is_reported = True
        if signal.sigtimedwait(_STOP_SIGNALS, _REFRESH_S if keys.is_ready else 1.0):
            break
    keys.is_ready = False
    signal.sigtimedwait(_STOP_SIGNALS, _LEAVE_S)
    server.shutdown()
    server.server_close()
