"""Layers that the store or the node has are not pulled; damaged or lost ones are."""

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.errors import NotFoundError
from bootseer.prefetch.cache.limit import trim_records
from bootseer.prefetch.index.catalogue import find_image
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.prefetch.reading.fill import fetch_tree
from bootseer.store import open_store
from testbed.images.building import LayoutBuilder
from tests.prefetch.images.conftest import TARS, big, index, indexed_contents, source_of
from tests.support.images.pulled import PullingNode, note_store


def test_layers_that_the_store_has_are_not_pulled(node: PullingNode, tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image(TARS[:2], tag="base", compression="gzip")
    index(f"oci:{layout.directory}:base", tmp_path / "store", tmp_path / "work")
    layout.add_image([*TARS[:2], big("top")], compression="gzip")
    resolved, contents = node.start(source_of(layout))
    tree = node.tree(resolved)
    assert [bool(blob.frames) for blob in tree.blobs] == [True, True, False]
    record, expected = indexed_contents(source_of(layout), tmp_path / "other")
    assert contents == expected
    assert publish_node_image(node.settings, resolved.record.index_digest) == record.index_digest


def test_an_image_whose_layers_are_all_known_is_not_pulled(
    node: PullingNode, tmp_path: Path
) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image(TARS, tag="one")
    index(f"oci:{layout.directory}:one", tmp_path / "store", tmp_path / "work")
    layout.add_image(TARS, tag="two", run={"Env": ["X=1"]})
    resolved, contents = node.start(f"oci:{layout.directory}:two")
    assert node.said == []
    assert resolved.record.config.env == ("X=1",)
    assert contents
    publish_node_image(node.settings, resolved.record.index_digest)
    with open_store(str(tmp_path / "store")) as store:
        assert find_image(store, resolved.record.reference).config.env == ("X=1",)


def test_what_was_pulled_is_not_pulled_again(node: PullingNode, layout: LayoutBuilder) -> None:
    first, contents = node.start(source_of(layout))
    for path in layout.directory.rglob("blobs/sha256/*"):
        # All layers; the documents are small.
        if path.read_bytes()[:2] == b"\x1f\x8b":
            path.unlink()
    second, again = node.start(source_of(layout))
    assert (second.record, again, node.said) == (first.record, contents, [])
    # Also by its name.
    third, again = node.start(first.record.reference)
    assert (third.record, again) == (first.record, contents)


def test_a_fetch_moves_nothing_of_a_layer_that_the_node_has_pulled(
    node: PullingNode, tmp_path: Path
) -> None:
    base = LayoutBuilder(tmp_path / "base")
    base.add_image(TARS[:1], compression="gzip")
    node.start(source_of(base))
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image(TARS[:2], compression="gzip")
    index(source_of(layout), tmp_path / "store", tmp_path / "work")
    record = node.obtain(source_of(layout)).record
    with open_store(str(tmp_path / "store")) as store:
        store.delete(blob_key(record.layers[0].blob_digest))
        fetch_tree(node.settings, store, record.index_digest, record.reference)
    assert (
        node.start(record.reference)[1]
        == indexed_contents(source_of(layout), tmp_path / "other")[1]
    )


def test_a_lost_stream_is_pulled_again(node: PullingNode, layout: LayoutBuilder) -> None:
    _, contents = node.start(source_of(layout))
    (stream, *_) = (node.settings.cache_dir / "streams").iterdir()
    shutil.rmtree(stream)
    assert node.start(source_of(layout))[1] == contents
    assert len(node.said) == 1


@pytest.mark.parametrize("what", ["layers", "images", "../indexes"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"rubbish"])
def test_a_damaged_catalogue_is_not_believed(
    node: PullingNode, layout: LayoutBuilder, what: str, damage: bytes
) -> None:
    _, contents = node.start(source_of(layout))
    for path in (node.settings.cache_dir / "catalogue" / what).iterdir():
        path.write_bytes(damage)
    assert node.start(source_of(layout))[1] == contents


def test_a_store_that_is_down(tmp_path: Path, layout: LayoutBuilder) -> None:
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    indexed = index(source_of(layout), tmp_path / "store", tmp_path / "work")
    down = PullingNode(tmp_path / "node", "hdfs://127.0.0.1:9/store")
    down.settings = replace(down.settings, deadline_s=1.0)
    resolved, contents = node.start(source_of(layout))
    assert resolved.is_published
    note_store(down.settings.cache_dir, down.settings.store_url)
    # Complete: the node needs no source.
    for image in (source_of(layout), indexed.reference):
        found, again = down.start(image)
        assert (found.record, again) == (indexed, contents)
        assert [line.startswith("warning: ") for line in down.said] == [True]
    # Incomplete: the source still exists.
    shutil.rmtree(down.settings.cache_dir / "streams")
    found, again = down.start(source_of(layout))
    assert (found.is_published, again) == (False, contents)
    assert ["without the shared store" in line for line in down.said] == [True, False]


def test_a_name_that_nobody_knows(node: PullingNode) -> None:
    with pytest.raises(NotFoundError, match="bootseer image list"):
        node.obtain("no/such:image")


def test_a_younger_image_of_the_name_stays(node: PullingNode, tmp_path: Path) -> None:
    """The tag moved while an old image waited for its publication."""
    layout = LayoutBuilder(tmp_path / "image")
    layout.add_image(TARS[:1])
    old = node.obtain(source_of(layout))
    old.release()
    moved = LayoutBuilder(tmp_path / "moved" / "image")
    moved.add_image(TARS)
    young = index(source_of(moved), tmp_path / "store", tmp_path / "work")
    assert young.reference == old.record.reference
    published = publish_node_image(node.settings, old.record.index_digest)
    with open_store(str(tmp_path / "store")) as store:
        assert find_image(store, young.reference) == young
        assert store.exists(f"indexes/{published.replace(':', '/')}")


def test_a_layer_that_nobody_has_any_more(
    node: PullingNode, layout: LayoutBuilder, tmp_path: Path
) -> None:
    resolved = node.obtain(source_of(layout))
    resolved.release()
    shutil.rmtree(node.settings.cache_dir / "streams")
    with pytest.raises(NotFoundError, match="neither in the store nor on this node"):
        publish_node_image(node.settings, resolved.record.index_digest)
    # Another node has published it meanwhile.
    record = index(source_of(layout), tmp_path / "store", tmp_path / "work")
    published = publish_node_image(node.settings, resolved.record.index_digest)
    assert published == record.index_digest


def test_trim_forgets_what_nobody_asked_for(node: PullingNode, layout: LayoutBuilder) -> None:
    _, contents = node.start(source_of(layout))
    assert trim_records(node.settings.cache_dir) == 0
    for path in node.settings.cache_dir.rglob("*.json"):
        os.utime(path, (1, 1))
    assert trim_records(node.settings.cache_dir) > 0
    assert not list(node.settings.cache_dir.rglob("*.json"))
    assert node.start(source_of(layout))[1] == contents
