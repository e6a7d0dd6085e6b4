"""Headers that `hosts.toml` adds for one server are sent to no other server."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bootseer.errors import BootseerError, UnavailableError
from bootseer.registry.client import RegistryClient
from bootseer.registry.credentials import Credential
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.registry.hosts import RegistryHost
from bootseer.transfer.policy import Policy
from testbed.servers.registry import QuietHandler, serve

BLOB = b"0123456789"
DIGEST = digest_of(BLOB)
SECRETS = (("X-Site-Token", "s3cret"), ("cookie", "s3cret=1"), ("Authorization", "Bearer s3cret"))


class Server:
    """Server that answers by `answers`, keyed by "METHOD PATH", and keeps the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        server = self

        class Handler(QuietHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                line = f"{self.command} {self.path.partition('?')[0]}"
                server.seen.append((line, {k.lower(): v for k, v in self.headers.items()}))
                status, body, headers = server.answers.get(line, (404, b"{}", {}))
                self.reply(status, body, **headers)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

        self._server = serve(Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def has_secret(self) -> bool:
        """Return whether any request had a secret."""
        return any("s3cret" in value for _, headers in self.seen for value in headers.values())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def own() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@contextmanager
def client_of(
    *servers: Server, login: Credential | None = None, of: int = 0
) -> Iterator[RegistryClient]:
    """Yield a client of the servers in this order; server number `of` has the secret headers."""
    hosts = [
        RegistryHost(one.host, f"http://{one.host}/v2", headers=SECRETS if number == of else ())
        for number, one in enumerate(servers)
    ]
    with RegistryClient(
        "a/b",
        hosts,
        find_login=lambda *_: login,
        deadline_s=60,
        policy=Policy(attempts=1, base_s=0.01),
    ) as client:
        yield client


def moved(server: Server, path: str, status: int = 307) -> tuple[int, bytes, dict[str, str]]:
    return status, b"", {"Location": f"http://{server.host}{path}"}


def test_a_redirect_takes_no_headers_of_the_hosts_file_along(own: Server, other: Server) -> None:
    manifest = json.dumps({"schemaVersion": 2}).encode()
    own.answers = {
        f"GET /v2/a/b/blobs/{DIGEST}": moved(other, "/blob"),
        "GET /v2/a/b/manifests/v1": moved(other, "/manifest"),
        "HEAD /v2/a/b/manifests/v1": moved(other, "/manifest"),
    }
    other.answers = {
        "GET /blob": (200, BLOB, {}),
        "GET /manifest": (200, manifest, {"Content-Type": MANIFEST_TYPE}),
        "HEAD /manifest": (200, b"", {"Docker-Content-Digest": DIGEST}),
    }
    with client_of(own) as client:
        assert client.blob(DIGEST, 100) == BLOB
        assert client.blob(DIGEST, 100) == BLOB  # from where it was found
        assert client.manifest("v1").data == manifest
        assert client.resolve("v1") == DIGEST
    assert len(other.seen) == 4
    assert own.has_secret()
    assert not other.has_secret()


def test_an_upload_elsewhere_takes_no_headers_of_the_hosts_file_along(
    own: Server, other: Server
) -> None:
    own.answers = {"POST /v2/a/b/blobs/uploads/": moved(other, "/upload", 202)}
    other.answers = {"PUT /upload": (201, b"", {})}
    with client_of(own) as client:
        client.push_blob(DIGEST, BLOB)
    assert [line for line, _ in other.seen] == ["PUT /upload"]
    assert own.has_secret()
    assert not other.has_secret()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_an_upload_that_is_redirected_is_sent_nowhere_else(
    own: Server, other: Server, status: int
) -> None:
    """The answer 202 says where an upload continues; a redirect would send the body along."""
    own.answers = {
        "POST /v2/a/b/blobs/uploads/": (202, b"", {"Location": "/upload"}),
        "PUT /upload": moved(other, "/upload", status),
    }
    other.answers = {"PUT /upload": (201, b"", {})}
    with client_of(own) as client, pytest.raises(UnavailableError, match="not allowed"):
        client.push_blob(DIGEST, BLOB)
    assert other.seen == []


def test_a_page_elsewhere_is_asked_for_without_headers_of_the_hosts_file(
    own: Server, other: Server
) -> None:
    link = {"Link": f'<http://{other.host}/next>; rel="next"'}
    entry = '{"manifests": [{"artifactType": "a/b", "digest": "%s"}]}'
    own.answers = {f"GET /v2/a/b/referrers/{DIGEST}": (200, (entry % "one").encode(), link)}
    other.answers = {"GET /next": (200, (entry % "two").encode(), {})}
    with client_of(own) as client:
        found = [one["digest"] for one in client.referrers(DIGEST, "a/b")]
    assert found == ["one", "two"]
    assert not other.has_secret()


def test_a_token_server_and_another_mirror_get_no_headers_of_the_hosts_file(
    own: Server, other: Server
) -> None:
    ask = {"WWW-Authenticate": f'Bearer realm="http://{other.host}/token",service="s"'}
    own.answers = {"GET /v2/a/b/manifests/v1": (401, b"{}", ask)}
    other.answers = {"GET /token": (200, b'{"token": "t"}', {})}
    with client_of(own, other) as client, pytest.raises(BootseerError):
        client.manifest("v1")
    lines = {line for line, _ in other.seen}
    assert lines == {"GET /token", "GET /v2/a/b/manifests/v1"}
    assert own.has_secret()
    assert not other.has_secret()


def test_a_token_server_that_redirects_is_not_followed_with_the_login(
    own: Server, other: Server
) -> None:
    ask = {"WWW-Authenticate": f'Bearer realm="http://{own.host}/token",service="s"'}
    own.answers = {
        "GET /v2/a/b/manifests/v1": (401, b"{}", ask),
        "GET /token": moved(other, "/token"),
    }
    login = Credential("me", "s3cret")
    with client_of(own, login=login) as client, pytest.raises(BootseerError):
        client.manifest("v1")
    assert other.seen == []


def test_a_signed_url_is_used_for_a_minute(
    own: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that, a change of the reader's rights or of the blob's place takes effect."""
    own.answers = {f"GET /v2/a/b/blobs/{DIGEST}": moved(other, "/blob")}
    other.answers = {"GET /blob": (200, BLOB, {})}
    monotonic, later_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + later_s)
    with client_of(own) as client:
        for later_s, asked in ((0.0, 1), (50.0, 1), (61.0, 2)):  # noqa: B007 - the clock reads it
            assert client.blob(DIGEST, 100) == BLOB
            assert len(own.seen) == asked
