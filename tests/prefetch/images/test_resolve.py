"""Images are started from pulled layers, and published as if they had been indexed before."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.prefetch.bundle.similar import name_of
from bootseer.prefetch.index.catalogue import find_image, publish_image, publish_layer, read_layer
from bootseer.prefetch.publish.indexing import change_time_ns
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from testbed.images.building import NASTY, LayoutBuilder, Member, tar_of, write_layout
from testbed.images.rootfs import odd_tree
from testbed.waiting import wait_for
from tests.prefetch.images.conftest import TARS, index, indexed_contents, source_of
from tests.support.images.pulled import PullingNode, objects


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_a_pulled_image_is_the_indexed_one(
    node: PullingNode, tmp_path: Path, compression: str
) -> None:
    layout = write_layout(tmp_path / "image", NASTY, compression=compression)
    resolved, contents = node.start(source_of(layout))
    assert not resolved.is_published
    assert ["pulling it whole" in line for line in node.said] == [True]
    record, expected = indexed_contents(source_of(layout), tmp_path / "other")
    assert contents == expected
    assert resolved.record.identity == record.identity
    pulled = node.tree(resolved)
    other = PullingNode(tmp_path / "other" / "node", tmp_path / "other" / "store")
    indexed = other.tree(other.obtain(record.reference))
    # Traces refer to these numbers.
    assert list(pulled.walk()) == list(indexed.walk())
    for number in range(pulled.inode_count):
        assert pulled.extents(number) == indexed.extents(number)
    assert [blob.stream_digest for blob in pulled.blobs] == [
        blob.stream_digest for blob in indexed.blobs
    ]
    assert not any(blob.frames for blob in pulled.blobs)


def test_it_is_published_byte_for_byte_as_if_indexed(
    node: PullingNode, layout: LayoutBuilder, tmp_path: Path
) -> None:
    resolved = node.obtain(source_of(layout))
    resolved.release()
    published = publish_node_image(node.settings, resolved.record.index_digest)
    assert published != resolved.record.index_digest
    record = index(source_of(layout), tmp_path / "other", tmp_path / "work")
    assert objects(tmp_path / "store") == objects(tmp_path / "other")
    assert published == record.index_digest
    # Again by another process: there is nothing left to do.
    assert publish_node_image(node.settings, resolved.record.index_digest) == published
    assert publish_node_image(node.settings, published) == published
    again = node.obtain(source_of(layout))
    assert (again.record.index_digest, node.said) == (published, [])
    # The published image reads the pulled bytes: only small records come from the store.
    shutil.rmtree(tmp_path / "store" / "blobs")
    assert node.contents(again) == indexed_contents(source_of(layout), tmp_path / "third")[1]


def unchanged(root: Path) -> Path:
    """Wait until the clock has passed the folder's last change; return the folder."""
    newest_ns = max(path.lstat().st_ctime_ns for path in (root, *root.rglob("*")))
    wait_for(lambda: change_time_ns() > newest_ns, "a tick of that clock", interval_s=0.005)
    return root


def test_a_directory_is_published_as_if_indexed(node: PullingNode, tmp_path: Path) -> None:
    root = unchanged(odd_tree(tmp_path / "root"))
    resolved, contents = node.start(root)
    assert contents["deep/er/file"] == (root / "deep/er/file").read_bytes()
    published = publish_node_image(node.settings, resolved.record.index_digest)
    record = index(str(root), tmp_path / "other", tmp_path / "work", resolved.record.reference)
    assert objects(tmp_path / "store") == objects(tmp_path / "other")
    assert (record.index_digest, record.identity) == (published, resolved.record.identity)
    again, now = node.start(root)
    assert (again.record.index_digest, node.said, now) == (published, [], contents)
    (root / "deep/new").write_text("new")
    changed, now = node.start(root)
    assert now == {**contents, "deep/new": b"new"}
    assert not changed.is_published
    assert "has changed" in node.said[0]


def test_a_directory_is_not_read_again_before_it_is_published(
    node: PullingNode, tmp_path: Path
) -> None:
    root = unchanged(odd_tree(tmp_path / "root"))
    first, contents = node.start(root)
    second, again = node.start(root)
    assert (second.record, again, node.said) == (first.record, contents, [])


def test_a_directory_of_another_node_is_another_one(node: PullingNode, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("here")
    resolved, _ = node.start(root)
    publish_node_image(node.settings, resolved.record.index_digest)
    # The same path on a node with other disks, on which everything was written before.
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    (root / "file").write_text("there")
    with open_store(str(tmp_path / "store")) as store:
        record = find_image(store, resolved.record.reference)
        publish_image(store, replace(record, created_ns=2**62))
    other, contents = PullingNode(tmp_path / "other", tmp_path / "store").start(root)
    assert contents == {"file": b"there"}
    # A record of one image may help the other.
    assert name_of(other.record.reference) == name_of(record.reference)


def test_what_changes_while_a_directory_is_read_has_changed(tmp_path: Path) -> None:
    for number in range(300):
        before_ns = change_time_ns()
        (tmp_path / str(number)).touch()
        assert (tmp_path / str(number)).stat().st_ctime_ns >= before_ns


def test_what_vanishes_while_a_directory_is_compared_has_changed(
    node: PullingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unchanged(odd_tree(tmp_path / "root"))
    _, contents = node.start(root)
    node.start(root)
    assert node.said == []
    listed = os.scandir
    vanished: list[Path] = []

    def scandir(path: Any) -> Any:
        if path == root / "deep" and not vanished:
            vanished.append(path)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert node.start(root)[1] == contents
    assert len(node.said) == len(vanished) == 1


def test_an_image_whose_layers_are_named_by_sha512(node: PullingNode, tmp_path: Path) -> None:
    """The cache knows streams by SHA-256 and BLAKE3 only."""
    layout = LayoutBuilder(tmp_path / "image")
    diff_ids = [f"sha512:{hashlib.sha512(tar).hexdigest()}" for tar in TARS]
    layout.add_image(TARS, diff_ids=diff_ids)
    resolved, contents = node.start(source_of(layout))
    second, again = node.start(source_of(layout))
    assert (second.record, again, node.said) == (resolved.record, contents, [])
    publish_node_image(node.settings, resolved.record.index_digest)
    index(source_of(layout), tmp_path / "other", tmp_path / "work")
    assert objects(tmp_path / "store") == objects(tmp_path / "other")


@pytest.fixture
def two(tmp_path: Path) -> LayoutBuilder:
    """Two images of one layer each, `good` and `evil`, in the store."""
    layout = LayoutBuilder(tmp_path / "image")
    for name in ("good", "evil"):
        layout.add_image([tar_of([Member("name", data=name.encode())])], tag=name)
        index(f"oci:{layout.directory}:{name}", tmp_path / "store", tmp_path / "work", name)
    return layout


def test_a_record_that_names_another_images_index_is_not_used(
    node: PullingNode, tmp_path: Path, two: LayoutBuilder
) -> None:
    source = f"oci:{two.directory}:good"
    with open_source(source, tmp_path / "work") as opened, open_store(str(tmp_path / "store")) as s:
        assert opened.identity is not None
        evil = find_image(s, "evil")
        publish_image(s, replace(evil, reference=opened.reference, identity=opened.identity))
    resolved, contents = node.start(source)
    assert contents == {"name": b"good"}
    assert [blob.frames != () for blob in node.tree(resolved).blobs] == [True]


def test_a_layers_record_that_names_another_layers_index_is_not_used(
    node: PullingNode, tmp_path: Path, two: LayoutBuilder
) -> None:
    with open_store(str(tmp_path / "store")) as store:
        good, evil = (find_image(store, name).layers[0].digest for name in ("good", "evil"))
        record = read_layer(store, evil)
        assert record is not None
        publish_layer(store, replace(record, digest=good))
    assert node.start(f"oci:{two.directory}:good")[1] == {"name": b"good"}


def test_what_starts_is_for_the_source_to_say(
    node: PullingNode, tmp_path: Path, two: LayoutBuilder
) -> None:
    source = f"oci:{two.directory}:good"
    with open_source(source, tmp_path / "work") as opened, open_store(str(tmp_path / "store")) as s:
        good = replace(find_image(s, "good"), reference=opened.reference)
        publish_image(s, replace(good, config=replace(good.config, entrypoint=("/evil",))))
    resolved, _ = node.start(source)
    assert (resolved.is_published, resolved.record.config) == (True, good.config)
