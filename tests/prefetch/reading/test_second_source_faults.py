"""Second source of bytes that the store has lost: its use, its failures and its hangs."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, DeadlineError, UnavailableError
from bootseer.prefetch.cache.node_cache import NodeCache, replacement_key
from bootseer.prefetch.cache.stream import WHOLE_PIECE_BYTES
from bootseer.prefetch.reading.image_bytes import ImageBytes
from testbed.waiting import TIMEOUT_S, pause, wait_for
from tests.support.images.stored_image import INDEX, Image, stored_image
from tests.support.ranged import as_reader

pytestmark = pytest.mark.usefixtures("no_second_requests")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return stored_image(tmp_path)


def test_what_only_this_node_had_and_lost_is_an_error(image: Image, tmp_path: Path) -> None:
    local = replace(image.tree.blobs[0], frames=())
    with pytest.raises(CorruptError, match="stored nowhere"):
        ImageBytes([local], as_reader(image.read_object), NodeCache(tmp_path / "cache"))
    cache = NodeCache(tmp_path / "cache")
    streams = ImageBytes(
        [local], as_reader(image.read_object), cache, vouched={local.stream_digest}
    )
    streams.streams[0].put(0, bytes(WHOLE_PIECE_BYTES))
    assert bytes(streams.read(0, 0, 512, reader=1, end=1024)) == bytes(512)
    for _ in range(2):
        with pytest.raises(CorruptError, match="stored nowhere"):
            streams.read(0, WHOLE_PIECE_BYTES, 512, reader=1, end=2**20)
    assert streams.fill_fetches() == []
    assert streams.faults.snapshot().failed_count == 2
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

    def repair(lost: Blob, came: Callable[[int], None]) -> None:
        asked.append(lost.stream_digest)
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(replacement_key(lost, INDEX) if lost.frames else lost.stream_digest).close()

    streams = ImageBytes(
        [blob],
        as_reader(image.read_object),
        cache,
        deadline_s=60,
        repair=repair,
        image_key=INDEX,
        vouched={blob.stream_digest} if damage == "local only" else (),
    )
    for offset in (0, 100_000, blob.stream_length - 700):
        assert bytes(streams.read(0, offset, 700)) == whole[offset : offset + 700]
    assert asked == [blob.stream_digest]
    streams.close()


def test_a_second_source_that_fails_is_not_asked_all_the_time(image: Image, tmp_path: Path) -> None:
    asked: list[str] = []

    def repair(lost: Blob, came: Callable[[int], None]) -> None:
        asked.append(lost.stream_digest)
        raise UnavailableError("gone, too")

    local = replace(image.tree.blobs[0], frames=())
    cache = NodeCache(tmp_path / "cache")
    streams = ImageBytes(
        [local], as_reader(image.read_object), cache, repair=repair, vouched={local.stream_digest}
    )
    for _ in range(3):
        with pytest.raises(CorruptError, match="stored nowhere"):
            streams.read(0, 512, 512)
    assert len(asked) == 1
    streams.close()


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """Event that is set at the end of the test, for readers that hang until then."""
    over = threading.Event()
    yield over
    over.set()


def test_a_read_that_waited_in_vain_is_not_waited_for_again(
    image: Image, tmp_path: Path, silence: threading.Event
) -> None:
    """The kernel asks twice: first for its readahead, then for the page."""
    asked: list[str] = []

    def hang(key: str, offset: int, length: int) -> bytes:
        asked.append(key)
        silence.wait()
        return image.read_object(key, offset, length)

    streams = ImageBytes(
        image.tree.blobs, as_reader(hang), NodeCache(tmp_path / "cache"), deadline_s=0.5, workers=64
    )
    with pytest.raises(DeadlineError):
        streams.read(0, 0, 128 * 1024)
    count = streams.fetcher.statistics().demand_count
    for offset in (0, 4096, 100_000):
        with pytest.raises(DeadlineError):
            streams.read(0, offset, 4096)
    assert streams.fetcher.statistics().demand_count == count
    silence.set()
    # The failure is forgotten in a moment, and the bytes are there.
    wait_for(lambda: _can_read(streams, 0, 4096))
    streams.close()


def _can_read(streams: ImageBytes, offset: int, length: int) -> bool:
    try:
        streams.read(0, offset, length)
    except DeadlineError:
        return False
    return True


def test_reads_wait_for_a_hanging_second_source_within_their_own_deadline(
    image: Image, tmp_path: Path, silence: threading.Event
) -> None:
    begun = threading.Event()

    def repair(lost: Blob, came: Callable[[int], None]) -> None:
        begun.set()
        silence.wait()

    local = replace(image.tree.blobs[0], frames=())
    cache = NodeCache(tmp_path / "cache")
    streams = ImageBytes(
        [local],
        as_reader(image.read_object),
        cache,
        deadline_s=0.5,
        repair=repair,
        vouched={local.stream_digest},
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

    def repair(lost: Blob, came: Callable[[int], None]) -> None:
        for _ in range(60):
            came(1)
            pause(0.1)  # so slow is the line
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(lost.stream_digest).close()

    local = replace(blob, frames=())
    streams = ImageBytes(
        [local],
        as_reader(image.read_object),
        cache,
        deadline_s=5,
        repair=repair,
        vouched={local.stream_digest},
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

    def repair(lost: Blob, came: Callable[[int], None]) -> None:
        with cache.new_stream() as new:
            new.append(whole)
            new.commit(replacement_key(lost, INDEX)).close()

    streams = ImageBytes(
        [blob], as_reader(hang), cache, deadline_s=12, repair=repair, image_key=INDEX
    )
    assert bytes(streams.read(0, 0, 700)) == whole[:700]
    streams.close()
