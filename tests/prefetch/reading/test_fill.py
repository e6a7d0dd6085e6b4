"""The background fill, its pauses, and starts of complete images without the store."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.blob.pack.frame_writer import FrameWriter
from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.tree import Tree
from bootseer.errors import UnavailableError
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.images.mount import unmount_image
from bootseer.prefetch.reading import fill as fill_module
from bootseer.prefetch.reading.fill import Fill
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.serve.plan import begin_serving
from bootseer.store import Store, open_store
from bootseer.transfer.policy import Policy
from testbed.mounts.image_mounts import (
    checksums_in_child,
    drop_cache,
    index,
    mounted,
    settings_at,
)
from testbed.mounts.sweeping import sweep
from testbed.waiting import wait_for
from tests.support.full_disk import FullDisk
from tests.support.ranged import as_reader

pytestmark = pytest.mark.usefixtures("no_second_requests")

SIZE_BYTES = 12 * 2**20
QUIET_S = 0.02


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    root = tmp_path / "root"
    root.mkdir()
    (root / "big").write_bytes(os.urandom(SIZE_BYTES))
    with (tmp_path / "blob").open("wb") as sink:
        return pack_directory(root, sink)


@pytest.fixture
def store(tmp_path: Path, tree: Tree) -> Store:
    opened = open_store((tmp_path / "store").as_uri())
    opened.publish(blob_key(tree.blobs[0].digest), tmp_path / "blob")
    return opened


@pytest.fixture
def streams(tmp_path: Path, tree: Tree, store: Store) -> Iterator[ImageBytes]:
    opened = ImageBytes(
        tree.blobs,
        store.read_into,
        NodeCache(tmp_path / "cache"),
        deadline_s=30,
        fill_bytes_per_s=10**10,
    )
    yield opened
    opened.close()


def yes(count: int = 0) -> bool:
    return True


def test_it_begins_when_the_start_is_over_and_ends_when_all_is_here(
    streams: ImageBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_module, "WINDOW_BYTES", 1_000_000)
    over = threading.Event()
    asked: list[int] = []

    def make_room(count: int) -> bool:
        asked.append(count)
        return True

    fill = Fill(streams, over.is_set, make_room, quiet_s=QUIET_S)
    fill.start()
    fill.join(0.2)
    assert fill.state == "waiting"
    assert streams.cached_bytes == 0
    over.set()
    wait_for(lambda: fill.state == "complete")
    assert streams.cached_bytes == streams.image_bytes
    assert streams.sources().fill_bytes == streams.image_bytes
    assert asked


def test_it_pauses_while_there_are_faults(streams: ImageBytes, tree: Tree) -> None:
    reads: list[str] = []
    fill = Fill(streams, yes, yes, quiet_s=QUIET_S)
    original = streams.fill

    def filling(fetches: object = None) -> None:
        reads.append(fill.state)
        original(fetches)  # type: ignore[arg-type]
        if len(reads) == 1:
            # A fault right after the first piece: the next piece waits for quiet.
            streams.faults.fault(1, failed=False)

    streams.fill = filling  # type: ignore[method-assign]
    states: list[str] = []
    await_quiet = fill.await_quiet

    def watching() -> bool:
        before = fill._seen_faults
        answer = await_quiet()
        states.append("waited" if fill._seen_faults != before else "went on")
        return answer

    fill.await_quiet = watching  # type: ignore[method-assign]
    fill.start()
    wait_for(lambda: fill.state == "complete")
    assert states[:3] == ["waited", "waited", "went on"]


def test_it_waits_where_there_is_no_room_and_goes_on_when_room_is_made(
    streams: ImageBytes,
) -> None:
    room = threading.Event()
    fill = Fill(streams, yes, lambda count: room.is_set(), quiet_s=QUIET_S, no_room_s=0.01)
    fill.start()
    wait_for(lambda: fill.state == "no room")
    assert streams.cached_bytes == 0
    room.set()
    wait_for(lambda: fill.state == "complete")
    assert streams.cached_bytes == streams.image_bytes


def test_it_outlives_a_disk_that_was_full(
    tree: Tree, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = NodeCache(tmp_path / "cache", try_again_s=0.0)
    streams = ImageBytes(tree.blobs, store.read_into, cache, deadline_s=30)
    disk = FullDisk(monkeypatch)
    fill = Fill(streams, yes, yes, quiet_s=QUIET_S, no_room_s=0.01)
    fill.start()
    wait_for(lambda: fill.state == "no room" and streams.is_full)
    disk.is_full = False
    wait_for(lambda: fill.state == "complete")
    assert streams.cached_bytes == streams.image_bytes
    assert not streams.is_full
    streams.close()


def test_it_stops_when_told_while_there_is_no_room(streams: ImageBytes) -> None:
    fill = Fill(streams, yes, lambda count: False, quiet_s=QUIET_S)
    fill.start()
    wait_for(lambda: fill.state == "no room")
    fill.stop()
    fill.join(60)
    assert (fill.state, streams.cached_bytes) == ("stopped", 0)


def test_it_outlives_an_outage_of_the_store(streams: ImageBytes, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    fill = Fill(streams, yes, yes, quiet_s=QUIET_S, pauses=Policy(base_s=0.05))
    fill.start()
    wait_for(lambda: fill.state == "failing")
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    wait_for(lambda: fill.state == "complete")


def test_it_stops_when_told_also_while_the_store_hangs(tree: Tree, tmp_path: Path) -> None:
    hanging = threading.Event()
    release = threading.Event()

    def read(key: str, offset: int, length: int) -> bytes:
        hanging.set()
        release.wait(60)
        raise UnavailableError("gone")

    opened = ImageBytes(tree.blobs, as_reader(read), NodeCache(tmp_path / "cache"), deadline_s=60)
    fill = Fill(opened, yes, yes, quiet_s=QUIET_S)
    fill.start()
    assert hanging.wait(60)
    fill.stop()
    release.set()
    opened.fetcher.close()
    fill.join(60)
    assert fill.state == "stopped"
    opened.close()


def test_it_goes_on_where_the_last_one_stopped(
    streams: ImageBytes, tree: Tree, store: Store, tmp_path: Path
) -> None:
    (fetch, *_) = streams.fill_fetches()
    streams.fill((fetch,))
    here = streams.cached_bytes
    assert 0 < here < streams.image_bytes
    streams.close()
    again = ImageBytes(tree.blobs, store.read_into, NodeCache(tmp_path / "cache"))
    fill = Fill(again, yes, yes, quiet_s=QUIET_S)
    fill.start()
    wait_for(lambda: fill.state == "complete")
    assert again.sources().fill_bytes == again.image_bytes - here
    again.close()


def test_of_the_servers_of_a_node_one_fills_and_the_next_takes_over(
    tree: Tree, store: Store, tmp_path: Path
) -> None:
    cache = NodeCache(tmp_path / "cache")
    lock = cache.fill_lock(tree.blobs[0].stream_digest)
    may_read = threading.Semaphore(1)
    reads: list[int] = []

    def read(key: str, offset: int, length: int) -> bytes:
        may_read.acquire()
        reads.append(length)
        return store.read(key, offset, length)

    opened = [ImageBytes(tree.blobs, as_reader(read), cache, deadline_s=60) for _ in range(8)]
    fills = [Fill(one, yes, yes, quiet_s=QUIET_S, lock=lock) for one in opened]
    for fill in fills:
        fill.start()
    wait_for(lambda: [fill.state for fill in fills].count("filling") == 1)
    (first,) = [fill for fill in fills if fill.state == "filling"]
    wait_for(lambda: len(reads) == 1)
    first.stop()
    may_read.release(1000)
    first.join(60)
    wait_for(lambda: all(fill.state == "complete" for fill in fills if fill is not first))
    # Each byte is fetched once, by either of them.
    assert sum(one.sources().fill_bytes for one in opened) == opened[0].image_bytes
    assert sum(reads) <= tree.blobs[0].size_bytes
    for fill in fills:
        fill.join(60)
    assert not lock.exists()
    for one in opened:
        one.close()


def test_it_pauses_while_another_server_of_the_image_has_faults(
    tree: Tree, store: Store, tmp_path: Path
) -> None:
    cache = NodeCache(tmp_path / "cache")
    lock = cache.fill_lock(tree.blobs[0].stream_digest)
    filler, other = (
        ImageBytes(tree.blobs, store.read_into, cache, deadline_s=60, fill_bytes_per_s=2**20)
        for _ in range(2)
    )
    first = Fill(filler, yes, yes, quiet_s=0.3, lock=lock)
    first.start()
    wait_for(lambda: first.state == "filling")
    second = Fill(other, yes, yes, quiet_s=0.3, lock=lock)
    second.start()

    def is_paused() -> bool:
        other.faults.fault(1, failed=False)
        return first.state == "waiting"

    wait_for(is_paused)
    wait_for(lambda: first.state == "filling")
    for fill in (first, second):
        fill.stop()
    for streams in (filler, other):
        streams.close()
    for fill in (first, second):
        fill.join(60)


@pytest.mark.needs("fuse")
def test_a_complete_image_starts_without_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(os.urandom(3_000_000))
    settings = replace(
        settings_at(tmp_path), fill_bytes_per_s=10**10, metrics_dir=tmp_path / "metrics"
    )
    record = index(settings, source, "image:1")
    drop_cache(settings)
    expected = checksums_in_child([source / "one", source / "two"])
    try:
        with mounted(settings, "image:1", tmp_path / "mnt", record="never") as image:
            assert image.status()["fill"]["state"] == "waiting"
            image.ready()
            wait_for(lambda: image.status()["fill"]["state"] == "complete")
            status = image.status()
            assert status["fill"]["missing_bytes"] == 0
            assert status["sources"]["fill_bytes"] == status["image_bytes"]
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        settings = replace(settings, record="never")
        begin_serving(settings, "image:1", record.index_digest, tmp_path / "mnt").wait()
        found = checksums_in_child([tmp_path / "mnt" / "one", tmp_path / "mnt" / "two"])
        assert found == expected
        unmount_image(settings, tmp_path / "mnt")
        texts = [path.read_text() for path in (tmp_path / "metrics").glob("*.prom")]
        # The second server takes the series over, unless the first one was still ending.
        assert len(texts) in (1, 2)
        assert all('image="image:1"' in text for text in texts)
        ended = 'bootseer_image_mounted{image="image:1",workload="train",slot="'
        assert all(text.partition(ended)[2].partition("\n")[0].endswith("} 0") for text in texts)
    finally:
        sweep(settings.run_dir.parent, settings)


def test_frames_that_begin_amid_a_sector_are_kept(tmp_path: Path) -> None:
    with (
        (tmp_path / "blob").open("wb") as sink,
        FrameWriter(sink, level=1, frame_bytes=10_007, threads=1) as writer,
    ):
        for _ in range(10):
            writer.write(os.urandom(10_007))
        blob = writer.finish()
    store = open_store((tmp_path / "store").as_uri())
    store.publish(blob_key(blob.digest), tmp_path / "blob")
    streams = ImageBytes(
        [blob],
        store.read_into,
        NodeCache(tmp_path / "cache"),
        deadline_s=30,
        fill_bytes_per_s=10**10,
    )
    try:
        fill = Fill(streams, yes, yes, quiet_s=QUIET_S)
        fill.start()
        wait_for(lambda: fill.state == "complete")
        fill.join(60)
        assert streams.cached_bytes == blob.stream_length
    finally:
        streams.close()
