"""The HTTPS server with real TLS: questions, probes, hostile and slow clients, renewal."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import urllib3

from bootseer.errors import CorruptError
from bootseer.kubernetes.webhook.certificate import Pair, make_pair
from bootseer.kubernetes.webhook.pods import BODY_BYTES_MAX
from bootseer.kubernetes.webhook.server import WebhookServer
from testbed.waiting import wait_for


class _Running:
    """Server, and clients that trust its first certificate."""

    def __init__(self, folder: Path, connection_s: float = 5.0) -> None:
        self.pair = make_pair(["localhost"], datetime.now(UTC))
        self.is_ready = True
        self.asked: list[bytes] = []
        self.server = WebhookServer(
            0, self._answer, lambda: self.is_ready, connection_s=connection_s, connections_max=4
        )
        self.server.use(self.pair)
        self._folder = folder

    def _answer(self, body: bytes) -> bytes:
        self.asked.append(body)
        if body == b"no question":
            raise CorruptError("the request's body is not an AdmissionReview")
        return b'{"answer":' + body + b"}"

    def client(self, pair: Pair | None = None) -> urllib3.PoolManager:
        """Return a client that trusts only this certificate."""
        file = self._folder / "ca.pem"
        file.write_bytes((pair or self.pair).trusted)
        return urllib3.PoolManager(ca_certs=str(file), retries=False, timeout=30)

    def url(self, path: str) -> str:
        return f"https://localhost:{self.server.server_port}{path}"

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        response = self.client().request(method, self.url(path), body=body)
        return response.status, response.data

    def connect(self) -> socket.socket:
        return socket.create_connection(("localhost", self.server.server_port), timeout=60)

    def secured(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=self.pair.trusted.decode())
        return context.wrap_socket(self.connect(), server_hostname="localhost")


@contextlib.contextmanager
def _serving(found: _Running) -> Iterator[_Running]:
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join()
        found.server.server_close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[_Running]:
    with _serving(_Running(tmp_path)) as found:
        yield found


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[_Running]:
    """Yield a server whose connections end early, but not before a busy machine's handshake."""
    with _serving(_Running(tmp_path, connection_s=3.0)) as found:
        yield found


def test_questions_and_probes_are_answered(running: _Running) -> None:
    assert running.ask("POST", "/pods?timeout=3s", b"1") == (200, b'{"answer":1}')
    assert running.ask("GET", "/healthz") == (200, b"ok\n")
    assert running.ask("GET", "/readyz") == (200, b"ok\n")
    running.is_ready = False
    assert running.ask("GET", "/readyz") == (503, b"not yet\n")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/", b"1", 404),
        ("GET", "/etc/passwd", None, 404),
        ("PUT", "/pods", b"1", 501),
        ("POST", "/pods", b"no question", 400),
    ],
)
def test_other_requests_are_refused(
    running: _Running, method: str, path: str, body: bytes | None, status: int
) -> None:
    assert running.ask(method, path, body)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: -1\r\n", b"411"),
        (b"Content-Length: 1e3\r\n", b"411"),
        (b"Transfer-Encoding: chunked\r\n", b"411"),
        (b"Content-Length: %d\r\n" % (BODY_BYTES_MAX + 1), b"413"),
        (b"A: b\r\n" * 200, b"431"),
        (b"A: " + b"b" * 70_000 + b"\r\n", b"431"),
    ],
)
def test_hostile_requests_are_refused_before_they_are_read(
    running: _Running, headers: bytes, status: bytes
) -> None:
    with running.secured() as connection, contextlib.suppress(ConnectionError, ssl.SSLError):
        connection.sendall(b"POST /pods HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        assert connection.recv(1000).split()[1] == status
    assert not running.asked


@pytest.mark.parametrize("sent", [None, b"", b"POST /pods HTT", b"full"])
def test_slow_clients_are_ended_and_leave_room(impatient: _Running, sent: bytes | None) -> None:
    """The clients stop before TLS, after it, in half a request, and in half a body."""
    request = b"POST /pods HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"
    with contextlib.ExitStack() as undo:
        clients: list[socket.socket] = []
        for _ in range(4):
            if sent is None:
                clients.append(undo.enter_context(impatient.connect()))
            else:
                secured = undo.enter_context(impatient.secured())
                secured.sendall(request if sent == b"full" else sent)
                clients.append(secured)
        for client in clients:
            # Ends without an answer: nothing was to be answered.
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert client.recv(1000) == b""

    def has_room() -> bool:
        """Return whether the threads of ended clients have ended."""
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            return impatient.ask("GET", "/healthz")[0] == 200
        return False

    wait_for(has_room, "room for another client")
    assert not impatient.asked


def test_half_a_question_is_not_answered(running: _Running) -> None:
    """The client has gone."""
    with running.secured() as client:
        client.sendall(b"POST /pods HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        # From here on the socket is a plain one: until the server has closed it.
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while client.recv(1000):
                pass
    assert not running.asked


def test_one_who_sends_byte_by_byte_is_ended_too(impatient: _Running) -> None:
    with impatient.secured() as client, contextlib.suppress(ConnectionError, ssl.SSLError):
        client.settimeout(0.05)
        is_open = True
        while is_open:
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                is_open = client.recv(10) != b""


def test_beyond_so_many_connections_new_ones_are_closed(tmp_path: Path) -> None:
    # No connection of these ends by its own deadline: only the bound can close one.
    with _serving(_Running(tmp_path, connection_s=600.0)) as running:
        with contextlib.ExitStack() as undo:
            for _ in range(4):
                undo.enter_context(running.connect())
            with pytest.raises(urllib3.exceptions.HTTPError):
                running.ask("GET", "/healthz")

        def answers() -> bool:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                return running.ask("GET", "/healthz") == (200, b"ok\n")
            return False

        wait_for(answers, "room for a new connection")


def test_no_plain_text_is_answered(running: _Running) -> None:
    with running.connect() as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in client.recv(1000)


def test_another_pair_is_served_from_then_on(running: _Running) -> None:
    other = make_pair(["localhost"], datetime.now(UTC))
    client = running.client(other)
    with pytest.raises(urllib3.exceptions.SSLError):
        client.request("GET", running.url("/healthz"))
    running.server.use(other)
    assert client.request("GET", running.url("/healthz")).status == 200


def test_the_key_is_on_no_disk(running: _Running) -> None:
    with pytest.raises(FileNotFoundError):
        Path("pair").stat()
    assert running.pair.key not in b"".join(
        path.read_bytes() for path in running._folder.iterdir() if path.is_file()
    )
