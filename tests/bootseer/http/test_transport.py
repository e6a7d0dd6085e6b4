"""Requests to servers that send a byte at a time, redirect, or are behind a proxy."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.http.transport import HttpServer, Transport, proxy_for, retry_after_s
from testbed.servers.answering import talking
from testbed.servers.registry import QuietHandler, serve
from testbed.waiting import TIMEOUT_S, wait_for

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
MIB = 2**20


def ends(work: Callable[[], object]) -> BaseException | None:
    """Return the exception that `work` ends with; it must end soon after its deadline of a
    second."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    threading.Thread(target=run, daemon=True).start()
    wait_for(lambda: found, "the end of it")
    return found[0]


def test_an_upload_of_which_a_byte_is_taken_now_and_then_ends() -> None:
    def take_drops(connection: socket.socket, over: threading.Event) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while not over.wait(0.05) and connection.recv(4096):
            pass

    body = bytes(64 * MIB)
    with talking(take_drops) as server:
        transport = Transport(HttpServer(server, f"http://{server}/v2"), 1.0)
        error = ends(lambda: transport.request("PUT", f"http://{server}/v2/x", {}, body))
        assert isinstance(error, DeadlineError | UnavailableError)
        transport.close()


def test_a_proxy_whose_answer_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
        while not over.wait(0.05):
            connection.sendall(b"x")

    with talking(drip) as proxy:
        far = HttpServer(
            "far.example", "https://far.example/v2", proxy=f"http://{proxy}", connect_s=0.5
        )
        transport = Transport(far, 1.0)
        error = ends(lambda: transport.request("GET", "https://far.example/v2/", {}))
        assert isinstance(error, DeadlineError | UnavailableError)
        transport.close()


@pytest.mark.parametrize(
    ("body_bytes", "piece_bytes", "comes"),
    [(32 * 1024, 4096, True), (1200, 200, True), (32 * 1024, 1, False), (1200, 1, False)],
)
def test_an_answer_has_its_deadline_as_long_as_bytes_come(
    body_bytes: int, piece_bytes: int, comes: bool
) -> None:
    """32 KiB in 1.6 s and more pass a deadline of half a second, a trickle does not.

    A short body may come more slowly, as a short range of a file may: on a line that many nodes
    share, a connection may get less than 8 KiB/s.
    """
    body = b"x" * body_bytes

    def send(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), piece_bytes):
            if over.wait(0.2):
                return
            connection.sendall(body[begin : begin + piece_bytes])

    with talking(send) as server:
        transport = Transport(HttpServer(server, f"http://{server}/v2"), 10.0)
        found: list[bytes] = []

        def ask() -> None:
            with transport.request("GET", f"http://{server}/v2/x", {}) as response:
                found.append(response.read_all(MIB, 0.5))

        error = ends(ask)
        assert found == ([body] if comes else []), error
        assert comes or isinstance(error, DeadlineError)
        transport.close()


_FORKED = """
import os, signal, sys
from bootseer.http.transport import HttpServer, Transport

server = HttpServer("here", sys.argv[1])
transport = Transport(server, 60.0)

def ask():
    with transport.request("GET", server.base_url + "/", {}) as response:
        return response.read_all(100, 60.0)

ask()
pid = os.fork()
if not pid:
    signal.alarm(60)
    os._exit(ask() != b"answer")
os.waitpid(pid, 0)
ask()
"""


def test_a_forked_child_has_connections_of_its_own() -> None:
    """On its parent's connections the child would read the parent's answers."""
    ports: list[int] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            ports.append(self.client_address[1])
            self.reply(200, b"answer")

    server = serve(Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    subprocess.run([sys.executable, "-c", _FORKED, url], timeout=120, check=True)
    server.shutdown()
    server.server_close()
    parent, child, again = ports
    assert parent == again != child


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_that_is_never_found_is_left(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cluster's search list, a resolver without servers takes minutes."""
    over = threading.Event()

    def hang(*_: object, **__: object) -> object:
        over.wait(600)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with Transport(
        HttpServer("far", f"{scheme}://far.example", proxy="", connect_s=0.1), 1.0
    ) as far:
        error = ends(lambda: far.request("GET", f"{scheme}://far.example/", {}))
        over.set()
    assert isinstance(error, DeadlineError)


def test_requests_at_once_need_one_thread_to_watch_them() -> None:
    """Otherwise a node that starts a job has a thousand threads."""
    count = 16
    arrived = threading.Barrier(count + 1)
    go_on = threading.Event()

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            arrived.wait(TIMEOUT_S)
            go_on.wait(TIMEOUT_S)
            self.reply(200, b"x")

    server = serve(Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    transport = Transport(HttpServer(host, f"http://{host}/v2"), 240.0)
    answers: list[int] = []

    def ask() -> None:
        response = transport.request("GET", f"http://{host}/v2/", {})
        answers.append(response.status)
        response.close()

    before = set(threading.enumerate())
    askers = [threading.Thread(target=ask) for _ in range(count)]
    for thread in askers:
        thread.start()
    try:
        arrived.wait(TIMEOUT_S)
        started = set(threading.enumerate()) - before - set(askers)
        # Those of the test's server have its name.
        watching = [one for one in started if "process_request_thread" not in one.name]
    finally:
        go_on.set()
        for thread in askers:
            thread.join(TIMEOUT_S)
        transport.close()
        server.shutdown()
        server.server_close()
    assert len(watching) <= 1
    assert answers == [200] * count


def test_no_proxy_for_this_machine_and_for_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy.lan:3128")
    monkeypatch.setenv("no_proxy", ".inside.lan")
    assert proxy_for("https", "r.io") == "http://proxy.lan:3128"
    for host in ("localhost", "127.0.0.1", "::1", "r.inside.lan"):
        assert proxy_for("https", host) == ""


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 120 ", 120),
        ("-3", 0),
        ("soon", 0),
        ("Thu, 01 Jan 2026 12:01:00 GMT", 60),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0),
        ("٣", 0),
        ("9" * 400, 999_999_999),
        ("Mon, 01 Jan 2024 00:00:00 +99999999999999999999", 0),
        ("Mon, 01 Jan 9999999999999999999999 00:00:00 GMT", 0),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, NOW) == seconds
