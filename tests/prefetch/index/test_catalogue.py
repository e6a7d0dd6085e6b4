"""Records of images and layers: codec, lookup by name and digest, hostile values, the tree."""

import hashlib
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.blob.build import build_tree
from bootseer.blob.index import digest, encode
from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.tree import Inode
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.prefetch.index.catalogue import (
    check_blobs,
    find_image,
    image_key,
    layer_key,
    list_images,
    load_tree,
    publish_image,
    publish_layer,
    read_layer,
)
from bootseer.prefetch.index.records import (
    IMAGE_FORM,
    LAYER_FORM,
    ImageConfig,
    ImageLayer,
    ImageRecord,
    LayerRecord,
)
from bootseer.store import Store, open_store
from tests.support.images.indexed import unsigned

A = "sha256:" + "a" * 64
B = "sha256:" + "b" * 64
RECORD = ImageRecord(
    "registry.example:5000/team/train:v1",
    A,
    B,
    1234,
    ImageConfig(env=("A=1",), cmd=("python",), user="0:0", diff_ids=(A,)),
    (ImageLayer(A, B, 99),),
    10**12,
    100_000,
    1_700_000_000_000_000_000,
)
LAYER = LayerRecord(A, B, 99, A, (b"", b"usr/\xff"), ((b"x\xfe", b"y"),))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def publish(store: Store, *records: ImageRecord) -> None:
    for record in records:
        store.publish(image_key(record.reference), IMAGE_FORM.encode(record), replace=True)


def test_records_survive_the_codec() -> None:
    assert IMAGE_FORM.decode(IMAGE_FORM.encode(RECORD), "x") == RECORD
    assert LAYER_FORM.decode(LAYER_FORM.encode(LAYER), "x") == LAYER
    assert LAYER_FORM.encode(LAYER) == LAYER_FORM.encode(
        LAYER_FORM.decode(LAYER_FORM.encode(LAYER), "x")
    )


@given(st.lists(st.binary(min_size=1).filter(lambda b: b"\0" not in b), max_size=4))
def test_any_path_survives(names: list[bytes]) -> None:
    layer = replace(LAYER, implied=tuple(names), links=tuple((n, n) for n in names))
    assert LAYER_FORM.decode(LAYER_FORM.encode(layer), "x") == layer


@pytest.mark.parametrize("encoded", [IMAGE_FORM.encode(RECORD), LAYER_FORM.encode(LAYER)])
@pytest.mark.parametrize(
    "value", [None, -1, True, 2**70, 1.5, "x", "", [], ["\0"], [1], {}, {"digest": A}, [[]]]
)
def test_hostile_values_are_refused_or_harmless(encoded: bytes, value: object) -> None:
    decode = IMAGE_FORM.decode if b"bootseer-image" in encoded else LAYER_FORM.decode
    document = unsigned(encoded)
    for key in document:
        changed = json.dumps({**document, key: value}).encode()
        try:
            record = decode(changed, "here")
        except (CorruptError, UnknownFormatError):
            continue
        assert decode(changed, "here") == record


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"null", b"{}", b"[" * 100_000, b"9" * 9999])
def test_what_is_no_record(data: bytes) -> None:
    for decode in (IMAGE_FORM.decode, LAYER_FORM.decode):
        with pytest.raises((CorruptError, UnknownFormatError)):
            decode(data, "here")


@pytest.mark.parametrize("encoded", [IMAGE_FORM.encode(RECORD), LAYER_FORM.encode(LAYER)])
def test_a_flipped_byte_is_noticed(encoded: bytes) -> None:
    """Each byte whose change changes the record's content."""
    decode = IMAGE_FORM.decode if b"bootseer-image" in encoded else LAYER_FORM.decode
    right = decode(encoded, "here")
    for position in range(len(encoded)):
        changed = bytearray(encoded)
        changed[position] ^= 1
        try:
            assert decode(bytes(changed), "here") == right
        except CorruptError:
            continue


def test_a_record_without_a_checksum_is_read() -> None:
    """Earlier releases wrote such records."""
    image = json.dumps(unsigned(IMAGE_FORM.encode(RECORD)), indent=1).encode()
    assert IMAGE_FORM.decode(image, "here") == RECORD
    layer = json.dumps(unsigned(LAYER_FORM.encode(LAYER)), indent=1).encode()
    assert LAYER_FORM.decode(layer, "here") == LAYER


def test_a_later_version_is_named() -> None:
    changed = json.dumps({**unsigned(IMAGE_FORM.encode(RECORD)), "version": 2}).encode()
    with pytest.raises(UnknownFormatError, match="version 2"):
        IMAGE_FORM.decode(changed, "here")


def test_find_by_name_tag_and_digest(store: Store) -> None:
    latest = replace(RECORD, reference="tool:latest", index_digest=A)
    publish(store, RECORD, latest)
    assert find_image(store, RECORD.reference) == RECORD
    assert find_image(store, "tool") == find_image(store, "tool:latest") == latest
    assert find_image(store, "bbbbbbbb") == find_image(store, B) == RECORD
    assert [record.reference for record in list_images(store)] == [
        RECORD.reference,
        "tool:latest",
    ]


def test_what_is_not_found(store: Store) -> None:
    publish(store, RECORD, replace(RECORD, reference="other", index_digest=B[:-1] + "c"))
    for reference in ("absent", "registry.example:5000/team/train", "cccccccc"):
        with pytest.raises(NotFoundError, match="image list"):
            find_image(store, reference)
    with pytest.raises(InvalidInputError, match="several"):
        find_image(store, "sha256:bbbbbbbb")


@pytest.mark.parametrize("reference", ["", "../x", "a b", "/x", "x" * 201, "é", "a" + "/" * 100])
def test_names_that_cannot_be_used(store: Store, reference: str) -> None:
    with pytest.raises(InvalidInputError):
        find_image(store, reference)


def test_a_record_under_another_name_is_refused(store: Store) -> None:
    store.publish(image_key("innocent"), IMAGE_FORM.encode(RECORD))
    with pytest.raises(CorruptError, match="innocent"):
        find_image(store, "innocent")


def test_what_could_not_be_read_back_is_not_written(store: Store) -> None:
    with pytest.raises(CorruptError, match="size_bytes"):
        publish_image(store, replace(RECORD, size_bytes=2**64))
    with pytest.raises(CorruptError, match="blob_size_bytes"):
        publish_layer(store, replace(LAYER, blob_size_bytes=2**60))
    assert list(store.list()) == []


def test_a_layers_record_is_under_its_digest(store: Store) -> None:
    assert read_layer(store, A) is None
    store.publish(layer_key(A), LAYER_FORM.encode(LAYER))
    assert read_layer(store, A) == LAYER
    store.publish(layer_key(B), LAYER_FORM.encode(LAYER))
    with pytest.raises(CorruptError):
        read_layer(store, B)


def test_the_tree_is_cached_and_verified_each_time(store: Store, tmp_path: Path) -> None:
    data = encode(build_tree([(b"x", 1)], [Inode(0o40755), Inode(0o100644)], []))
    record = replace(RECORD, index_digest=digest(data))
    cache = tmp_path / "cache"
    with pytest.raises(CorruptError, match="index it again"):
        load_tree(store, record, cache)
    store.publish(index_key(digest(data)), data)
    assert load_tree(store, record, cache).name_count == 1
    store.delete(index_key(digest(data)))
    assert load_tree(store, record, cache).name_count == 1
    (copy,) = (cache / "indexes").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600
    copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store.publish(index_key(digest(data)), data)
    assert load_tree(store, record, cache).name_count == 1
    assert copy.read_bytes() == data
    assert [path.name for path in (cache / "indexes").iterdir()] == [copy.name]


def layers_of(store: Store, count: int) -> tuple[ImageLayer, ...]:
    """Return layers whose blobs are in the store."""
    found = []
    for number in range(count):
        data = b"%d" % number
        blob = f"sha256:{hashlib.sha256(data).hexdigest()}"
        store.publish(blob_key(blob), data)
        found.append(ImageLayer(A, blob, len(data)))
    return tuple(found)


def test_the_store_is_asked_for_several_blobs_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(RECORD, layers=layers_of(store, 40))
    # Passed only by calls that are made at the same time.
    others = threading.Barrier(4)
    asking = threading.Semaphore(16)
    size = store.size

    def size_of(key: str) -> int:
        assert asking.acquire(blocking=False), "more than 16 at once"
        try:
            others.wait(60)
            return size(key)
        finally:
            asking.release()

    monkeypatch.setattr(store, "size", size_of)
    check_blobs(store, record)


def test_a_missing_or_shorter_blob_is_named(store: Store) -> None:
    layers = layers_of(store, 20)
    check_blobs(store, replace(RECORD, layers=layers))
    longer = (*layers[:7], replace(layers[7], blob_size_bytes=99), *layers[8:])
    with pytest.raises(CorruptError, match=f"{layers[7].blob_digest[7:]} has 1 bytes"):
        check_blobs(store, replace(RECORD, layers=longer))
    store.delete(blob_key(layers[11].blob_digest))
    with pytest.raises(CorruptError, match=f"{layers[11].blob_digest[7:]} is missing"):
        check_blobs(store, replace(RECORD, layers=layers))


def test_an_index_with_another_digest_is_refused(store: Store, tmp_path: Path) -> None:
    store.publish(index_key(B), encode(build_tree([], [Inode(0o40755)], [])))
    with pytest.raises(CorruptError, match="digest"):
        load_tree(store, RECORD, tmp_path / "cache")
