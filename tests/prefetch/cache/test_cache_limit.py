"""The size limit of the node's cache."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.linux.locks import lock_file
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.cache.limit import CacheRoom, folders
from bootseer.prefetch.cache.node_cache import NodeCache

PIECE = bytes(range(256)) * 256


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def put(cache: NodeCache, number: int) -> None:
    with cache.new_stream() as new:
        new.append(PIECE)
        stream = new.commit(digest(number))
    os.utime(stream.directory, ns=(number, number))
    stream.close()


def kept(cache: NodeCache) -> list[str]:
    return [one.key for one in cache.streams()]


def test_the_longest_unused_goes_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    for number in range(4):
        put(cache, number)
    size = cache.streams()[0].size_bytes
    used = cache.open_pieces(digest(0), (0, len(PIECE)))
    os.utime(used.directory, ns=(0, 0))
    assert CacheRoom(tmp_path, 4 * size).make_room()
    assert len(kept(cache)) == 4
    assert CacheRoom(tmp_path, 2 * size).make_room()
    assert kept(cache) == [digest(0), digest(3)]
    assert CacheRoom(tmp_path, 2 * size).make_room(size)
    assert kept(cache) == [digest(0)]
    assert not CacheRoom(tmp_path, 2 * size).make_room(2 * size)
    assert not CacheRoom(tmp_path, 0).make_room()
    assert kept(cache) == [digest(0)]
    assert used.read(0, len(PIECE)) == PIECE
    used.close()


def test_what_a_container_nests_deeply_ends_no_counting(tmp_path: Path) -> None:
    """Deeper than Python's recursion limit, and than a path can be."""
    deep = tmp_path / "containers/c"
    deep.mkdir(parents=True)
    (tmp_path / "streams").mkdir()
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.chdir(deep)
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
        found = {one.name: one.size_bytes for one in folders(tmp_path)}
    finally:
        os.fchdir(before)
        os.close(before)
        remove_tree(deep)
    assert found.keys() == {"containers", "streams"}
    assert CacheRoom(tmp_path, 2**30).make_room()


def test_everything_that_is_kept_counts(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    put(cache, 1)
    put(cache, 2)
    size = sum(one.size_bytes for one in cache.streams())
    for name in ("extracted", "local-store", "containers", "tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(300_000))
        os.link(tmp_path / name / "file", tmp_path / name / "again")
    found = {one.name: one for one in folders(tmp_path)}
    assert 300_000 <= found["extracted"].size_bytes < 330_000
    assert found["streams"].size_bytes >= size
    assert [name for name, one in found.items() if not one.counts] == ["containers", "tmp"]
    limit = size + 700_000
    assert CacheRoom(tmp_path, limit).make_room()
    assert len(kept(cache)) == 2
    (tmp_path / "extracted" / "more").write_bytes(bytes(150_000))
    assert CacheRoom(tmp_path, limit).make_room()
    assert kept(cache) == [digest(2)]


def test_indexes_of_images_that_are_not_started_any_more_go(tmp_path: Path) -> None:
    (tmp_path / "indexes").mkdir()
    for name, age_s in (("new", 0), ("old", 40 * 86_400)):
        (tmp_path / "indexes" / name).write_bytes(b"index")
        used_s = time.time() - age_s
        os.utime(tmp_path / "indexes" / name, (used_s, used_s))
    CacheRoom(tmp_path, 10**9).make_room()
    assert [path.name for path in (tmp_path / "indexes").iterdir()] == ["new"]


def test_locks_and_notes_that_nobody_needs_go(tmp_path: Path) -> None:
    for folder in ("catalogue", "damaged"):
        (tmp_path / folder).mkdir()
    (tmp_path / "catalogue" / "dead.lock").touch()
    held = lock_file(tmp_path / "catalogue" / "held.lock", 0)
    for name, age_s in (("new.json", 0), ("old.json", 40 * 86_400)):
        (tmp_path / "damaged" / name).write_bytes(b"note")
        os.utime(tmp_path / "damaged" / name, (time.time() - age_s,) * 2)
    CacheRoom(tmp_path, 10**9).make_room()
    assert [path.name for path in (tmp_path / "catalogue").iterdir()] == ["held.lock"]
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["new.json"]
    os.close(held)


def test_a_disk_that_is_nearly_full_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = CacheRoom(tmp_path, 10**15)
    for share, has_room in ((21, False), (2, True)):
        disk = SimpleNamespace(f_frsize=4096, f_blocks=share * 10**9, f_bavail=10**9)
        monkeypatch.setattr(os, "statvfs", lambda path, disk=disk: disk)
        assert room.make_room() is has_room


def test_there_may_be_no_cache_yet(tmp_path: Path) -> None:
    assert not CacheRoom(tmp_path / "none", 10**9).make_room()
    assert folders(tmp_path / "none") == []
