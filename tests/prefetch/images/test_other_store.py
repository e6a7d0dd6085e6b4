"""Knowledge of an image of one store is not used for an image of another store."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BootseerError
from testbed.mounts.image_mounts import index
from tests.support.images.pulled import PullingNode, note_store

DOWN = "hdfs://127.0.0.1:9/store"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    (path / "code").write_bytes(b"print(1)" * 5000)
    return path


def test_an_image_of_another_store_does_not_stand_in(tmp_path: Path, root: Path) -> None:
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    index(node.settings, root, "image:1")
    node.start("image:1")
    down = PullingNode(tmp_path / "node", DOWN)
    down.settings = replace(down.settings, deadline_s=1.0)
    with pytest.raises(BootseerError):
        down.obtain("image:1")
    # As with a single store.
    note_store(down.settings.cache_dir, DOWN)
    down.obtain("image:1").release()
    assert "starting image image:1 with what this node has of it" in down.said[0]


def test_nor_does_one_that_is_not_published(tmp_path: Path, root: Path) -> None:
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    name = node.obtain(root).record.reference
    node.obtain(name).release()
    with pytest.raises(BootseerError):
        PullingNode(tmp_path / "node", tmp_path / "other").obtain(name)
