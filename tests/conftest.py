"""Fixtures that several packages' tests use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hdfs.classpath import CannotAssembleError
from tests.hdfs.cluster import MiniHdfs


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """The URL of a local store that does not exist yet."""
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """A real HDFS of one NameNode and three DataNodes, shared by the whole session.

    A test works in a folder of its own (`hdfs_url`), and undoes what it does to the servers.
    """
    cluster = MiniHdfs(tmp_path_factory.mktemp("hdfs"))
    try:
        cluster.start()
    except CannotAssembleError as error:
        if os.environ.get("BOOTSEER_REQUIRE_HDFS"):
            raise
        pytest.skip(f"no HDFS here: {error}")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def hdfs_url(hdfs: MiniHdfs, tmp_path: Path) -> str:
    """A folder of the test's own on a real HDFS, which does not exist yet."""
    return f"{hdfs.url}/{tmp_path.parent.name}-{tmp_path.name}"
