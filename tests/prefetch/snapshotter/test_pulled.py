"""Images that containerd had to pull are indexed from its content store, not pulled again."""

import json
import os
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError
from bootseer.prefetch.index.catalogue import list_images, load_tree
from bootseer.prefetch.index.chains import chain_ids, read_chain
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.publishing import (
    start_chain_publisher,
    wait_published,
)
from bootseer.prefetch.sources.files import open_content
from bootseer.served.service import new_service_dir, take_lock
from bootseer.store import open_store
from testbed.containers.containerd_images import add_image, layers
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import LayoutBuilder, digest, tar_of
from testbed.mounts.image_mounts import TIMEOUT_S, index, settings_at
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import running_registry
from testbed.waiting import wait_for

BLOBS = r"GET /v2/.*/blobs/"


def images(node: ContainerdNode) -> list[ImageRecord]:
    with open_store(node.settings.store_url) as store:
        return list(list_images(store))


@pytest.fixture
def content(tmp_path: Path) -> LayoutBuilder:
    """Folder like containerd's content store: images' blobs, and no index."""
    layout = LayoutBuilder(tmp_path / "content")
    add_image(layout, layers("other"), "other")
    add_image(layout, layers("train"), "train")
    (layout.directory / "index.json").unlink()
    (layout.directory / "oci-layout").unlink()
    return layout


def top_chain(name: str) -> str:
    return chain_ids([digest(tar_of(members)) for members in layers(name)])[-1]


def test_the_next_node_need_not_pull_it(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "image")
    add_image(layout, layers("train"), "latest")
    with (
        running_registry(tmp_path / "registry") as registry,
        FaultyRelay(registry.host) as relay,
        ContainerdNode(auto_index=True) as node,
    ):
        registry.push_layout(layout.directory, "latest", "train:1")
        image = f"{relay.host}/train:1"
        # The client with the least information: with containerd 1.6 not even the unpacked layer.
        node.ctr("images", "pull", "--plain-http", "--snapshotter", "bootseer", image)
        pulled = relay.count(BLOBS)
        wait_for(lambda: images(node))
        assert wait_published(node.settings, TIMEOUT_S)
        assert relay.count(BLOBS) == pulled
        (record,) = images(node)
        assert record.reference == f"containerd/{record.identity}"
        # As on another node.
        node.remove_image(image)
        wait_for(lambda: not node.snapshots())
        node.pull(image)
        assert relay.count(BLOBS) - pulled <= 1, "more than the configuration"
        assert node.run(image, "train", "cat", "/opt/train") == "train\n"
        assert len(images(node)) == 1


def test_it_is_as_if_it_were_indexed_by_name(content: LayoutBuilder, tmp_path: Path) -> None:
    settings = settings_at(tmp_path / "node")
    chain = top_chain("train")
    assert start_chain_publisher(settings, content.directory, chain)
    assert wait_published(settings, TIMEOUT_S)
    with open_store(settings.store_url) as store:
        (record,) = list_images(store)
        known = read_chain(store, chain)
        assert known is not None
        assert known.index_digest == record.index_digest
        load_tree(store, record, settings.cache_dir)
    other = settings_at(tmp_path / "other")
    layout = LayoutBuilder(tmp_path / "layout")
    add_image(layout, layers("train"), "latest")
    named = index(other, layout.directory, "train:1")
    assert (named.index_digest, named.identity) == (record.index_digest, record.identity)


def test_one_image_after_the_other(content: LayoutBuilder, tmp_path: Path) -> None:
    settings = settings_at(tmp_path / "node")
    lock = take_lock(new_service_dir(settings.run_dir, "chain-other"))
    assert not start_chain_publisher(settings, content.directory, top_chain("train"))
    os.close(lock)
    assert start_chain_publisher(settings, content.directory, top_chain("train"))
    assert wait_published(settings, TIMEOUT_S)


def test_what_containerd_lacks_is_not_indexed(content: LayoutBuilder, tmp_path: Path) -> None:
    settings = settings_at(tmp_path / "node")
    manifest = json.loads(path_of(content, content.manifests[1]["digest"]).read_text())
    path_of(content, manifest["layers"][1]["digest"]).unlink()
    assert start_chain_publisher(settings, content.directory, top_chain("train"))
    assert wait_published(settings, TIMEOUT_S)
    log = "".join(path.read_text() for path in (settings.run_dir / "logs").iterdir())
    assert "nothing of this start is published: " in log
    with open_store(settings.store_url) as store:
        assert list(list_images(store)) == []
    assert list((settings.run_dir / "services").iterdir()) == []


@pytest.mark.parametrize("damage", ["other", "{", "no manifest", "fifo"])
def test_damaged_documents_are_passed_over(content: LayoutBuilder, damage: str) -> None:
    blob = path_of(content, content.manifests[1]["digest"])
    text = {"other": path_of(content, content.manifests[0]["digest"]).read_text(), "{": "{"}
    blob.unlink()
    if damage == "fifo":
        os.mkfifo(blob)
    elif damage in text:
        blob.write_text(text[damage])
    with pytest.raises(NotFoundError, match="chain of layers"):
        open_content(content.directory, top_chain("train"))
    with open_content(content.directory, top_chain("other")) as source:
        assert len(source.layers) == len(layers("other"))


def path_of(layout: LayoutBuilder, digest_: str) -> Path:
    return layout.directory / "blobs" / digest_.replace(":", "/")
