"""Faults and readahead on a real store and cache, without a mount."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key
from bootseer.errors import BootseerError, CorruptError, UnavailableError
from bootseer.prefetch.cache.node_cache import frame_starts, frames_key
from tests.support.images.stored_image import SIZES, Image, stored_image

pytestmark = pytest.mark.usefixtures("no_second_requests")


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
    figures = streams.faults.snapshot()
    assert figures.readahead_frame_count > figures.fault_frame_count
    streams.close()


def test_reading_here_and_there_does_not(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    blob, start, _ = image.place("big", 0, 1)
    for offset in (2_500_000, 100, 1_200_000, 2_000_000, 600_000):
        streams.read(blob, start + offset, 4096, reader=1, end=start + SIZES["big"])
    assert streams.faults.snapshot().readahead_frame_count == 0
    streams.close()


def test_damaged_frame_is_an_error_never_bytes(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "store" / blob_key(image.tree.blobs[0].digest)
    data = bytearray(path.read_bytes())
    frame = image.tree.blobs[0].frames[3]
    data[frame.offset + 20] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    streams = image.streams(tmp_path / "cache", deadline_s=60)
    with pytest.raises(CorruptError):
        streams.read(0, frame.stream_offset, 100)
    assert not streams.streams[0].holds_bytes(frame.stream_offset, 100)
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
    assert sum("cannot write to" in message for message in caplog.messages) == 1
    streams.close()


def test_fill_brings_everything(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    streams.read(0, 0, 512)
    streams.fill()
    assert not streams.fill_fetches()
    assert streams.streams[0].present_bytes() == image.tree.blobs[0].stream_length
    streams.close()


def test_figures_say_where_bytes_came_from(image: Image, tmp_path: Path) -> None:
    streams = image.streams(tmp_path / "cache")
    blob, start, _ = image.place("big", 0, 1)
    for offset in range(0, 1_000_000, 65536):
        streams.read(blob, start + offset, 65536, reader=1, end=start + SIZES["big"])
    streams.read(blob, start, 4096)
    middle = streams.sources()
    streams.fill()
    sources, figures = streams.sources(), streams.faults.snapshot()
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
    # A process that announces a fetch of the frame, stores it, and reports its end.
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bootseer.prefetch.cache.node_cache import NodeCache\n"
        "path, key, *starts = sys.argv[1:]\n"
        "c = NodeCache(Path(path)).open_pieces(key, [*map(int, starts)])\n"
        "assert c.announce(2, 3)\n"
        "print('claimed', flush=True)\n"
        "content = sys.stdin.buffer.read()\n"
        "c.put(2, content) if content else None\n"
    )
    source = image.streams(tmp_path / "source")
    content = bytes(source.read(0, frame.stream_offset, frame.stream_length))
    source.close()
    image.reads.clear()
    for answer in (b"", content):
        arguments = tmp_path / "cache", frames_key(blob), *frame_starts(blob)
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
                assert streams.faults.snapshot().fault_count == 1
                assert bytes(streams.read(*place)) == content[:100]
                assert not image.reads
            else:
                # The fetch fails: waiting and later readers fetch the frame themselves.
                other.stdin.close()
                other.wait(60)
                assert streams.streams[0].announce(2, 3)
                streams.streams[0].withdraw(2, 3)
    streams.close()
