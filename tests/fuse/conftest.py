"""Fixtures for tests that mount FUSE file systems."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.mounts import fuse_mount
from testbed.mounts.sweeping import sweep
from testbed.needs import require


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """Empty directory to mount on; unmounted at the end in any case."""
    require("fuse")
    path = tmp_path / "mnt"
    path.mkdir()
    try:
        yield path
    finally:
        fuse_mount.clear_mount(path)
        sweep(tmp_path)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """Directory to mirror."""
    path = tmp_path / "backing"
    path.mkdir()
    return path
