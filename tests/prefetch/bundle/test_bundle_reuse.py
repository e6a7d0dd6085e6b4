"""Records of images that share bundles, and launches of rebuilt images."""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import index_key
from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store, similar
from bootseer.prefetch.bundle.similar import (
    FORM,
    LayerStream,
    SimilarImage,
    SimilarImages,
    choose_similar,
    describe_image,
    name_of,
)
from bootseer.prefetch.index.catalogue import read_tree
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.service import log_path
from bootseer.settings.config import Settings
from bootseer.store import Store, open_store
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import (
    checksums_in_child,
    drop_cache,
    index,
    mounted,
    settings_at,
)
from testbed.mounts.sweeping import sweep
from testbed.needs import require
from testbed.waiting import wait_for

A, B, C, D = ("sha256:" + digit * 64 for digit in "abcd")


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("train", "train"),
        ("train:v1", "train"),
        ("team/train:v1", "team/train"),
        ("127.0.0.1:5000/team/train", "127.0.0.1:5000/team/train"),
        ("127.0.0.1:5000/team/train:v2", "127.0.0.1:5000/team/train"),
        (f"127.0.0.1:5000/team/train:v2@{A}", "127.0.0.1:5000/team/train"),
        (f"registry://host/train@{A}", "registry://host/train"),
    ],
)
def test_an_images_name_is_without_tag_and_digest(reference: str, name: str) -> None:
    assert name_of(reference) == name


def test_the_one_that_shares_most_is_chosen() -> None:
    own = SimilarImage(A, 0, (LayerStream(B, 1000), LayerStream(C, 10)))
    small = SimilarImage(B, 9, (LayerStream(C, 10),))
    large = SimilarImage(C, 1, (LayerStream(D, 5000), LayerStream(B, 1000)))
    assert choose_similar(own, [small, large]) == large
    # A stream of the same name and another length is a different one.
    assert choose_similar(own, [small, SimilarImage(C, 1, (LayerStream(B, 5000),))]) == small
    assert choose_similar(own, [SimilarImage(B, 1, ()), SimilarImage(C, 2, ())]) == SimilarImage(
        C, 2, ()
    )
    assert choose_similar(own, [SimilarImage(A, 9, own.streams)]) is None


def test_names_of_any_length_have_keys() -> None:
    keys = {hot_store.name_key(name, "train") for name in ("a/b", "a%2Fb", "a" * 999, "b" * 999)}
    assert len(keys) == 4
    assert all(max(map(len, key.split("/"))) < 256 and key.count("/") == 3 for key in keys)


def blobs_of(*streams: tuple[str, int]) -> list[Blob]:
    return [Blob(digest, 0, (), digest, length) for digest, length in streams]


def test_records_keep_the_longest_streams() -> None:
    own = describe_image(A, 7, blobs_of((B, 10), (C, 1000), (B, 10)))
    assert own == SimilarImage(A, 7, (LayerStream(C, 1000), LayerStream(B, 10)))
    assert FORM.decode(FORM.encode(SimilarImages((own,))), "x") == SimilarImages((own,))
    many = describe_image(A, 7, blobs_of(*((f"sha256:{n:064x}", n) for n in range(1000))))
    assert FORM.decode(FORM.encode(SimilarImages((many,) * 4)), "x").images == (many,) * 4
    assert many.streams[0].length == 999


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "other"}, CorruptError),
        ({"version": 2}, UnknownFormatError),
        ({"images": [{}] * 5}, CorruptError),
        ({"images": "x"}, CorruptError),
        ({"images": [{"index_digest": "../x", "created_ns": 1}]}, CorruptError),
        ({"images": [{"index_digest": A, "created_ns": -1}]}, CorruptError),
        (
            {"images": [{"index_digest": A, "created_ns": 1, "streams": [{"digest": "a/../b"}]}]},
            CorruptError,
        ),
    ],
)
def test_hostile_records(change: dict[str, object], error: type[BootseerError]) -> None:
    document = {**json.loads(FORM.encode(SimilarImages(()))), **change}
    with pytest.raises(error):
        FORM.decode(json.dumps(document).encode(), "x")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b" " * 100_000])
def test_noise_is_no_record(data: bytes) -> None:
    with pytest.raises((CorruptError, UnknownFormatError)):
        FORM.decode(data, "x")


# ---- launches --------------------------------------------------------------------------------

pytest_fuse = pytest.mark.needs("fuse")


def files(seed: int, count: int, folder: str) -> list[Member]:
    chance = random.Random(seed)
    return [Member(f"{folder}/{n}", data=chance.randbytes(30_000)) for n in range(count)]


BASE, PACKAGES, CODE = files(1, 40, "usr"), files(2, 40, "site"), files(3, 10, "app")
HOT = [*BASE[:10], *CODE, *PACKAGES[5:30]]


class NodeAndStore:
    """Node and its store."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.settings: Settings = settings_at(base)
        self.v1 = ""
        self.count = 0

    def index(self, reference: str, layers: Sequence[Sequence[Member]]) -> ImageRecord:
        self.count += 1
        layout = self.base / f"layout-{self.count}"
        write_layout(layout, layers)
        record = index(self.settings, layout, reference)
        drop_cache(self.settings)
        return record

    def record(self, reference: str) -> None:
        """Make a first start, which is recorded."""
        with mounted(self.settings, reference, self.base / "mnt") as image:
            self.read(image.directory)
        assert wait_published(self.settings, 30)
        drop_cache(self.settings)

    def read(self, directory: Path, hot: Sequence[Member] = tuple(HOT)) -> None:
        found = checksums_in_child([directory / member.name for member in hot])
        assert found == [hashlib.sha256(member.data).hexdigest() for member in hot]

    def stored(self, key: str) -> Path:
        path = self.base / "store" / key
        path.chmod(0o600)
        return path

    def store(self) -> Store:
        return open_store(self.settings.store_url)


def later(members: Sequence[Member]) -> list[Member]:
    return [Member(m.name, data=m.data, mtime=m.mtime + 5) for m in members]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> NodeAndStore:
    """Node and store after one start of train:v1."""
    require("fuse")
    made = NodeAndStore(tmp_path_factory.mktemp("recorded"))
    made.v1 = made.index("train:v1", (BASE, PACKAGES, CODE)).index_digest
    made.record("train:v1")
    sweep(made.settings.run_dir.parent, made.settings)
    return made


@pytest.fixture
def node(recorded: NodeAndStore, tmp_path: Path) -> Iterator[NodeAndStore]:
    made = NodeAndStore(tmp_path)
    made.v1 = recorded.v1
    shutil.copytree(recorded.base / "store", tmp_path / "store")
    yield made
    sweep(made.settings.run_dir.parent, made.settings)


NEW_CODE = [Member(m.name, data=m.data[::-1]) for m in CODE[:2]] + later(CODE[2:])


@pytest_fuse
@pytest.mark.parametrize(
    ("reference", "layers"),
    [
        ("train:v2", (BASE, PACKAGES, NEW_CODE)),
        ("train:v2", (BASE, later(PACKAGES), CODE)),
        ("train:v2", (later(BASE), PACKAGES, CODE)),
        ("other:v1", (BASE, PACKAGES, NEW_CODE)),
    ],
    ids=["top", "middle", "base", "another-name"],
)
def test_a_rebuilt_image_starts_with_the_old_bundle(
    node: NodeAndStore, reference: str, layers: Sequence[Sequence[Member]]
) -> None:
    new = node.index(reference, layers)
    assert new.index_digest != node.v1
    by_name = {member.name: member for layer in layers for member in layer}
    hot = [by_name[member.name] for member in HOT]
    with mounted(node.settings, reference, node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        node.read(image.directory, hot)
        prefetch = image.status()["prefetch"]
        assert prefetch["error"] is None
        assert prefetch["bundle_index"] == node.v1
        # Two files of 45 are new in the first image.
        assert prefetch["recall"] > (0.9 if layers[2] is NEW_CODE else 0.99)
        assert prefetch["precision"] > 0.99
        image.ready()
    assert wait_published(node.settings, 30)
    with node.store() as store:
        pointer = hot_store.read_pointer(store, new.index_digest, "train")
    # A bundle with misses is replaced; a perfect one is not.
    assert (pointer is not None) == (prefetch["recall"] < 0.95)


@pytest_fuse
@pytest.mark.parametrize(
    "damage",
    ["similar", "foreign", "pointer", "other-pointer", "header", "huge", "index", "no-index"],
)
def test_damage_costs_one_warning_and_the_help(node: NodeAndStore, damage: str) -> None:
    new = node.index("train:v2", (BASE, later(PACKAGES), CODE))
    with node.store() as store:
        pointer = hot_store.read_pointer(store, node.v1, "train")
        assert pointer is not None
        stranger = similar.find_similar(
            store,
            describe_image(D, 0, read_tree(store, new.index_digest).blobs),
            "train:v2",
            "train",
        )
    assert stranger is not None
    pointer_path = node.stored(hot_store.pointer_key(node.v1, "train"))
    if damage == "similar":
        for path in (node.base / "store/hot").glob("*s/*/train.json"):
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:-20])
    elif damage == "foreign":
        # The record names an image that was never indexed.
        record = FORM.encode(SimilarImages((SimilarImage(D, 1, stranger.streams),)))
        node.stored(hot_store.name_key("train", "train")).write_bytes(record)
        foreign = replace(pointer, index_digest=D)
        with node.store() as store:
            store.publish(hot_store.pointer_key(D, "train"), hot_store.POINTER_FORM.encode(foreign))
    elif damage == "pointer":
        pointer_path.write_bytes(b"{")
    elif damage == "other-pointer":
        other = replace(pointer, index_digest=D)
        pointer_path.write_bytes(hot_store.POINTER_FORM.encode(other))
    elif damage == "huge":
        document = json.loads(pointer_path.read_bytes())
        pointer_path.write_text(json.dumps({**document, "header_bytes": 60 * 2**20}))
    elif damage == "no-index":
        node.stored(index_key(node.v1)).unlink()
    else:
        key = hot_store.header_key(pointer.bundle_digest)
        path = node.stored(key if damage == "header" else index_key(node.v1))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with mounted(node.settings, "train:v2", node.base / "mnt") as image:
        node.read(image.directory)
        assert image.status()["prefetch"] is None
        log = log_path(node.settings.run_dir, image.state.id)
        assert log.read_text().count("no bundle is used") == 1


@pytest_fuse
def test_another_image_of_the_name_is_no_hindrance(node: NodeAndStore) -> None:
    strange = files(9, 10, "strange")
    node.index("train:v2", (strange,))
    with mounted(node.settings, "train:v2", node.base / "mnt") as image:
        node.read(image.directory, strange)
        assert image.status()["prefetch"] is None
    assert wait_published(node.settings, 30)
    with node.store() as store:
        record = store.read(hot_store.name_key("train", "train"))
    assert len(FORM.decode(record, "x").images) == 2
