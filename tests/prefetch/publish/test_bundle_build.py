"""Traces of many starts, and the decision to make a bundle; a real store, no mounts."""

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.base.content_digest import content_digest
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import decode_frame, write_bundle
from bootseer.prefetch.bundle.hot_store import MERGED_TRACE_COUNT, HotPointer
from bootseer.prefetch.index.catalogue import read_tree
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish import bundle_build
from bootseer.prefetch.publish.bundle_build import add_trace
from bootseer.prefetch.record import hotset
from bootseer.prefetch.record import trace as trace_format
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.trace import Access, Trace
from bootseer.settings.config import Settings
from bootseer.store import Store, open_store
from bootseer.store.objects.lease import Lease
from testbed.mounts.image_mounts import index, settings_at

FILE_BYTES = 64 * 1024
FILE_COUNT = 40


@dataclass
class IndexedImage:
    """Indexed image and its store."""

    settings: Settings
    store: Store
    record: ImageRecord
    tree: Tree

    def trace(self, *numbers: int, ended: str = "ready", node: str = "n", at_ns: int = 1) -> Trace:
        """Return the trace of a start that read these files as a whole."""
        files = []
        for number in numbers:
            inode = self.tree.resolve(b"f%d" % number)
            assert inode is not None
            files.append(TracedFile(b"f%d" % number, self.tree.inode(inode).digest or b""))
        return Trace(
            self.record.index_digest,
            "train",
            node,
            at_ns,
            ended,
            32768,
            tuple(files),
            tuple(Access(i, 0, FILE_BYTES, i) for i in range(len(files))),
        )

    def add(self, trace: Trace, *, renew: bool = False) -> HotPointer | None:
        return add_trace(self.settings, self.store, self.tree, trace, "image:1", renew=renew)

    def pointer(self) -> HotPointer:
        pointer = hot_store.read_pointer(self.store, self.record.index_digest, "train")
        assert pointer is not None
        return pointer

    def hot_files(self) -> list[bytes]:
        """Return the files of the newest bundle's hot set in order."""
        data = self.store.read(hot_store.hotset_key(self.pointer().hotset_digest))
        return [hot_range.path for hot_range in hotset.decode(data).ranges]

    def trace_count(self) -> int:
        prefix = hot_store.trace_prefix(self.record.index_digest, "train")
        return len(list(self.store.list(prefix)))

    def path(self, key: str) -> Path:
        path = Path(self.settings.store_url.removeprefix("file://")) / key
        path.chmod(0o600)
        return path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[IndexedImage]:
    source = tmp_path / "source"
    source.mkdir()
    chance = random.Random(1)
    for number in range(FILE_COUNT):
        (source / f"f{number}").write_bytes(chance.randbytes(FILE_BYTES))
    settings = settings_at(tmp_path)
    record = index(settings, source, "image:1")
    with open_store(settings.store_url) as store:
        yield IndexedImage(settings, store, record, read_tree(store, record.index_digest))


def test_a_bundle_is_made_anew_only_for_what_it_missed(site: IndexedImage) -> None:
    first = site.add(site.trace(*range(20)))
    assert first == site.pointer()
    # All files are known, then nineteen twentieths: a record is not worthwhile.
    assert site.add(site.trace(*range(20), node="m")) is None
    assert site.add(site.trace(*range(19), 20, node="o")) is None
    assert site.pointer() == first
    assert site.trace_count() == 1
    made = site.add(site.trace(*range(5, 25), node="p"))
    assert made == site.pointer()
    assert made.trace_count == 2
    assert set(site.hot_files()) == {b"f%d" % n for n in range(25)}


def test_what_two_further_starts_did_not_use_is_dropped(site: IndexedImage) -> None:
    site.add(site.trace(*range(30)))
    for node in "mo":
        assert len(site.hot_files()) == 30
        assert site.add(site.trace(0, 1, 2, node=node)) is not None
    assert site.hot_files() == [b"f0", b"f1", b"f2"]


def test_what_is_read_elsewhere_in_each_start_is_not_hot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: random samples of a data file were recorded by each start and fetched by the
    next.

    No bundle can match them, and the frames around them cost more than they do.
    """
    source = tmp_path / "source"
    source.mkdir()
    chance = random.Random(3)
    for number in range(10):
        (source / f"f{number}").write_bytes(chance.randbytes(FILE_BYTES))
    (source / "data").write_bytes(chance.randbytes(8 * 2**20))
    settings = settings_at(tmp_path)
    record = index(settings, source, "image:1")
    with open_store(settings.store_url) as store:
        site = IndexedImage(settings, store, record, read_tree(store, record.index_digest))
        inode = site.tree.resolve(b"data")
        assert inode is not None
        data = TracedFile(b"data", site.tree.inode(inode).digest or b"")

        def start(node: str) -> Trace:
            trace = site.trace(*range(10), node=node)
            pages = [4096 * page for page in chance.sample(range(2048), 300)]
            accesses = [Access(10, offset, 4096, 20 + i) for i, offset in enumerate(pages)]
            return replace(trace, files=(*trace.files, data), accesses=(*trace.accesses, *accesses))

        for node in "ab":
            assert site.add(start(node)) is not None
            assert b"data" in site.hot_files()
        with caplog.at_level("INFO"):
            pointer = site.add(start("c"))
        assert pointer is not None
        assert pointer.scattered == (b"data",)
        assert "'data'" in caplog.text
        assert set(site.hot_files()) == {b"f%d" % n for n in range(10)}
        assert pointer.size_bytes < 20 * FILE_BYTES
        # The next start reads other pages again, and adds no information.
        assert site.add(start("d")) is None
        assert site.pointer() == pointer


def test_a_hundred_nodes_at_once(site: IndexedImage) -> None:
    chance = random.Random(3)
    traces = [site.trace(*chance.sample(range(10), 10), node=f"n{number}") for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        made = [pointer for pointer in pool.map(site.add, traces) if pointer is not None]
    # One trace of the start is published, and a bundle with all files that the others read.
    assert made == [site.pointer()]
    assert set(site.hot_files()) == {b"f%d" % n for n in range(10)}
    assert site.trace_count() == 1


def test_while_another_node_builds_nothing_is_published(site: IndexedImage) -> None:
    key = hot_store.lease_key(site.record.index_digest, "train")
    lease = site.store.lease(key, ttl_s=60, owner="another")
    assert lease is not None
    with lease:
        assert site.add(site.trace(1)) is None
    assert hot_store.read_pointer(site.store, site.record.index_digest, "train") is None
    assert site.trace_count() == 0
    made = site.add(site.trace(2))
    assert made is not None
    assert made.trace_count == 1


def test_traces_that_are_not_merged_any_more_are_deleted(site: IndexedImage) -> None:
    for number in range(MERGED_TRACE_COUNT + 4):
        old = site.trace(1, node=f"n{number}", at_ns=number + 1)
        hot_store.publish_trace(site.store, old)
    made = site.add(site.trace(1, at_ns=100))
    assert made is not None
    assert (made.trace_count, site.trace_count()) == (MERGED_TRACE_COUNT, MERGED_TRACE_COUNT)


def test_the_lease_is_renewed_while_a_bundle_is_built(
    site: IndexedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large bundle takes longer than the lease lasts."""
    monkeypatch.setattr(bundle_build, "LEASE_S", 6.0)
    building, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bytes:
        building.set()
        assert go_on.wait(60)
        return write_bundle(*arguments)

    monkeypatch.setattr(bundle_build, "write_bundle", slow)
    renew, renewed = Lease.renew, threading.Event()

    def renewing(lease: Lease) -> None:
        renew(lease)
        renewed.set()

    monkeypatch.setattr(Lease, "renew", renewing)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(site.add, site.trace(1))
        try:
            assert building.wait(60)
            assert renewed.wait(60)
        finally:
            go_on.set()
        assert made.result(60) is not None


def test_sixteen_large_traces(site: IndexedImage) -> None:
    """Five thousand accesses each, in slightly different orders."""
    files = tuple(TracedFile(b"lib/%d" % n, hashlib.sha256(b"%d" % n).digest()) for n in range(125))
    traces = []
    for number in range(16):
        order = list(range(5_000))
        chance = random.Random(number)
        for _ in range(100):
            i = chance.randrange(4_990)
            order[i], order[i + 9] = order[i + 9], order[i]
        accesses = tuple(Access(n // 40, n % 40 * 4096, 4096, n) for n in order)
        base = site.trace(1)
        traces.append(replace(base, node=f"n{number}", files=files, accesses=accesses))
    hot = hotset.merge_traces(site.record.index_digest, "train", traces)
    assert [(r.path, r.length) for r in hot.ranges] == [(f.path, 40 * 4096) for f in files]


@pytest.mark.parametrize("damage", ["pointer", "pointer-foreign", "header", "no-header", "version"])
def test_a_damaged_bundle_is_made_anew(site: IndexedImage, damage: str) -> None:
    site.add(site.trace(1, 2))
    before = site.pointer()
    pointer_path = site.path(hot_store.pointer_key(site.record.index_digest, "train"))
    header_path = site.path(hot_store.header_key(before.bundle_digest))
    if damage == "pointer":
        pointer_path.write_bytes(pointer_path.read_bytes()[:-9])
    elif damage == "pointer-foreign":
        other = replace(before, index_digest="sha256:" + "9" * 64)
        pointer_path.write_bytes(hot_store.POINTER_FORM.encode(other))
    elif damage == "version":
        document = json.loads(pointer_path.read_bytes())
        pointer_path.write_text(json.dumps({**document, "version": 99}))
    elif damage == "header":
        data = bytearray(header_path.read_bytes())
        data[-1] ^= 1
        header_path.write_bytes(data)
    else:
        header_path.unlink()
    # The same start again makes the same bundle under the same names.
    assert site.add(site.trace(1, 2)) is not None
    assert site.pointer().bundle_digest == before.bundle_digest
    lengths = [blob.stream_length for blob in site.tree.blobs]
    assert hot_store.read_bundle(site.store, site.pointer(), lengths).frames


def test_a_damaged_frame_is_mended_once(site: IndexedImage) -> None:
    site.add(site.trace(1, 2))
    before = site.pointer()
    path = site.path(hot_store.part_key(before.bundle_digest, 0))
    path.write_bytes(bytes(path.stat().st_size))
    late = before.created_ns + 1
    # Two starts that found the damage: the first repairs it, the second finds it repaired.
    assert site.add(site.trace(1, 2, at_ns=late), renew=True) is not None
    assert site.add(site.trace(1, 2, at_ns=late, node="m"), renew=True) is None
    lengths = [blob.stream_length for blob in site.tree.blobs]
    for frame in hot_store.read_bundle(site.store, site.pointer(), lengths).frames:
        key = hot_store.part_key(site.pointer().bundle_digest, frame.part)
        stored = site.store.read(key, frame.offset, frame.length)
        assert content_digest(stored) == frame.digest
        assert len(decode_frame(frame, stored)) == frame.stream_length


def test_damaged_hot_sets_are_refused(site: IndexedImage) -> None:
    site.add(site.trace(1, 2))
    pointer = site.pointer()
    hot = hot_store.read_hotset(site.store, pointer)
    foreign = hotset.encode(replace(hot, index_digest="sha256:" + "9" * 64))
    digest = f"sha256:{hashlib.sha256(foreign).hexdigest()}"
    site.store.publish(hot_store.hotset_key(digest), foreign)
    with pytest.raises(CorruptError, match="another image"):
        hot_store.read_hotset(site.store, replace(pointer, hotset_digest=digest))
    path = site.path(hot_store.hotset_key(pointer.hotset_digest))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="digest in its name"):
        hot_store.read_hotset(site.store, pointer)


def test_hostile_traces_are_left_out_or_bounded(
    site: IndexedImage, caplog: pytest.LogCaptureFixture
) -> None:
    good = site.trace(1, 2)
    prefix = hot_store.trace_prefix(site.record.index_digest, "train")
    flipped = bytearray(site.store.read(hot_store.publish_trace(site.store, good)))
    flipped[len(flipped) // 2] ^= 1
    site.store.publish(prefix + "0" * 32, bytes(flipped))
    other = replace(good, index_digest="sha256:" + "9" * 64)
    foreign = trace_format.encode(other)
    site.store.publish(prefix + hashlib.sha256(foreign).hexdigest()[:32], foreign)
    # The trace claims to have read all of the largest possible file.
    endless = replace(good, node="x", accesses=(Access(0, 0, 2**62 - 1, 0), *good.accesses))
    hot_store.publish_trace(site.store, endless)
    unknown = tuple(TracedFile(path, b"d" * 32) for path in (b"../../etc/passwd", b"/etc/passwd"))
    hot_store.publish_trace(site.store, replace(good, node="y", files=unknown))
    assert site.add(replace(good, node="z")) is not None
    assert site.hot_files().count(b"f2") == 1
    assert caplog.text.count("is left out") == 2
    lengths = [blob.stream_length for blob in site.tree.blobs]
    bundle = hot_store.read_bundle(site.store, site.pointer(), lengths)
    assert bundle.stream_bytes == 2 * FILE_BYTES
