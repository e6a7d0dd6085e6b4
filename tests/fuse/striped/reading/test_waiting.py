"""Deadlines of reads: extended while bytes arrive, and no longer than a source exists."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from functools import partial
from pathlib import Path

import pytest

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.fuse.striped.memory import Droppable, Memory, Tier
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.store.local.backend import LocalBackend
from bootseer.transfer.attempt import Attempt
from testbed.waiting import pause, wait_for
from tests.bootseer.transfer.thin_line import ThinLine
from tests.fuse.striped.support.faulty import FaultyBackend, hanging
from tests.fuse.striped.support.harness import Driver, storage_on

UNIT = 4 << 20
_ALL_S = 120.0


class Clock:
    """Monotonic clock that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead_s)


class SlowBackend(LocalBackend):
    """Backend that sends parts in pieces, and advances the clock before each piece of the first
    unit."""

    clock: Clock | None = None
    piece_bytes = 0
    pause_s = 40.0
    reached = 0

    def open_reader(self, path: str, *, is_checked: bool = False):  # type: ignore[no-untyped-def]
        reader = super().open_reader(path, is_checked=is_checked)
        clock, whole = self.clock, reader.read_into
        if clock is None or PARTS_FOLDER not in path:
            return reader

        def read_into(offset: int, buffer: memoryview, attempt: Attempt) -> int:
            done = 0
            while done < len(buffer) and not attempt.is_given_up:
                position = offset + done
                if self.reached <= position < UNIT:
                    # Once for all attempts, and not for readahead.
                    self.reached = position + 1
                    clock.ahead_s += self.pause_s
                piece = buffer[done : done + self.piece_bytes]
                whole(position, piece, Attempt())
                done += len(piece)
                attempt.done_bytes = done
                # The reader checks four times a second.
                pause(0.3)
            return done

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StripedStorage]:
    """Storage with a file of two units whose bytes come slowly from now on."""
    backend = SlowBackend(tmp_path)
    with storage_on(backend, unit=UNIT, count=1, deadline_s=60.0) as storage:
        Driver(storage).write("f", bytes(2 * UNIT), step=1 << 20)
        backend.clock = Clock(monkeypatch)
        backend.piece_bytes = 1 << 20
        yield storage


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_read_whose_bytes_still_move_goes_on_beyond_the_deadline(
    slow: StripedStorage, is_direct: bool
) -> None:
    """Regression: with eight nodes behind a thin line, all but one failed."""
    file = slow.reader.open(slow.tree.stored.view("f"))
    if is_direct:
        buffer = memoryview(bytearray(b"x" * UNIT))
        assert slow.reader.read_into(file, 0, buffer) == UNIT
        assert bytes(buffer) == bytes(UNIT)
    else:
        assert slow.reader.read_bytes(file, 0, UNIT) == bytes(UNIT)


def test_a_byte_now_and_then_is_silence(slow: StripedStorage) -> None:
    assert isinstance(slow.backend, SlowBackend)
    slow.backend.piece_bytes = 1024
    file = slow.reader.open(slow.tree.stored.view("f"))
    with pytest.raises(DeadlineError, match="no answer"):
        slow.reader.read_bytes(file, 0, UNIT)


class BehindThinLine(LocalBackend):
    """Backend whose parts come over a line that all nodes share."""

    def __init__(self, root: Path, line: ThinLine) -> None:
        super().__init__(root)
        self._line = line

    def open_reader(self, path: str, *, is_checked: bool = False):  # type: ignore[no-untyped-def]
        reader = super().open_reader(path, is_checked=is_checked)
        whole = reader.read_into
        if PARTS_FOLDER not in path:
            return reader

        def read_into(offset: int, buffer: memoryview, attempt: Attempt) -> int:
            data = memoryview(bytearray(len(buffer)))
            count = whole(offset, data, Attempt())
            return self._line.bring(data[:count], buffer[:count], attempt)

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader


def test_eight_nodes_behind_a_thin_line_all_read_their_file(tmp_path: Path) -> None:
    unit, data, deadline_s = 72 << 10, random.Random(1).randbytes(2 * 72 << 10), 2.0
    settings = StripeSettings(unit, 2, deadline_s)
    with StripedStorage(LocalBackend(tmp_path), settings, memory_bytes=32 * unit) as storage:
        Driver(storage).write("f", data)
    line = ThinLine(8 * 2 * 16 * 1024)

    def node(is_direct: bool) -> bytes:
        backend = BehindThinLine(tmp_path, line)
        with StripedStorage(backend, settings, memory_bytes=32 * unit, thread_count=2) as storage:
            file = storage.reader.open(storage.tree.stored.view("f"))
            if not is_direct:
                return storage.reader.read_bytes(file, 0, len(data))
            buffer = bytearray(len(data))
            storage.reader.read_into(file, 0, memoryview(buffer))
            return bytes(buffer)

    with ThreadPoolExecutor(8) as pool:
        for read in [pool.submit(node, number % 2 == 0) for number in range(8)]:
            assert read.result() == data
    assert time.monotonic() - line.began_s > 1.5 * deadline_s, "or the line was not thin"


def test_readers_of_a_file_that_cannot_be_read_hold_up_nobody_else(tmp_path: Path) -> None:
    """A read that is retried later waits without a thread."""
    backend = FaultyBackend(LocalBackend(tmp_path))
    with storage_on(backend, deadline_s=_ALL_S) as storage:
        driver = Driver(storage)
        for path in ("dead/f", "well"):
            if "/" in path:
                driver.mkdir("dead")
            driver.write(path, bytes(100_000))
        asked: set[int] = set()

        def refuse(operation: str, path: str) -> None:
            if operation == "read" and path.startswith(f"dead/{PARTS_FOLDER}"):
                asked.add(threading.get_ident())
                raise UnavailableError("down")

        backend.rules.append(refuse)
        dead = storage.reader.open(storage.tree.stored.view("dead/f"))
        with ThreadPoolExecutor(12) as pool:
            readers: list[Future[bytes]] = [
                pool.submit(storage.reader.read_bytes, dead, at * 8192, 100) for at in range(12)
            ]
            wait_for(lambda: storage.counters.read().read_retry_count >= 12, "the first failures")
            assert driver.read("well") == bytes(100_000)
            assert not any(reader.done() for reader in readers)
            backend.rules.clear()
            assert all(reader.result(60) == bytes(100) for reader in readers)


def test_closing_a_storage_tells_those_who_wait_for_it(tmp_path: Path) -> None:
    released = threading.Event()
    backend = FaultyBackend(LocalBackend(tmp_path))
    storage = storage_on(backend, deadline_s=_ALL_S)
    Driver(storage).write("f", bytes(200_000))
    backend.rules.append(hanging("read", released, within=PARTS_FOLDER))
    file = storage.reader.open(storage.tree.stored.view("f"))
    buffer = memoryview(bytearray(150_000))
    # More reads than threads: some are queued.
    count = 9
    with ThreadPoolExecutor(count + 1) as pool:
        readers: list[Future[object]] = [
            pool.submit(storage.reader.read_bytes, file, at * 8192, 100) for at in range(count)
        ]
        readers.append(pool.submit(storage.reader.read_into, file, 0, buffer))
        try:
            wait_for(lambda: len([c for c in backend.calls if c[0] == "read"]) > 4, "the reads")
            storage.close()
            ended, waiting = wait_all(readers, 50)
        finally:
            released.set()
    assert not waiting
    for reader in ended:
        with pytest.raises(UnavailableError, match="was closed"):
            reader.result()
    with pytest.raises(UnavailableError, match="was closed"):
        storage.reader.read_bytes(file, 0, 100)


def test_a_large_taker_of_memory_has_its_turn() -> None:
    memory = Memory(10)
    assert memory.try_charge(6)
    asked, ended = threading.Event(), threading.Event()

    def cancelled() -> bool:
        asked.set()
        return ended.is_set()

    def take() -> None:
        memory.charge(8, _ALL_S, cancelled)

    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(take)
        try:
            assert asked.wait(60)
            assert not memory.try_charge(4), "one that came later has what the first waits for"
        finally:
            ended.set()
            with pytest.raises(InterruptedError):
                large.result(60)


def test_those_behind_a_large_taker_go_on_with_what_it_waits_for() -> None:
    """They hold memory that the first one needs, and free it once they have a little more."""
    memory = Memory(10)
    assert memory.try_charge(6)
    large_waits, small_waits, over = threading.Event(), threading.Event(), threading.Event()

    def cancelled(waits: threading.Event) -> bool:
        waits.set()
        return over.is_set()

    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(memory.charge, 8, _ALL_S, partial(cancelled, large_waits))
        try:
            assert large_waits.wait(60)
            small = pool.submit(memory.charge, 4, _ALL_S, partial(cancelled, small_waits))
            small.result(60)
            assert small_waits.is_set(), "it went first, before the large one had its turn"
            memory.give(10)
            large.result(60)
        finally:
            over.set()
    assert memory.used_bytes == 8


class _Kept(Droppable):
    """Bytes whose memory is offered to others."""

    def __init__(self, memory: Memory, length: int) -> None:
        self.length = length
        self._memory = memory

    def drop(self) -> None:
        self._memory.give(self.length)


def test_bytes_that_somebody_uses_are_not_dropped() -> None:
    memory = Memory(10)
    used, unused = _Kept(memory, 4), _Kept(memory, 4)
    for kept in (used, unused):
        assert memory.try_charge(kept.length)
        memory.offer(kept, Tier.CACHED)
    assert memory.use(used)
    assert memory.try_charge(6)
    assert unused.is_dropped
    assert not memory.try_charge(4)
    assert not used.is_dropped
    memory.end_use(used)
    assert memory.try_charge(4)
    assert used.is_dropped
    assert not memory.use(used)


def test_all_takers_of_memory_have_their_turn() -> None:
    memory = Memory(64)
    with ThreadPoolExecutor(12) as pool:

        def work(count: int) -> None:
            for _ in range(200 // count):
                memory.charge(count, _ALL_S, lambda: False)
                memory.give(count)

        for done in [
            pool.submit(work, count) for count in (1, 1, 2, 3, 5, 8, 40, 60, 64, 64, 7, 1)
        ]:
            done.result(_ALL_S)
    assert memory.used_bytes == 0
    assert memory.peak_bytes <= 64
