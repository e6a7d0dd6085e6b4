"""The fsspec interface in fsspec's own suite."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import fsspec.tests.abstract as suite
import pytest

from bootseer.fuse.striped.fsspec_system import CheckpointFileSystem
from tests.fuse.striped.support.fsspec_access import OPTIONS

pytestmark = pytest.mark.usefixtures("no_instances_stay")


class _Suite(suite.AbstractFixtures):  # type: ignore[misc] # fsspec has no types
    @pytest.fixture
    def fs(self) -> CheckpointFileSystem:
        return CheckpointFileSystem("file", **OPTIONS)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> Iterator[str]:
        # In memory where there is such a place: 150 tests of many small files, each made durable.
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as path:
            yield path


class TestCopy(_Suite, suite.AbstractCopyTests):  # type: ignore[misc]
    """cp within the file system."""


class TestGet(_Suite, suite.AbstractGetTests):  # type: ignore[misc]
    """From the file system to local files."""


class TestPut(_Suite, suite.AbstractPutTests):  # type: ignore[misc]
    """From local files into the file system."""


class TestOpen(_Suite, suite.AbstractOpenTests):  # type: ignore[misc]
    """Exclusive creation."""


class TestPipe(_Suite, suite.AbstractPipeTests):  # type: ignore[misc]
    """Whole contents."""


@pytest.mark.hdfs
class TestHdfs(
    _Suite,
    suite.AbstractCopyTests,  # type: ignore[misc]
    suite.AbstractGetTests,  # type: ignore[misc]
    suite.AbstractPutTests,  # type: ignore[misc]
    suite.AbstractOpenTests,  # type: ignore[misc]
    suite.AbstractPipeTests,  # type: ignore[misc]
):
    """The suite on a real HDFS, but for the 96 patterns: they are expanded by the same code, and
    take two minutes there."""

    test_copy_glob_edge_cases = test_get_glob_edge_cases = test_put_glob_edge_cases = None

    @pytest.fixture
    def fs(self, hdfs_url: str) -> CheckpointFileSystem:
        fs: CheckpointFileSystem = fsspec.url_to_fs(f"bootseer::{hdfs_url}", **OPTIONS)[0]
        return fs

    @pytest.fixture
    def fs_path(self, hdfs_url: str) -> str:
        return "/" + hdfs_url.split("/", 3)[3]
