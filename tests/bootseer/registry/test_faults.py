"""Registries and networks that fail: which failures are retried, and how others are reported."""

import logging
import os
import time
from collections.abc import Callable

import pytest

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.registry.client import RegistryClient
from bootseer.registry.credentials import Credential
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import QuietHandler, Registry, free_port, serve
from tests.bootseer.registry.conftest import Connect
from tests.bootseer.registry.pushing import manifest_of, push_blob

SIZE = 300_000
DATA = os.urandom(SIZE)
DIGEST = digest_of(DATA)


@pytest.fixture
def through(connect: Connect, registry: Registry, relay: FaultyRelay) -> RegistryClient:
    """Return a client behind the relay, of a repository with DATA and the tag v1."""
    direct = connect(registry.host)
    push_blob(direct, DATA)
    direct.push_manifest("v1", MANIFEST_TYPE, manifest_of(direct))
    return connect(relay.host, deadline_s=20)


def read_all(client: RegistryClient) -> bytes:
    with client.open(DIGEST, SIZE) as file:
        return b"".join(iter(lambda: file.read(50_000), b""))


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_fails_for_a_while(
    through: RegistryClient, relay: FaultyRelay, status: int
) -> None:
    relay.faults = [Fault("GET .*manifests", 2, status), Fault("GET .*blobs", 2, status)]
    assert through.manifest("v1").media_type == MANIFEST_TYPE
    assert read_all(through) == DATA


def test_a_server_that_goes_on_failing(through: RegistryClient, relay: FaultyRelay) -> None:
    relay.faults = [Fault("GET", 1000, 503)]
    with pytest.raises(UnavailableError, match="answered 503"):
        through.manifest("v1")
    assert relay.count("GET .*manifests") == 6


def test_retry_after_is_obeyed_within_the_deadline(
    through: RegistryClient, relay: FaultyRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(time, "sleep", waits_s.append)
    relay.faults = [Fault("manifests", 1, 429, {"Retry-After": "1"})]
    through.manifest("v1")
    assert 1.0 in waits_s
    relay.faults = [Fault("manifests", 1, 429, {"Retry-After": "3600"})]
    with pytest.raises(UnavailableError, match="429"):
        through.manifest("v1")


@pytest.mark.parametrize("status", [404, 403, 400, 501])
def test_answers_that_asking_again_does_not_change(
    through: RegistryClient, relay: FaultyRelay, status: int
) -> None:
    relay.faults = [Fault("manifests", 1000, status)]
    with pytest.raises(BootseerError, match=str(status)):
        through.manifest("v1")
    assert relay.count("manifests") == (1 if status < 500 else 6)


@pytest.mark.usefixtures("no_second_requests")
def test_a_download_that_breaks_goes_on_where_it_was(
    through: RegistryClient, relay: FaultyRelay
) -> None:
    relay.faults = [
        Fault("GET .*blobs", 1, cut_after_bytes=100_000),
        Fault("GET .*blobs", 1, cut_after_bytes=0),
        Fault("GET .*blobs", 1, cut_after_bytes=50_000),
    ]
    assert read_all(through) == DATA
    starts = [seen.headers["range"] for seen in relay.seen if "/blobs/" in seen.path]
    assert starts == [f"bytes={n}-{SIZE - 1}" for n in (0, 100_000, 100_000, 150_000)]


def test_a_download_that_breaks_at_a_server_without_ranges(
    through: RegistryClient, relay: FaultyRelay
) -> None:
    relay.faults = [
        Fault("GET .*blobs", 1, cut_after_bytes=100_000, ignore_range=True),
        Fault("GET .*blobs", 9, ignore_range=True),
    ]
    assert read_all(through) == DATA


@pytest.mark.usefixtures("no_second_requests")
def test_a_download_that_breaks_for_ever(through: RegistryClient, relay: FaultyRelay) -> None:
    relay.faults = [Fault("GET .*blobs", 1000, cut_after_bytes=10)]
    with pytest.raises(UnavailableError, match=r"closed the connection|cut off"):
        read_all(through)
    assert relay.count("GET .*blobs") == 6


def test_a_download_counts_all_failures_together(
    through: RegistryClient, relay: FaultyRelay
) -> None:
    """Retries of requests within retries of bodies that break off would be 36 attempts."""
    rounds = ([Fault("GET .*blobs", 5, 503), Fault("GET .*blobs", 1, cut_after_bytes=10)],) * 6
    relay.faults = [fault for pair in rounds for fault in pair]
    with pytest.raises(UnavailableError):
        read_all(through)
    assert relay.count("GET .*blobs") == 6


def test_a_registry_that_dies_in_the_middle(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    push_blob(connect(registry.host), DATA)
    relay.faults = [Fault("GET .*blobs", 1, cut_after_bytes=1000)]
    client = connect(relay.host)
    with client.open(DIGEST, SIZE) as file:
        assert file.read(1000) == DATA[:1000]
        relay.close()
        with pytest.raises(UnavailableError):
            file.read(SIZE)


@pytest.mark.usefixtures("no_second_requests")
def test_the_rest_comes_from_another_server(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    push_blob(connect(registry.host), DATA)
    relay.faults = [Fault("GET .*blobs", 1000, cut_after_bytes=70_000)]
    client = connect(relay.host, registry.host)
    assert read_all(client) == DATA
    assert relay.count("GET .*blobs") == 1
    assert relay.seen[0].path.endswith(f"?ns={registry.host.replace(':', '%3A')}")


def test_a_blob_that_is_read_again_comes_from_another_server(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    push_blob(connect(registry.host), DATA)
    relay.faults = [Fault("GET .*blobs", 1000, flip_at=7)]
    client = connect(relay.host, registry.host)
    assert read_all(client) != DATA
    assert read_all(client) == DATA


def test_a_mirror_that_is_down_is_passed_over(connect: Connect, registry: Registry) -> None:
    push_blob(connect(registry.host), DATA)
    assert read_all(connect(f"127.0.0.1:{free_port()}", registry.host)) == DATA


def test_what_a_mirror_lacks_or_denies_the_registry_has(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    direct = connect(registry.host)
    direct.push_manifest("v1", MANIFEST_TYPE, manifest_of(direct))
    for status in (404, 403, 401):
        relay.faults = [Fault("manifests", 1, status)]
        assert connect(relay.host, registry.host).manifest("v1") == direct.manifest("v1")


def test_what_nobody_has_is_not_asked_for_again(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    with pytest.raises(NotFoundError):
        connect(relay.host, registry.host).manifest("absent")
    assert relay.count("manifests") == 1


@pytest.mark.parametrize(
    "fault", [Fault("manifests/sha", 1, flip_at=10), Fault("manifests/sha", 1, truncate_bytes=20)]
)
def test_a_wrong_document_is_asked_for_again(
    through: RegistryClient, relay: FaultyRelay, fault: Fault
) -> None:
    digest = through.resolve("v1")
    relay.faults = [fault]
    assert through.manifest(digest).digest == digest
    assert relay.count("GET .*manifests/sha") == 2


def test_a_document_that_stays_wrong_is_refused(
    through: RegistryClient, relay: FaultyRelay
) -> None:
    digest = through.resolve("v1")
    relay.faults = [Fault("manifests|blobs", 1000, flip_at=10)]
    with pytest.raises(CorruptError, match="has the digest"):
        through.manifest(digest)
    with pytest.raises(CorruptError, match="has the digest"):
        through.manifest("v1")
    with pytest.raises(CorruptError, match="other contents"):
        through.blob(DIGEST, SIZE)


def test_a_truncated_blob_is_completed_or_refused(
    through: RegistryClient, relay: FaultyRelay
) -> None:
    relay.faults = [Fault("GET .*blobs", 1, truncate_bytes=1000)]
    assert read_all(through) == DATA


Ask = Callable[[RegistryClient], object]


@pytest.mark.parametrize("ask", [read_all, lambda client: client.manifest("v1")])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", 1000, hang_s=30),
        Fault("GET", 1000, trickle_s=0.05),
        Fault("GET", 1000, trickle_s=0.05, trickle_head=True),
    ],
    ids=["hangs", "trickles", "trickles its head"],
)
def test_a_slow_loris_ends_by_the_deadline(
    connect: Connect, through: RegistryClient, relay: FaultyRelay, fault: Fault, ask: Ask
) -> None:
    fault.times = 1000
    relay.faults = [fault]
    with pytest.raises((DeadlineError, UnavailableError)):
        ask(connect(relay.host, deadline_s=0.5))


@pytest.mark.parametrize("trickle_head", [False, True])
def test_a_slow_loris_is_left_for_another_server(
    connect: Connect, registry: Registry, relay: FaultyRelay, trickle_head: bool
) -> None:
    push_blob(connect(registry.host), DATA)
    relay.faults = [Fault("GET .*blobs", 1000, trickle_s=0.01, trickle_head=trickle_head)]
    assert read_all(connect(relay.host, registry.host, deadline_s=8)) == DATA


def test_a_redirected_blob_is_asked_for_without_the_login(
    connect: Connect, registry: Registry, relay: FaultyRelay, caplog: pytest.LogCaptureFixture
) -> None:
    direct = connect(registry.host)
    push_blob(direct, DATA)
    repository = direct.name.partition("/")[2]
    with FaultyRelay(registry.host) as storage:
        target = f"http://{storage.host}/v2/{repository}/blobs/{DIGEST}?signature=s3cret"
        relay.challenge = 'Basic realm="r"'
        relay.faults = [
            Fault("GET", 1, 401, {"WWW-Authenticate": 'Basic realm="r"'}),
            Fault("GET .*blobs", 5, 307, {"Location": target}),
        ]
        # A signed URL that is refused is asked for again.
        storage.faults = [Fault("GET", 1, 403), Fault("GET", 1, cut_after_bytes=1000)]
        client = connect(relay.host, login=Credential("me", "s3cret"))
        with caplog.at_level(logging.DEBUG):
            assert read_all(client) == DATA
        assert len(storage.seen) == 3
        assert not any("authorization" in seen.headers for seen in storage.seen)
        assert "authorization" in relay.seen[-1].headers
        storage.faults = [Fault("GET", 1000, 403)]
        relay.faults = [Fault("GET .*blobs", 1000, 307, {"Location": target})]
        with caplog.at_level(logging.DEBUG), pytest.raises(UnavailableError) as caught:
            read_all(client)
    assert "s3cret" not in caplog.text + str(caught.value)


@pytest.mark.usefixtures("no_second_requests")
def test_where_a_blob_was_found_is_remembered_while_it_holds(
    connect: Connect, registry: Registry, relay: FaultyRelay
) -> None:
    direct = connect(registry.host)
    push_blob(direct, DATA)
    repository = direct.name.partition("/")[2]
    with FaultyRelay(registry.host) as storage:
        target = f"http://{storage.host}/v2/{repository}/blobs/{DIGEST}?signature=s3cret"
        relay.faults = [Fault("GET .*blobs", 1000, 307, {"Location": target})]
        client = connect(relay.host)
        for start in range(0, 5000, 1000):
            found = client.file(DIGEST, SIZE).read(start, 1000)
            assert found == DATA[start : start + 1000]
        assert (relay.count("GET"), storage.count("GET")) == (1, 5)
        # The signed URL expires.
        storage.faults = [Fault("GET", 1, 403)]
        assert client.file(DIGEST, SIZE).read(0, 10) == DATA[:10]
        assert (relay.count("GET"), storage.count("GET")) == (2, 7)
        # The storage breaks off, and the remembered URL is requested again.
        storage.faults = [Fault("GET", 1, cut_after_bytes=3)]
        assert client.file(DIGEST, SIZE).read(0, 10) == DATA[:10]


@pytest.mark.parametrize(
    "location", ["", "file:///etc/passwd", "ftp://x/y", "http://", "/v2/", "http://\x7f/"]
)
def test_redirects_to_nowhere_are_errors(
    through: RegistryClient, relay: FaultyRelay, location: str
) -> None:
    relay.faults = [Fault("GET", 1000, 302, {"Location": location})]
    with pytest.raises(BootseerError):
        through.manifest("v1")


def test_a_basic_login_that_is_wrong(connect: Connect, relay: FaultyRelay) -> None:
    relay.faults = [Fault("", 1000, 401, {"WWW-Authenticate": 'Basic realm="r"'})]
    for login in (None, Credential("me", "s3cret")):
        with pytest.raises(PermissionDeniedError, match="docker login") as caught:
            connect(relay.host, login=login).manifest("v1")
        assert "s3cret" not in str(caught.value)


def test_an_upload_is_tried_again(connect: Connect, registry: Registry, relay: FaultyRelay) -> None:
    relay.faults = [Fault("POST", 1, 503), Fault("PUT .*uploads", 1, 500), Fault("HEAD", 1, 502)]
    client = connect(relay.host)
    client.push_blob(DIGEST, DATA)
    assert client.blob(DIGEST, SIZE) == DATA


@pytest.mark.parametrize(
    ("status", "headers", "ask"),
    [
        (307, {"Location": "http://[::1"}, lambda client: client.manifest("v1")),
        (
            200,
            {"Link": '<http://[::1>; rel="next"'},
            lambda client: client.referrers(DIGEST, "a/b"),
        ),
        (
            206,
            {"Content-Range": f"bytes 0-{'9' * 5000}/{SIZE}"},
            lambda client: client.open(DIGEST, SIZE).read(1),
        ),
        (
            401,
            {"WWW-Authenticate": 'Bearer realm="http://[::1"'},
            lambda client: client.manifest("v1"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_headers_that_make_no_sense_are_errors_of_the_registry(
    connect: Connect,
    status: int,
    headers: dict[str, str],
    ask: Callable[[RegistryClient], object],
) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(status)
            for name, value in ({"Content-Length": "2"} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")

    server = serve(Handler)
    try:
        client = connect(f"127.0.0.1:{server.server_address[1]}", deadline_s=5)
        with pytest.raises((UnavailableError, CorruptError)):
            ask(client)
    finally:
        server.shutdown()
        server.server_close()
