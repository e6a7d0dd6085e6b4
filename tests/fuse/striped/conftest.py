"""Fixtures of the tests of checkpoint trees, mounted and not."""

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.fuse.striped.fsspec_system import CheckpointFileSystem
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools import fsck
from bootseer.store import open_backend
from testbed.waiting import pause
from tests.fuse.striped.support.harness import storage_on
from tests.fuse.striped.support.mounting import BIG, checkpoints


@pytest.fixture(params=["file", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hdfs":
        return str(request.getfixturevalue("hdfs_url"))
    return (tmp_path / "stored").as_uri()


@pytest.fixture
def here(tmp_path: Path, mountpoint: Path, url: str) -> Iterator[Path]:
    """Mounted tree."""
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


@pytest.fixture
def storage(url: str) -> Iterator[StripedStorage]:
    """Tree of small units, on a local disk and on HDFS."""
    with storage_on(open_backend(url), memory_bytes=2**28) as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[StripedStorage]:
    with storage_on(tmp_path / "stored") as opened:
        yield opened


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes garbage count as old at once."""
    monkeypatch.setattr(fsck, "MIN_AGE_S", 0.0)
    return lambda: pause(0.02)


@pytest.fixture
def no_instances_stay() -> Iterator[None]:
    """Clear fsspec's cache of file systems, so that the next test gets new ones."""
    yield
    CheckpointFileSystem.clear_instance_cache()
    gc.collect()
