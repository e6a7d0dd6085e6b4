"""Window of reads: fetched bytes, memory, and the cost of random reads."""

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DeadlineError, InvalidInputError
from bootseer.fuse.striped.layout import MAGIC
from bootseer.fuse.striped.memory import Memory
from bootseer.fuse.striped.reading.opened import StreamTracker
from bootseer.fuse.striped.tools.copy import copy_out
from bootseer.fuse.striped.writing.tail import Tail
from bootseer.store.local.backend import LocalBackend
from testbed.waiting import wait_for
from tests.fuse.striped.support.harness import Driver, storage_on

MIB = 2**20
DATA = random.Random(3).randbytes(24 * MIB)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Backend with a striped and an ordinary file of the same content."""
    root = tmp_path_factory.mktemp("stored")
    driver = Driver(storage_on(root, unit=MIB, count=4))
    driver.write("striped", DATA, step=MIB)
    (root / "plain").write_bytes(DATA)
    driver.storage.close()
    return root


@pytest.mark.parametrize("name", ["striped", "plain"])
def test_random_small_reads_stay_small(stored: Path, name: str) -> None:
    driver = Driver(storage_on(stored, unit=MIB))
    file = driver.open(name, os.O_RDONLY)
    numbers = random.Random(5)
    for _ in range(20):
        offset = numbers.randrange(len(DATA) - 4096)
        assert driver.pread(file, offset, 4096) == DATA[offset : offset + 4096]
    # A read may touch two blocks of 256 KiB; it must not read units or start readahead.
    assert driver.storage.reader.fetched_bytes <= 20 * 2 * 256 * 2**10
    driver.close(file)
    driver.storage.close()


@pytest.mark.parametrize("name", ["striped", "plain"])
@pytest.mark.parametrize("step", [MIB, 128 * 2**10, 10_000])
def test_a_sequential_read_fetches_each_byte_about_once(stored: Path, name: str, step: int) -> None:
    driver = Driver(storage_on(stored, unit=MIB))
    file = driver.open(name, os.O_RDONLY)
    position = 0
    while piece := driver.pread(file, position, step):
        assert piece == DATA[position : position + len(piece)]
        position += len(piece)
    assert position == len(DATA)
    # The first blocks may be read again with their whole unit.
    assert driver.storage.reader.fetched_bytes <= len(DATA) + 8 * MIB
    driver.close(file)
    driver.storage.close()


def test_interleaved_streams_on_one_descriptor_stay_within_the_budget(stored: Path) -> None:
    limit = 16 * MIB
    driver = Driver(storage_on(stored, unit=MIB, memory_bytes=limit))
    file = driver.open("striped", os.O_RDONLY)
    positions = [0, 6 * MIB, 12 * MIB, 18 * MIB]
    for _ in range(6 * MIB // (256 * 2**10)):
        for index, position in enumerate(positions):
            piece = driver.pread(file, position, 256 * 2**10)
            assert piece == DATA[position : position + len(piece)]
            positions[index] += len(piece)
    assert driver.storage.memory.peak_bytes <= limit
    assert driver.storage.reader.fetched_bytes <= len(DATA) + 16 * MIB
    driver.close(file)
    driver.storage.close()


def test_a_file_that_does_not_fit_is_read_through_few_buffers(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as sparse:
        sparse.truncate(192 * MIB)
    driver = Driver(storage_on(tmp_path, unit=MIB, memory_bytes=160 * MIB))
    file = driver.open("large", os.O_RDONLY)
    for offset in range(0, 192 * MIB, MIB):
        assert len(driver.pread(file, offset, MIB)) == MIB
    # The readahead, and a few units behind it: new memory costs more than the read.
    assert driver.storage.memory.peak_bytes <= 96 * MIB
    driver.close(file)
    driver.storage.close()


@pytest.mark.parametrize("name", ["striped", "plain"])
def test_a_copy_out_takes_few_buffers(stored: Path, tmp_path: Path, name: str) -> None:
    steps: list[int] = []
    with storage_on(stored, unit=MIB) as storage:
        copy_out(storage, name, tmp_path / "copy", on_progress=steps.append)
        assert storage.memory.peak_bytes <= 48 * MIB
        assert storage.reader.fetched_bytes == sum(steps) == len(DATA)
    assert (tmp_path / "copy").read_bytes() == DATA


@contextlib.contextmanager
def failed_copy(stored: Path, refuse: Callable[[int, memoryview], None]) -> Iterator[None]:
    """Copy a file of 24 units to `refuse`, which must make it fail; enter before it is closed."""
    with storage_on(stored, unit=MIB) as storage:
        opened = storage.reader.open(storage.tree.stored.view("striped"))
        with pytest.raises(OSError, match="No space left"):
            storage.reader.copy(opened, refuse, lambda count: None)
        yield
        storage.reader.close(opened)


def test_a_copy_out_ends_when_its_disk_is_full(stored: Path) -> None:
    def refuse(offset: int, piece: memoryview) -> None:
        taken.append(offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken: list[int] = []
    with failed_copy(stored, refuse):
        count = len(taken)
    assert len(taken) == count <= 16, "nothing is written after the failure"


def test_a_copy_out_fails_before_its_first_read_ends(stored: Path) -> None:
    """Regression: reads were begun as long as the first one had not ended."""
    many = threading.Event()

    def refuse(offset: int, piece: memoryview) -> None:
        if offset == 0:
            many.wait(0.5)
            return
        taken.append(offset)
        if len(taken) == 20:
            many.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken: list[int] = []
    with failed_copy(stored, refuse):
        pass
    assert not many.is_set()


def test_a_caller_that_keeps_what_it_got_does_not_starve_itself(stored: Path) -> None:
    """Regression: a read waited until its deadline for memory that only its caller could free."""
    with storage_on(stored, unit=MIB, memory_bytes=16 * MIB, deadline_s=20.0) as storage:
        file = storage.reader.open(storage.tree.stored.view("striped"))
        pieces: list[memoryview] = []
        for offset in range(0, len(DATA), MIB):
            pieces += storage.reader.read(file, offset, MIB)
        assert b"".join(pieces) == DATA
        pieces.clear()
        storage.reader.close(file)
        assert storage.reader.read_bytes(file, 0, MIB) == DATA[:MIB]
        assert storage.memory.used_bytes <= storage.memory.limit_bytes


def test_readers_and_writers_share_one_budget(tmp_path: Path, stored: Path) -> None:
    limit = 16 * MIB
    storage = storage_on(tmp_path, unit=MIB, memory_bytes=limit)
    driver = Driver(storage)
    errors: list[BaseException] = []

    def save(name: str) -> None:
        try:
            driver.write(name, DATA, step=MIB)
            assert driver.read(name, step=MIB) == DATA
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(f"f{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert storage.memory.peak_bytes <= limit
    storage.close()


def test_concurrent_readers_of_one_file_share_the_fetches(stored: Path) -> None:
    driver = Driver(storage_on(stored, unit=MIB, memory_bytes=64 * MIB))
    failures: list[int] = []

    def read_all() -> None:
        if driver.read("striped", step=MIB) != DATA:
            failures.append(1)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert driver.storage.reader.fetched_bytes <= len(DATA) + 8 * MIB
    driver.storage.close()


def test_what_looks_like_a_layout_is_stored_striped(tmp_path: Path) -> None:
    driver = Driver(storage_on(tmp_path))
    trap = MAGIC + bytes(1729 - len(MAGIC))
    driver.write("trap", trap)
    assert driver.read("trap") == trap
    assert (tmp_path / "trap").read_bytes() != trap
    driver.storage.close()


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="at least"):
        storage_on(LocalBackend(tmp_path), unit=MIB, memory_bytes=MIB)


# ---- the pure parts -----------------------------------------------------------------------


def test_the_window_grows_with_what_was_read_and_no_further_than_its_share() -> None:
    tracker = StreamTracker()
    position, ahead = 0, 0
    for step in range(40):
        advice = tracker.observe(position, position + 256 * 2**10, 8 * MIB, float(step))
        position += 256 * 2**10
        assert advice.ahead_end - position <= 8 * MIB
        ahead = max(ahead, advice.ahead_end - position)
    assert ahead == 8 * MIB


def test_who_begins_at_the_start_is_read_to_from_all_parts_at_once(tmp_path: Path) -> None:
    """Regression: until the first unit was here, six of eight DataNodes had nothing to do."""
    with storage_on(tmp_path, unit=MIB, count=8, memory_bytes=64 * MIB) as storage:
        driver = Driver(storage)
        driver.write("f", bytes(20 * MIB), step=MIB)
        file = storage.reader.open(storage.tree.stored.view("f"))
        before = storage.reader.fetched_bytes
        storage.reader.read_bytes(file, 0, MIB)
        wait_for(lambda: storage.reader.fetched_bytes - before >= 9 * MIB, "read-ahead")
        storage.reader.close(file)


def test_random_reads_are_no_stream() -> None:
    tracker = StreamTracker()
    numbers = random.Random(1)
    for step in range(500):
        start = numbers.randrange(10**10)
        advice = tracker.observe(start, start + 4096, 64 * MIB, float(step))
        assert not advice.whole_units
        assert advice.ahead_start == advice.ahead_end


def test_two_random_reads_that_lie_close_are_no_stream() -> None:
    tracker = StreamTracker()
    tracker.observe(100 * MIB, 101 * MIB, 64 * MIB, 0.0)
    assert not tracker.observe(102 * MIB, 102 * MIB + 4096, 64 * MIB, 1.0).whole_units


def test_reads_that_overtake_each_other_stay_one_stream() -> None:
    tracker = StreamTracker()
    order = list(range(64))
    for at in range(1, 64, 4):
        order[at], order[at + 1] = order[at + 1], order[at]
    for step, number in enumerate(order):
        tracker.observe(number * 128 * 2**10, (number + 1) * 128 * 2**10, 64 * MIB, float(step))
    # A stream that was overtaken before it was proven may be left.
    assert tracker.active_count(10.0) == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 400_000)),
            st.tuples(st.just("give"), st.sampled_from([2**20, 2**20 - 48, 2**17])),
            st.tuples(st.just("append"), st.sampled_from([48, 2**18])),
            st.tuples(st.just("patch"), st.integers(0, 10**6)),
            st.tuples(st.just("cut"), st.integers(0, 10**6)),
        ),
        max_size=8,
    )
)
def test_a_tail_is_a_bytearray(steps: list[tuple[str, int]]) -> None:
    tail, model = Tail(), bytearray()
    for number, (what, value) in enumerate(steps):
        if what in ("append", "give"):
            data = bytes([number]) * value
            tail.append(bytearray(data) if what == "give" else data)
            model += data
        elif what == "patch" and model:
            at = value % len(model)
            tail.patch(at, b"patch"[: len(model) - at])
            model[at : at + 5] = b"patch"[: len(model) - at]
        elif what == "cut":
            tail.cut(value % (len(model) + 1))
            del model[value % (len(model) + 1) :]
        assert tail.length == len(model)
    assert tail.join() == bytes(model) == b"".join(tail.pieces())


def test_a_budget_that_nobody_gives_back_ends_in_a_deadline() -> None:
    memory = Memory(100)
    assert memory.try_charge(80)
    with pytest.raises(DeadlineError):
        memory.charge(30, 0.05, lambda: False)
    with pytest.raises(InterruptedError):
        memory.charge(30, 5.0, lambda: True)
    memory.give(80)
    # More than the whole memory: let through alone.
    memory.charge(500, 0.05, lambda: False)
