"""Fixtures for tests that mount FUSE file systems."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.mounts import fuse_mount
from testbed.needs import require


@pytest.fixture(scope="session", autouse=True)
def _no_stale_mounts() -> None:
    """Clear what a killed earlier run left behind."""
    fuse_mount.sweep_stale()


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty directory to mount on; unmounted in the end, whatever happened."""
    require("fuse")
    path = tmp_path / "mnt"
    path.mkdir()
    try:
        yield path
    finally:
        fuse_mount.clear_mount(path)
        fuse_mount.sweep(tmp_path)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """A directory to mirror."""
    path = tmp_path / "backing"
    path.mkdir()
    return path
