"""Folders that are stores: a share that is not mounted does not become a new store."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from bootseer.errors import NotFoundError, UnavailableError, UnknownFormatError
from bootseer.store import Store, open_backend, open_store

MARK = ".bootseer.store"


def _open(tmp_path: Path, said: list[str]) -> Store:
    return open_store(str(tmp_path / "store"), memory=tmp_path / "memory", say=said.append)


def test_the_first_use_makes_the_folder_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    with _open(tmp_path, said) as store:
        assert not store.exists("key")
        assert not (tmp_path / "store").exists()
        assert store.publish("key", b"data")
        assert [info.path for info in store.list()] == ["key"]
    assert said == [f"a new store begins in {tmp_path}/store: nothing was there"]
    assert json.loads((tmp_path / "store" / MARK).read_text()) == {"version": 1}
    with _open(tmp_path, said) as store:
        assert store.publish("other", b"data")
    assert len(said) == 1


def test_objects_without_a_mark_are_marked_in_silence(tmp_path: Path) -> None:
    said: list[str] = []
    backend = open_backend(str(tmp_path / "store"))
    with backend.create("key") as writer:
        writer.write(b"data")
    with _open(tmp_path, said) as store:
        assert store.publish("other", b"data")
        assert store.read("key") == b"data"
    assert said == []
    assert (tmp_path / "store" / MARK).exists()


def test_nothing_is_published_into_a_store_of_another_version(tmp_path: Path) -> None:
    with _open(tmp_path, []) as store:
        store.publish("key", b"data")
    (tmp_path / "store" / MARK).write_text('{"version": 2}')
    with _open(tmp_path, []) as store:
        assert store.read("key") == b"data"
        with pytest.raises(UnknownFormatError, match="version 2"):
            store.publish("other", b"data")
        with pytest.raises(UnknownFormatError, match="version 2"):
            store.lease("leases/x", ttl_s=1, owner="me")
        assert [info.path for info in store.list()] == ["key"]


def test_a_mark_that_a_crash_has_emptied_is_a_mark(tmp_path: Path) -> None:
    with _open(tmp_path, []) as store:
        store.publish("key", b"data")
    (tmp_path / "store" / MARK).write_bytes(b"")
    with _open(tmp_path, []) as store:
        assert store.publish("other", b"data")


def test_several_that_begin_a_store_at_once_all_publish(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(30):
            begin = Barrier(4)
            with _open(tmp_path / str(number), []) as store, ThreadPoolExecutor(4) as pool:

                def publish(key: str, store: Store = store, begin: Barrier = begin) -> bool:
                    begin.wait(30)
                    return store.publish(key, b"data")

                assert all(pool.map(publish, "abcd"))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("has_mount_point", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_a_vanished_store_is_not_begun_anew(
    tmp_path: Path, has_mount_point: bool, published: bool
) -> None:
    """A named bug: objects published while a share was not mounted lay below its mount point."""
    said: list[str] = []
    with open_store(str(tmp_path / "store")) as store:
        store.publish("key", b"data")
    with _open(tmp_path, said) as store:
        if published:
            store.publish("other", b"data")
        else:
            store.read("key")
    (tmp_path / "store").rename(tmp_path / "away")
    if has_mount_point:
        (tmp_path / "store").mkdir()
    with _open(tmp_path, said) as store:
        with pytest.raises(UnavailableError, match="is its share mounted"):
            store.lease("lease", ttl_s=10, owner="node")
        with pytest.raises(UnavailableError, match="is its share mounted") as caught:
            store.publish("key", b"data")
    assert (tmp_path / "store").exists() == has_mount_point
    assert not has_mount_point or os.listdir(tmp_path / "store") == []
    # As the message says.
    for file in (tmp_path / "memory").iterdir():
        assert str(file) in str(caught.value)
        file.unlink()
    with _open(tmp_path, said) as store:
        assert store.publish("key", b"data")
    assert len(said) == 1


@pytest.mark.parametrize("has_mount_point", [True, False])
def test_a_store_that_vanishes_meanwhile_is_unavailable_and_not_empty(
    tmp_path: Path, has_mount_point: bool
) -> None:
    with open_store(str(tmp_path / "store")) as store:
        store.publish("key", b"data")
        with pytest.raises(NotFoundError):
            store.read("missing")
    with open_store(str(tmp_path / "store")) as store:
        assert store.read("key") == b"data"
        (tmp_path / "store").rename(tmp_path / "away")
        if has_mount_point:
            (tmp_path / "store").mkdir()
        with pytest.raises(UnavailableError, match="is it mounted"):
            store.read("key")
        with pytest.raises(UnavailableError, match="is it mounted"):
            store.backend.create("new")
        if has_mount_point:
            (tmp_path / "store").rmdir()
        (tmp_path / "away").rename(tmp_path / "store")
        assert store.read("key") == b"data"
