"""Chain ids as in the OCI specification, and the limited trust in a store's records of them.

A record is believed only as far as its layers make the chain under whose id it is found.
"""

import hashlib
import json
from pathlib import Path

import pytest

from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.index.chains import (
    Chain,
    chain_ids,
    chain_key,
    decode_chain,
    encode_chain,
    publish_chain_index,
    publish_chains,
    read_chain,
)
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.store import Store
from testbed.images.building import Member, digest, tar_of, write_layout
from tests.support.images.indexed import unsigned

DIFF_IDS = tuple(digest(text) for text in (b"a", b"b", b"c"))


def test_ids_are_those_of_the_specification() -> None:
    first = DIFF_IDS[0]
    second = "sha256:" + hashlib.sha256(f"{first} {DIFF_IDS[1]}".encode()).hexdigest()
    third = "sha256:" + hashlib.sha256(f"{second} {DIFF_IDS[2]}".encode()).hexdigest()
    assert chain_ids(DIFF_IDS) == (first, second, third)
    assert chain_ids(()) == ()


def test_every_chain_of_an_indexed_image_is_known(store: Store, tmp_path: Path) -> None:
    layers = [[Member(name, data=name.encode())] for name in ("one", "two", "three")]
    write_layout(tmp_path / "layout", layers)
    with open_source(str(tmp_path / "layout"), tmp_path / "work") as source:
        record = index_image(source, store, tmp_path / "work", reference="image:1")
    diff_ids = tuple(digest(tar_of(members)) for members in layers)
    for count, chain_id in enumerate(chain_ids(diff_ids), 1):
        index_digest = record.index_digest if count == 3 else ""
        assert read_chain(store, chain_id) == Chain(diff_ids[:count], index_digest)


def test_a_plain_directory_has_no_chain(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    with open_source(str(tmp_path / "root"), tmp_path / "work") as source:
        index_image(source, store, tmp_path / "work", reference="plain:1")
    assert list(store.list("chains/")) == []


def test_an_unknown_chain_is_none(store: Store) -> None:
    assert read_chain(store, DIFF_IDS[0]) is None


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "sha256:..", "sha256:" + "A" * 64, "x/y"])
def test_what_is_no_digest_is_refused_before_the_store_is_asked(store: Store, name: str) -> None:
    with pytest.raises(CorruptError, match="not a digest"):
        read_chain(store, name)


@pytest.mark.parametrize(
    "diff_ids",
    [DIFF_IDS[:2], (*DIFF_IDS, DIFF_IDS[0]), (DIFF_IDS[1], DIFF_IDS[0], DIFF_IDS[2]), ()],
    ids=["shorter", "longer", "other-order", "empty"],
)
def test_layers_that_do_not_make_the_chain_are_refused(diff_ids: tuple[str, ...]) -> None:
    chain_id = chain_ids(DIFF_IDS)[-1]
    document = unsigned(encode_chain(Chain(DIFF_IDS)))
    document["diff_ids"] = diff_ids
    with pytest.raises(CorruptError, match=r"do not make the chain|diff_ids"):
        decode_chain(json.dumps(document).encode(), chain_id, "here")


def test_another_kind_or_version_is_refused() -> None:
    chain_id = chain_ids(DIFF_IDS)[-1]
    document = unsigned(encode_chain(Chain(DIFF_IDS)))
    for change, error in (
        ({"kind": "bootseer-layer"}, CorruptError),
        ({"version": 2}, UnknownFormatError),
    ):
        with pytest.raises(error):
            decode_chain(json.dumps({**document, **change}).encode(), chain_id, "here")


def test_a_damaged_record_is_written_again(store: Store) -> None:
    chain_id = chain_ids(DIFF_IDS)[-1]
    store.publish(chain_key(chain_id), b'{"kind": "bootseer-chain", "version"')
    with pytest.raises(CorruptError):
        read_chain(store, chain_id)
    publish_chains(store, DIFF_IDS)
    assert read_chain(store, chain_id) == Chain(DIFF_IDS)


def test_the_record_of_a_later_release_stays(store: Store) -> None:
    key = chain_key(DIFF_IDS[0])
    store.publish(key, b'{"kind": "bootseer-chain", "version": 2}')
    with pytest.raises(UnknownFormatError):
        publish_chains(store, DIFF_IDS)
    assert b'"version": 2' in store.read(key)


def test_the_index_of_a_chain_stays_known_and_is_replaced_by_another(store: Store) -> None:
    chain_id = chain_ids(DIFF_IDS)[-1]
    publish_chain_index(store, DIFF_IDS, DIFF_IDS[0])
    # An image on top of this chain is indexed, which tells nothing about the chain's own index.
    publish_chains(store, DIFF_IDS)
    assert read_chain(store, chain_id) == Chain(DIFF_IDS, DIFF_IDS[0])
    publish_chain_index(store, DIFF_IDS, DIFF_IDS[1])
    assert read_chain(store, chain_id) == Chain(DIFF_IDS, DIFF_IDS[1])
