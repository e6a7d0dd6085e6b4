"""Stripe units that other nodes of a start send: taken if they are right and in time."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.fanout.local import SharedRanges
from bootseer.fuse.striped.mounted.newest import read_newest
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.ranges import Chunk
from tests.fuse.striped.support.harness import UNIT, Driver, storage_on

DATA = random.Random(3).randbytes(9 * UNIT + 100)
URL = "hdfs://user:secret@namenode/checkpoints"


class OtherNodes(SharedRanges):
    """Ranges that come from a copy of the stored parts, each changed by `change`; b"" is late."""

    def __init__(self, folder: Path, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        super().__init__(b"")
        self.parts = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob(".bootseer-parts/*/*")
        }
        self.change = change
        self.url = ""
        self.chunks: Sequence[Chunk] = ()
        self.declined: Sequence[Chunk] = ()

    def share(self, url: str, chunks: Sequence[Chunk]) -> bool:
        self.url, self.chunks = url, chunks
        return True

    def decline(self, url: str, chunks: Sequence[Chunk]) -> None:
        self.declined = chunks

    def covers(self, key: str) -> bool:
        return key in self.parts

    def bring(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> bool:
        assert not attempt.asks_elsewhere
        data = self.change(self.parts[key][offset : offset + len(buffer)])
        if not data or not attempt.put(0, buffer, data):
            return False
        self.shared_bytes += len(data)
        return True


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with storage_on(tmp_path / "stored") as storage:
        driver = Driver(storage)
        driver.mkdir("step-1")
        # Two segments, of five and six units.
        driver.write("step-1/model.pt", DATA[: 4 * UNIT + 7])
        driver.write("step-1/model.pt", DATA[4 * UNIT + 7 :], os.O_APPEND)
        driver.write("step-1/config.json", b"{}")
    return tmp_path / "stored"


def _read_bytes(storage: StripedStorage) -> int:
    """Return the bytes that came from the storage itself."""
    sources = storage.counters.read().sources
    return sum(one.read_bytes for one in sources if one.name.startswith("part"))


def test_units_that_other_nodes_send_are_not_read_from_the_storage(saved: Path) -> None:
    with storage_on(saved) as storage:
        ranges = OtherNodes(saved)
        assert read_newest(storage, 2 * len(DATA), url=URL, ranges=ranges) == len(DATA) + 2
        assert Driver(storage).read("step-1/model.pt") == DATA
        assert (ranges.shared_bytes, _read_bytes(storage)) == (len(DATA), 0)
    assert ranges.url == URL
    # Every unit in the order of the file, each with the digest of its bytes.
    assert b"".join(ranges.parts[c.key][c.offset : c.end] for c in ranges.chunks) == DATA
    for chunk in ranges.chunks:
        assert content_digest(ranges.parts[chunk.key][chunk.offset : chunk.end]) == chunk.digest


@pytest.mark.parametrize("change", [lambda data: bytes(len(data)), lambda data: b""])
def test_units_that_come_wrong_or_late_are_read_from_the_storage(
    saved: Path, change: Callable[[bytes], bytes]
) -> None:
    with storage_on(saved) as storage:
        storage.reader.share(OtherNodes(saved, change))
        assert Driver(storage).read("step-1/model.pt") == DATA
        assert _read_bytes(storage) >= len(DATA)


def test_a_file_that_was_replaced_meanwhile_has_no_byte_of_the_old_one(saved: Path) -> None:
    new = DATA[::-1]
    with storage_on(saved) as storage, storage_on(saved) as elsewhere:
        driver = Driver(storage)
        ranges = OtherNodes(saved)
        old = driver.open("step-1/model.pt", os.O_RDONLY)
        storage.reader.share(ranges)
        Driver(elsewhere).write("step-1/model.pt", new)
        assert driver.read("step-1/model.pt") == new
        assert ranges.shared_bytes == 0
        # Whoever had the old one open still gets it.
        assert driver.pread(old, 0, UNIT) == DATA[:UNIT]
        driver.close(old)


def test_a_node_that_has_the_checkpoint_declines(saved: Path) -> None:
    with storage_on(saved) as storage:
        read_newest(storage, 2 * len(DATA))
        ranges = OtherNodes(saved)
        read_newest(storage, 2 * len(DATA), url=URL, ranges=ranges)
        assert (len(ranges.declined), ranges.shared_bytes) == (11, 0)


def test_after_the_start_the_storage_is_read(saved: Path) -> None:
    with storage_on(saved) as storage:
        ranges, newer = OtherNodes(saved), OtherNodes(saved)
        storage.reader.share(ranges)
        storage.reader.share(newer)
        # The end of an earlier start does not end the sharing of the next one.
        storage.reader.end_sharing(ranges)
        Driver(storage).read("step-1/model.pt")
        assert newer.shared_bytes == len(DATA)
    with storage_on(saved) as storage:
        storage.reader.share(ranges)
        storage.reader.end_sharing(ranges)
        Driver(storage).read("step-1/model.pt")
        assert ranges.shared_bytes == 0
