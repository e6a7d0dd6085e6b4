"""The backends and stores that the conformance suite runs on."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.store import Backend, Store, open_backend
from tests.hdfs.cluster import MiniHdfs

LOCAL = pytest.param("local", id="local")
MEMORY = pytest.param("memory", id="memory")
LIMITED = pytest.param("limited", id="limited")
HDFS = pytest.param("hdfs", id="hdfs", marks=pytest.mark.hdfs)
ALL = (LOCAL, MEMORY, LIMITED, HDFS)


@pytest.fixture(params=ALL)
def backend_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a folder that does not exist yet, on each kind of backend."""
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
        case _:
            return (tmp_path / "root").as_uri()


@pytest.fixture
def backend(backend_url: str) -> Iterator[Backend]:
    """A fresh backend of each kind."""
    opened = open_backend(backend_url)
    yield opened
    opened.close()


@pytest.fixture
def store(backend: Backend) -> Store:
    """A fresh store on each kind of backend."""
    return Store(backend)
