"""Faults, read-ahead, bundles and replay, on a real store and cache, without a mount."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.prefetch.bundle.bundle_accuracy import accuracy_of
from bootseer.prefetch.bundle.format import decode_header
from bootseer.prefetch.bundle.hot_store import part_key
from bootseer.prefetch.bundle.replay import plan_replay
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.cache.stream_keys import claimed_key, frames_key
from bootseer.prefetch.streams.repairs import Came
from bootseer.prefetch.streams.streams import BlobStreams
from bootseer.transfer.plan import Chunk
from tests.support.images.stored_image import INDEX, SIZES, Image, stored_image
from tests.support.waiting import TIMEOUT_S, wait_for


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return stored_image(tmp_path)


def test_every_byte_is_right_and_fetched_once(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    generator = random.Random(3)
    for _ in range(300):
        name = generator.choice(list(SIZES))
        offset = generator.randrange(SIZES[name])
        length = min(generator.randrange(1, 200_000), SIZES[name] - offset)
        found = streams.read(*image.place(name, offset, length))
        assert bytes(found) == image.contents[name][offset : offset + length]
    assert image.read_bytes <= image.tree.blobs[0].size_bytes
    streams.close()
    again = image.streams(tmp_path / "cache")
    before = len(image.reads)
    assert bytes(again.read(*image.place("small", 0, 700))) == image.contents["small"]
    assert len(image.reads) == before
    again.close()


def test_many_readers_at_once(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    wrong: list[int] = []

    def reader(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(60):
            offset = generator.randrange(SIZES["big"] - 50_000)
            found = streams.read(*image.place("big", offset, 50_000), reader=seed, end=3_000_000)
            if bytes(found) != image.contents["big"][offset : offset + 50_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len({read[1] for read in image.reads}) == len(image.reads)
    streams.close()


def test_reading_on_fetches_ahead(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    blob, start, _ = image.place("big", 0, 1)
    for offset in range(0, SIZES["big"] - 65536, 65536):
        data = streams.read(blob, start + offset, 65536, reader=1, end=start + SIZES["big"])
        assert bytes(data) == image.contents["big"][offset : offset + 65536]
    figures = streams.figures()
    assert figures.readahead_frame_count > figures.fault_frame_count
    streams.close()


def test_reading_here_and_there_does_not(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    blob, start, _ = image.place("big", 0, 1)
    for offset in (2_500_000, 100, 1_200_000, 2_000_000, 600_000):
        streams.read(blob, start + offset, 4096, reader=1, end=start + SIZES["big"])
    assert streams.figures().readahead_frame_count == 0
    streams.close()


def test_damaged_frame_is_an_error_never_bytes(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "store" / blob_key(image.tree.blobs[0].digest)
    data = bytearray(path.read_bytes())
    frame = image.tree.blobs[0].frames[3]
    data[frame.offset + 20] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    streams = image.streams(tmp_path / "cache", deadline_s=3)
    with pytest.raises(CorruptError):
        streams.read(0, frame.stream_offset, 100)
    assert not streams.caches[0].has(frame.stream_offset, 100)
    streams.close()


def test_store_out_of_reach_is_an_error_in_time(image: Image, tmp_path: Path) -> None:
    def unreachable(key: str) -> None:
        raise UnavailableError("gone")

    image.before_read = unreachable
    streams = image.streams(tmp_path / "cache", deadline_s=1)
    with pytest.raises(BootseerError):
        streams.read(0, 0, 512)
    streams.close()


def test_store_that_hangs_is_an_error_in_time(image: Image, tmp_path: Path) -> None:
    release = threading.Event()

    def hang(key: str) -> None:
        release.wait(60)

    image.before_read = hang
    streams = image.streams(tmp_path / "cache", deadline_s=0.5)
    with pytest.raises(BootseerError):
        streams.read(0, 0, 512)
    release.set()
    streams.close()


def test_replay_brings_the_hot_bytes_and_nothing_else(image: Image, tmp_path: Path) -> None:
    ranges = [image.place("big", offset, 4096) for offset in range(0, 2_000_000, 100_000)]
    digest, header = image.publish_bundle(ranges)
    streams = image.streams(tmp_path / "cache")
    replay = image.replay(streams, digest, header)
    replay.start()
    for offset in range(0, 2_000_000, 100_000):
        found = streams.read(*image.place("big", offset, 4096))
        assert bytes(found) == image.contents["big"][offset : offset + 4096]
    assert {read[0] for read in image.reads} == {part_key(digest, 0), part_key(digest, 1)}
    # A frame is counted a moment after its bytes can be read.
    wait_for(lambda: replay.is_over)
    assert replay.error is None
    assert replay.remaining_count == 0
    # Each range begins wherever its file does, and so may touch one sector more.
    assert len(ranges) * 4096 <= replay.fetched_bytes <= len(ranges) * (4096 + 512)
    streams.close()
    again = image.streams(tmp_path / "cache")
    image.reads.clear()
    second = image.replay(again, digest, header)
    second.start()
    assert second.remaining_count == 0
    assert not image.reads
    again.close()


def test_replay_begins_with_small_requests_and_ends_with_large_ones() -> None:
    sizes = [150_000 + i for i in range(200)]
    offsets = [sum(sizes[:i]) for i in range(200)]
    chunks = [Chunk("k", o, size) for o, size in zip(offsets, sizes, strict=True)]
    cached = set(chunks[20:30])
    fetches = plan_replay(chunks, lambda chunk: chunk in cached)
    planned = [chunk for fetch in fetches for chunk in fetch.chunks]
    assert planned == [chunk for chunk in chunks if chunk not in cached]
    assert [len(fetch.chunks) for fetch in fetches[:8]] == [1] * 8
    assert max(fetch.length for fetch in fetches) <= 2**21
    assert sum(fetch.length for fetch in fetches) == sum(chunk.length for chunk in planned)
    assert fetches[-2].length > 2**20


def test_what_the_bundle_lacks_comes_from_the_blob(image: Image, tmp_path: Path) -> None:
    digest, header = image.publish_bundle([image.place("big", 0, 4096)])
    streams = image.streams(tmp_path / "cache")
    image.replay(streams, digest, header).start()
    found = streams.read(*image.place("big", 0, 20_000))
    assert bytes(found) == image.contents["big"][:20_000]
    assert bytes(streams.read(*image.place("middle", 5, 9))) == image.contents["middle"][5:14]
    streams.close()


@pytest.mark.parametrize("damage", ["flip", "gone", "short"])
def test_damaged_bundle_is_left_aside(
    image: Image, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranges = [image.place("big", offset, 4096) for offset in range(0, 2_000_000, 100_000)]
    digest, header = image.publish_bundle(ranges)
    path = tmp_path / "store" / part_key(digest, 1)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(data[:1000])
    else:
        data[1000] ^= 1
        path.write_bytes(data)
    streams = image.streams(tmp_path / "cache", deadline_s=30)
    replay = image.replay(streams, digest, header)
    replay.start()
    for offset in range(0, 2_000_000, 100_000):
        found = streams.read(*image.place("big", offset, 4096))
        assert bytes(found) == image.contents["big"][offset : offset + 4096]
    streams.close()
    assert replay.error is not None
    assert sum("not used any further" in message for message in caplog.messages) == 1


def test_full_disk_still_serves(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    streams = image.streams(tmp_path / "cache")
    monkeypatch.setattr(os, "pwrite", refuse)
    for name, content in image.contents.items():
        for offset in range(0, len(content), 100_000):
            length = min(100_000, len(content) - offset)
            found = streams.read(*image.place(name, offset, length))
            assert bytes(found) == content[offset : offset + length]
    assert sum("no longer cached" in message for message in caplog.messages) == 1
    streams.close()


def test_fill_brings_everything(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    streams.read(0, 0, 512)
    streams.fill()
    assert not streams.fill_fetches()
    assert streams.caches[0].present_bytes() == image.tree.blobs[0].stream_length
    streams.close()


def test_aim_counts_hits_waste_and_misses(image: Image) -> None:
    _, header = image.publish_bundle([image.place("big", 0, 8192), image.place("small", 0, 700)])
    lengths = [blob.stream_length for blob in image.tree.blobs]
    bundle = decode_header(header, INDEX, lengths)
    number = image.tree.resolve(b"big")
    assert number is not None
    aim = accuracy_of(
        bundle, lengths, [(number, 4096, 8192, 0)], lambda n: image.tree.inode(n).extents
    )
    assert (aim.bundle_bytes, aim.asked_bytes, aim.used_bytes) == (8192 + 1024, 8192, 4096)
    assert aim.recall == 0.5
    assert accuracy_of(None, lengths, [], lambda n: ()).precision is None


def test_what_only_this_node_had_and_lost_is_an_error(image: Image, tmp_path: Path) -> None:
    local = replace(image.tree.blobs[0], frames=())
    with pytest.raises(CorruptError, match="stored nowhere"):
        BlobStreams([local], image.read_object, NodeCache(tmp_path / "cache"))
    cache = NodeCache(tmp_path / "cache")
    streams = BlobStreams([local], image.read_object, cache, is_local=True)
    streams.caches[0].proven.write(0, bytes(512))
    assert bytes(streams.read(0, 0, 512, reader=1, end=1024)) == bytes(512)
    for _ in range(2):
        with pytest.raises(CorruptError, match="stored nowhere"):
            streams.read(0, 512, 512, reader=1, end=2048)
    assert streams.fill_fetches() == []
    assert streams.figures().failed_count == 2
    assert not image.reads
    streams.close()


@pytest.mark.parametrize("damage", ["gone", "local only", "damaged"])
def test_a_second_source_brings_what_the_store_cannot(
    image: Image, tmp_path: Path, damage: str
) -> None:
    source = image.streams(tmp_path / "source")
    source.fill()
    stored = image.tree.blobs[0]
    whole = bytes(source.read(0, 0, stored.stream_length))
    source.close()
    blob = replace(stored, frames=()) if damage == "local only" else stored
    path = tmp_path / "store" / blob_key(stored.digest)
    path.chmod(0o600)
    if damage == "gone":
        path.unlink()
    elif damage == "damaged":
        path.write_bytes(bytes(path.stat().st_size))
    cache = NodeCache(tmp_path / "cache")
    asked: list[str] = []

    def repair(lost: Blob, came: Came) -> None:
        asked.append(lost.stream_digest)
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(claimed_key(INDEX, lost) if lost.frames else lost.stream_digest).close()

    streams = BlobStreams(
        [blob],
        image.read_object,
        cache,
        deadline_s=10,
        repair=repair,
        claimant=INDEX,
        is_local=damage == "local only",
    )
    for offset in (0, 100_000, blob.stream_length - 700):
        assert bytes(streams.read(0, offset, 700)) == whole[offset : offset + 700]
    assert asked == [blob.stream_digest]
    streams.close()


def test_a_second_source_that_fails_is_not_asked_all_the_time(image: Image, tmp_path: Path) -> None:
    asked: list[str] = []

    def repair(lost: Blob, came: Came) -> None:
        asked.append(lost.stream_digest)
        raise UnavailableError("gone, too")

    local = replace(image.tree.blobs[0], frames=())
    cache = NodeCache(tmp_path / "cache")
    streams = BlobStreams([local], image.read_object, cache, repair=repair, is_local=True)
    for _ in range(3):
        with pytest.raises(CorruptError, match="stored nowhere"):
            streams.read(0, 512, 512)
    assert len(asked) == 1
    streams.close()


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """What whoever hangs waits for: the end of the test."""
    over = threading.Event()
    yield over
    over.set()


def test_a_read_that_waited_in_vain_is_not_waited_for_again(
    image: Image, tmp_path: Path, silence: threading.Event
) -> None:
    """The kernel asks twice: first it reads ahead, then it wants the page."""
    asked: list[str] = []

    def hang(key: str, offset: int, length: int) -> bytes:
        asked.append(key)
        silence.wait()
        return image.read_object(key, offset, length)

    streams = BlobStreams(
        image.tree.blobs, hang, NodeCache(tmp_path / "cache"), deadline_s=0.5, workers=64
    )
    with pytest.raises(DeadlineError):
        streams.read(0, 0, 128 * 1024)
    count = streams.statistics().demand_count
    for offset in (0, 4096, 100_000):
        with pytest.raises(DeadlineError):
            streams.read(0, offset, 4096)
    assert streams.statistics().demand_count == count
    silence.set()
    # It is forgotten in a moment, and the bytes are there.
    wait_for(lambda: _can_read(streams, 0, 4096))
    streams.close()


def _can_read(streams: BlobStreams, offset: int, length: int) -> bool:
    try:
        streams.read(0, offset, length)
    except DeadlineError:
        return False
    return True


def test_reads_wait_for_a_hanging_second_source_within_their_own_deadline(
    image: Image, tmp_path: Path, silence: threading.Event
) -> None:
    begun = threading.Event()

    def repair(lost: Blob, came: Came) -> None:
        begun.set()
        silence.wait()

    local = replace(image.tree.blobs[0], frames=())
    cache = NodeCache(tmp_path / "cache")
    streams = BlobStreams(
        [local], image.read_object, cache, deadline_s=0.5, repair=repair, is_local=True
    )
    failed: list[BaseException] = []

    def read() -> None:
        try:
            streams.read(0, 0, 4096)
        except BootseerError as error:
            failed.append(error)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert begun.is_set()
    assert [type(error) for error in failed] == [DeadlineError] * 3
    streams.close()


def test_a_second_source_that_brings_bytes_may_take_longer_than_a_deadline(
    image: Image, tmp_path: Path
) -> None:
    source = image.streams(tmp_path / "other")
    source.fill()
    blob = image.tree.blobs[0]
    whole = bytes(source.read(0, 0, blob.stream_length))
    source.close()
    cache = NodeCache(tmp_path / "cache")

    def repair(lost: Blob, came: Came) -> None:
        for _ in range(20):
            came(1)
            time.sleep(0.1)  # so slow is the line
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(lost.stream_digest).close()

    local = replace(blob, frames=())
    streams = BlobStreams(
        [local], image.read_object, cache, deadline_s=0.5, repair=repair, is_local=True
    )
    assert bytes(streams.read(0, 0, 700)) == whole[:700]
    streams.close()


def test_the_store_leaves_time_for_the_second_source(
    image: Image, tmp_path: Path, silence: threading.Event
) -> None:
    def hang(key: str, offset: int, length: int) -> bytes:
        silence.wait()
        raise UnavailableError("never")

    source = image.streams(tmp_path / "other")
    source.fill()
    blob = image.tree.blobs[0]
    whole = bytes(source.read(0, 0, blob.stream_length))
    source.close()
    cache = NodeCache(tmp_path / "cache")

    def repair(lost: Blob, came: Came) -> None:
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(claimed_key(INDEX, lost)).close()

    streams = BlobStreams([blob], hang, cache, deadline_s=3, repair=repair, claimant=INDEX)
    assert bytes(streams.read(0, 0, 700)) == whole[:700]
    streams.close()


def test_figures_say_where_bytes_came_from(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    blob, start, _ = image.place("big", 0, 1)
    for offset in range(0, 1_000_000, 65536):
        streams.read(blob, start + offset, 65536, reader=1, end=start + SIZES["big"])
    streams.read(blob, start, 4096)
    middle = streams.sources()
    streams.fill()
    sources, figures = streams.sources(), streams.figures()
    assert middle.cache_bytes >= 4096
    assert middle.fault_bytes > 0
    assert middle.readahead_bytes > 0
    assert middle.fill_bytes == 0
    came = sources.fault_bytes + sources.readahead_bytes + sources.fill_bytes
    assert came == image.tree.blobs[0].stream_length
    assert sum(figures.wait_counts) == figures.fault_count > 0
    assert 0 < figures.wait_p50_ns <= figures.wait_p99_ns <= figures.wait_max_ns
    streams.close()


def test_what_another_process_is_fetching_is_not_fetched_twice(
    image: Image, tmp_path: Path
) -> None:
    frame = image.tree.blobs[0].frames[2]
    blob = image.tree.blobs[0]
    streams = image.streams(tmp_path / "cache")
    # A process that says that it fetches the frame, brings it, and says so when it has.
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bootseer.prefetch.cache.node_cache import NodeCache\n"
        "path, digest, length, offset, count = sys.argv[1:]\n"
        "c = NodeCache(Path(path)).open_stream(digest, int(length))\n"
        "assert c.announce(int(offset), int(count))\n"
        "print('claimed', flush=True)\n"
        "content = sys.stdin.buffer.read()\n"
        "c.write(int(offset), content) if content else None\n"
    )
    source = image.streams(tmp_path / "source")
    content = bytes(source.read(0, frame.stream_offset, frame.stream_length))
    source.close()
    image.reads.clear()
    for answer in (b"", content):
        arguments = (
            *(tmp_path / "cache", frames_key(blob), blob.stream_length),
            *(frame.stream_offset, frame.stream_length),
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdout is not None
            assert other.stdin is not None
            assert other.stdout.readline() == b"claimed\n"
            place = (0, frame.stream_offset, 100)
            reader = threading.Thread(target=streams.read, args=place)
            if answer:
                reader.start()
                other.stdin.write(answer)
                other.stdin.close()
                reader.join(60)
                assert streams.figures().fault_count == 1
                assert bytes(streams.read(*place)) == content[:100]
                assert not image.reads
            else:
                # It fails: whoever waits, or comes later, fetches for itself.
                other.stdin.close()
                other.wait(60)
                assert streams.caches[0].proven.announce(frame.stream_offset, frame.stream_length)
                streams.caches[0].proven.withdraw(frame.stream_offset, frame.stream_length)
    streams.close()
