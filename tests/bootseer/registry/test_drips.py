"""Servers that say or take a byte now and then: the total counts, not the last byte."""

import gc
import socket
import threading
from collections.abc import Callable

import pytest

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import digest_of
from bootseer.registry.hosts import Host
from bootseer.registry.transport import Transport
from bootseer.transfer.policy import Policy
from testbed.servers.answering import talking
from testbed.servers.registry import QuietHandler, serve
from testbed.waiting import TIMEOUT_S, wait_for

MIB = 2**20


def ends(work: Callable[[], object]) -> BaseException | None:
    """What `work` ends by, which must be soon after its deadline of a second."""
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
        transport = Transport(Host(server, f"http://{server}/v2"), 1.0)
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
        host = Host("far.example", "https://far.example/v2", proxy=f"http://{proxy}", connect_s=0.5)
        transport = Transport(host, 1.0)
        error = ends(lambda: transport.request("GET", "https://far.example/v2/", {}))
        assert isinstance(error, DeadlineError | UnavailableError)
        transport.close()


def test_requests_at_once_need_one_thread_to_watch_them() -> None:
    """A thread for each would be a thousand of them on a node that starts."""
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
    transport = Transport(Host(host, f"http://{host}/v2"), 240.0)
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


def test_who_waits_for_a_token_that_fails_does_not_ask_again() -> None:
    """Else a token server that hangs holds each of the threads, one after the other."""
    count = 8
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            if self.path.startswith("/token"):
                asked.append(self.path)
                if len(asked) == 1:
                    threading.Event().wait(2.0)  # by then most of them wait for the token
                self.reply(503, b"{}")
                return
            ask = f'Bearer realm="http://{host}/token",service="s"'
            self.reply(401, b"{}", **{"WWW-Authenticate": ask})

    server = serve(Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    failures: list[BootseerError] = []
    with RegistryClient(
        "a/b",
        [Host(host, f"http://{host}/v2")],
        find_login=lambda *_: None,
        deadline_s=240,
        policy=Policy(attempts=1),
    ) as client:

        def ask() -> None:
            try:
                client.manifest("v1")
            except BootseerError as error:
                failures.append(error)

        askers = [threading.Thread(target=ask) for _ in range(count)]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join(TIMEOUT_S)
    server.shutdown()
    server.server_close()
    assert [type(one) for one in failures] == [UnavailableError] * count
    assert len(asked) < count


def test_blobs_without_number_leave_nothing_behind() -> None:
    """A server that lives for weeks reads the beginnings of millions of blobs."""
    blob = b"0123456789"

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.reply(200, blob)

    server = serve(Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    digests = [digest_of(b"%d" % number) for number in range(1100)]
    with RegistryClient(
        "a/b", [Host(host, f"http://{host}/v2")], find_login=lambda *_: None, deadline_s=240
    ) as client:
        for digest in digests:
            assert client.blobs.read(digest, len(blob), 0, len(blob)) == blob
        gc.collect()
        wanted = set(digests)
        # By the type of each: lazy objects of other libraries answer isinstance() by loading.
        kept = [dict.keys(one) for one in gc.get_objects() if issubclass(type(one), dict)]
        assert 0 < max(len(wanted & keys) for keys in kept) <= 1000
    server.shutdown()
    server.server_close()
