"""Replay of a bundle with a real store and cache, without a mount."""

from pathlib import Path

import pytest

from bootseer.prefetch.bundle.hot_store import part_key
from bootseer.prefetch.bundle.replay import plan_replay
from bootseer.transfer.ranges import Chunk
from testbed.waiting import wait_for
from tests.support.images.stored_image import Image, stored_image


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return stored_image(tmp_path)


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
    wait_for(lambda: replay.has_ended)
    assert replay.error is None
    assert replay.remaining_count == 0
    # A range begins where its file does, and so may touch one sector more.
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
    assert sum("the bundle is given up" in message for message in caplog.messages) == 1
