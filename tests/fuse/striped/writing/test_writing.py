"""Writing in spite of failures: a part is written again from memory or from the storage."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import PermissionDeniedError, UnavailableError
from bootseer.fuse.striped.layout import PARTS_FOLDER, decode_layout
from bootseer.fuse.striped.memory import Memory
from bootseer.fuse.striped.writing.write_memory import WriteMemory
from bootseer.store.backend import Piece
from bootseer.store.local.backend import LocalBackend
from bootseer.store.local.files import LocalWriter
from tests.fuse.striped.support.faulty import FaultyBackend, failing
from tests.fuse.striped.support.harness import UNIT, Driver, refused_with, storage_on
from tests.fuse.striped.support.stored import find_garbage

DATA = random.Random(4).randbytes(40 * UNIT + 77)


def squeeze(memory: Memory) -> None:
    """Make all holders free the memory that they can."""
    if memory.try_charge(memory.limit_bytes):
        memory.give(memory.limit_bytes)


class Saving:
    """Driver over a faulty local folder."""

    def __init__(self, root: Path, memory_units: int = 24) -> None:
        self.root = root
        self.backend = FaultyBackend(LocalBackend(root))
        self.storage = storage_on(self.backend, memory_bytes=memory_units * UNIT)
        self.driver = Driver(self.storage)

    def fails(
        self, operation: str, after: int, error: Callable[[], BaseException], *, part: str = ""
    ) -> None:
        """Make the operation fail once, after `after` successes on all parts, or on `part`."""
        left = [after]
        lock = threading.Lock()
        once = failing(operation, error, within=PARTS_FOLDER, times=1)

        def rule(name: str, path: str) -> None:
            counts = name == operation and PARTS_FOLDER in path and path.endswith(part)
            with lock:
                left[0] -= counts
                due = left[0] < 0
            if counts and due:
                once(name, path)

        self.backend.rules.append(rule)

    def gives_up_memory(self) -> None:
        """Free the memory of bytes that are stored, but not durable yet."""
        self.backend.rules.append(lambda *_: squeeze(self.storage.memory))

    def retry_count(self) -> int:
        return self.storage.counters.read().write_retry_count

    def assert_stored_whole(self) -> None:
        self.backend.rules.clear()
        with storage_on(self.root) as elsewhere:
            assert Driver(elsewhere).read("f", step=50_000) == DATA
        assert find_garbage(self.backend.inner, "") == []
        (folder,) = (self.root / PARTS_FOLDER).iterdir()
        assert len([each for each in folder.iterdir() if each.name != "layout"]) == 3


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    made = Saving(tmp_path / "backend")
    yield made
    made.driver.fs.destroyed()
    made.storage.close()


@pytest.mark.parametrize(
    "error",
    [
        lambda: UnavailableError("reset"),
        lambda: OSError(errno.EIO, "5"),
        lambda: OSError(errno.EOVERFLOW, "75"),
        lambda: OSError(errno.ENOTCONN, "107"),
        lambda: BaseException("a panic"),  # as hdfs-native's are no Exception
    ],
)
@pytest.mark.parametrize(("operation", "after"), [("create", 1), ("write", 9), ("close", 2)])
def test_a_part_that_fails_once_is_written_again(
    saving: Saving, operation: str, after: int, error: Callable[[], BaseException]
) -> None:
    saving.fails(operation, after, error)
    saving.driver.write("f", DATA)
    assert saving.retry_count() == 1
    saving.assert_stored_whole()


@pytest.mark.parametrize(("operation", "after"), [("write", 10), ("close", 0)])
def test_what_memory_has_not_kept_is_read_back_from_the_failed_part(
    saving: Saving, operation: str, after: int
) -> None:
    saving.gives_up_memory()
    saving.fails(operation, after, lambda: UnavailableError("reset"), part="/01")
    saving.driver.write("f", DATA)
    assert saving.retry_count() == 1
    read = [path for name, path in saving.backend.calls if name == "read"]
    assert any(path.rpartition("/")[2] in ("00", "01", "02") for path in read)
    saving.assert_stored_whole()


def test_what_is_read_back_is_checked(saving: Saving) -> None:
    def flip(path: str, offset: int, data: memoryview) -> None:
        if PARTS_FOLDER in path and len(data):
            data[0] ^= 1

    saving.gives_up_memory()
    saving.fails("write", 10, lambda: OSError(errno.ENOTCONN, "107"), part="/01")
    saving.backend.corrupt = flip
    with refused_with(errno.ENOTCONN):
        saving.driver.write("f", DATA)
    saving.backend.rules.clear()
    assert saving.driver.names("") == []


def test_a_part_that_goes_on_failing_is_given_up(saving: Saving) -> None:
    saving.backend.rules.append(
        failing("close", lambda: UnavailableError("down"), within=PARTS_FOLDER)
    )
    with pytest.raises(UnavailableError):
        saving.driver.write("f", DATA)
    # Each of three parts is written at most four times.
    assert sum(name == "create" for name, _ in saving.backend.calls) <= 12


@pytest.mark.parametrize("operation", ["create", "write"])
def test_a_storage_that_takes_nothing_for_a_while_is_waited_for(
    saving: Saving, operation: str
) -> None:
    """More attempts than for a part, since nothing is written: a NameNode was just started."""
    saving.backend.rules.append(
        failing(operation, lambda: UnavailableError("safe mode"), within=PARTS_FOLDER, times=15)
    )
    saving.driver.write("f", DATA)
    assert saving.retry_count() == 15
    saving.assert_stored_whole()


def test_what_an_outage_kept_from_being_read_back_is_asked_for_again(saving: Saving) -> None:
    saving.gives_up_memory()
    saving.fails("write", 10, lambda: UnavailableError("reset"), part="/01")
    for operation in ("abandon", "read"):
        saving.backend.rules.append(
            failing(operation, lambda: UnavailableError("down"), within=PARTS_FOLDER, times=2)
        )
    saving.driver.write("f", DATA)
    saving.assert_stored_whole()


def test_a_refusal_is_not_tried_again(saving: Saving) -> None:
    saving.fails("create", 0, lambda: PermissionDeniedError("no"))
    with pytest.raises(PermissionDeniedError):
        saving.driver.write("f", DATA)
    assert saving.retry_count() == 0


def test_a_short_write_is_written_again(saving: Saving) -> None:
    """The server takes a part of the bytes, and then fails."""
    inner_create = saving.backend.inner.create
    torn = [True]

    def create(path: str, *, overwrite: bool = False):  # type: ignore[no-untyped-def]
        writer = inner_create(path, overwrite=overwrite)
        whole = writer.write

        def write(data: Piece) -> None:
            if PARTS_FOLDER in path and torn:
                torn.pop()
                whole(data[: len(data) // 2])
                raise OSError(errno.EIO, "short")
            whole(data)

        writer.write = write  # type: ignore[method-assign]
        return writer

    saving.backend.inner.create = create  # type: ignore[method-assign]
    saving.driver.write("f", DATA)
    assert saving.retry_count() == 1
    saving.assert_stored_whole()


def test_units_are_kept_only_as_long_as_nobody_needs_the_memory() -> None:
    budget = Memory(1000)
    memory = WriteMemory(budget, 0)
    units = [memory.take_unit([b"x" * 100], 100, 0, 1.0, lambda: False) for _ in range(8)]
    for unit in units:
        memory.keep(unit)
    # At most half of the budget is kept.
    assert [unit.pieces is None for unit in units] == [True] * 3 + [False] * 5
    assert budget.used_bytes == 500
    # Bytes that were taken back are not freed; the others are when memory is short.
    memory.take_back(units[3])
    memory.take_back(units[0])
    assert budget.try_charge(900)
    assert [unit.pieces is None for unit in units] == [True] * 3 + [False] + [True] * 4
    for unit in units:
        memory.release(unit)
    budget.give(900)
    assert budget.used_bytes == 0


class Buffering(LocalBackend):
    writer_bytes = 13 * UNIT


def test_what_open_parts_take_in_the_storages_client_is_charged(tmp_path: Path) -> None:
    """Regression: eight files written at once took twice the memory of their mount."""
    with storage_on(Buffering(tmp_path), count=8, memory_bytes=104 * UNIT) as storage:
        driver, budget = Driver(storage), storage.memory
        files = [driver.open(f"f{number}", os.O_WRONLY | os.O_CREAT) for number in range(8)]
        data = bytes(UNIT)
        for at in range(24):
            for file in files:
                driver.pwrite(file, at * UNIT, data)
        # Four files have room for a part; the others get one all the same.
        assert budget.used_bytes >= 4 * Buffering.writer_bytes
        for file in files:
            driver.close(file)
        assert budget.peak_bytes <= budget.limit_bytes
        layouts = [decode_layout((tmp_path / f"f{n}").read_bytes(), "") for n in range(8)]
        assert {len(layout.segments[0].parts) for layout in layouts} == {1}
        # A single file has as many parts as fit into memory.
        driver.write("alone", data * 24, step=UNIT)
        layout = decode_layout((tmp_path / "alone").read_bytes(), "")
        assert len(layout.segments[0].parts) == 3
        squeeze(budget)
        assert budget.used_bytes == 0


class DirectWriter(LocalWriter):
    is_buffered = False


def test_parts_that_the_storages_client_does_not_hold_are_not_charged_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.store.local.backend.LocalWriter", DirectWriter)
    with storage_on(Buffering(tmp_path), count=8, memory_bytes=104 * UNIT) as storage:
        Driver(storage).write("f", bytes(24 * UNIT), step=UNIT)
        layout = decode_layout((tmp_path / "f").read_bytes(), "")
        assert len(layout.segments[0].parts) == 8
        squeeze(storage.memory)
        assert storage.memory.used_bytes == 0


def test_a_part_whose_client_holds_it_after_all_is_charged_then() -> None:
    budget = Memory(104 * UNIT)
    memory = WriteMemory(budget, Buffering.writer_bytes)
    first, second = (memory.begin_part(number, UNIT, 1.0, lambda: False) for number in range(2))
    assert first is not None
    assert second is not None
    first.settle(is_buffered=False)
    assert first.charged_bytes == UNIT
    assert budget.used_bytes == UNIT + second.charged_bytes == UNIT + Buffering.writer_bytes
    # The client's write fails and is repeated by the client.
    for _ in range(2):
        first.settle(is_buffered=True)
        assert budget.used_bytes == 2 * first.charged_bytes == 2 * Buffering.writer_bytes
    for charge in (first, second):
        charge.end()
    assert budget.used_bytes == 0


def test_what_cannot_be_given_up_is_at_most_half_of_the_memory() -> None:
    """Otherwise parts that each wait for their next unit could hold all memory."""
    memory = WriteMemory(Memory(1000), 0)
    unit = memory.take_unit([b"x" * 300], 300, 0, 1.0, lambda: False)
    assert memory.hold(unit)
    assert not memory.hold(unit)
    memory.end_hold(300)
    assert memory.hold(unit)
