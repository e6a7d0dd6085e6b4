"""The window of frames between the store and extraction."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError
from bootseer.prefetch import stored_frames
from bootseer.prefetch.stored_frames import StoredFrames, plan_stored_frames
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue, fetch
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.fetch import fetch_tree, find_local_blobs
from bootseer.store import Store, open_store
from bootseer.store.backend import Backend, Reader
from bootseer.transfer.attempt import Attempt
from testbed.needs import MissingError
from tests.bootseer.blob.trees import state
from tests.snapshots.conftest import MakeNode


class _DamagingBackend:
    """Backend that flips bits in all reads, or in those without the storage's own checks."""

    def __init__(self, backend: Backend, *, always: bool = False) -> None:
        self._backend = backend
        self._always = always
        self.unchecked_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open_reader(self, path: str, *, is_checked: bool = False) -> Reader:
        return Backend.open_reader(cast("Backend", self), path, is_checked=is_checked)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(self._backend.read(path, offset, length))
        if self._always:
            _damage(memoryview(data))
        return bytes(data)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        count = self._backend.read_into(path, offset, buffer, attempt)
        is_checked = attempt is not None and attempt.is_checked
        self.unchecked_count += is_checked
        if is_checked or self._always:
            _damage(buffer)
        return count


def _damage(data: memoryview) -> None:
    data[::1000] = bytes(byte ^ 1 for byte in data[::1000])


def _read(source: StoredFrames, offset: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += source.read(0, offset + len(data), length - len(data))
    return data


@pytest.fixture
def node(make_node: MakeNode) -> Settings:
    return make_node("a")


@pytest.fixture
def packed(tmp_path: Path, node: Settings) -> Iterator[tuple[Store, str, Tree, bytes]]:
    """Yield store, key, tree and content of a blob with many frames."""
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
    with StoredFrames(store, plan_stored_frames(tree), deadline_s=20) as source:
        for _ in range(100):
            offset = generator.randrange(end)
            length = generator.randrange(1, 400_000)
            length = min(length, end - offset)
            assert _read(source, offset, length) == content[offset : offset + length]
        for frame in tree.blobs[0].frames:
            data = _read(source, frame.offset, frame.length)
            assert data == content[frame.offset : frame.offset + frame.length]
        with pytest.raises(CorruptError):
            source.read(1, 0, 10)


def test_frames_that_no_run_has_are_read_one_by_one(
    packed: tuple[Store, str, Tree, bytes],
) -> None:
    store, _, tree, content = packed
    plan = plan_stored_frames(tree)
    end = tree.blobs[0].frames[-1].offset
    with StoredFrames(store, replace(plan, runs=plan.runs[1::2]), deadline_s=20) as source:
        assert _read(source, 0, end) == content[:end]


def test_what_was_consumed_long_ago_can_be_read_again(
    packed: tuple[Store, str, Tree, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the frame has been used for other frames meanwhile."""
    store, _, tree, content = packed
    monkeypatch.setattr(stored_frames, "KEPT_BYTES", 2**20)
    monkeypatch.setattr(stored_frames, "WINDOW_BYTES", 2**22)
    end = tree.blobs[0].frames[-1].offset
    with StoredFrames(store, plan_stored_frames(tree), deadline_s=20) as source:
        for _ in range(2):
            assert _read(source, 0, end) == content[:end]


def test_what_came_damaged_is_read_with_the_storages_checks(
    packed: tuple[Store, str, Tree, bytes],
) -> None:
    store, _, tree, content = packed
    damaging = _DamagingBackend(store.backend)
    end = tree.blobs[0].frames[-1].offset
    plan = plan_stored_frames(tree)
    with StoredFrames(Store(cast("Backend", damaging)), plan, deadline_s=20) as source:
        assert _read(source, 0, end) == content[:end]
    assert 0 < damaging.unchecked_count < len(plan.runs)


def test_lasting_damage_is_an_error(packed: tuple[Store, str, Tree, bytes]) -> None:
    store, _, tree, _ = packed
    damaging = Store(cast("Backend", _DamagingBackend(store.backend, always=True)))
    with (
        StoredFrames(damaging, plan_stored_frames(tree), deadline_s=60) as source,
        pytest.raises(CorruptError),
    ):
        source.read(0, 0, 1)


@pytest.mark.parametrize("is_near", [True, False])
def test_a_store_on_a_disk_of_this_node_is_read_as_files(
    packed: tuple[Store, str, Tree, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_near: bool,
) -> None:
    store, _, tree, _ = packed
    if not is_near:
        monkeypatch.setattr(fetch, "LOCAL_KINDS", frozenset())
    elif find_local_blobs(store, tree) is None:
        raise MissingError("the tests' folder is on a file system that counts as far")
    (manifest,) = catalogue.list_all(store)
    (target,) = manifest.targets
    moved_bytes = fetch_tree(store, target, tree, tmp_path / "out", 20.0).moved_bytes
    assert tree.blobs[0].size_bytes * 0.9 < moved_bytes <= tree.blobs[0].size_bytes
    assert state(tmp_path / "out") == state(tmp_path / "source")
