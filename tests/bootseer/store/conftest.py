"""Backends and stores that the conformance suite runs on."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.registry.client import open_registry_client
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.registry.reference import parse_reference
from bootseer.store import Backend, Store, open_backend
from testbed.hdfs.cluster import MiniHdfs
from testbed.servers.azurite import azurite
from testbed.servers.registry import Registry, running_registry

LOCAL = pytest.param("local", id="local")
MEMORY = pytest.param("memory", id="memory")
LIMITED = pytest.param("limited", id="limited")
HDFS = pytest.param("hdfs", id="hdfs", marks=pytest.mark.hdfs)
OCI = pytest.param("oci", id="oci")
MOTO = pytest.param("moto", id="moto", marks=pytest.mark.moto)
RGW = pytest.param("rgw", id="rgw", marks=pytest.mark.rgw)
BUCKETS = (MOTO, RGW)
AZURE = pytest.param("azure", id="azure")
ALL = (LOCAL, MEMORY, LIMITED, HDFS, OCI, *BUCKETS, AZURE)


@pytest.fixture(scope="session")
def azure() -> Iterator[dict[str, str]]:
    """Yield the options of an emulator of Azure with the tests' container."""
    with azurite("conformance") as environment:
        yield environment


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Yield a real registry; each of its repositories is used by one test."""
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def push_image(registry: Registry) -> str:
    """Push a small image to a repository of its own; return HOST/REPOSITORY@DIGEST."""
    name = f"{registry.host}/store/r{secrets.token_hex(6)}"
    config = b"{}"
    with open_registry_client(parse_reference(name)) as client:
        client.push_blob(digest_of(config), config)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest_of(config),
                "size": len(config),
            },
            "layers": [],
        }
        data = json.dumps(manifest).encode()
        client.push_manifest("v1", MANIFEST_TYPE, data)
    return f"{name}@{digest_of(data)}"


@pytest.fixture(params=ALL)
def backend_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Yield the URL of a folder that does not exist yet, on each kind of backend."""
    unique = f"{tmp_path.name}-{secrets.token_hex(4)}"
    match request.param:
        case "memory":
            return f"memory://{unique}"
        case "limited":
            rates = f"node_bytes_per_s=2e9&stream_bytes_per_s=1e9&account={tmp_path}/account"
            return f"limit+{(tmp_path / 'root').as_uri()}?{rates}"
        case "hdfs":
            cluster: MiniHdfs = request.getfixturevalue("hdfs")
            # Several blocks per object, so that their borders are crossed.
            return f"{cluster.url}/{unique}?block_size_bytes=8388608"
        case "moto" | "rgw" | "azure":
            server: dict[str, str] = request.getfixturevalue(request.param)
            monkeypatch = request.getfixturevalue("monkeypatch")
            for name, value in server.items():
                monkeypatch.setenv(name, value)
            scheme = "az" if request.param == "azure" else "s3"
            return f"{scheme}://conformance/{unique}"
        case "oci":
            return f"oci://{push_image(request.getfixturevalue('registry'))}"
        case _:
            return (tmp_path / "root").as_uri()


@pytest.fixture
def backend(backend_url: str) -> Iterator[Backend]:
    """Yield an empty backend of each kind."""
    opened = open_backend(backend_url)
    yield opened
    opened.close()


@pytest.fixture
def store(backend: Backend) -> Store:
    """Return an empty store on each kind of backend."""
    return Store(backend)
