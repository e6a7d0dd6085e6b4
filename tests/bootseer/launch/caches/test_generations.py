"""Generations of a cache: restored, merged, published by one node of many, bounded, never mixed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BootseerError, CorruptError, NoSpaceError
from bootseer.launch.caches.records import IN_PLACE, MISS, RESTORED
from bootseer.snapshots import catalogue
from bootseer.store import open_own_store
from testbed.needs import MissingError, require
from testbed.paths import REPOSITORY
from testbed.waiting import pause
from tests.bootseer.launch.caches.generations import CachingNode, entry

FIRST = {entry(0): "kernel 0", entry(1): "kernel 1"}


def blobs(base: Path) -> list[Path]:
    return sorted(path for path in (base / "store/blobs").rglob("*") if path.is_file())


def test_what_one_node_made_another_has(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two")
    assert one.restore().how == MISS
    one.write(FIRST)
    assert one.publish().how == "published"
    assert two.restore().how == RESTORED
    assert two.files() == FIRST
    assert two.publish().how == "nothing new"
    again = two.restore()
    assert (again.how, again.moved_bytes) == (IN_PLACE, 0)


def test_an_empty_cache_writes_nothing(tmp_path: Path) -> None:
    one = CachingNode(tmp_path, "one")
    one.restore()
    assert one.publish().how == "nothing new"
    assert not (tmp_path / "store/snapshots").exists()


def test_a_later_generation_has_both_and_stores_what_is_new(tmp_path: Path) -> None:
    one, two, three = (CachingNode(tmp_path, name) for name in ("one", "two", "three"))
    large = {entry(0): os.urandom(100_000).hex(), entry(1): os.urandom(500_000).hex()}
    roomy = replace(one.settings, keep_limit_bytes=10**8)
    for node in (one, two, three):
        node.settings = replace(node.settings, keep_limit_bytes=roomy.keep_limit_bytes)
    one.write(large)
    first = one.publish()
    two.restore()
    two.write({entry(2): "kernel 2"})
    second = two.publish()
    assert (second.how, second.new_files) == ("published", 1)
    assert second.stored_bytes < first.stored_bytes / 10
    three.restore()
    assert three.files() == {**large, entry(2): "kernel 2"}
    # A node that has the first generation fetches what it lacks.
    one.begun_ns = time.time_ns()
    later = one.restore()
    assert (later.file_count, one.files()) == (1, three.files())
    assert later.moved_bytes < first.stored_bytes / 100


def test_two_nodes_that_know_nothing_of_each_other_are_merged(tmp_path: Path) -> None:
    one, two, three = (CachingNode(tmp_path, name) for name in ("one", "two", "three"))
    one.write({entry(0): "kernel 0", "numba/f.nbi": "index of one", "numba/f.1.nbc": "one"})
    two.write({entry(1): "kernel 1", "numba/f.nbi": "index of two!", "numba/f.2.nbc": "two"})
    one.publish()
    pause(0.01)
    two.begun_ns = time.time_ns()
    assert two.publish().how == "published"
    three.restore()
    # An index and the files that it names come from one node.
    assert three.files() == {
        entry(0): "kernel 0",
        entry(1): "kernel 1",
        "numba/f.nbi": "index of two!",
        "numba/f.2.nbc": "two",
    }


def test_of_eight_nodes_at_once_one_publishes(tmp_path: Path) -> None:
    nodes = [CachingNode(tmp_path, f"node-{number}") for number in range(8)]
    for number, node in enumerate(nodes):
        # No two compilers give the same bytes.
        node.write({name: f"{text} by {number}" for name, text in FIRST.items()})
    with ThreadPoolExecutor(8) as pool:
        results = [done.how for done in pool.map(CachingNode.publish, nodes)]
    assert sorted(results) == ["nothing new"] * 7 + ["published"]
    assert len(blobs(tmp_path)) == 1


def test_nothing_is_mixed_across_keys(tmp_path: Path) -> None:
    one, other = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "other", torch="2.7.0")
    one.write(FIRST)
    one.publish()
    assert other.restore().how == MISS
    assert other.files() == {}


def test_a_generation_under_another_key_is_refused(tmp_path: Path) -> None:
    one, other = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "other", torch="2.7.0")
    one.write(FIRST)
    one.publish()
    manifest = tmp_path / "store" / catalogue.manifest_key(one.cache.key)
    manifest.rename(tmp_path / "store" / catalogue.manifest_key(other.cache.key))
    with pytest.raises(CorruptError, match="fingerprint"):
        other.restore()
    assert other.files() == {}


def test_a_damaged_blob_is_not_restored_and_is_replaced(tmp_path: Path) -> None:
    one, two, three = (CachingNode(tmp_path, name) for name in ("one", "two", "three"))
    one.write(FIRST)
    one.publish()
    (blob,) = blobs(tmp_path)
    data = bytearray(blob.read_bytes())
    data[len(data) // 3] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)
    with pytest.raises(BootseerError):
        two.restore()
    # Nothing of it, not even the frames that were whole.
    assert two.files() == {}
    assert list(two.folder.iterdir()) == []
    # The job compiles, and its result replaces the damaged one.
    two.write(FIRST)
    two.begun_ns = time.time_ns()
    assert two.publish(is_damaged=True).how == "published"
    assert three.restore().how == RESTORED
    assert three.files() == FIRST


def test_what_the_folder_has_stays(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two")
    one.write({**FIRST, "numba/f.nbi": "one", "numba/f.1.nbc": "one"})
    one.publish()
    two.write({entry(0): "own", "numba/f.nbi": "own"})
    assert two.restore().file_count == 1
    assert two.files() == {entry(0): "own", entry(1): "kernel 1", "numba/f.nbi": "own"}


def test_the_bound_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one", limit="25kB"), CachingNode(tmp_path, "two")
    one.write({entry(0): "0" * 10_000}, age_s=9e5)
    one.write({entry(1): "1" * 10_000}, age_s=8e5)
    one.write({entry(2): "2" * 10_000})
    one.publish()
    two.restore()
    assert set(two.files()) == {entry(1), entry(2)}


def test_in_a_folder_of_the_user_older_files_are_not_taken(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two")
    for node in (one, two):
        node.cache = replace(node.cache, is_ours=False)
    one.write({entry(0): "of some other key"})
    one.begun_ns = time.time_ns()
    one.write({entry(1): "kernel 1"})
    one.publish()
    two.restore()
    assert two.files() == {entry(1): "kernel 1"}
    # What the generation has counts at the next start on that node, too.
    two.begun_ns = time.time_ns()
    two.write({entry(2): "kernel 2"})
    two.publish()
    assert one.restore().file_count == 1
    assert set(one.files()) == {entry(0), entry(1), entry(2)}


LARGE = {entry(number): os.urandom(400_000).hex() for number in range(5)}


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Mount a disk on the folder with less room than the cache needs."""
    require("root")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=30).returncode:
        raise MissingError("tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=30)


def test_a_full_disk_restores_nothing(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one", limit="10MB"), CachingNode(tmp_path, "two")
    one.write(LARGE)
    one.publish()
    with full_disk(two.folder):
        with pytest.raises(NoSpaceError, match="no room"):
            two.restore()
        assert two.files() == {}


@pytest.mark.parametrize("where", ["two/cache", "store"])
def test_a_full_disk_publishes_nothing(tmp_path: Path, where: str) -> None:
    """The full disk is the node's, on which a generation is packed, or the store's."""
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two", limit="10MB")
    one.write(FIRST)
    with full_disk(tmp_path / where):
        one.publish()
        two.restore()
        two.write(LARGE)
        with pytest.raises(NoSpaceError):
            two.publish()
        three = CachingNode(tmp_path, "three")
        three.restore()
        assert three.files() == FIRST


def test_what_a_killed_restore_left_is_removed(tmp_path: Path) -> None:
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two")
    one.write(FIRST)
    one.publish()
    two.write({".bootseer-cache/3b/half.so": "half"})
    assert two.restore().how == RESTORED
    assert two.files() == FIRST


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.bootseer.launch.caches.generations import CachingNode, entry
from bootseer.store import Store
node = CachingNode(Path(sys.argv[1]), "killed")
node.write({entry(0): "kernel 0", entry(1): "kernel 1"})
number = 0
publish = Store.publish
def killed(self, key, data, *, replace=False):
    global number
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    number += 1
    return publish(self, key, data, replace=replace)
Store.publish = killed
node.publish()
"""


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_killed_publisher_leaves_nothing_to_be_seen(tmp_path: Path, step: int) -> None:
    """The kill comes before the blob, between blob and tree, or before the manifest."""
    words = [sys.executable, "-c", _KILLED, str(tmp_path), str(step)]
    done = subprocess.run(words, cwd=REPOSITORY, timeout=60, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == -signal.SIGKILL
    one, two = CachingNode(tmp_path, "one"), CachingNode(tmp_path, "two")
    assert one.restore().how == MISS
    one.write(FIRST)
    # The lease expires by itself; this node waits for it as for another node's.
    lease = tmp_path / "store" / catalogue.lease_key(one.cache.key)
    assert lease.exists()
    lease.unlink()
    assert one.publish().how == "published"
    two.restore()
    assert two.files() == FIRST


def test_a_generation_is_a_snapshot_that_says_of_which_cache(tmp_path: Path) -> None:
    one = CachingNode(tmp_path, "one")
    one.write(FIRST)
    one.publish()
    with open_own_store(one.settings) as store:
        manifest = catalogue.load(store, one.cache.key)
    assert manifest is not None
    assert manifest.cache == "X_CACHE"
    assert [target.path for target in manifest.targets] == [b"/x"]


@pytest.mark.hdfs
def test_generations_in_hdfs(tmp_path: Path, hdfs_url: str) -> None:
    nodes = [CachingNode(tmp_path, f"node-{number}", store=hdfs_url) for number in range(3)]
    nodes[0].write(FIRST)
    assert nodes[0].publish().how == "published"
    assert nodes[1].restore().how == RESTORED
    nodes[1].write({entry(2): "kernel 2"})
    assert nodes[1].publish().how == "published"
    nodes[2].restore()
    assert nodes[2].files() == {**FIRST, entry(2): "kernel 2"}
