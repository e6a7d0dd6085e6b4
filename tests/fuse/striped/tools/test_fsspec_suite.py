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
        # In memory if possible: 150 tests make many small files durable.
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as path:
            yield path


class TestCopy(_Suite, suite.AbstractCopyTests):  # type: ignore[misc]
    pass


class TestGet(_Suite, suite.AbstractGetTests):  # type: ignore[misc]
    pass


class TestPut(_Suite, suite.AbstractPutTests):  # type: ignore[misc]
    pass


class TestOpen(_Suite, suite.AbstractOpenTests):  # type: ignore[misc]
    pass


class TestPipe(_Suite, suite.AbstractPipeTests):  # type: ignore[misc]
    pass


@pytest.mark.hdfs
class TestHdfs(
    _Suite,
    suite.AbstractCopyTests,  # type: ignore[misc]
    suite.AbstractGetTests,  # type: ignore[misc]
    suite.AbstractPutTests,  # type: ignore[misc]
    suite.AbstractOpenTests,  # type: ignore[misc]
    suite.AbstractPipeTests,  # type: ignore[misc]
):
    """The suite on a real HDFS, without the 96 patterns, which take two minutes there.

    The patterns are expanded by the same code.
    """

    test_copy_glob_edge_cases = test_get_glob_edge_cases = test_put_glob_edge_cases = None

    @pytest.fixture
    def fs(self, hdfs_url: str) -> CheckpointFileSystem:
        fs: CheckpointFileSystem = fsspec.url_to_fs(f"bootseer::{hdfs_url}", **OPTIONS)[0]
        return fs

    @pytest.fixture
    def fs_path(self, hdfs_url: str) -> str:
        return "/" + hdfs_url.split("/", 3)[3]
