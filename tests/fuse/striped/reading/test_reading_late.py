"""Late reads are asked for again and the first answer wins; reads into a caller's buffer."""

import random
import threading
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.fuse.striped.memory import Memory
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.store.backend import FileInfo, Reader
from bootseer.store.local.backend import LocalBackend
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import Pace
from tests.fuse.striped.support.faulty import FaultyBackend, failing, hanging
from tests.fuse.striped.support.harness import Driver, storage_on

UNIT = 64 * 2**10
DATA = random.Random(9).randbytes(40 * UNIT + 777)


class SlowReplica:
    """Storage whose first reader of each file writes half of the bytes, and then waits."""

    can_stop = True
    has_replicas = True
    block_bytes = 0

    def __init__(self, inner: Reader, world: "TwoReplicas", is_slow: bool) -> None:
        self._inner, self._world, self._is_slow = inner, world, is_slow

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        if not self._is_slow or self._world.is_fast:
            self._world.checked_by_us.append(attempt.is_checked)
            return self._inner.read_into(offset, buffer, attempt)
        with attempt.lock:
            buffer[:] = bytes(len(buffer))
            self._inner.read_into(offset, buffer[:1], Attempt())
            attempt.done_bytes = 1
        self._world.released.wait(60)
        with attempt.lock:
            if not attempt.is_given_up:
                buffer[:] = b"\xff" * len(buffer)
        return len(buffer)

    def current(self) -> FileInfo:
        return self._inner.current()


class TwoReplicas(LocalBackend):
    """Storage with a fast second replica."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = threading.Event()
        self.is_fast = False
        self.checked_by_us: list[bool] = []
        """Whether Bootseer verified the bytes, for each attempt at the fast replica."""
        self._opened: set[str] = set()

    def open_reader(  # type: ignore[override]
        self, path: str, *, is_checked: bool = False
    ) -> SlowReplica:
        is_first = path not in self._opened
        self._opened.add(path)
        return SlowReplica(super().open_reader(path), self, is_first)


def stored_in(folder: Path) -> Path:
    driver = Driver(storage_on(folder, unit=UNIT))
    driver.write("f", DATA, step=UNIT)
    driver.storage.close()
    return folder


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return stored_in(tmp_path / "stored")


def read_into(storage: StripedStorage, buffer: bytearray, offset: int = 0) -> int:
    file = storage.reader.open(storage.tree.stored.view("f"))
    try:
        return storage.reader.read_into(file, offset, memoryview(buffer))
    finally:
        storage.reader.close(file)


@pytest.mark.parametrize("direct", [False, True])
def test_the_first_verified_answer_wins_and_the_late_one_touches_nothing(
    stored: Path, direct: bool
) -> None:
    backend = TwoReplicas(stored)
    storage = storage_on(backend, unit=UNIT)
    buffer = bytearray(len(DATA))
    if direct:
        assert read_into(storage, buffer) == len(DATA)
    else:
        buffer[:] = Driver(storage).read("f", step=len(DATA))
    assert buffer == DATA
    backend.released.set()
    look = storage.counters.read()
    assert look.late_count >= look.late_won_count >= 3, "one for each part at least"
    # Otherwise the pace of the second method is learned, and the first one is used.
    assert all(backend.checked_by_us)
    assert Driver(storage).read("f", step=len(DATA)) == DATA
    storage.close()
    assert buffer == DATA


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, len(DATA)), (5, 3 * UNIT), (UNIT, UNIT), (7, 100), (len(DATA) - 5, 100), (10**9, 10)],
)
def test_reading_into_a_buffer_equals_reading(stored: Path, offset: int, length: int) -> None:
    storage = storage_on(stored, unit=UNIT)
    expected = DATA[offset : offset + length]
    for _ in range(2):
        buffer = bytearray(b"?" * length)
        assert read_into(storage, buffer, offset) == len(expected)
        assert buffer == expected.ljust(length, b"?")
        # The second time, some bytes come from the window.
        Driver(storage).read("f", step=3 * UNIT)
    storage.close()


def test_whole_units_are_read_into_a_buffer_without_a_copy(stored: Path) -> None:
    storage = storage_on(stored, unit=UNIT)
    read_into(storage, bytearray(40 * UNIT))
    assert storage.memory.peak_bytes == 0
    storage.close()


def test_a_read_into_a_buffer_that_failed_leaves_it_alone_from_then_on(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(stored_in(tmp_path / "stored")))
    released = threading.Event()
    backend.rules.append(hanging("read", released, within=f"{PARTS_FOLDER}/"))
    storage = storage_on(backend, unit=UNIT, deadline_s=5.0)
    buffer = bytearray(len(DATA))
    with pytest.raises(DeadlineError):
        read_into(storage, buffer)
    before = bytes(buffer)
    released.set()
    backend.rules.clear()
    assert Driver(storage).read("f") == DATA
    assert buffer == before
    storage.close()


class Writing(LocalBackend):
    """Storage whose reads of parts are abandoned while they write into the buffer."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = threading.Event()
        self.may_write = threading.Event()

    def open_reader(  # type: ignore[override]
        self, path: str, *, is_checked: bool = False
    ) -> "WritingReader":
        return WritingReader(super().open_reader(path), self)


class WritingReader:
    """Reader that writes a moment after checking whether it was abandoned."""

    can_stop = True
    has_replicas = False
    block_bytes = 0

    def __init__(self, inner: Reader, storage: Writing) -> None:
        self._inner, self._storage = inner, storage

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        with attempt.lock:
            if not attempt.is_given_up:
                self._storage.begun.set()
                assert self._storage.may_write.wait(60)
                buffer[:] = b"\xff" * len(buffer)
        return len(buffer)

    def current(self) -> FileInfo:
        return self._inner.current()


def test_who_gives_a_read_into_a_buffer_up_has_it_back_when_nobody_writes_there(
    stored: Path,
) -> None:
    backend = Writing(stored)
    storage = storage_on(backend, unit=UNIT)
    buffer = bytearray(len(DATA))
    file = storage.reader.open(storage.tree.stored.view("f"))
    # The reads go on writing after their caller was interrupted.
    later = threading.Timer(0.5, backend.may_write.set)

    def is_interrupted() -> bool:
        if not backend.begun.is_set():
            return False
        if not later.ident:
            later.start()
        return True

    with pytest.raises(InterruptedError):
        storage.reader.read_into(file, 0, memoryview(buffer), is_interrupted)
    before = bytes(buffer)
    later.join()
    storage.reader.close(file)
    storage.close()
    assert buffer == before


def test_what_fails_for_a_while_is_read_in_the_end(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(stored_in(tmp_path / "stored")))
    backend.rules.append(failing("read", lambda: UnavailableError("away"), within="/00", times=3))
    storage = storage_on(backend, unit=UNIT)
    assert Driver(storage).read("f", step=len(DATA)) == DATA
    assert storage.counters.read().read_retry_count == 3
    storage.close()


@pytest.mark.parametrize("code", [5, 75, 107])
def test_an_errno_of_the_storage_reaches_the_reader_and_passes(tmp_path: Path, code: int) -> None:
    backend = FaultyBackend(LocalBackend(stored_in(tmp_path / "stored")))
    backend.rules.append(failing("read", lambda: OSError(code, "injected"), within=PARTS_FOLDER))
    storage = storage_on(backend, unit=UNIT, deadline_s=5.0)
    with pytest.raises((OSError, BootseerError)) as caught:
        Driver(storage).read("f")
    assert getattr(caught.value, "errno", None) == code
    backend.rules.clear()
    assert Driver(storage).read("f") == DATA
    storage.close()


# ---- the pure parts -----------------------------------------------------------------------


def test_a_read_is_late_by_what_has_come_so_far() -> None:
    pace = Pace()
    for _ in range(8):
        pace.note(4_000_000, 1.0)
    assert not pace.is_late(4_000_000, 500_000, 0.9, 0.0, has_replicas=True), "too early to say"
    assert pace.is_late(4_000_000, 500_000, 1.1, 0.0, has_replicas=True)
    assert not pace.is_late(4_000_000, 2_000_000, 1.1, 0.0, has_replicas=True)
    # The same disk would not be faster; a dead connection is another matter.
    assert not pace.is_late(4_000_000, 500_000, 1.1, 0.0, has_replicas=False)
    assert pace.is_late(4_000_000, 500_000, 5.0, 4.1, has_replicas=False)


def test_second_requests_that_never_come_first_become_rare() -> None:
    pace = Pace()
    while pace.spend():
        pass
    asked = 0
    for _ in range(100):
        pace.note(1, 1.0)
        asked += pace.spend()
    assert asked <= 10
    pace.note(1, 1.0, is_second=True)
    assert pace.spend()


def test_buffers_are_reused_and_bounded_together_with_what_is_spare() -> None:
    memory = Memory(8 * UNIT)
    views = [memory.try_take(UNIT) for _ in range(8)]
    assert None not in views
    assert memory.try_take(UNIT) is None
    kept = views[0][:10]  # type: ignore[index]
    views.clear()
    assert (memory.used_bytes, memory.spare_bytes) == (UNIT, 7 * UNIT)
    assert memory.try_charge(4 * UNIT), "for somebody else"
    assert memory.spare_bytes == 3 * UNIT
    kept.release()
    assert (memory.used_bytes, memory.spare_bytes) == (4 * UNIT, 4 * UNIT)
