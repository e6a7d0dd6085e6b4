"""Bytes that other people wrote for one image never reach another image through the cache."""

import dataclasses
import logging
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.blob.index import decode, encode
from bootseer.blob.index import digest as digest_of
from bootseer.blob.keys import blob_key
from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import CorruptError
from bootseer.prefetch.bundle.replay import ReplayState
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.catalogue import find_image, list_images, load_tree, read_tree
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.publish.publish_image import publish_node_image
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.sources.layer_tar import pack_layer
from bootseer.store import Store, open_store
from testbed.images.building import LayoutBuilder, Member, write_layout
from testbed.waiting import wait_for
from tests.support.images.pulled import PullingNode
from tests.support.images.stored_image import Image, stored_image

CODE = b"print('the code of the image')\n" * 4000


def packed(base: Path, content: bytes) -> tuple[Tree, Store]:
    """Return an image of one file in a store of its own."""
    (base / "root").mkdir(parents=True)
    (base / "root" / "code").write_bytes(content)
    with (base / "blob").open("wb") as sink:
        tree = pack_directory(base / "root", sink)
    store = open_store((base / "store").as_uri())
    store.publish(blob_key(tree.blobs[0].digest), base / "blob")
    return tree, store


def read_code(blobs: Sequence[Blob], tree: Tree, store: Store, cache: Path) -> bytes:
    number = tree.resolve(b"code")
    assert number is not None
    (extent,) = tree.inode(number).extents
    streams = ImageBytes(blobs, store.read_into, NodeCache(cache), deadline_s=10)
    try:
        return bytes(streams.read(0, extent.blob_offset, extent.length))
    finally:
        streams.close()


@pytest.fixture
def honest(tmp_path: Path) -> tuple[Tree, Store]:
    return packed(tmp_path / "honest", CODE)


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Tree, Store]:
    return packed(tmp_path / "hostile", CODE.replace(b"print", b"wrong"))


def lying(hostile: Tree, honest: Tree) -> list[Blob]:
    """Return the hostile image's frames under the name of the honest image's stream."""
    (own,), (other,) = hostile.blobs, honest.blobs
    assert own.stream_length == other.stream_length
    return [replace(own, stream_digest=other.stream_digest)]


def test_a_lying_index_puts_nothing_into_another_image(
    tmp_path: Path, honest: tuple[Tree, Store], hostile: tuple[Tree, Store]
) -> None:
    blobs = lying(hostile[0], honest[0])
    assert b"wrong" in read_code(blobs, *hostile, tmp_path / "cache")
    assert read_code(honest[0].blobs, *honest, tmp_path / "cache") == CODE


def test_a_lying_index_reads_nothing_of_another_image(
    tmp_path: Path, honest: tuple[Tree, Store], hostile: tuple[Tree, Store]
) -> None:
    assert read_code(honest[0].blobs, *honest, tmp_path / "cache") == CODE
    blobs = lying(hostile[0], honest[0])
    assert b"wrong" in read_code(blobs, *hostile, tmp_path / "cache")
    # Named like a pulled stream, which no store has.
    without_frames = [replace(honest[0].blobs[0], frames=(), size_bytes=0)]
    with pytest.raises(CorruptError, match="stored nowhere"):
        read_code(without_frames, *honest, tmp_path / "cache")


def test_a_wrong_length_keeps_no_other_image_from_starting(
    tmp_path: Path, honest: tuple[Tree, Store], hostile: tuple[Tree, Store]
) -> None:
    length = honest[0].blobs[0].stream_length
    blobs = [replace(lying(hostile[0], honest[0])[0], stream_length=2 * length)]
    streams = ImageBytes(blobs, hostile[1].read_into, NodeCache(tmp_path / "cache"))
    try:
        assert read_code(honest[0].blobs, *honest, tmp_path / "cache") == CODE
    finally:
        streams.close()


# ---- what was pulled ----------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> LayoutBuilder:
    words = random.Random(5).choices([b"layer ", b"frame ", b"digest ", b"stream "], k=50_000)
    return write_layout(tmp_path / "image", [[Member("file", data=b"".join(words))]])


def image_bytes(
    node: PullingNode, index_digest: str, blobs: Sequence[Blob], store: Store
) -> ImageBytes:
    """Open the image with this index as a server of the node does."""
    vouched = vouched_streams(node.settings, index_digest)
    return ImageBytes(blobs, store.read_into, NodeCache(node.settings.cache_dir), vouched=vouched)


def fetched_bytes(node: PullingNode, layout: LayoutBuilder) -> int:
    """Return the bytes fetched to read all of the image."""
    with open_store(node.settings.store_url) as store:
        record = find_image(store, node.obtain(f"oci:{layout.directory}").record.reference)
        tree = load_tree(store, record, node.settings.cache_dir)
        streams = image_bytes(node, record.index_digest, tree.blobs, store)
        try:
            assert all(len(blob.frames) for blob in tree.blobs)
            streams.fill()
            return streams.fetcher.statistics().fetched_bytes
        finally:
            streams.close()


def test_what_a_node_pulled_serves_the_index_made_of_it(
    tmp_path: Path, layout: LayoutBuilder
) -> None:
    nodes = [
        PullingNode(tmp_path / name, tmp_path / "store") for name in ("packs", "waits", "lacks")
    ]
    indexes = [node.start(f"oci:{layout.directory}")[0].record.index_digest for node in nodes[:2]]
    for node, index in zip(nodes, indexes, strict=False):
        publish_node_image(node.settings, index)
    # The second node finds the layer in the store, and has pulled it itself.
    assert [fetched_bytes(node, layout) > 0 for node in nodes] == [False, False, True]


def test_a_directory_that_a_node_published_is_not_fetched_by_it(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_bytes(CODE)
    node = PullingNode(tmp_path / "node", tmp_path / "store")
    unpublished = node.start(tmp_path / "root")[0].record.index_digest
    index_digest = publish_node_image(node.settings, unpublished)
    assert index_digest != unpublished
    with open_store(node.settings.store_url) as store:
        tree = read_tree(store, index_digest)
        streams = image_bytes(node, index_digest, tree.blobs, store)
        assert all(len(blob.frames) for blob in tree.blobs)
        assert streams.fill_fetches() == []
        streams.close()


def test_of_many_nodes_of_a_first_start_each_layer_is_packed_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = random.Random(5).choices([b"layer ", b"frame ", b"digest "], k=5_000)
    layers = [[Member(f"file-{number}", data=b"".join(words))] for number in range(3)]
    layout = write_layout(tmp_path / "image", layers)
    packings: list[str | None] = []

    def counting(*arguments: Any, diff_id: str | None = None) -> LayerTree:
        packings.append(diff_id)
        return pack_layer(*arguments, diff_id=diff_id)

    monkeypatch.setattr("bootseer.prefetch.publish.publish_image.pack_layer", counting)
    nodes = [PullingNode(tmp_path / f"node-{number}", tmp_path / "store") for number in range(4)]
    indexes = [node.start(f"oci:{layout.directory}")[0].record.index_digest for node in nodes]
    for node, index in zip(nodes, indexes, strict=True):
        publish_node_image(node.settings, index)
    assert len(packings) == 3


@pytest.fixture
def other_frames(tmp_path: Path, layout: LayoutBuilder) -> tuple[PullingNode, str]:
    """Return a node that has pulled a layer which another node published with other frames.

    The digest is that of the index in the store.
    """
    first, second = (
        PullingNode(tmp_path / name, tmp_path / "store") for name in ("first", "second")
    )
    indexes = [
        node.start(f"oci:{layout.directory}")[0].record.index_digest for node in (first, second)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bootseer.prefetch.sources.layer_tar.LEVEL", 7)
        publish_node_image(first.settings, indexes[0])
    return second, publish_node_image(second.settings, indexes[1])


def test_frames_of_another_packer_are_not_fetched(
    layout: LayoutBuilder, other_frames: tuple[PullingNode, str]
) -> None:
    assert fetched_bytes(other_frames[0], layout) == 0


def test_no_frame_gets_into_a_pulled_stream(
    layout: LayoutBuilder, other_frames: tuple[PullingNode, str]
) -> None:
    node, index_digest = other_frames
    (diff_id,) = layers_of(node, index_digest)
    stream = NodeCache(node.settings.cache_dir).open_whole(diff_id)
    assert stream is not None
    data, length = stream.directory / "data", stream.stream_length
    right = stream.read(0, length)
    stream.close()
    with data.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([right[1000] ^ 1]))
    with open_store(node.settings.store_url) as store:
        tree = read_tree(store, index_digest)
        streams = image_bytes(node, index_digest, tree.blobs, store)
        try:
            assert bytes(streams.read(0, 0, length)) == right
            assert streams.fetcher.statistics().fetched_bytes > 0
        finally:
            streams.close()
    assert NodeCache(node.settings.cache_dir).open_whole(diff_id) is None


def test_an_image_of_a_store_reads_no_pulled_stream_by_naming_it(
    layout: LayoutBuilder, other_frames: tuple[PullingNode, str], honest: tuple[Tree, Store]
) -> None:
    """Only a source's own configuration vouches for a layer."""
    node, index_digest = other_frames
    (diff_id,) = layers_of(node, index_digest)
    (blob,) = honest[0].blobs
    claiming = encode(Tree(honest[0].columns, (replace(blob, stream_digest=diff_id),)))
    streams = image_bytes(node, digest_of(claiming), decode(claiming).blobs, honest[1])
    try:
        assert CODE[:30] in bytes(streams.read(0, 0, blob.stream_length))
    finally:
        streams.close()


def layers_of(node: PullingNode, index_digest: str) -> tuple[str, ...]:
    with open_store(node.settings.store_url) as store:
        (record,) = [one for one in list_images(store) if one.index_digest == index_digest]
    return record.config.diff_ids


# ---- bundles ------------------------------------------------------------------------------

HOT = [(offset, 4096) for offset in range(0, 1_000_000, 50_000)]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return stored_image(tmp_path)


def wrong_bundle(image: Image, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bytes]:
    """Make a bundle with other pages than the image's, but with right digests of its own."""
    with monkeypatch.context() as patch:
        read = ImageBytes.read
        patch.setattr(
            ImageBytes,
            "read",
            lambda *arguments, **options: b"wrong" + bytes(read(*arguments, **options))[5:],
        )
        return image.publish_bundle([image.place("big", *piece) for piece in HOT])


def read_big(image: Image, streams: ImageBytes, offset: int, length: int) -> bytes:
    return bytes(streams.read(*image.place("big", offset, length)))


def test_a_wrong_bundle_serves_its_own_image_alone(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = wrong_bundle(image, monkeypatch)
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, *bundle)
    replay.start()
    wait_for(lambda: replay.has_ended)
    assert replay.error is None
    # As another image with the same layer, and the building of a bundle, read it.
    others = ImageBytes(image.tree.blobs, image.store.read_into, NodeCache(tmp_path / "cache"))
    for offset, length in HOT:
        right = image.contents["big"][offset : offset + length]
        assert read_big(image, others, offset, length) == right
    others.close()
    streams.close()


def test_a_wrong_bundle_is_found_as_its_frames_come(
    image: Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundle = wrong_bundle(image, monkeypatch)
    streams = image.streams(tmp_path / "cache")
    follower = image.streams(tmp_path / "cache")
    for opened in (streams, follower):
        replay = image.replay(opened, *bundle)
        replay.start()
        wait_for(lambda replay=replay: replay.has_ended)  # type: ignore[misc]
    assert read_big(image, streams, *HOT[0]) != image.contents["big"][:4096]
    with caplog.at_level(logging.ERROR):
        # A fault beside a hot page fetches the frame that holds both.
        assert read_big(image, streams, 8192, 100) == image.contents["big"][8192:8292]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "not those of the image" in caplog.text
    # Also if another process has believed the same bundle.
    for opened in (streams, follower):
        for offset, length in HOT:
            right = image.contents["big"][offset : offset + length]
            assert read_big(image, opened, offset, length) == right
    streams.close()
    follower.close()


def test_a_refuted_bundle_is_believed_by_no_server_of_the_node(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = wrong_bundle(image, monkeypatch)
    reading, held = threading.Event(), threading.Event()

    def hold(key: str) -> None:
        if key.startswith("bundles/"):
            reading.set()
            assert held.wait(60)

    slow = dataclasses.replace(image, reads=[], before_read=hold)
    first = image.streams(tmp_path / "cache")
    second = slow.streams(tmp_path / "cache")
    replays = [slow.replay(second, *bundle), image.replay(first, *bundle)]
    replays[0].start()
    assert reading.wait(60)
    replays[1].start()
    wait_for(lambda: replays[1].has_ended)
    # The first server finds it wrong while the second one's bytes are under way.
    assert read_big(image, first, 8192, 100) == image.contents["big"][8192:8292]
    held.set()
    wait_for(lambda: replays[0].has_ended)
    third = image.streams(tmp_path / "cache")
    replays.append(image.replay(third, *bundle))
    replays[-1].start()
    for opened in (third, first, second):
        for offset, length in HOT:
            right = image.contents["big"][offset : offset + length]
            assert read_big(image, opened, offset, length) == right
    assert {replay.state for replay in replays} == {ReplayState.REFUTED}
    for opened in (first, second, third):
        opened.close()


def test_a_right_bundle_is_believed_after_a_wrong_one(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = wrong_bundle(image, monkeypatch)
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, *bundle)
    replay.start()
    wait_for(lambda: replay.has_ended)
    read_big(image, streams, 8192, 100)
    right = image.publish_bundle([image.place("big", *piece) for piece in HOT])
    # While the server that found the wrong page lives on.
    again = image.streams(tmp_path / "cache")
    following = image.replay(again, *right)
    following.start()
    wait_for(lambda: following.has_ended)
    image.reads.clear()
    for offset, length in HOT:
        content = image.contents["big"][offset : offset + length]
        assert read_big(image, again, offset, length) == content
    assert image.reads == []
    streams.close()
    again.close()


def test_a_cache_that_is_removed_refutes_nothing(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, *wrong_bundle(image, monkeypatch))
    replay.start()
    wait_for(lambda: replay.has_ended)
    read_big(image, streams, 8192, 100)
    streams.close()
    again = image.streams(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    caplog.clear()
    again.drop_refuted()
    assert caplog.records == []
    again.close()


def test_what_was_refuted_does_not_come_back_with_a_crash_of_the_machine(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = wrong_bundle(image, monkeypatch)
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, *bundle)
    replay.start()
    wait_for(lambda: replay.has_ended)
    read_big(image, streams, 8192, 100)
    streams.close(durable=False)
    monkeypatch.setattr("bootseer.prefetch.cache.node_cache.boot_id", lambda: "ab" * 16)
    again = image.streams(tmp_path / "cache")
    for offset, length in HOT:
        right = image.contents["big"][offset : offset + length]
        assert read_big(image, again, offset, length) == right
    again.close()


def test_the_fill_compares_what_a_bundle_brought(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(
        streams, *image.publish_bundle([image.place("big", *piece) for piece in HOT])
    )
    replay.start()
    wait_for(lambda: replay.has_ended)
    claimed = sum(length for _, _, length in streams.unproven())
    assert claimed >= 4096 * len(HOT)
    assert (streams.proven_bytes, streams.cached_bytes) == (0, claimed)
    streams.fill(streams.fill_fetches(streams.unproven()))
    assert streams.unproven() == []
    assert replay.error is None
    cache = NodeCache(tmp_path / "cache")
    assert len(cache.streams()) == 2
    streams.close()
    # The bundle is not needed any more.
    assert len(cache.streams()) == 1


# ---- the disk -----------------------------------------------------------------------------


def test_what_the_disk_changed_is_fetched_again(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    streams.fill()
    streams.close()
    flips = random.Random(3)
    (data,) = tmp_path.glob("cache/streams*/*/data")
    content = bytearray(data.read_bytes())
    for _ in range(200):
        content[flips.randrange(len(content))] ^= 1 << flips.randrange(8)
    data.write_bytes(content)
    again = image.streams(tmp_path / "cache")
    image.reads.clear()
    for name, right in image.contents.items():
        found = b"".join(
            bytes(again.read(*image.place(name, start, min(32768, len(right) - start))))
            for start in range(0, len(right), 32768)
        )
        assert found == right
    assert image.reads
    again.close()


@pytest.mark.parametrize("value", [b"\1", b"\0"], ids=["all here", "half lost"])
def test_damaged_checksums_are_no_wrong_byte(image: Image, tmp_path: Path, value: bytes) -> None:
    streams = image.streams(tmp_path / "cache")
    for offset in range(0, 2_900_000, 300_000):
        read_big(image, streams, offset, 4096)
    streams.close()
    (path,) = tmp_path.glob("cache/streams/*/sums")
    content = bytearray(path.read_bytes())
    stop = 64 + 8 * len(image.tree.blobs[0].frames)
    start = 64 if value == b"\1" else stop // 2
    content[start:stop] = value * (stop - start)
    path.write_bytes(content)
    again = image.streams(tmp_path / "cache")
    for offset in range(0, 2_900_000, 50_000):
        assert read_big(image, again, offset, 4096) == image.contents["big"][offset : offset + 4096]
    again.close()
