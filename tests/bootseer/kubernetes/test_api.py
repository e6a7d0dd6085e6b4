"""Client of the API server: an answer that trickles ends by the deadline of its request."""

import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.certificate import make_pair
from testbed.servers.answering import talking
from testbed.waiting import wait_for

Talk = Callable[[socket.socket, threading.Event], None]


def drip_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{")
    while not over.wait(0.05):
        connection.sendall(b" ")


def drip_head(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
    while not over.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize("drip", [drip_body, drip_head])
def test_an_answer_that_drips_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drip: Talk
) -> None:
    pair = make_pair(["localhost"], datetime.now(UTC))
    (tmp_path / "ca.crt").write_bytes(pair.trusted)
    (tmp_path / "token").write_text("token")
    (tmp_path / "namespace").write_text("default")
    (tmp_path / "pair.pem").write_bytes(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")

    def talk(connection: socket.socket, over: threading.Event) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(4096)
            drip(secured, over)

    with talking(talk) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.rpartition(":")[2])
        api = Api(tmp_path, timeout_s=1.0)
        found: list[BaseException | None] = []

        def ask() -> None:
            try:
                api.get("/x")
            except BaseException as error:
                found.append(error)
            else:
                found.append(None)

        threading.Thread(target=ask, daemon=True).start()
        wait_for(lambda: found, "the end of a request")
        assert isinstance(found[0], UnavailableError)
