"""Replay of a bundle while the store is slow, dies, lies or hangs, and with several servers."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key
from bootseer.errors import DeadlineError, UnavailableError
from bootseer.prefetch.bundle.replay import BundleReplay, ReplayState
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.transfer.chunks import Deliver
from bootseer.transfer.ranges import Chunk
from testbed.waiting import wait_for
from tests.support.full_disk import FullDisk
from tests.support.images.stored_image import Image, stored_image

pytestmark = pytest.mark.usefixtures("no_second_requests")

HOT = [(offset, 4096) for offset in range(0, 2_900_000, 20_000)]
WORKERS = 8
WARNING = "the bundle is given up"


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return stored_image(tmp_path)


@pytest.fixture
def bundle(image: Image) -> tuple[str, bytes]:
    return image.publish_bundle([image.place("big", *piece) for piece in HOT])


@pytest.fixture
def streams(image: Image, tmp_path: Path) -> Iterator[ImageBytes]:
    opened = image.streams(tmp_path / "cache", deadline_s=60)
    yield opened
    opened.close()


def check(image: Image, streams: ImageBytes, pieces: list[tuple[int, int]]) -> None:
    for offset, length in pieces:
        found = streams.read(*image.place("big", offset, length))
        assert bytes(found) == image.contents["big"][offset : offset + length]


def is_bundle(key: str) -> bool:
    return key.startswith("bundles/")


class Gate:
    """Store whose reads of a bundle wait until they are let through; records the reads."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._permits = threading.Semaphore(0)
        image.before_read = self._wait

    def _wait(self, key: str) -> None:
        if is_bundle(key):
            assert self._permits.acquire(timeout=60)

    def let(self, count: int) -> None:
        self._permits.release(count)


def held_back(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> tuple[Gate, BundleReplay]:
    """Start a replay whose workers all wait for the store; return the gate and the replay."""
    gate = Gate(image)
    replay = image.replay(streams, *bundle)
    replay.start()
    wait_for(lambda: len(image.reads) == WORKERS)
    return gate, replay


def test_a_fault_is_read_while_all_of_the_prefetch_hangs(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> None:
    gate, replay = held_back(image, streams, bundle)
    # No byte of the bundle comes, and no read waits for it.
    found = streams.read(*image.place("middle", 5, 9))
    assert bytes(found) == image.contents["middle"][5:14]
    assert [is_bundle(key) for key, _, _ in image.reads] == [True] * WORKERS + [False]
    gate.let(10**6)
    check(image, streams, HOT)
    wait_for(lambda: replay.has_ended)


def test_faults_on_the_bundle_go_before_all_that_is_queued(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> None:
    gate, replay = held_back(image, streams, bundle)
    # A range that is wanted last of all is read at once.
    piece = HOT[-1]
    (number,) = replay._file.frames_for(*image.place("big", *piece))
    chunk = replay._chunks[number]
    thread = threading.Thread(target=check, args=(image, streams, [piece]))
    thread.start()
    wait_for(lambda: len(image.reads) > WORKERS)
    key, offset, length = image.reads[WORKERS]
    assert key == chunk.key
    assert offset <= chunk.offset < chunk.end <= offset + length
    gate.let(10**6)
    thread.join(60)
    assert not thread.is_alive()
    wait_for(lambda: replay.has_ended)
    assert replay.error is None


def test_faults_are_not_starved_by_a_slow_store(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> None:
    """Between a fault and its read, only prefetches that were under way are read."""
    gate, replay = held_back(image, streams, bundle)
    # One range in each frame of the blob.
    for offset in (50, 140_000, 280_000):
        before = len(image.reads)
        streams.read(*image.place("middle", offset, 9))
        since = [is_bundle(key) for key, _, _ in image.reads[before:]]
        assert since.index(False) <= WORKERS
        gate.let(1)
    gate.let(10**6)
    wait_for(lambda: replay.has_ended)


def test_the_bundle_s_store_dies_in_the_middle(
    image: Image,
    streams: ImageBytes,
    bundle: tuple[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def die(key: str) -> None:
        if is_bundle(key) and len(image.reads) > 5:
            raise UnavailableError("the connection was reset")

    image.before_read = die
    replay = image.replay(streams, *bundle)
    replay.start()
    check(image, streams, HOT)
    wait_for(lambda: replay.error is not None)
    assert sum(WARNING in message for message in caplog.messages) == 1
    assert any(key == blob_key(image.tree.blobs[0].digest) for key, _, _ in image.reads)


def test_a_short_outage_costs_nothing_but_time(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> None:
    failures = threading.Semaphore(6)

    def fail(key: str) -> None:
        if len(image.reads) > 5 and failures.acquire(blocking=False):
            raise UnavailableError("the connection was reset")

    image.before_read = fail
    replay = image.replay(streams, *bundle)
    replay.start()
    check(image, streams, HOT)
    wait_for(lambda: replay.has_ended)
    assert replay.error is None
    assert all(is_bundle(key) for key, _, _ in image.reads)


@pytest.mark.parametrize("every", [3, 1], ids=["some", "all"])
def test_flipped_bytes_are_never_served(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes], every: int
) -> None:
    generator = random.Random(4)

    def flip(key: str, data: bytes) -> bytes:
        if is_bundle(key) and generator.randrange(every) == 0:
            position = generator.randrange(len(data))
            return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]
        return data

    image.change = flip
    replay = image.replay(streams, *bundle)
    replay.start()
    check(image, streams, HOT)
    assert streams.fetcher.statistics().corrupt_count > 0
    wait_for(lambda: replay.has_ended)
    if every == 1:
        assert replay.error is not None
    whole = len(image.contents["big"])
    check(image, streams, [(offset, 100_000) for offset in range(0, whole - 100_000, 100_000)])


def test_a_bundle_that_hangs_is_left_for_the_blobs(
    image: Image, bundle: tuple[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streams = image.streams(tmp_path / "cache", deadline_s=12)
    release = threading.Event()

    def hang(key: str) -> None:
        if is_bundle(key):
            release.wait(60)

    image.before_read = hang
    replay = image.replay(streams, *bundle)
    replay.start()
    check(image, streams, HOT[:3])
    assert replay.error is not None
    assert sum(WARNING in message for message in caplog.messages) == 1
    # Every later fault goes to the blobs at once.
    assert streams.faults.snapshot().bundle_wait_count == 1
    check(image, streams, HOT[3:])
    assert streams.faults.snapshot().bundle_wait_count == 1
    release.set()
    streams.close()


def bundle_reads(image: Image) -> int:
    return sum(is_bundle(key) for key, _, _ in image.reads)


def test_on_a_full_disk_nothing_of_a_bundle_is_fetched(
    image: Image,
    bundle: tuple[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FullDisk(monkeypatch)
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, *bundle)
    replay.start()
    check(image, streams, HOT)
    wait_for(lambda: replay.has_ended)
    assert (bundle_reads(image), replay.state) == (0, ReplayState.NO_ROOM)
    assert sum(WARNING in message for message in caplog.messages) == 1
    streams.close()


def test_a_disk_that_becomes_full_ends_the_bundle(
    image: Image,
    streams: ImageBytes,
    bundle: tuple[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, replay = held_back(image, streams, bundle)
    FullDisk(monkeypatch)
    gate.let(1)
    wait_for(lambda: replay.has_ended)
    gate.let(10**6)
    # Reads under way are used, and no more are started.
    frames = replay.bundle.frames
    wait_for(lambda: all(replay._file.has(number) for number in range(WORKERS)))
    before = len(image.reads)
    for frame in frames[:WORKERS]:
        for extent in frame.extents:
            streams.read(*extent)
    assert len(image.reads) == before
    check(image, streams, HOT)
    streams.close()
    assert bundle_reads(image) <= WORKERS + 1
    assert replay.state is ReplayState.NO_ROOM


def test_a_disk_with_room_again_is_used_again(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    # Full when the server starts, then free, full again later, and free again.
    streams = image.streams(tmp_path / "cache", try_again_s=0.0)
    for turn, offset in enumerate(range(0, 2_000_000, 500_000)):
        disk.is_full = turn % 2 == 0
        before_bytes = streams.cached_bytes
        check(image, streams, [(offset, 4096)])
        assert streams.is_full == disk.is_full
        assert (streams.cached_bytes > before_bytes) == (not disk.is_full)
    disk.is_full = False
    check(image, streams, HOT)
    streams.close()


@pytest.mark.parametrize(("deadline_s", "wait_s"), [(12.0, 3.0), (40.0, 10.0), (600.0, 10.0)])
def test_a_fault_waits_for_the_bundle_for_a_part_of_its_deadline_only(
    image: Image,
    bundle: tuple[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deadline_s: float,
    wait_s: float,
) -> None:
    """The rest of the deadline is for the blobs, so that a hanging bundle does not fail the
    read."""
    streams = image.streams(tmp_path / "cache", deadline_s=deadline_s)
    release = threading.Event()

    def hang(key: str) -> None:
        if is_bundle(key):
            release.wait(60)

    image.before_read = hang
    replay = image.replay(streams, *bundle)
    replay.start()
    waits: list[float] = []
    demand = streams.fetcher.demand

    def waiting(chunk: Chunk, deliver: Deliver, *, deadline_s: float) -> None:
        if not is_bundle(chunk.key):
            demand(chunk, deliver, deadline_s=deadline_s)
            return
        waits.append(deadline_s)
        raise DeadlineError("it hangs")

    monkeypatch.setattr(streams.fetcher, "demand", waiting)
    check(image, streams, HOT[:1])
    assert 0 < max(waits) <= wait_s
    release.set()
    streams.close()


def test_a_bundle_that_was_given_up_is_not_fetched_any_further(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes]
) -> None:
    gate, replay = held_back(image, streams, bundle)
    replay.give_up(UnavailableError("no more of it"))
    gate.let(10**6)
    check(image, streams, HOT)
    streams.close()
    assert bundle_reads(image) <= WORKERS + 1


def begin_two(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes], cache_dir: Path, lock: Path
) -> tuple[Gate, BundleReplay, BundleReplay, ImageBytes]:
    """Start replays of two servers of a node; return gate, leader, follower and its streams."""
    gate = Gate(image)
    first = image.replay(streams, *bundle, lock)
    first.start()
    other = image.streams(cache_dir, deadline_s=60)
    second = image.replay(other, *bundle, lock)
    second.start()
    return gate, first, second, other


def test_of_two_servers_one_fetches_and_the_other_follows(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes], tmp_path: Path
) -> None:
    lock = NodeCache(tmp_path / "cache").replay_lock(bundle[0], image.store.url)
    gate, first, second, other = begin_two(image, streams, bundle, tmp_path / "cache", lock)
    gate.let(10**6)
    check(image, other, HOT)
    wait_for(lambda: first.has_ended and second.has_ended)
    assert second.fetched_bytes == 0
    assert first.fetched_bytes == first.bundle.stream_bytes
    assert second.remaining_count == 0
    assert not lock.exists()
    other.close()


def test_a_follower_goes_on_where_the_leader_stopped(
    image: Image, streams: ImageBytes, bundle: tuple[str, bytes], tmp_path: Path
) -> None:
    lock = NodeCache(tmp_path / "cache").replay_lock(bundle[0], image.store.url)
    gate, first, second, other = begin_two(image, streams, bundle, tmp_path / "cache", lock)
    gate.let(1)
    wait_for(lambda: first.fetched_bytes > 0 and len(image.reads) == WORKERS + 1)
    # A leader without any bytes does not hold up the follower's fault for long.
    thread = threading.Thread(target=check, args=(image, other, HOT[-1:]))
    thread.start()
    wait_for(lambda: len(image.reads) > WORKERS + 1)
    # The leader ends while its reads are under way.
    streams.close()
    gate.let(10**6)
    thread.join(60)
    assert not thread.is_alive()
    wait_for(lambda: second.has_ended)
    assert second.error is None
    check(image, other, HOT)
    assert second.fetched_bytes > 0
    other.close()


def test_closing_while_following_ends_quietly(
    image: Image,
    streams: ImageBytes,
    bundle: tuple[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock = NodeCache(tmp_path / "cache").replay_lock(bundle[0], image.store.url)
    gate, _, _, other = begin_two(image, streams, bundle, tmp_path / "cache", lock)
    other.close()
    gate.let(10**6)
    streams.close()
    assert not any(WARNING in message for message in caplog.messages)
