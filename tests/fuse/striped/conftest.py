"""Fixtures of the tests that mount a checkpoint tree."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.striped.mounting import BIG, checkpoints


@pytest.fixture(params=["file", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hdfs":
        return str(request.getfixturevalue("hdfs_url"))
    return (tmp_path / "stored").as_uri()


@pytest.fixture
def here(tmp_path: Path, mountpoint: Path, url: str) -> Iterator[Path]:
    """A mounted tree."""
    with checkpoints(tmp_path, mountpoint, url):
        yield mountpoint


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big"
    path.write_bytes(random.Random(7).randbytes(BIG))
    return path


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    return (tmp_path / "stored").as_uri()
