"""Wrong addresses of an HDFS: the error says at once which one and why."""

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.store import open_backend
from testbed.hdfs.pair import NAME, pair_configuration, write_configuration
from testbed.waiting import wait_for


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _failure(url: str) -> str:
    backend = open_backend(url)
    try:
        with pytest.raises(UnavailableError) as caught:
            backend.stat("a")
        return str(caught.value)
    finally:
        backend.close()


def test_a_port_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    port = _unused_port()
    message = _failure(f"hdfs://127.0.0.1:{port}/x?deadline_s=2")
    where = f"(127.0.0.1:{port}: Connection refused)"
    assert f"no NameNode can be reached {where}" in message
    assert f"check the URL hdfs://127.0.0.1:{port}" in message
    # What is waited for was said at once.
    assert caplog.messages == [f"waiting up to 2 s for a NameNode {where}"]


def test_a_host_that_is_unknown() -> None:
    """`.invalid` never resolves (RFC 2606), also without a resolver."""
    message = _failure("hdfs://namenode.invalid/x?deadline_s=2")
    assert "no NameNode can be reached (namenode.invalid:8020: " in message
    assert "HADOOP_CONF_DIR names the folder of hdfs-site.xml" in message


def test_all_namenodes_of_a_nameservice_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = (_unused_port(), _unused_port())
    addresses = [f"127.0.0.1:{port}" for port in ports]
    write_configuration(tmp_path / "conf", pair_configuration(addresses))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    message = _failure(f"hdfs://{NAME}/x?deadline_s=2")
    assert all(f"{address}: Connection refused" in message for address in addresses)
    assert "HADOOP_CONF_DIR" not in message


@pytest.fixture
def web_page() -> Iterator[int]:
    """Yield the port of an HTTP server."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_one_that_takes_connections_is_enough(
    silent: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in (_unused_port(), silent())]
    write_configuration(tmp_path / "conf", pair_configuration(addresses))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    backend = open_backend(f"hdfs://{NAME}/x?deadline_s=2")
    with pytest.raises(DeadlineError, match="no answer within 2 s"):
        backend.stat("a")
    backend.close()


def test_one_that_comes_back_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    port = _unused_port()
    backend = open_backend(f"hdfs://127.0.0.1:{port}/x?deadline_s=3")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(backend.stat, "a")
        wait_for(lambda: caplog.messages, "the first failure")
        with socket.create_server(("127.0.0.1", port), backlog=64):
            error = asked.exception(60)
    # It was asked, and did not answer.
    assert isinstance(error, DeadlineError), error
    backend.close()


def test_the_port_of_the_web_pages(web_page: int) -> None:
    message = _failure(f"hdfs://127.0.0.1:{web_page}/x?deadline_s=30")
    assert f"127.0.0.1:{web_page} does not speak Hadoop's RPC" in message
    assert "mostly 8020" in message


@pytest.fixture
def silent() -> Iterator[Callable[[], int]]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield lambda: int(server.getsockname()[1])


def test_a_server_that_says_nothing_is_waited_for_and_named(
    silent: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_backend(f"hdfs://127.0.0.1:{silent()}/x?deadline_s=1")
    with pytest.raises(DeadlineError, match=rf"127\.0\.0\.1:{silent()}/x/a: no answer within 1 s"):
        backend.stat("a")
    backend.close()
    (message,) = [one for one in caplog.messages if "waiting" in one]
    assert message.startswith(f"waiting up to 1 s for hdfs://127.0.0.1:{silent()}: ")
