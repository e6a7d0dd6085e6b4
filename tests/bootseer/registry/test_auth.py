"""Logins against a real registry: Basic, and tokens from a token server."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.errors import BootseerError, PermissionDeniedError, UnavailableError
from bootseer.registry.client import open_registry_client
from bootseer.registry.credentials import Credential
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.registry.hosts import RegistryHost
from bootseer.registry.reference import parse_reference
from bootseer.registry.tokens import Authorizer
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import (
    QuietHandler,
    Registry,
    TokenServer,
    htpasswd_auth,
    running_registry,
    serve,
)
from tests.bootseer.registry.conftest import Connect
from tests.bootseer.registry.pushing import manifest_of, push_blob

USER, PASSWORD, REFRESH = "me", "s3cret-pass", "s3cret-refresh"
LOGIN = Credential(USER, PASSWORD)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Yield a registry that requires a Basic login."""
    root = tmp_path_factory.mktemp("guarded")
    with running_registry(root, htpasswd_auth(root, USER, PASSWORD)) as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    server = TokenServer(tmp_path_factory.mktemp("tokens"), USER, PASSWORD, REFRESH)
    yield server
    server.close()


@pytest.fixture(scope="module")
def tokened(tmp_path_factory: pytest.TempPathFactory, tokens: TokenServer) -> Iterator[Registry]:
    """Yield a registry that requires a token of `tokens`."""
    with running_registry(tmp_path_factory.mktemp("tokened"), tokens.auth) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "tokens" in request.fixturenames:
        server: TokenServer = request.getfixturevalue("tokens")
        server.requests.clear()
        server.expires_in = 300


def test_a_basic_login(guarded: Registry, connect: Connect) -> None:
    client = connect(guarded.host, login=LOGIN)
    client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client, b"layer"))
    assert client.resolve("v1").startswith("sha256:")
    assert client.blob(digest_of(b"layer"), 10) == b"layer"


@pytest.mark.parametrize("login", [None, Credential(USER, "s3cret-wrong")])
def test_a_missing_or_wrong_login(
    guarded: Registry, connect: Connect, login: Credential | None
) -> None:
    with pytest.raises(PermissionDeniedError, match=f"docker login {guarded.host}") as caught:
        connect(guarded.host, login=login).manifest("v1")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("login", [LOGIN, Credential("", identity_token=REFRESH)])
def test_tokens_are_fetched_once_per_action(
    tokened: Registry, tokens: TokenServer, connect: Connect, login: Credential
) -> None:
    client = connect(tokened.host, login=login)
    client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client, b"layer"))
    for _ in range(3):
        client.manifest("v1")
        assert client.blob(digest_of(b"layer"), 10) == b"layer"
    scopes = [set(query["scope"][0].rpartition(":")[2].split(",")) for _, query in tokens.requests]
    assert sorted(scopes, key=len) == [{"pull"}, {"pull", "push"}]
    assert {method for method, _ in tokens.requests} == {"POST" if login is not LOGIN else "GET"}


@pytest.mark.parametrize(
    "login", [None, Credential(USER, "s3cret-wrong"), Credential("", identity_token="s3cret-old")]
)
def test_a_token_that_is_not_given(
    tokened: Registry, connect: Connect, login: Credential | None
) -> None:
    with pytest.raises(PermissionDeniedError, match="docker login") as caught:
        connect(tokened.host, login=login).manifest("v1")
    assert "s3cret" not in str(caught.value)


def test_a_token_is_renewed_before_it_expires(
    tokened: Registry, tokens: TokenServer, connect: Connect
) -> None:
    client = connect(tokened.host, login=LOGIN)
    client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client))
    tokens.requests.clear()
    tokens.expires_in = 0.0001  # type: ignore[assignment]
    other = connect(tokened.host, login=LOGIN)
    for _ in range(3):
        other.manifest("v1")
    assert len(tokens.requests) == 3


def test_a_token_that_expires_in_the_middle_of_a_download(
    tokened: Registry, tokens: TokenServer, connect: Connect
) -> None:
    data = os.urandom(300_000)
    with FaultyRelay(tokened.host) as relay:
        client = connect(relay.host, login=LOGIN)
        push_blob(client, data)
        relay.challenge = (
            f'Bearer realm="{tokens.url}",service="tests",'
            f'scope="repository:{client.name.partition("/")[2]}:pull"'
        )
        relay.faults = [Fault("GET .*blobs", 1, cut_after_bytes=100_000)]
        with client.open(digest_of(data), len(data)) as file:
            found = file.read(10_000)
            relay.revoke()
            tokens.requests.clear()
            while piece := file.read(50_000):
                found += piece
    assert found == data
    assert len(tokens.requests) == 1


def test_what_docker_login_wrote_is_used(
    guarded: Registry, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"auths": {guarded.host: {"auth": "bWU6czNjcmV0LXBhc3M="}}})
    )
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    reference = parse_reference(f"{guarded.host}/{repository}")
    with open_registry_client(reference, hosts_dir=tmp_path) as client:
        client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client))
        assert client.resolve("v1").startswith("sha256:")


@pytest.mark.parametrize(
    "header",
    ["", "Negotiate", "Bearer", 'Bearer realm="file:///etc/passwd"', 'Bearer realm="http://"'],
)
def test_challenges_that_nobody_can_meet(
    registry: Registry, relay: FaultyRelay, connect: Connect, header: str
) -> None:
    relay.faults = [Fault("", 1000, 401, {"WWW-Authenticate": header})]
    with pytest.raises(BootseerError, match=r"refuse|names no server"):
        connect(relay.host, login=LOGIN).manifest("v1")


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"token":7}', b'{"token":"a\\r\\nX: y"}', b"[" * 200_000]
)
def test_token_servers_that_talk_nonsense(
    relay: FaultyRelay, connect: Connect, answer: bytes
) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.reply(200, answer)

    server = serve(Handler)
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/t"
        relay.faults = [Fault("", 1000, 401, {"WWW-Authenticate": f'Bearer realm="{url}"'})]
        with pytest.raises(UnavailableError, match="gave no token"):
            connect(relay.host).manifest("v1")
    finally:
        server.shutdown()
        server.server_close()


def test_a_token_for_longer_than_a_number_holds(
    registry: Registry, relay: FaultyRelay, connect: Connect
) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.reply(200, b'{"token":"x","expires_in":1%s}' % (b"0" * 400))

    client = connect(registry.host)
    client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client))
    server = serve(Handler)
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/t"
        relay.faults = [Fault("", 1, 401, {"WWW-Authenticate": f'Bearer realm="{url}"'})]
        assert connect(relay.host).manifest("v1").media_type == MANIFEST_TYPE
    finally:
        server.shutdown()
        server.server_close()


def test_a_login_is_not_sent_unencrypted() -> None:
    host = RegistryHost("r.io", "https://r.io/v2")
    never = SimpleNamespace(request=None)
    authorizer = Authorizer(host, "a", never, lambda *_: LOGIN, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PermissionDeniedError, match="unencrypted"):
        authorizer.renewed('Bearer realm="http://auth.r.io/token"', "pull", None)
