"""Pulls and publishers that are killed or meet damage, a full disk or each other."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bootseer.blob.keys import blob_key
from bootseer.errors import CorruptError, NoSpaceError, NotFoundError
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.catalogue import check_blobs, list_images, read_tree
from bootseer.prefetch.index.records import LAYER_FORM
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.store import Store, open_store
from testbed.images.building import LayoutBuilder
from testbed.mounts.image_mounts import run_program, start_program
from testbed.waiting import wait_for
from tests.prefetch.images.conftest import TARS, big, index, source_of
from tests.support.images.pulled import PullingNode, objects


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_layer_leaves_nothing(node: PullingNode, tmp_path: Path, damage: str) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image([big("a"), big("b")], compression="gzip")
    layer = max(layout.directory.rglob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    right = layer.read_bytes()
    half = len(right) // 2
    if damage == "missing":
        layer.unlink()
    elif damage == "truncated":
        layer.write_bytes(right[:half])
    else:
        layer.write_bytes(right[:half] + bytes([right[half] ^ 4]) + right[half + 1 :])
    with pytest.raises((CorruptError, NotFoundError)):
        node.obtain(source_of(layout))
    # The other layer may be here as a whole.
    assert len([path for path in node.left_behind() if "/data" in path]) <= 1
    assert not list((node.settings.cache_dir / "streams").glob("new-*"))
    layer.write_bytes(right)
    assert len(node.start(source_of(layout))[1]) == 6


@pytest.mark.needs("mount", "fuse")
def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        node = PullingNode(small / "node", tmp_path / "store")
        layout = LayoutBuilder(tmp_path / "image")
        layout.add_image([big("a", 12_000_000)])
        with pytest.raises(NoSpaceError, match="free space or set BOOTSEER_CACHE_DIR"):
            node.obtain(source_of(layout))
        assert node.left_behind() == []
        # An indexed image starts all the same: bytes that the disk refuses are read again.
        index(source_of(layout), tmp_path / "store", tmp_path / "work")
        assert len(node.start(source_of(layout))[1]) == 3
        # Unused streams make room.
        layout.add_image([big("b", 5_000_000)], tag="small")
        layout.manifests = layout.manifests[-1:]
        layout.write_index()
        assert len(node.start(f"oci:{layout.directory}:small")[1]) == 3
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


PULL = """
import sys
from pathlib import Path
from tests.support.images.pulled import PullingNode
node = PullingNode(Path(sys.argv[1]), Path(sys.argv[2]))
print(len(node.start(sys.argv[3])[1]), node.said)
"""
PUBLISH = """
import sys
from pathlib import Path
from bootseer.prefetch.publish.publish_image import publish_node_image
from tests.support.images.pulled import PullingNode
node = PullingNode(Path(sys.argv[1]), Path(sys.argv[2]))
print(publish_node_image(node.settings, sys.argv[3]))
"""


def _wait_unless_ended(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    wait_for(lambda: process.poll() is not None or condition(), interval_s=0.001)


def test_kill_9_in_the_middle_of_a_pull(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image([big("a", 30_000_000), big("b", 30_000_000)], compression="gzip")
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    streams = node.settings.cache_dir / "streams"
    for _ in range(3):
        process = start_program(PULL, tmp_path / "node", tmp_path / "store", source_of(layout))
        _wait_unless_ended(process, lambda: any(streams.glob("new-*/data")))
        process.kill()
        process.communicate()
        # Only whole objects are visible.
        assert all(
            NodeCache(node.settings.cache_dir).open_whole(stream.key) is not None
            for stream in NodeCache(node.settings.cache_dir).streams()
        )
    assert len(node.start(source_of(layout))[1]) == 6
    assert not list(streams.glob("new-*"))


def _shows(store: Path, count: int) -> bool:
    return visible_count(store) >= count


def test_kill_9_of_the_publisher(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image([big("a", 6_000_000), big("b", 6_000_000), *TARS], compression="gzip")
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    resolved, contents = node.start(source_of(layout))
    store = tmp_path / "store"
    arguments = (tmp_path / "node", store, resolved.record.index_digest)
    # One more object each time, up to the last.
    for count in range(1, 12):
        process = start_program(PUBLISH, *arguments)
        _wait_unless_ended(process, partial(_shows, store, count))
        process.kill()
        process.communicate()
        check_records(store)
        # Make the lease look expired: otherwise a layer is not taken over for two minutes.
        shutil.rmtree(store / "leases", ignore_errors=True)
    assert run_program(PUBLISH, *arguments)
    index(source_of(layout), tmp_path / "other", tmp_path / "work")
    published = {k: v for k, v in objects(store).items() if not k.startswith("leases/")}
    assert published == objects(tmp_path / "other")
    assert node.start(source_of(layout))[1] == contents


def visible_count(store: Path) -> int:
    with open_store(str(store)) as opened:
        return sum(not info.path.startswith("leases/") for info in opened.list())


def check_records(store: Path) -> None:
    """Check that all objects named by a record are in the store."""
    with open_store(str(store)) as opened:
        for info in opened.list("layers/"):
            record = LAYER_FORM.decode(opened.read(info.path), info.path)
            assert opened.size(blob_key(record.blob_digest)) == record.blob_size_bytes
            read_tree(opened, record.index_digest)
        for image in list_images(opened):
            check_blobs(opened, image)
            read_tree(opened, image.index_digest)


def test_two_starts_at_once_pull_each_layer_once(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image([big("a", 30_000_000), big("b", 9_000_000)], compression="gzip")
    started = [
        start_program(PULL, tmp_path / "node", tmp_path / "store", source_of(layout))
        for _ in range(3)
    ]
    said = [process.communicate_checked() for process in started]
    assert all(text.startswith("6 ") for text in said)
    # A layer may be ready before another process has begun, which then prints nothing.
    assert 1 <= sum("pulling it whole" in text for text in said) <= 2


def test_of_two_nodes_one_packs_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image([big("a"), big("b")], compression="gzip")
    nodes = [PullingNode(tmp_path / f"node-{i}", tmp_path / "store") for i in range(3)]
    indexes = [node.start(source_of(layout))[0].record.index_digest for node in nodes]
    packed: list[str] = []
    publish = Store.publish

    def counted(self: Store, key: str, *arguments: Any, **options: Any) -> bool:
        if key.startswith("blobs/"):
            packed.append(key)
        return publish(self, key, *arguments, **options)

    monkeypatch.setattr(Store, "publish", counted)
    with ThreadPoolExecutor(3) as pool:
        published = list(pool.map(publish_node_image, (n.settings for n in nodes), indexes))
    assert len(set(published)) == 1
    assert len(packed) == len(set(packed)) == 2
    assert not list((tmp_path / "store" / "leases").rglob("*.json"))


def test_what_the_disk_has_damaged_is_not_published(
    node: PullingNode, layout: LayoutBuilder
) -> None:
    resolved = node.obtain(source_of(layout))
    resolved.release()
    for path in (node.settings.cache_dir / "streams").glob("*/data"):
        with path.open("r+b") as file:
            file.seek(600)
            file.write(b"damage")
    with pytest.raises(CorruptError):
        publish_node_image(node.settings, resolved.record.index_digest)
    with open_store(node.settings.store_url) as store:
        assert not list(store.list("images/"))
        assert not list(store.list("layers/"))


def test_a_stream_that_is_lost_while_served(node: PullingNode, layout: LayoutBuilder) -> None:
    resolved = node.obtain(source_of(layout))
    resolved.release()
    shutil.rmtree(node.settings.cache_dir / "streams")
    with pytest.raises(CorruptError, match="pull the image again"):
        node.contents(resolved)
