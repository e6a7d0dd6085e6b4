"""A store behind a web server is replayed from, never written, and never redirected elsewhere."""

import base64
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.store import Backend, open_backend, open_store
from bootseer.transfer.attempt import Attempt
from testbed.servers.answering import talking
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import QuietHandler, serve
from testbed.servers.starving import StarvingServer
from testbed.waiting import wait_for

ODD = (
    "with space",
    "ünï-日本",
    "percent%20%41",
    "hash#tag",
    "question?mark=1&b",
    "quote'\"",
    "a<b>",
)


class _Files(SimpleHTTPRequestHandler):
    """Python's own server of a folder, which knows no ranges."""

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store in a folder, with a few objects."""
    with open_store((tmp_path / "store").as_uri()) as store:
        for key in ("blobs/one", "names/a/b", *(f"odd/{name}" for name in ODD)):
            store.publish(key, key.encode() * 1000)
        store.publish("empty", b"")
    return tmp_path / "store"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    server = serve(partial(_Files, directory=str(folder)))  # type: ignore[arg-type]  # called alike
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def web(url: str) -> Iterator[Backend]:
    opened = open_backend(url, deadline_s=60)
    yield opened
    opened.close()


def test_a_web_server_gives_what_the_folder_holds(folder: Path, url: str) -> None:
    with open_store(folder.as_uri()) as direct, open_store(url) as store:
        there = {one.path: (one.size_bytes, one.modified_ns // 10**9) for one in direct.list()}
        assert {
            one.path: (one.size_bytes, one.modified_ns // 10**9) for one in store.list()
        } == there
        for key in there:
            assert store.read(key) == direct.read(key)
            assert store.info(key).size_bytes == direct.info(key).size_bytes
            assert store.read(key, 5, 7) == direct.read(key, 5, 7)
        assert [one.path for one in store.list("names/")] == ["names/a/b"]
        assert not store.exists("absent")
        for key, length in (("absent", None), ("absent/x", 10)):
            with pytest.raises(NotFoundError, match=r"absent.* does not exist"):
                store.read(key, 0, length)
        for length in (None, 0):
            with pytest.raises(InvalidInputError, match="is a folder"):
                store.read("blobs", 0, length)
        assert store.backend.stat("").is_dir
        assert store.backend.stat("names").is_dir


def test_nothing_is_written(web: Backend) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: web.create("new"),
        lambda: web.delete("blobs/one"),
        lambda: web.rename("blobs/one", "new"),
        lambda: web.mkdir("new"),
    )
    for call in calls:
        with pytest.raises(PermissionDeniedError, match="read-only"):
            call()


def test_ranges_of_a_server_that_knows_them() -> None:
    data = os.urandom(300_000)
    with StarvingServer(data) as server, open_store(server.url) as store:
        for offset, length in ((0, 10), (1, 299_999), (299_990, 100)):
            assert store.read("x", offset, length) == data[offset : offset + length]
            buffer = bytearray(length)
            count = store.read_into("x", offset, memoryview(buffer), Attempt())
            assert bytes(buffer[:count]) == data[offset : offset + length]
        assert store.read("x", 7) == data[7:]
        assert store.size("x") == len(data)
    assert (1, 300_000) in server.ranges


class Answers(QuietHandler):
    """Handler that answers with `statuses` in turn, and keeps the requests."""

    replies: list[tuple[int, bytes, dict[str, str]]]
    seen: list[dict[str, str]]

    def _answer(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        status, body, headers = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.reply(status, body, **headers)

    do_GET = do_HEAD = _answer  # noqa: N815


@pytest.fixture
def answering() -> Iterator[Callable[..., tuple[str, list[dict[str, str]]]]]:
    """Yield a function that starts a server with these answers in turn, repeating the last.

    The function returns the server's host, and the list of its requests' headers.
    """
    servers = []

    def start(*replies: tuple[int, bytes, dict[str, str]]) -> tuple[str, list[dict[str, str]]]:
        class Handler(Answers):
            pass

        Handler.replies, Handler.seen = list(replies), []
        servers.append(serve(Handler))
        return f"127.0.0.1:{servers[-1].server_address[1]}", Handler.seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


Start = Callable[..., tuple[str, list[dict[str, str]]]]


def test_a_login_in_the_url_reaches_that_server_alone_and_no_message(answering: Start) -> None:
    elsewhere, seen_elsewhere = answering((200, b"x", {}), (403, b"", {}))
    own, seen = answering((302, b"", {"Location": f"http://{elsewhere}/signed?key=s3cret"}))
    with open_store(f"http://me:s3cret@{own}/store") as store:
        assert store.read("a") == b"x"
        with pytest.raises(PermissionDeniedError) as caught:
            store.read("a")
        assert "s3cret" not in str(caught.value) + store.url
    login = base64.b64encode(b"me:s3cret").decode()
    assert [one["authorization"] for one in seen] == [f"Basic {login}"] * 2
    assert not any("authorization" in one for one in seen_elsewhere)


def test_a_web_server_leads_nobody_to_the_metadata_of_a_cloud(answering: Start) -> None:
    host, _ = answering((302, b"", {"Location": "http://169.254.169.254/latest/"}))
    with (
        open_store(f"http://{host}") as store,
        pytest.raises(PermissionDeniedError, match="link-local"),
    ):
        store.read("a")


@pytest.mark.parametrize(
    "reply",
    [
        (206, b"x", {"Content-Range": "bytes 3-3/10"}),
        (206, b"xyz", {"Content-Range": "bytes 0-2/10"}),
        (206, b"x", {}),
        (206, b"x", {"Content-Range": f"bytes 0-{'9' * 5000}/2"}),
        (416, b"", {"Content-Range": "bytes */10"}),
    ],
    ids=["another range", "a longer range", "no range", "no number", "no such range"],
)
def test_the_answer_to_another_question_is_refused(
    answering: Start, reply: tuple[int, bytes, dict[str, str]]
) -> None:
    host, _ = answering(reply)
    with open_store(f"http://{host}") as store, pytest.raises(BootseerError):
        store.read("a", 0, 1)


def test_a_page_of_a_folder_names_nothing_outside_it(answering: Start) -> None:
    page = b"""<a href="../">up</a><a href="/etc/passwd">x</a><a href="http://other/a">x</a>
        <a href="//other/b">x</a><a href="?C=N;O=D">by name</a><a href="%2e%2e">x</a>
        <a class=b href="q&amp;a">x</a>
        <a href="a/b">deep</a><a href="http://[">x</a><a href="%00">x</a><a href="a%2fb">x</a>
        <a name="none"><a href="good">x</a><a href="folder/">x</a><A HREF='./fine'>x"""
    host, _ = answering((200, page, {}), (200, b"12", {}))
    with open_store(f"http://{host}/top") as store:
        found = {one.path: one.is_dir for one in store.backend.list("")}
    assert found == {"fine": False, "folder": True, "good": False, "q&a": False}


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_cannot_answer_now_is_asked_again(url: str, status: int) -> None:
    with (
        FaultyRelay(url.removeprefix("http://")) as relay,
        open_store(f"http://{relay.host}") as store,
    ):
        relay.faults = [Fault("GET", 1, status), Fault("GET", 1, cut_after_bytes=10)]
        assert store.read("blobs/one") == b"blobs/one" * 1000
        relay.faults = [Fault("GET", 1000, status)]
        with pytest.raises(UnavailableError, match=str(status)):
            store.read_into("blobs/one", 0, memoryview(bytearray(10)), Attempt())


def drip_head(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
    while not over.wait(0.05):
        connection.sendall(b"x")


def drip_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b"x")


def hang(connection: socket.socket, over: threading.Event) -> None:
    over.wait(600)


@pytest.mark.parametrize("talk", [drip_head, drip_body, hang])
def test_a_server_that_hangs_or_drips_is_left(
    talk: Callable[[socket.socket, threading.Event], None],
) -> None:
    with talking(talk) as host:
        backend = open_backend(f"http://{host}", deadline_s=0.5)
        found: list[BaseException | None] = []

        def ask() -> None:
            try:
                backend.read_into("key", 0, memoryview(bytearray(100_000)), Attempt())
            except BaseException as error:
                found.append(error)
            else:
                found.append(None)

        threading.Thread(target=ask, daemon=True).start()
        wait_for(lambda: found, "the end of a read")
        assert isinstance(found[0], DeadlineError | UnavailableError)
        backend.close()


@pytest.mark.parametrize("url", ["http://{}/s", "oci://{}/a/b@sha256:" + "0" * 64])
def test_a_start_waits_for_a_store_that_hangs_only_once(url: str) -> None:
    """The sum of all waits in vain is bounded, as in the stages of `bootseer run`."""
    came: list[int] = []

    def count_and_hang(connection: socket.socket, over: threading.Event) -> None:
        came.append(1)
        over.wait(600)

    with talking(count_and_hang) as host, open_store(url.format(host), deadline_s=60) as store:
        WAIT_BUDGET.limit(0.7)
        try:
            with pytest.raises(DeadlineError):
                store.read("a")
            seen = len(came)
            with pytest.raises(DeadlineError, match="in earlier calls"):
                store.read("b")
        finally:
            WAIT_BUDGET.limit(math.inf)
        assert len(came) == seen >= 1


@pytest.mark.parametrize("url", ["http://", "https:///x", "http://[::1", "http://h:port/x"])
def test_a_url_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_backend(url)
