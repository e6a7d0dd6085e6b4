"""Images in a real registry are packed like the layout that was pushed."""

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnknownFormatError,
    UnsupportedError,
)
from bootseer.prefetch.index.catalogue import check_reference, is_source
from bootseer.prefetch.sources import ImageSource, open_source
from bootseer.prefetch.sources.registry import store_name
from bootseer.registry.client import RegistryClient, open_registry_client
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.registry.reference import parse_reference
from testbed.images.building import (
    INDEX_TYPE,
    NASTY,
    LayoutBuilder,
    Member,
    run_tool,
    tar_of,
    write_layout,
)
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import Registry
from tests.prefetch.sources.packed import packed_digests

RUN = {"Env": ["A=1"], "Entrypoint": ["/bin/sh", "-c"], "WorkingDir": "/w", "User": "9"}


@pytest.fixture(autouse=True)
def _without_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-logins"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)


def name() -> str:
    return f"tests/i{secrets.token_hex(6)}"


def opened(where: str, tmp_path: Path) -> ImageSource:
    return open_source(
        f"registry://{where}",
        tmp_path / "work",
        registry_hosts_dir=tmp_path / "hosts",
        deadline_s=20,
    )


def client_of(where: str, tmp_path: Path) -> RegistryClient:
    return open_registry_client(parse_reference(where), hosts_dir=tmp_path)


@pytest.mark.parametrize("compression", ["none", "gzip", "members", "zstd"])
def test_an_image(registry: Registry, tmp_path: Path, compression: str) -> None:
    layout = write_layout(tmp_path / "l", NASTY, compression=compression, tag="v1", run=RUN)
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1")
    pushed = opened(where, tmp_path)
    original = open_source(f"oci:{layout.directory}:v1", tmp_path)
    assert (pushed.reference, pushed.identity) == (where, original.identity)
    assert pushed.config == original.config
    assert pushed.manifest_digest == layout.manifests[0]["digest"]
    assert [layer.digest for layer in pushed.layers] == [layer.digest for layer in original.layers]
    by_digest = opened(f"{where.rpartition(':')[0]}@{pushed.manifest_digest}", tmp_path)
    assert packed_digests(pushed) == packed_digests(original) == packed_digests(by_digest)


def test_an_image_in_dockers_format(registry: Registry, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l", NASTY, compression="gzip", tag="v1", run=RUN)
    where = f"{registry.host}/{name()}:v1"
    run_tool(
        *("skopeo", "--insecure-policy", "copy", "--quiet", "--format", "v2s2"),
        *("--dest-tls-verify=false", f"oci:{layout.directory}:v1", f"docker://{where}"),
    )
    with client_of(where, tmp_path) as client:
        assert "docker" in client.manifest("v1").media_type
    assert packed_digests(opened(where, tmp_path)) == packed_digests(
        open_source(f"oci:{layout.directory}:v1", tmp_path)
    )


def pushed_index(registry: Registry, tmp_path: Path, *platforms: dict[str, str]) -> tuple[str, Any]:
    """Push an index with one image for each platform, whose only file names the platform."""
    layout = LayoutBuilder(tmp_path / "platforms")
    entries = []
    for platform in platforms:
        tar = tar_of([Member("which", data=json.dumps(platform).encode())])
        descriptor = layout.add_image([tar], listed=False, tag=None)
        entries.append({**descriptor, "platform": platform})
    index = layout.add_document({"schemaVersion": 2, "manifests": entries}, INDEX_TYPE)
    index["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    layout.manifests.append(index)
    layout.write_index()
    return registry.push_layout(layout.directory, "v1", f"{name()}:v1"), entries


@pytest.mark.parametrize(
    ("machine", "chosen"), [("x86_64", 1), ("aarch64", 3), ("armv7l", 5), ("s390x", None)]
)
def test_this_machines_platform_is_chosen(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    chosen: int | None,
) -> None:
    where, entries = pushed_index(
        registry,
        tmp_path,
        {"os": "linux", "architecture": "amd64", "variant": "v3"},
        {"os": "linux", "architecture": "amd64"},
        {"os": "windows", "architecture": "amd64"},
        {"os": "linux", "architecture": "arm64", "variant": "v8"},
        {"os": "linux", "architecture": "arm", "variant": "v6"},
        {"os": "linux", "architecture": "arm", "variant": "v7"},
    )
    monkeypatch.setattr("platform.machine", lambda: machine)
    if chosen is None:
        with pytest.raises(NotFoundError, match="linux/s390x"):
            opened(where, tmp_path)
        return
    with opened(where, tmp_path) as source:
        assert source.manifest_digest == entries[chosen]["digest"]


def push_document(registry: Registry, tmp_path: Path, document: object, media_type: str) -> str:
    where = f"{registry.host}/{name()}"
    with client_of(where, tmp_path) as client:
        client.push_blob(digest_of(b"{}"), b"{}")
        client.push_manifest("v1", media_type, json.dumps(document).encode())
    return f"{where}:v1"


EMPTY = {"digest": digest_of(b"{}"), "size": 2}


def test_what_is_no_container_image(registry: Registry, tmp_path: Path) -> None:
    config = {**EMPTY, "mediaType": "application/vnd.cncf.helm.config.v1+json"}
    chart = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": []}
    where = push_document(registry, tmp_path, chart, MANIFEST_TYPE)
    with pytest.raises(InvalidInputError, match=r"artifact \(application/vnd\.cncf\.helm"):
        opened(where, tmp_path)


@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    ],
)
def test_layers_that_may_not_be_distributed(
    registry: Registry, relay: FaultyRelay, tmp_path: Path, media_type: str
) -> None:
    """Not every registry accepts them, so a relay answers."""
    config = {**EMPTY, "mediaType": "application/vnd.oci.image.config.v1+json"}
    layer = {**EMPTY, "mediaType": media_type, "urls": ["https://example.com/x"]}
    image = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": [layer]}
    relay.faults = [Fault("GET .*manifests", 1, 200, body=json.dumps(image).encode())]
    with pytest.raises(UnsupportedError, match="may not be distributed"):
        opened(f"{relay.host}/{name()}", tmp_path)


def test_the_format_of_2015(registry: Registry, relay: FaultyRelay, tmp_path: Path) -> None:
    """No program pushes it any more: a relay marks the registry's answer as one."""
    layout = write_layout(tmp_path / "l", NASTY, tag="v1")
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1")
    old = json.dumps({"schemaVersion": 1, "fsLayers": []}).encode()
    relay.faults = [Fault("GET .*manifests", 1, 200, body=old)]
    with pytest.raises(UnknownFormatError, match="schema version 1"):
        opened(f"{relay.host}/{where.partition('/')[2]}", tmp_path)


def test_indexes_that_contain_themselves_without_end(registry: Registry, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l", NASTY, tag=None)
    where = f"{registry.host}/{name()}"
    with client_of(where, tmp_path) as client:
        for path in sorted(layout.blob_path("sha256:").iterdir()):
            client.push_blob(f"sha256:{path.name}", path)
        descriptor = layout.manifests[0]
        for _ in range(6):
            data = layout.blob_path(descriptor["digest"]).read_bytes()
            client.push_manifest(descriptor["digest"], descriptor["mediaType"], data)
            document = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [descriptor]}
            descriptor = layout.add_document(document, INDEX_TYPE)
        data = layout.blob_path(descriptor["digest"]).read_bytes()
        client.push_manifest(descriptor["digest"], descriptor["mediaType"], data)
    with pytest.raises(CorruptError, match="nested too deeply"):
        opened(f"{where}@{descriptor['digest']}", tmp_path)


def test_a_layer_survives_what_networks_do(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "l", NASTY, compression="gzip", tag="v1")
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1").partition("/")[2]
    source = opened(f"{relay.host}/{where}", tmp_path)
    relay.faults = [
        Fault("GET .*blobs", 1, cut_after_bytes=100),
        Fault("GET .*blobs", 1, 503),
        Fault("GET .*blobs", 1, truncate_bytes=100),
    ]
    assert packed_digests(source) == packed_digests(
        open_source(f"oci:{layout.directory}:v1", tmp_path)
    )


def test_a_layer_with_a_flipped_bit_is_refused(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "l", NASTY, tag="v1")
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1").partition("/")[2]
    source = opened(f"{relay.host}/{where}", tmp_path)
    relay.faults = [Fault("GET .*blobs", 1, flip_at=600)]
    with pytest.raises(CorruptError):
        packed_digests(source)


def test_a_registry_that_dies_in_the_middle(
    registry: Registry, relay: FaultyRelay, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "l", NASTY, tag="v1")
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1").partition("/")[2]
    source = opened(f"{relay.host}/{where}", tmp_path)
    relay.faults = [Fault("GET .*blobs", 1000, cut_after_bytes=100)]
    with pytest.raises(UnavailableError):
        packed_digests(source)


def test_a_mirror_serves_the_image(registry: Registry, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l", NASTY, compression="gzip", tag="v1")
    where = registry.push_layout(layout.directory, "v1", f"{name()}:v1").partition("/")[2]
    (tmp_path / "hosts/upstream.invalid").mkdir(parents=True)
    (tmp_path / "hosts/upstream.invalid/hosts.toml").write_text(f'[host."{registry.url}"]')
    assert len(packed_digests(opened(f"upstream.invalid/{where}", tmp_path))) == len(NASTY)


@pytest.mark.parametrize("text", ["registry://", "registry://A B", "registry://x@sha256:1"])
def test_names_that_are_none(text: str, tmp_path: Path) -> None:
    assert is_source(text)
    with pytest.raises(InvalidInputError, match="image"):
        open_source(text, tmp_path)


def test_an_image_that_is_not_there(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"MANIFEST_UNKNOWN.*; check the image's name and tag"):
        opened(f"{registry.host}/{name()}:v1", tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python:3.12", "docker.io/library/python:3.12"),
        ("[::1]:5000/x", "0::1:5000/x:latest"),
        ("[2001:db8::1]/x:v1", "2001:db8::1/x:v1"),
    ],
)
def test_what_an_image_is_called_in_a_store(text: str, name: str) -> None:
    assert check_reference(store_name(parse_reference(text))) == name
