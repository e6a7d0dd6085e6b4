"""Images are started from what was pulled, and published as if they had been indexed before."""

import hashlib
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.errors import CorruptError, NoSpaceError, NotFoundError
from bootseer.prefetch.cache import NodeCache
from bootseer.prefetch.catalogue import (
    check_blobs,
    find_image,
    list_images,
    publish_image,
    publish_layer,
    read_layer,
    read_tree,
)
from bootseer.prefetch.indexing import change_time_ns, index_image
from bootseer.prefetch.merge import LayerTree
from bootseer.prefetch.node_catalogue import NodeCatalogue
from bootseer.prefetch.obtain_source import _changed_since
from bootseer.prefetch.publish_image import _CachedLayer, publish_node_image
from bootseer.prefetch.records import ImageRecord, decode_layer
from bootseer.prefetch.relatives import name_of
from bootseer.prefetch.sources import open_source
from bootseer.store import open_store
from tests.support.fuse_mount import require_root
from tests.support.image_mounts import outside, start_outside
from tests.support.images import NASTY, Layout, Member, tar_of, write_layout
from tests.support.pulled import Node, objects
from tests.support.rootfs import odd_tree

TARS = [tar_of(members) for members in NASTY]
TAG = "latest"


def big(name: str, size_bytes: int = 3_000_000) -> bytes:
    """A layer that does not compress."""
    return tar_of([Member(f"{name}/{i}", data=os.urandom(size_bytes // 3)) for i in range(3)])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return write_layout(tmp_path / "image", NASTY, compression="gzip")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node", tmp_path / "store")


def source_of(layout: Layout) -> str:
    return f"oci:{layout.directory}:{TAG}"


def index(source: str, store: Path, work_dir: Path, reference: str | None = None) -> ImageRecord:
    with open_source(source, work_dir) as opened, open_store(str(store)) as target:
        return index_image(opened, target, work_dir, reference=reference)


def indexed_contents(source: str, base: Path) -> tuple[ImageRecord, dict[str, bytes]]:
    """The same by way of the store, read by a node that has nothing."""
    record = index(source, base / "store", base / "work")
    return record, Node(base / "node", base / "store").start(record.reference)[1]


# ---- the same image ------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_a_pulled_image_is_the_indexed_one(node: Node, tmp_path: Path, compression: str) -> None:
    layout = write_layout(tmp_path / "image", NASTY, compression=compression)
    obtained, contents = node.start(source_of(layout))
    assert not obtained.image.is_published
    assert ["pulling it whole" in line for line in node.said] == [True]
    record, expected = indexed_contents(source_of(layout), tmp_path / "other")
    assert contents == expected
    assert obtained.record.identity == record.identity
    pulled = node.tree(obtained)
    other = Node(tmp_path / "other" / "node", tmp_path / "other" / "store")
    indexed = other.tree(other.obtain(record.reference))
    # The numbers are what a trace goes by.
    assert list(pulled.walk()) == list(indexed.walk())
    for number in range(pulled.inode_count):
        assert pulled.extents(number) == indexed.extents(number)
    assert [blob.stream_digest for blob in pulled.blobs] == [
        blob.stream_digest for blob in indexed.blobs
    ]
    assert not any(blob.frames for blob in pulled.blobs)


def test_it_is_published_byte_for_byte_as_if_indexed(
    node: Node, layout: Layout, tmp_path: Path
) -> None:
    obtained = node.obtain(source_of(layout))
    obtained.release()
    published = publish_node_image(node.settings, obtained.record.index_digest)
    assert published != obtained.record.index_digest
    record = index(source_of(layout), tmp_path / "other", tmp_path / "work")
    assert objects(tmp_path / "store") == objects(tmp_path / "other")
    assert published == record.index_digest
    # Again, and by another process: nothing is left to do.
    assert publish_node_image(node.settings, obtained.record.index_digest) == published
    assert publish_node_image(node.settings, published) == published
    again = node.obtain(source_of(layout))
    assert (again.record.index_digest, node.said) == (published, [])
    # The published image reads what was pulled: nothing but small records comes from the store.
    shutil.rmtree(tmp_path / "store" / "blobs")
    assert node.contents(again) == indexed_contents(source_of(layout), tmp_path / "third")[1]


def unchanged(root: Path) -> Path:
    """Once the clock of change times has gone on since the last change."""
    while change_time_ns() <= max(path.lstat().st_ctime_ns for path in (root, *root.rglob("*"))):
        time.sleep(0.005)
    return root


def test_a_directory_is_published_as_if_indexed(node: Node, tmp_path: Path) -> None:
    root = unchanged(odd_tree(tmp_path / "root"))
    obtained, contents = node.start(root)
    assert contents["deep/er/file"] == (root / "deep/er/file").read_bytes()
    published = publish_node_image(node.settings, obtained.record.index_digest)
    record = index(str(root), tmp_path / "other", tmp_path / "work", obtained.record.reference)
    assert objects(tmp_path / "store") == objects(tmp_path / "other")
    assert (record.index_digest, record.identity) == (published, obtained.record.identity)
    again, now = node.start(root)
    assert (again.record.index_digest, node.said, now) == (published, [], contents)
    (root / "deep/new").write_text("new")
    changed, now = node.start(root)
    assert now == {**contents, "deep/new": b"new"}
    assert not changed.image.is_published
    assert "has changed" in node.said[0]


def test_a_directory_is_not_read_again_before_it_is_published(node: Node, tmp_path: Path) -> None:
    root = unchanged(odd_tree(tmp_path / "root"))
    first, contents = node.start(root)
    second, again = node.start(root)
    assert (second.record, again, node.said) == (first.record, contents, [])


def test_a_directory_of_another_node_is_another_one(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("here")
    obtained, _ = node.start(root)
    publish_node_image(node.settings, obtained.record.index_digest)
    # The same path on a node with disks of its own, where all was written before.
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    (root / "file").write_text("there")
    with open_store(str(tmp_path / "store")) as store:
        record = find_image(store, obtained.record.reference)
        publish_image(store, replace(record, created_ns=2**62))
    other, contents = Node(tmp_path / "other", tmp_path / "store").start(root)
    assert contents == {"file": b"there"}
    # A record of the one may help the other nevertheless.
    assert name_of(other.record.reference) == name_of(record.reference)


def test_what_changes_while_a_directory_is_read_has_changed(tmp_path: Path) -> None:
    for number in range(300):
        before_ns = change_time_ns()
        (tmp_path / str(number)).touch()
        assert (tmp_path / str(number)).stat().st_ctime_ns >= before_ns


def test_what_vanishes_while_a_directory_is_compared_has_changed(tmp_path: Path) -> None:
    assert _changed_since(tmp_path / "gone", 2**62)
    (tmp_path / "there").mkdir()
    assert not _changed_since(tmp_path / "there", 2**62)


def test_sha512(node: Node, tmp_path: Path) -> None:
    """The cache knows streams by SHA-256 and BLAKE3 only."""
    layout = Layout(tmp_path / "image")
    diff_ids = [f"sha512:{hashlib.sha512(tar).hexdigest()}" for tar in TARS]
    layout.add_image(TARS, diff_ids=diff_ids)
    obtained, contents = node.start(source_of(layout))
    second, again = node.start(source_of(layout))
    assert (second.image, again, node.said) == (obtained.image, contents, [])
    publish_node_image(node.settings, obtained.record.index_digest)
    index(source_of(layout), tmp_path / "other", tmp_path / "work")
    assert objects(tmp_path / "store") == objects(tmp_path / "other")


# ---- records that lie ---------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Layout:
    """Two images of one layer each, `good` and `evil`, in the store."""
    layout = Layout(tmp_path / "image")
    for name in ("good", "evil"):
        layout.add_image([tar_of([Member("name", data=name.encode())])], tag=name)
        index(f"oci:{layout.directory}:{name}", tmp_path / "store", tmp_path / "work", name)
    return layout


def test_a_record_that_names_another_images_index_is_not_used(
    node: Node, tmp_path: Path, two: Layout
) -> None:
    source = f"oci:{two.directory}:good"
    with open_source(source, tmp_path / "work") as opened, open_store(str(tmp_path / "store")) as s:
        assert opened.identity is not None
        evil = find_image(s, "evil")
        publish_image(s, replace(evil, reference=opened.reference, identity=opened.identity))
    obtained, contents = node.start(source)
    assert contents == {"name": b"good"}
    assert [blob.frames != () for blob in node.tree(obtained).blobs] == [True]


def test_a_layers_record_that_names_another_layers_index_is_not_used(
    node: Node, tmp_path: Path, two: Layout
) -> None:
    with open_store(str(tmp_path / "store")) as store:
        good, evil = (find_image(store, name).layers[0].digest for name in ("good", "evil"))
        record = read_layer(store, evil)
        assert record is not None
        publish_layer(store, replace(record, digest=good))
    assert node.start(f"oci:{two.directory}:good")[1] == {"name": b"good"}


def test_what_starts_is_for_the_source_to_say(node: Node, tmp_path: Path, two: Layout) -> None:
    source = f"oci:{two.directory}:good"
    with open_source(source, tmp_path / "work") as opened, open_store(str(tmp_path / "store")) as s:
        good = replace(find_image(s, "good"), reference=opened.reference)
        publish_image(s, replace(good, config=replace(good.config, entrypoint=("/evil",))))
    obtained, _ = node.start(source)
    assert (obtained.image.is_published, obtained.record.config) == (True, good.config)


# ---- who has what --------------------------------------------------------------------------------


def test_layers_that_the_store_has_are_not_pulled(node: Node, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "image")
    layout.add_image(TARS[:2], tag="base", compression="gzip")
    index(f"oci:{layout.directory}:base", tmp_path / "store", tmp_path / "work")
    layout.add_image([*TARS[:2], big("top")], compression="gzip")
    obtained, contents = node.start(source_of(layout))
    tree = node.tree(obtained)
    assert [bool(blob.frames) for blob in tree.blobs] == [True, True, False]
    record, expected = indexed_contents(source_of(layout), tmp_path / "other")
    assert contents == expected
    assert publish_node_image(node.settings, obtained.record.index_digest) == record.index_digest


def test_an_image_whose_layers_are_all_known_is_not_pulled(node: Node, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "image")
    layout.add_image(TARS, tag="one")
    index(f"oci:{layout.directory}:one", tmp_path / "store", tmp_path / "work")
    layout.add_image(TARS, tag="two", run={"Env": ["X=1"]})
    obtained, contents = node.start(f"oci:{layout.directory}:two")
    assert node.said == []
    assert obtained.record.config.env == ("X=1",)
    assert contents
    publish_node_image(node.settings, obtained.record.index_digest)
    with open_store(str(tmp_path / "store")) as store:
        assert find_image(store, obtained.record.reference).config.env == ("X=1",)


def test_what_was_pulled_is_not_pulled_again(node: Node, layout: Layout) -> None:
    first, contents = node.start(source_of(layout))
    for path in layout.directory.rglob("blobs/sha256/*"):
        # All layers; the documents are small.
        if path.read_bytes()[:2] == b"\x1f\x8b":
            path.unlink()
    second, again = node.start(source_of(layout))
    assert (second.image, again, node.said) == (first.image, contents, [])
    # Also by its name.
    third, again = node.start(first.record.reference)
    assert (third.image, again) == (first.image, contents)


def test_a_lost_stream_is_pulled_again(node: Node, layout: Layout) -> None:
    _, contents = node.start(source_of(layout))
    (stream, *_) = (node.settings.cache_dir / "streams").iterdir()
    shutil.rmtree(stream)
    assert node.start(source_of(layout))[1] == contents
    assert len(node.said) == 1


@pytest.mark.parametrize("what", ["layers", "images", "../indexes"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"rubbish"])
def test_a_damaged_catalogue_is_not_believed(
    node: Node, layout: Layout, what: str, damage: bytes
) -> None:
    _, contents = node.start(source_of(layout))
    for path in (node.settings.cache_dir / "catalogue" / what).iterdir():
        path.write_bytes(damage)
    assert node.start(source_of(layout))[1] == contents


def test_a_store_that_is_down(tmp_path: Path, layout: Layout) -> None:
    node = Node(tmp_path / "node", tmp_path / "store")
    indexed = index(source_of(layout), tmp_path / "store", tmp_path / "work")
    down = Node(tmp_path / "node", "hdfs://127.0.0.1:9/store")
    down.settings = replace(down.settings, deadline_s=1.0)
    obtained, contents = node.start(source_of(layout))
    assert obtained.image.is_published
    # Complete: the node needs nobody.
    for image in (source_of(layout), indexed.reference):
        found, again = down.start(image)
        assert (found.record, again) == (indexed, contents)
        assert [line.startswith("warning: ") for line in down.said] == [True]
    # Incomplete: the source is there still.
    shutil.rmtree(down.settings.cache_dir / "streams")
    found, again = down.start(source_of(layout))
    assert (found.image.is_published, again) == (False, contents)
    assert ["without the shared store" in line for line in down.said] == [True, False]


def test_a_name_that_nobody_knows(node: Node) -> None:
    with pytest.raises(NotFoundError, match="bootseer image list"):
        node.obtain("no/such:image")


def test_a_younger_image_of_the_name_stays(node: Node, tmp_path: Path) -> None:
    """The tag moved while an old image waited for being published."""
    layout = Layout(tmp_path / "image")
    layout.add_image(TARS[:1])
    old = node.obtain(source_of(layout))
    old.release()
    moved = Layout(tmp_path / "moved" / "image")
    moved.add_image(TARS)
    young = index(source_of(moved), tmp_path / "store", tmp_path / "work")
    assert young.reference == old.record.reference
    published = publish_node_image(node.settings, old.record.index_digest)
    with open_store(str(tmp_path / "store")) as store:
        assert find_image(store, young.reference) == young
        assert store.exists(f"indexes/{published.replace(':', '/')}")


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_layer_leaves_nothing(node: Node, tmp_path: Path, damage: str) -> None:
    layout = Layout(tmp_path / "image")
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
    # The other layer may be here, whole.
    assert len([path for path in node.left_behind() if "/data" in path]) <= 1
    assert not list((node.settings.cache_dir / "streams").glob("new-*"))
    layer.write_bytes(right)
    assert len(node.start(source_of(layout))[1]) == 6


def test_a_full_disk(tmp_path: Path) -> None:
    require_root()
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], check=True)
    try:
        node = Node(small / "node", tmp_path / "store")
        layout = Layout(tmp_path / "image")
        layout.add_image([big("a", 12_000_000)])
        with pytest.raises(NoSpaceError, match="free space or set BOOTSEER_CACHE_DIR"):
            node.obtain(source_of(layout))
        assert node.left_behind() == []
        # Indexed, it starts all the same: what the disk does not take is read again.
        index(source_of(layout), tmp_path / "store", tmp_path / "work")
        assert len(node.start(source_of(layout))[1]) == 3
        # What nobody uses makes room.
        layout.add_image([big("b", 5_000_000)], tag="small")
        layout.manifests = layout.manifests[-1:]
        layout.write_index()
        assert len(node.start(f"oci:{layout.directory}:small")[1]) == 3
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


PULL = """
import sys
from pathlib import Path
from tests.support.pulled import Node
node = Node(Path(sys.argv[1]), Path(sys.argv[2]))
print(len(node.start(sys.argv[3])[1]), node.said)
"""
PUBLISH = """
import sys
from pathlib import Path
from bootseer.prefetch.publish_image import publish_node_image
from tests.support.pulled import Node
node = Node(Path(sys.argv[1]), Path(sys.argv[2]))
print(publish_node_image(node.settings, sys.argv[3]))
"""


def test_kill_9_in_the_middle_of_a_pull(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "image")
    layout.add_image([big("a", 30_000_000), big("b", 30_000_000)], compression="gzip")
    node = Node(tmp_path / "node", tmp_path / "store")
    streams = node.settings.cache_dir / "streams"
    for _ in range(3):
        process = start_outside(PULL, tmp_path / "node", tmp_path / "store", source_of(layout))
        deadline_s = time.monotonic() + 30
        while not list(streams.glob("new-*/data")) and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        process.kill()
        process.communicate()
        # Nothing is visible that is not whole.
        assert all(
            NodeCache(node.settings.cache_dir).open_whole(stream.digest) is not None
            for stream in NodeCache(node.settings.cache_dir).streams()
        )
    assert len(node.start(source_of(layout))[1]) == 6
    assert not list(streams.glob("new-*"))


def test_kill_9_of_the_publisher(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "image")
    layout.add_image([big("a", 6_000_000), big("b", 6_000_000), *TARS], compression="gzip")
    node = Node(tmp_path / "node", tmp_path / "store")
    obtained, contents = node.start(source_of(layout))
    store = tmp_path / "store"
    arguments = (tmp_path / "node", store, obtained.record.index_digest)
    # One more object each time, up to the last.
    for count in range(1, 12):
        process = start_outside(PUBLISH, *arguments)
        while process.poll() is None and visible_count(store) < count:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        check_records(store)
        # As if it had run out: nobody else takes over a layer for two minutes.
        shutil.rmtree(store / "leases", ignore_errors=True)
    assert outside(PUBLISH, *arguments)
    index(source_of(layout), tmp_path / "other", tmp_path / "work")
    published = {k: v for k, v in objects(store).items() if not k.startswith("leases/")}
    assert published == objects(tmp_path / "other")
    assert node.start(source_of(layout))[1] == contents


def visible_count(store: Path) -> int:
    with open_store(str(store)) as opened:
        return sum(not info.path.startswith("leases/") for info in opened.list())


def check_records(store: Path) -> None:
    """Whatever a record names is there."""
    with open_store(str(store)) as opened:
        for info in opened.list("layers/"):
            record = decode_layer(opened.read(info.path), info.path)
            assert opened.size(blob_key(record.blob_digest)) == record.blob_size_bytes
            read_tree(opened, record.index_digest)
        for image in list_images(opened):
            check_blobs(opened, image)
            read_tree(opened, image.index_digest)


def test_two_starts_at_once_pull_each_layer_once(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "image")
    layout.add_image([big("a", 30_000_000), big("b", 9_000_000)], compression="gzip")
    started = [
        start_outside(PULL, tmp_path / "node", tmp_path / "store", source_of(layout))
        for _ in range(3)
    ]
    said = [process.communicate_checked() for process in started]
    assert all(text.startswith("6 ") for text in said)
    # A layer may be at hand before another process has begun, so that it says nothing at all.
    assert 1 <= sum("pulling it whole" in text for text in said) <= 2


def test_of_two_nodes_one_packs_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.prefetch.indexing._OTHER_NODE_POLL_S", 0.05)
    layout = Layout(tmp_path / "image")
    layout.add_image([big("a"), big("b")], compression="gzip")
    nodes = [Node(tmp_path / f"node-{i}", tmp_path / "store") for i in range(3)]
    indexes = [node.start(source_of(layout))[0].record.index_digest for node in nodes]
    packed: list[str | None] = []
    pack = _CachedLayer.pack

    def counted(self: _CachedLayer, *arguments: Any) -> LayerTree:
        packed.append(self.digest)
        return pack(self, *arguments)

    monkeypatch.setattr(_CachedLayer, "pack", counted)
    with ThreadPoolExecutor(3) as pool:
        published = list(pool.map(publish_node_image, (n.settings for n in nodes), indexes))
    assert len(set(published)) == 1
    assert len(packed) == len(set(packed)) == 2
    assert not list((tmp_path / "store" / "leases").rglob("*.json"))


def test_a_layer_that_nobody_has_any_more(node: Node, layout: Layout, tmp_path: Path) -> None:
    obtained = node.obtain(source_of(layout))
    obtained.release()
    shutil.rmtree(node.settings.cache_dir / "streams")
    with pytest.raises(NotFoundError, match="neither in the store nor on this node"):
        publish_node_image(node.settings, obtained.record.index_digest)
    # Another node has published it meanwhile.
    record = index(source_of(layout), tmp_path / "store", tmp_path / "work")
    published = publish_node_image(node.settings, obtained.record.index_digest)
    assert published == record.index_digest


def test_what_the_disk_has_damaged_is_not_published(node: Node, layout: Layout) -> None:
    obtained = node.obtain(source_of(layout))
    obtained.release()
    for path in (node.settings.cache_dir / "streams").glob("*/data"):
        with path.open("r+b") as file:
            file.seek(600)
            file.write(b"damage")
    with pytest.raises(CorruptError):
        publish_node_image(node.settings, obtained.record.index_digest)
    with open_store(node.settings.store_url) as store:
        assert not list(store.list("images/"))
        assert not list(store.list("layers/"))


def test_trim_forgets_what_nobody_asked_for(node: Node, layout: Layout) -> None:
    _, contents = node.start(source_of(layout))
    catalogue = NodeCatalogue(node.settings.cache_dir)
    assert catalogue.trim() == 0
    for path in node.settings.cache_dir.rglob("*.json"):
        os.utime(path, (1, 1))
    assert catalogue.trim() > 0
    assert not list(node.settings.cache_dir.rglob("*.json"))
    assert node.start(source_of(layout))[1] == contents


def test_a_stream_that_is_lost_while_served(node: Node, layout: Layout) -> None:
    """Nobody else has it: an error, not zeros."""
    obtained = node.obtain(source_of(layout))
    obtained.release()
    shutil.rmtree(node.settings.cache_dir / "streams")
    with pytest.raises(CorruptError, match="pull the image again"):
        node.contents(obtained)
