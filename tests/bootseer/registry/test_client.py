"""The client against a real registry: documents, blobs, uploads, lists."""

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.http import ranges
from bootseer.registry.client import RegistryClient, open_registry_client
from bootseer.registry.documents import INDEX_TYPE, MANIFEST_TYPE, digest_of, fallback_tag
from bootseer.registry.hosts import RegistryHost
from bootseer.registry.reference import parse_reference
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import Registry, free_port
from tests.bootseer.registry.conftest import Connect
from tests.bootseer.registry.pushing import manifest_of, push_blob


@pytest.fixture
def client(connect: Connect, registry: Registry) -> RegistryClient:
    return connect(registry.host)


def test_a_manifest_comes_back_by_tag_and_by_digest(client: RegistryClient) -> None:
    data = manifest_of(client, b"layer")
    assert client.push_manifest("v1", MANIFEST_TYPE, data) is False
    by_tag = client.manifest("v1")
    assert (by_tag.digest, by_tag.media_type, by_tag.data) == (digest_of(data), MANIFEST_TYPE, data)
    assert client.manifest(by_tag.digest) == by_tag
    assert client.resolve("v1") == by_tag.digest


def test_what_is_absent(client: RegistryClient, registry: Registry) -> None:
    for ask in (
        lambda: client.manifest("v1"),
        lambda: client.resolve("v1"),
        lambda: client.manifest(digest_of(b"")),
        lambda: client.blob(digest_of(b"x"), 10),
        lambda: client.open(digest_of(b"x"), 10).read(1),
    ):
        with pytest.raises(NotFoundError, match=registry.host):
            ask()


def test_small_blobs_are_bounded(client: RegistryClient) -> None:
    data = os.urandom(1000)
    digest = push_blob(client, data)["digest"]
    assert client.blob(digest, 1000) == data
    with pytest.raises(CorruptError, match="more than 999"):
        client.blob(digest, 999)


def test_a_blob_is_pushed_once(connect: Connect, relay: FaultyRelay, tmp_path: Path) -> None:
    client = connect(relay.host)
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(300_000))
    digest = digest_of(path.read_bytes())
    client.push_blob(digest, path)
    client.push_blob(digest, path)
    assert relay.count("PUT .*blobs/uploads") == 1
    assert client.blob(digest, 300_000) == path.read_bytes()


def test_a_registry_refuses_a_blob_of_another_digest(client: RegistryClient) -> None:
    with pytest.raises(InvalidInputError, match="DIGEST_INVALID"):
        client.push_blob(digest_of(b"one"), b"two")


def test_ranges_of_a_blob(client: RegistryClient) -> None:
    data = os.urandom(200_000)
    digest = push_blob(client, data)["digest"]
    for start, end in ((0, 1), (0, 200_000), (199_999, 200_000), (5, 100_005), (7, 7)):
        assert client.file(digest, len(data)).read(start, end - start) == data[start:end]
    assert client.file(digest, len(data)).read(199_990, 100_010) == data[199_990:]


def test_a_blob_of_another_size_is_refused(client: RegistryClient) -> None:
    digest = push_blob(client, b"x" * 1000)["digest"]
    for size_bytes in (999, 1001):
        with client.open(digest, size_bytes) as file, pytest.raises(CorruptError):
            file.read()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every connection as slow, so that blobs are read in many small parts."""
    monkeypatch.setattr(ranges, "PART_BYTES", 10_000)
    monkeypatch.setattr(ranges, "FAST_BYTES_PER_S", 1e15)
    monkeypatch.setattr(ranges, "FIRST_BYTES", 20_000)
    monkeypatch.setattr(ranges, "LARGE_BYTES", 20_000)


@pytest.mark.parametrize("size_bytes", [0, 1, 19_999, 20_000, 20_001, 30_000, 123_457])
@pytest.mark.usefixtures("small_parts")
def test_a_blob_over_a_slow_connection_is_read_in_parts(
    connect: Connect, relay: FaultyRelay, size_bytes: int
) -> None:
    client = connect(relay.host)
    data = os.urandom(size_bytes)
    digest = push_blob(client, data)["digest"]
    for piece in (1_000, 7_919, 1 << 20):
        with client.open(digest, size_bytes) as file:
            found = b"".join(iter(partial(file.read, piece), b""))
            assert file.read(piece) == b""
        assert found == data
    assert relay.count("GET .*blobs") == 3 * (
        (size_bytes > 0) + max(0, -(-(size_bytes - 20_000) // 10_000))
    )


def test_a_blob_over_a_fast_connection_is_read_through_that(
    connect: Connect, relay: FaultyRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "FAST_BYTES_PER_S", 0.0)
    client = connect(relay.host)
    data = os.urandom(1 << 20) * 34
    digest = push_blob(client, data)["digest"]
    with client.open(digest, len(data)) as file:
        sha = hashlib.sha256()
        while piece := file.read(1 << 20):
            sha.update(piece)
    assert f"sha256:{sha.hexdigest()}" == digest
    assert relay.count("GET .*blobs") == 1


@pytest.mark.usefixtures("small_parts")
def test_closing_in_the_middle_ends_the_threads(client: RegistryClient) -> None:
    data = os.urandom(200_000)
    digest = push_blob(client, data)["digest"]
    with client.open(digest, len(data)) as file:
        for _ in range(3):
            file.read(20_000)
    threads = [t for t in threading.enumerate() if t.name.startswith("blob-part")]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_many_threads_share_a_client(client: RegistryClient) -> None:
    data = os.urandom(100_000)
    digest = push_blob(client, data)["digest"]

    def read(number: int) -> bool:
        start = number * 1000
        return client.file(digest, len(data)).read(start, 900) == data[start:][:900]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(100)))


def test_referrers_of_an_old_registry_are_under_a_tag(client: RegistryClient) -> None:
    subject = digest_of(manifest_of(client))
    assert client.referrers(subject, "a/b") == []
    entries = [
        {"mediaType": MANIFEST_TYPE, "digest": digest_of(b"1"), "size": 1, "artifactType": "a/b"},
        {"mediaType": MANIFEST_TYPE, "digest": digest_of(b"2"), "size": 1, "artifactType": "c/d"},
    ]
    # An index may only refer to manifests that exist.
    for entry in entries:
        data = manifest_of(client, artifactType=entry["artifactType"])
        entry["digest"], entry["size"] = digest_of(data), len(data)
        client.push_manifest(str(entry["digest"]), MANIFEST_TYPE, data)
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    client.push_manifest(fallback_tag(subject), INDEX_TYPE, json.dumps(index).encode())
    (found,) = client.referrers(subject, "a/b")
    assert found["digest"] == entries[0]["digest"]


def test_deleting_a_manifest(client: RegistryClient) -> None:
    data = manifest_of(client)
    client.push_manifest("v1", MANIFEST_TYPE, data)
    client.delete_manifest(digest_of(data))
    client.delete_manifest(digest_of(data))
    with pytest.raises(NotFoundError):
        client.manifest("v1")


def test_a_registry_that_is_not_there(connect: Connect) -> None:
    host = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=f"{host}: Connection refused"):
        connect(host, deadline_s=1).manifest("v1")


def test_a_mirror_that_may_not_push(connect: Connect, registry: Registry) -> None:
    host = RegistryHost(registry.host, f"{registry.url}/v2", capabilities=frozenset(("pull",)))
    with RegistryClient("a/b", [host]) as client, pytest.raises(UnsupportedError, match="push"):
        client.push_blob(digest_of(b""), b"")


def test_the_hosts_file_is_obeyed(
    registry: Registry, client: RegistryClient, repository: str, tmp_path: Path
) -> None:
    client.push_manifest("v1", MANIFEST_TYPE, manifest_of(client))
    (tmp_path / "some.registry").mkdir()
    (tmp_path / "some.registry" / "hosts.toml").write_text(f'server = "{registry.url}"')
    reference = parse_reference(f"some.registry/{repository}:v1")
    with open_registry_client(reference, hosts_dir=tmp_path) as named:
        assert named.manifest("v1") == client.manifest("v1")
