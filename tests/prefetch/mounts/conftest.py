"""Fixtures for a node that mounts an image of four files for the first time."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootseer.prefetch.index.records import ImageRecord
from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import (
    checksums_in_child,
    drop_cache,
    index,
    settings_at,
)
from testbed.mounts.sweeping import sweep
from testbed.needs import require

BIG_BYTES = 8 * 2**20
HOT = ("hot-1", "hot-2")


@dataclass
class IndexedDirectory:
    """Indexed directory, and a node that has not seen it."""

    settings: Settings
    source: Path
    record: ImageRecord
    base: Path

    def stored(self, key: str) -> Path:
        path = self.base / "store" / key
        path.chmod(0o600)
        return path


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[IndexedDirectory]:
    require("fuse")
    source = tmp_path / "source"
    source.mkdir()
    for name, size in (("big", BIG_BYTES), ("hot-1", 700_000), ("hot-2", 9_000), ("cold", 10**6)):
        (source / name).write_bytes(os.urandom(size))
    settings = settings_at(tmp_path)
    record = index(settings, source, "image:1")
    drop_cache(settings)
    yield IndexedDirectory(settings, source, record, tmp_path)
    sweep(settings.run_dir.parent, settings)


def read_hot(node: IndexedDirectory, directory: Path) -> None:
    paths = [directory / name for name in HOT]
    assert checksums_in_child(paths) == [digest_of(node.source / name) for name in HOT]
