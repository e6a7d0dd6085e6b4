"""The window of frames between store and extraction."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.config import Settings
from bootseer.errors import CorruptError
from bootseer.snapshots import catalogue
from bootseer.snapshots.commands import create_snapshot
from bootseer.snapshots.restoring import near
from bootseer.snapshots.restoring.fetch import FrameSource, plan_frames
from bootseer.snapshots.restoring.restore import fetch_tree
from bootseer.store import Store, open_store
from tests.blob.trees import state
from tests.snapshots.conftest import MakeNode


class _DamagingStore(Store):
    """Flips bits in every range that is read for the first time, or in all."""

    always = False

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(super().read(key, offset, length))
        seen = self.__dict__.setdefault("seen", set())
        if self.always or (offset, length) not in seen:
            data[::1000] = bytes(byte ^ 1 for byte in data[::1000])
        seen.add((offset, length))
        return bytes(data)


@pytest.fixture
def node(make_node: MakeNode) -> Settings:
    return make_node("a")


@pytest.fixture
def packed(tmp_path: Path, node: Settings) -> Iterator[tuple[Store, str, Tree, bytes]]:
    """(store, key, tree, content) of a blob with many frames."""
    source = tmp_path / "source"
    source.mkdir()
    generator = random.Random(7)
    for number in range(20):
        (source / str(number)).write_bytes(generator.randbytes(300_000))
    (source / "large").write_bytes(generator.randbytes(20_000_000))
    manifest = create_snapshot(node, [str(source)])
    with open_store(node.store_url) as store:
        (target,) = manifest.targets
        key = blob_key(target.blob.digest)
        yield store, key, catalogue.load_tree(store, target), store.read(key)


def test_any_range_in_any_order(packed: tuple[Store, str, Tree, bytes]) -> None:
    store, _, tree, content = packed
    generator = random.Random(11)
    end = tree.blobs[0].frames[-1].offset
    with FrameSource(store, plan_frames(tree), deadline_s=20) as source:
        for _ in range(100):
            offset = generator.randrange(end)
            length = generator.randrange(1, 400_000)
            length = min(length, end - offset)
            assert source.read(0, offset, length) == content[offset : offset + length]
        for frame in tree.blobs[0].frames:
            data = source.read(0, frame.offset, frame.length)
            assert data == content[frame.offset : frame.offset + frame.length]
        with pytest.raises(CorruptError):
            source.read(1, 0, 10)


def test_a_damaged_transfer_is_tried_again(packed: tuple[Store, str, Tree, bytes]) -> None:
    store, _, tree, content = packed
    damaging = _DamagingStore(store.backend)
    frame = tree.blobs[0].frames[0]
    with FrameSource(damaging, plan_frames(tree), deadline_s=20) as source:
        assert source.read(0, frame.offset, frame.length) == content[: frame.length]


def test_lasting_damage_is_an_error(packed: tuple[Store, str, Tree, bytes]) -> None:
    store, _, tree, _ = packed
    damaging = _DamagingStore(store.backend)
    damaging.always = True
    frame = tree.blobs[0].frames[0]
    with (
        FrameSource(damaging, plan_frames(tree), deadline_s=5) as source,
        pytest.raises(CorruptError),
    ):
        source.read(0, frame.offset, frame.length)


@pytest.mark.parametrize("is_near", [True, False])
def test_a_store_on_a_disk_of_this_node_is_read_as_files(
    packed: tuple[Store, str, Tree, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_near: bool,
) -> None:
    store, _, tree, _ = packed
    if not is_near:
        monkeypatch.setattr(near, "_LOCAL", frozenset())
    elif near.near_blobs(store, tree) is None:
        pytest.skip("the tests' folder is on a file system that counts as far")
    (manifest,) = catalogue.list_all(store)
    (target,) = manifest.targets
    moved_bytes = fetch_tree(store, target, tree, tmp_path / "out", 20.0).moved_bytes
    assert tree.blobs[0].size_bytes * 0.9 < moved_bytes <= tree.blobs[0].size_bytes
    assert state(tmp_path / "out") == state(tmp_path / "source")
