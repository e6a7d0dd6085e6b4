"""Stores beside an image: lists, their writers, and registries that differ.

The other files here check the promises of every backend.
"""

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    UnavailableError,
)
from bootseer.registry.client import RegistryClient, open_registry_client
from bootseer.registry.documents import INDEX_TYPE, MANIFEST_TYPE, digest_of, this_architecture
from bootseer.registry.reference import parse_reference
from bootseer.store import Store, oci, open_store
from bootseer.store.oci import ARTIFACT_TYPE, decode_object, encode_object, objects_by_key
from testbed.servers.faulty_relay import Fault, FaultyRelay, ReferrersRelay
from testbed.servers.registry import Registry
from testbed.waiting import TIMEOUT_S, wait_for
from tests.bootseer.store.conftest import push_image

SUBJECT = {"mediaType": MANIFEST_TYPE, "digest": digest_of(b"image"), "size": 5}


@pytest.fixture
def image(registry: Registry) -> str:
    """Push an image; return HOST/REPOSITORY@DIGEST."""
    return push_image(registry)


@pytest.fixture
def client(image: str) -> Iterator[RegistryClient]:
    with open_registry_client(parse_reference(image)) as opened:
        yield opened


def beside(image: str, relay: FaultyRelay | None = None) -> Store:
    host, _, name = image.partition("/")
    return open_store(f"oci://{relay.host if relay else host}/{name}", deadline_s=20)


def image_digest(image: str) -> str:
    return image.partition("@")[2]


def test_another_node_finds_what_was_published(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with beside(image) as first, beside(image) as second:
        assert not second.exists("images/x.json")
        assert first.publish("images/x.json", b"one")
        monkeypatch.setattr(oci, "FRESH_S", 0.0)
        assert second.read("images/x.json") == b"one"
        assert [info.path for info in second.list()] == ["images/x.json"]


def test_a_replaced_object_is_seen_after_a_while(
    image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "FRESH_S", 3600.0)
    with beside(image) as first, beside(image) as second:
        first.publish("hot/x.json", b"one")
        assert second.read("hot/x.json") == b"one"
        first.publish("hot/x.json", b"two", replace=True)
        assert second.read("hot/x.json") == b"one"
        monkeypatch.setattr(oci, "FRESH_S", 0.0)
        assert second.read("hot/x.json") == b"two"


def test_opening_takes_a_handful_of_requests(
    image: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "FRESH_S", 3600.0)
    with beside(image) as store:
        for number in range(25):
            store.publish(f"layers/{number}", b"%d" % number)
    with FaultyRelay(registry.host) as relay, beside(image, relay) as store:
        assert len(list(store.list("layers/"))) == 25
        assert relay.count("") == 2
        assert store.read("layers/7") == b"7"
        assert not store.exists("layers/absent")
        assert relay.count("") == 3


def test_a_layers_blob_is_not_looked_up_again(
    image: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "FRESH_S", 0.0)
    data = b"x" * 10_000
    key = f"blobs/{digest_of(data).replace(':', '/')}"
    with FaultyRelay(registry.host) as relay, beside(image, relay) as store:
        store.publish(key, data)
        relay.seen.clear()
        assert b"".join(store.read(key, n, 1000) for n in range(0, 10_000, 1000)) == data
        assert relay.count("") == relay.count("GET .*blobs") == 10


def test_with_the_referrers_api(
    image: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReferrersRelay(registry.host) as relay, beside(image, relay) as store:
        for number in range(5):
            assert store.publish(f"a/{number}", b"%d" % number)
        assert not store.publish("a/0", b"again")
        assert store.publish("a/0", b"replaced", replace=True)
        store.delete("a/1")
        assert relay.count("manifests/sha256-") <= 3  # where a store deletes, it looks there too
        with beside(image, relay) as other:
            assert [info.path for info in other.list("a/")] == ["a/0", "a/2", "a/3", "a/4"]
            assert other.read("a/0") == b"replaced"
            lease = other.lease("leases/x", ttl_s=30, owner="me")
            assert lease is not None
            assert store.lease("leases/x", ttl_s=30, owner="you") is None
            lease.release()
        monkeypatch.setattr(oci, "FRESH_S", 0.0)
        again = store.lease("leases/x", ttl_s=30, owner="you")
        assert again is not None
        again.release()


def test_what_others_have_beside_the_image_stays(image: str, client: RegistryClient) -> None:
    client.push_blob(digest_of(b"{}"), b"{}")
    config = {"mediaType": "application/x", "digest": digest_of(b"{}"), "size": 2}
    signature = json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": []}
    ).encode()
    client.push_manifest(digest_of(signature), MANIFEST_TYPE, signature)
    foreign = {
        "mediaType": MANIFEST_TYPE,
        "digest": digest_of(signature),
        "size": len(signature),
        "artifactType": "application/vnd.signature",
        "x-field": [1],
    }
    client.tag_referrers(image_digest(image), [foreign])
    with beside(image) as store:
        store.publish("a", b"1")
        store.delete("a")
        assert list(store.list()) == []
    assert client.tagged_referrers(image_digest(image)) == [foreign]


def test_a_list_that_somebody_wrote_over_is_completed(image: str, client: RegistryClient) -> None:
    with beside(image) as store:
        store.publish("a", b"1")
        store.publish("b", b"2")
        # Another writer had read the list before the first of them.
        client.tag_referrers(image_digest(image), [])
        store.publish("c", b"3")
        assert len(client.tagged_referrers(image_digest(image))) == 3
        client.tag_referrers(image_digest(image), [])
    # At the end it is looked at once more.
    assert len(client.tagged_referrers(image_digest(image))) == 3
    with beside(image) as store:
        assert [store.read(key) for key in "abc"] == [b"1", b"2", b"3"]


def test_many_nodes_publish_at_once(image: str) -> None:
    stores = [beside(image) for _ in range(4)]
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            done = [
                pool.submit(store.publish, f"k/{node}-{number}", b"%d" % node)
                for number in range(3)
                for node, store in enumerate(stores)
            ]
            assert all(future.result(60) for future in done)
    finally:
        for store in stores:
            store.close()
    with beside(image) as store:
        found = {info.path for info in store.list("k/")}
    assert found == {f"k/{node}-{number}" for node in range(4) for number in range(3)}


def test_one_of_several_nodes_creates_a_key(image: str) -> None:
    """At least one node creates the key, and readers get the bytes of one that did.

    Without the referrers API no more is promised.
    """
    stores = [beside(image) for _ in range(4)]
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            won = list(
                pool.map(
                    lambda node: stores[node].publish("key", b"%d" % node), range(4), timeout=60
                )
            )
        assert any(won)
    finally:
        for store in stores:
            store.close()
    with beside(image) as store:
        assert won[int(store.read("key"))]


def test_a_registry_that_does_not_delete(image: str, registry: Registry) -> None:
    with FaultyRelay(registry.host) as relay, beside(image, relay) as store:
        relay.faults = [Fault("DELETE", 1000, 405)]
        store.publish("a", b"1")
        store.publish("a", b"2", replace=True)
        assert store.read("a") == b"2"
        store.delete("a")
        assert not store.exists("a")


def test_a_registry_that_is_down(image: str, registry: Registry) -> None:
    with FaultyRelay(registry.host) as relay, beside(image, relay) as store:
        store.publish("a", b"1")
        relay.faults = [Fault("", 10_000, 503)]
        with pytest.raises(UnavailableError, match="503"):
            store.read("a")


def test_an_image_that_is_not_there(registry: Registry) -> None:
    with beside(f"{registry.host}/absent/image:v1") as store:
        with pytest.raises(InvalidInputError, match="no image"):
            store.exists("a")
        with pytest.raises(InvalidInputError, match="no image"):
            store.publish("a", b"1")


@pytest.mark.parametrize("url", ["oci://", "oci://A B", "oci://host/x@sha256:1", "oci:///x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InvalidInputError, match="image"):
        open_store(url)


def test_a_tag_of_several_platforms_means_this_machines(image: str, client: RegistryClient) -> None:
    own = client.manifest(image_digest(image))
    config = {"mediaType": "application/x", "digest": digest_of(b"{}"), "size": 2}
    other = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config}).encode()
    client.push_manifest(digest_of(other), MANIFEST_TYPE, other)
    entries = [
        {
            "mediaType": MANIFEST_TYPE,
            "digest": digest,
            "size": size,
            "platform": {"os": "linux", "architecture": architecture},
        }
        for digest, size, architecture in (
            (digest_of(other), len(other), "mips"),
            (own.digest, len(own.data), this_architecture()),
        )
    ]
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    client.push_manifest("all", INDEX_TYPE, json.dumps(index).encode())
    with beside(image) as store:
        store.publish("a", b"1")
    with beside(image.replace(f"@{own.digest}", ":all")) as store:
        assert store.read("a") == b"1"


def test_a_lone_image_of_an_index_needs_no_platform(image: str, client: RegistryClient) -> None:
    """Sources of images have the same rule."""
    own = client.manifest(image_digest(image))
    entry = {"mediaType": MANIFEST_TYPE, "digest": own.digest, "size": len(own.data)}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    client.push_manifest("lone", INDEX_TYPE, json.dumps(index).encode())
    with beside(image) as store:
        store.publish("a", b"1")
    with beside(image.replace(f"@{own.digest}", ":lone")) as store:
        assert store.read("a") == b"1"


def test_a_file_becomes_no_folder_beside_an_image(image: str) -> None:
    with beside(image) as store:
        store.publish("a", b"1")
        with pytest.raises(InvalidInputError, match="no folder"):
            store.publish("a/b", b"2")
        with pytest.raises(AlreadyExistsError):
            store.backend.create("a")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(_json)
def test_any_entry_of_a_list_is_read_or_passed_over(entry: Any) -> None:
    assert objects_by_key([entry]) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", "../up"),
        ("key", "/abs"),
        ("key", ""),
        ("key", 7),
        ("key", "a\0"),
        ("digest", "sha256:0"),
        ("digest", "../../x"),
        ("size", "-1"),
        ("size", "9" * 20),
        ("size", "1e3"),
        ("written_ns", "soon"),
        ("written_ns", None),
    ],
)
def test_an_entry_with_a_wrong_field_is_no_object(name: str, value: object) -> None:
    _, descriptor = encode_object("a/b", digest_of(b"x"), 1, 10**18, SUBJECT)
    assert decode_object(descriptor) is not None
    descriptor["annotations"][f"org.bootseer.{name}"] = value
    assert decode_object(descriptor) is None


@pytest.mark.parametrize(
    ("written", "order"),
    [
        # (when, whether it replaces): the last counts.
        ([(20, False), (30, False), (10, False)], [30, 20, 10]),
        ([(20, True), (30, True), (10, True)], [10, 20, 30]),
        ([(40, False), (20, True), (30, False)], [40, 30, 20]),
    ],
)
def test_which_object_of_a_key_counts(written: list[tuple[int, bool]], order: list[int]) -> None:
    entries = [
        encode_object("a", digest_of(b"x"), 1, when, SUBJECT, replaces=replaces)[1]
        for when, replaces in written
    ]
    assert [o.written_ns for o in objects_by_key(entries)["a"]] == order


def test_a_list_that_names_what_is_gone_is_mended(image: str, client: RegistryClient) -> None:
    with beside(image) as store:
        store.publish("a", b"1")
        entries = client.tagged_referrers(image_digest(image))
        store.delete("a")
    # A registry does not take such a list; one becomes so by what is deleted.
    with pytest.raises(InvalidInputError, match="MANIFEST"):
        client.tag_referrers(image_digest(image), entries)
    with beside(image) as store:
        store.publish("b", b"2")
        (entry,) = client.tagged_referrers(image_digest(image))
        client.delete_manifest(entry["digest"])
        assert store.publish("c", b"3")
        assert [info.path for info in store.list()] == ["c"]


def test_the_manifest_of_an_object_is_as_documented() -> None:
    data, descriptor = encode_object("a/b", digest_of(b"x"), 1, 1_700_000_000_000_000_000, SUBJECT)
    assert descriptor["digest"] == digest_of(data)
    assert json.loads(data) == {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {
            "mediaType": "application/vnd.oci.empty.v1+json",
            "digest": digest_of(b"{}"),
            "size": 2,
        },
        "layers": [
            {
                "mediaType": "application/vnd.bootseer.object.v1",
                "digest": digest_of(b"x"),
                "size": 1,
            }
        ],
        "subject": SUBJECT,
        "annotations": {
            "org.bootseer.key": "a/b",
            "org.bootseer.digest": digest_of(b"x"),
            "org.bootseer.size": "1",
            "org.bootseer.written_ns": "1700000000000000000",
            "org.opencontainers.image.created": "2023-11-14T22:13:20Z",
        },
    }


def test_who_looks_does_not_wait_for_a_writer(
    image: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "FRESH_S", 0.0)
    _, _, name = image.partition("/")
    with FaultyRelay(registry.host) as relay:
        store = open_store(f"oci://{relay.host}/{name}", deadline_s=240)
        store.publish("here", b"x")
        relay.faults = [Fault("PUT .*manifests", 1, hang_s=600)]
        failed: list[BootseerError] = []

        def write() -> None:
            try:
                store.publish("slow", b"y")
            except BootseerError as error:
                failed.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        wait_for(lambda: not relay.faults[0].times, "the writer's request")
        found: list[object] = []

        def look() -> None:
            found.extend([store.read("here"), store.exists("absent"), len(list(store.list()))])

        threading.Thread(target=look, daemon=True).start()
        wait_for(lambda: len(found) == 3, "a look beside a writer")
        assert found == [b"x", False, 1]
        assert not failed
        assert writer.is_alive()
    # Its server has gone: it ends, in one way or the other.
    writer.join(TIMEOUT_S)
    assert not writer.is_alive()
