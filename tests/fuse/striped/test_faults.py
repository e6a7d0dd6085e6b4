"""Faults of the storage: writers see errors, readers never see wrong bytes, nothing hangs."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.checkpoints import size_of
from bootseer.errors import (
    CorruptError,
    DeadlineError,
    NoSpaceError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.store.backend import Traits
from bootseer.store.local.backend import LocalBackend
from testbed.needs import MissingError
from testbed.waiting import pause, wait_for
from tests.fuse.striped.support.faulty import FaultyBackend, failing, hanging
from tests.fuse.striped.support.harness import CALLER, UNIT, Driver, refused_with, storage_on
from tests.fuse.striped.support.stored import find_garbage

OLD = random.Random(1).randbytes(5 * UNIT + 3)
NEW = random.Random(2).randbytes(7 * UNIT + 5)


class World:
    """Driver over a faulty backend with one old file, and another node."""

    def __init__(self, root: Path, deadline_s: float) -> None:
        self.backend = FaultyBackend(LocalBackend(root))
        self.driver = Driver(storage_on(self.backend, deadline_s=deadline_s))
        self.elsewhere = Driver(storage_on(root))
        self.released = threading.Event()
        self.driver.write("f", OLD)

    def close(self) -> None:
        self.released.set()
        self.backend.rules.clear()
        self.driver.fs.destroyed()
        self.driver.storage.close()
        self.elsewhere.storage.close()

    def fails_with(self, code: int, call: Callable[[], object]) -> None:
        with refused_with(code):
            call()

    def assert_old_is_whole(self) -> None:
        self.backend.rules.clear()
        assert self.elsewhere.read("f") == OLD
        assert self.elsewhere.names("") == ["f"]

    def assert_no_garbage(self) -> None:
        """Assert that no garbage is left once the parts' threads have cleaned up."""
        wait_for(lambda: not find_garbage(self.backend.inner, ""), "the end of the parts")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "backend", 20.0)
    yield made
    made.close()


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[World]:
    """World in which hanging calls end soon."""
    made = World(tmp_path / "backend", 2.0)
    yield made
    made.close()


# ---- reading ------------------------------------------------------------------------------


def flip(path: str, offset: int, data: memoryview) -> None:
    if PARTS_FOLDER in path:
        data[len(data) // 2] ^= 1


def test_a_flipped_byte_is_never_served(world: World) -> None:
    world.backend.corrupt = flip
    world.fails_with(errno.EIO, lambda: world.driver.read("f"))
    file = world.driver.open("f", os.O_RDONLY)
    with pytest.raises(CorruptError, match="checksum"):
        world.driver.pread(file, UNIT, 10)
    world.driver.close(file)


def test_a_flip_that_a_second_try_does_not_show_is_healed(world: World) -> None:
    seen: set[tuple[str, int]] = set()

    def once(path: str, offset: int, data: memoryview) -> None:
        if (path, offset) not in seen:
            seen.add((path, offset))
            flip(path, offset, data)

    world.backend.corrupt = once
    assert world.driver.read("f") == OLD


@pytest.mark.parametrize("at", [9, 40, 200], ids=["version", "header", "body"])
def test_a_damaged_layout_is_refused(world: World, tmp_path: Path, at: int) -> None:
    stored = tmp_path / "backend" / "f"
    data = bytearray(stored.read_bytes())
    data[at] ^= 1
    stored.write_bytes(data)
    world.fails_with(errno.EIO, lambda: world.elsewhere.read("f"))
    # It can still be removed and replaced, for which the kernel looks it up.
    assert world.elsewhere.size("f") > 0
    world.elsewhere.unlink("f")
    world.elsewhere.write("f", NEW)
    assert world.elsewhere.read("f") == NEW


def test_a_part_that_is_cut_short_is_an_error(world: World, tmp_path: Path) -> None:
    (folder,) = (tmp_path / "backend" / PARTS_FOLDER).iterdir()
    part = folder / "01"
    part.write_bytes(part.read_bytes()[:-1])
    world.fails_with(errno.EIO, lambda: world.driver.read("f"))


def test_an_outage_is_tried_again(world: World) -> None:
    outage = failing("read", lambda: UnavailableError("down"), within=PARTS_FOLDER, times=1)
    world.backend.rules.append(outage)
    assert world.driver.read("f") == OLD


def test_a_lasting_outage_is_an_error_and_passes(hurried: World) -> None:
    hurried.backend.rules.append(
        failing("read", lambda: UnavailableError("down"), within=PARTS_FOLDER)
    )
    hurried.fails_with(errno.EIO, lambda: hurried.driver.read("f"))
    hurried.backend.rules.clear()
    assert hurried.driver.read("f") == OLD


def test_a_read_that_hangs_ends_and_later_reads_work(hurried: World) -> None:
    hurried.backend.rules.append(hanging("read", hurried.released, within=PARTS_FOLDER))
    with pytest.raises(DeadlineError, match="within 3 s"):
        hurried.driver.read("f")
    hurried.backend.rules.clear()
    assert hurried.driver.read("f") == OLD


def test_an_exception_that_is_no_exception_reaches_the_reader(world: World) -> None:
    class PanicError(BaseException):
        pass

    world.backend.rules.append(failing("read", lambda: PanicError("at end"), within=PARTS_FOLDER))
    world.fails_with(errno.EIO, lambda: world.driver.read("f"))


# ---- writing ------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["create", "write", "close"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (lambda: NoSpaceError("full"), errno.ENOSPC),
        (lambda: UnavailableError("down"), errno.EIO),
        (lambda: OSError(errno.EOVERFLOW, "75"), errno.EOVERFLOW),
        (lambda: OSError(errno.ENOTCONN, "107"), errno.ENOTCONN),
    ],
)
def test_a_part_that_fails_fails_the_file(
    hurried: World, operation: str, error: Callable[[], BaseException], code: int
) -> None:
    world = hurried
    world.backend.rules.append(failing(operation, error, within=PARTS_FOLDER))
    file = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)

    def save() -> None:
        for at in range(0, len(NEW), 5000):
            world.driver.pwrite(file, at, NEW[at : at + 5000])
        world.driver.fs.flush(CALLER, *file)

    world.fails_with(code, save)
    # Every later call on the descriptor returns the same error.
    world.fails_with(code, lambda: world.driver.fs.fsync(CALLER, *file, False))
    world.fails_with(code, lambda: world.driver.close(file))
    world.assert_old_is_whole()
    world.assert_no_garbage()


@pytest.mark.parametrize("operation", ["create", "write", "close"])
def test_a_write_that_hangs_ends(hurried: World, operation: str) -> None:
    world = hurried
    world.backend.rules.append(hanging(operation, world.released, within=PARTS_FOLDER))
    world.fails_with(errno.ETIMEDOUT, lambda: world.driver.write("f", NEW))
    world.assert_old_is_whole()
    world.released.set()
    world.assert_no_garbage()
    assert world.driver.storage.memory.used_bytes <= 8 * UNIT


def test_a_failed_commit_leaves_the_old_file(world: World) -> None:
    world.backend.rules.append(failing("rename", lambda: PermissionDeniedError("no")))
    world.fails_with(errno.EACCES, lambda: world.driver.write("f", NEW))
    world.assert_old_is_whole()


def test_a_commit_whose_answer_is_lost_keeps_the_new_file_whole(world: World) -> None:
    """The writer, who asks again, learns that the file is stored."""
    world.backend.after.append(failing("rename", lambda: UnavailableError("lost")))
    world.driver.write("f", NEW)
    assert world.elsewhere.read("f") == NEW
    world.backend.after.clear()


def test_a_commit_is_made_again_after_an_outage(world: World) -> None:
    world.backend.rules.append(failing("rename", lambda: UnavailableError("down"), times=3))
    world.driver.write("f", NEW)
    assert world.elsewhere.read("f") == NEW
    world.assert_no_garbage()


def test_parts_whose_deletion_failed_are_deleted_later(world: World) -> None:
    """The deleting thread survives any error."""
    errors = iter([UnavailableError("down"), RuntimeError("unforeseen"), OSError(errno.EIO, "5")])
    failed: list[BaseException] = []

    def rule(operation: str, path: str) -> None:
        if operation == "delete" and PARTS_FOLDER in path:
            error = next(errors, None)
            if error is not None:
                failed.append(error)
                raise error

    world.backend.rules.append(rule)
    world.driver.write("f", NEW)
    wait_for(lambda: len(failed) == 3, "the failures")
    world.assert_no_garbage()
    assert world.elsewhere.read("f") == NEW


def test_a_small_file_that_fails_leaves_the_old_one(world: World) -> None:
    world.backend.rules.append(failing("close", lambda: NoSpaceError("full")))
    world.fails_with(errno.ENOSPC, lambda: world.driver.write("f", b"small"))
    world.assert_old_is_whole()
    world.assert_no_garbage()


def test_a_server_that_vanishes_in_a_save_leaves_only_garbage(world: World) -> None:
    file = world.driver.open("new", os.O_WRONLY | os.O_CREAT)
    over = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)
    for at in range(0, len(NEW), 5000):
        world.driver.pwrite(file, at, NEW[at : at + 5000])
        world.driver.pwrite(over, at, NEW[at : at + 5000])
    world.assert_old_is_whole()
    assert find_garbage(world.backend.inner, "")


def test_two_writers_of_one_name_the_last_close_wins_whole(world: World) -> None:
    first = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)
    second = world.elsewhere.open("f", os.O_WRONLY | os.O_TRUNC)
    for at in range(0, len(NEW), 5000):
        world.driver.pwrite(first, at, NEW[at : at + 5000])
        world.elsewhere.pwrite(second, at, OLD[::-1][at : at + 5000])
    world.elsewhere.close(second)
    assert world.elsewhere.read("f") == OLD[::-1]
    world.driver.close(first)
    # Names are cached for a second.
    wait_for(lambda: world.elsewhere.read("f") == NEW, "the commit")
    world.assert_no_garbage()


def test_appending_to_what_was_replaced_meanwhile_is_refused(world: World) -> None:
    file = world.driver.open("f", os.O_WRONLY | os.O_APPEND)
    world.driver.pwrite(file, len(OLD), b"more")
    world.elsewhere.write("f", NEW)
    world.fails_with(errno.ESTALE, lambda: world.driver.close(file))
    assert world.elsewhere.read("f") == NEW
    world.assert_no_garbage()


def test_a_reader_of_an_ordinary_file_replaced_elsewhere_gets_no_mix(
    world: World, tmp_path: Path
) -> None:
    plain = tmp_path / "backend" / "plain"
    plain.write_bytes(bytes(10 * 2**20))
    file = world.driver.open("plain", os.O_RDONLY)
    assert world.driver.pread(file, 0, 10) == bytes(10)
    plain.write_bytes(b"x" * (10 * 2**20))
    world.fails_with(errno.EIO, lambda: world.driver.pread(file, 5 * 2**20, 10))
    world.driver.close(file)


def test_a_file_that_is_replaced_between_a_look_and_a_read_is_looked_at_again(
    world: World,
) -> None:
    looks = iter([None])

    def rule(operation: str, path: str) -> None:
        for _ in looks if (operation, path) == ("read", "f") else ():
            world.elsewhere.write("f", b"small")

    world.backend.rules.append(rule)
    assert size_of(world.driver.storage, "f") == len(b"small")
    assert next(looks, "replaced") == "replaced"


@pytest.mark.needs("root")
def test_a_full_disk_is_told_to_the_writer(tmp_path: Path) -> None:
    from testbed.mounts.fuse_mount import run

    small = tmp_path / "small"
    small.mkdir()
    done = run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small])
    if done.returncode:
        raise MissingError(f"cannot mount a tmpfs: {done.stderr}")
    try:
        driver = Driver(storage_on(small))
        driver.write("old", OLD)
        with refused_with(errno.ENOSPC):
            driver.write("new", bytes(2 * 2**20))
        assert driver.read("old") == OLD
        assert driver.names("") == ["old"]
        # The parts of the failed save are gone, and their space is free again.
        wait_for(lambda: not find_garbage(driver.storage.backend, ""), "the end of the parts")
        driver.write("new", bytes(600 * 2**10))
        driver.fs.destroyed()
        driver.storage.close()
    finally:
        run(["umount", "-l", small])


def test_a_backend_without_append_is_not_asked_to(tmp_path: Path) -> None:
    """A large ordinary file cannot be appended to; the refusal has the reason."""
    driver = Driver(storage_on(tmp_path))
    (tmp_path / "plain").write_bytes(bytes(100_000))
    file = driver.open("plain", os.O_WRONLY | os.O_APPEND)
    with pytest.raises(UnsupportedError, match="not appended"):
        driver.pwrite(file, 100_000, b"x")
    driver.close(file)
    driver.storage.close()


def test_a_storage_without_atomic_rename_is_read_only(world: World) -> None:
    world.backend.traits = Traits()
    world.fails_with(errno.EOPNOTSUPP, lambda: world.driver.write("f", NEW))
    world.fails_with(errno.EOPNOTSUPP, lambda: world.driver.write("new", NEW))
    world.assert_old_is_whole()
    assert world.driver.read("f") == OLD
    assert world.driver.fs.figures().files_open == 0


@pytest.mark.parametrize("operation", ["create", "write", "close"])
def test_the_threads_of_a_failed_file_end(world: World, operation: str) -> None:
    """Regression: the thread of a part whose close failed waited for an end that had passed."""
    before = set(threading.enumerate())
    world.backend.rules.append(failing(operation, lambda: NoSpaceError("x"), within=PARTS_FOLDER))
    world.fails_with(errno.ENOSPC, lambda: world.driver.write("f", NEW))

    def left() -> list[threading.Thread]:
        threads = set(threading.enumerate()) - before
        return [thread for thread in threads if thread.name.startswith("stripe-part")]

    wait_for(lambda: not left(), "the end of the parts' threads")


class Panic(BaseException):
    """Exception of a panic in an extension written in Rust."""


def test_a_panic_in_the_last_close_leaves_no_open_file(world: World) -> None:
    file = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)

    def panic(operation: str, path: str) -> None:
        if operation == "rename":
            raise Panic

    world.backend.rules.append(panic)
    world.driver.fs.release(*file, 0)
    world.assert_old_is_whole()
    assert world.driver.fs.figures().files_open == 0
    stopped: list[bool] = []
    assert world.driver.fs.stop_if_quiet(lambda: stopped.append(True))
    assert stopped


def test_a_rename_that_the_storage_refuses_publishes_nothing(world: World) -> None:
    world.driver.mkdir("d")
    file = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)
    world.driver.pwrite(file, 0, b"new")

    def refuse(operation: str, path: str) -> None:
        if operation == "create" and path.startswith("d/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    world.backend.rules.append(refuse)
    with refused_with(errno.EACCES):
        world.driver.rename("f", "d/f")
    assert world.elsewhere.read("f") == OLD
    assert world.elsewhere.names("d") == []
    # The writer continues with its old name.
    world.driver.pwrite(file, 3, b" and more")
    world.driver.close(file)
    assert world.elsewhere.read("f") == b"new and more"


def test_an_unlink_that_the_storage_refuses_loses_no_writer(world: World) -> None:
    file = world.driver.open("f", os.O_WRONLY | os.O_TRUNC)
    world.driver.pwrite(file, 0, b"new")

    def refuse(operation: str, path: str) -> None:
        if operation == "delete" and path == "f":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    world.backend.rules.append(refuse)
    with refused_with(errno.EACCES):
        world.driver.unlink("f")
    world.driver.close(file)
    assert world.elsewhere.read("f") == b"new"


def test_the_rename_of_a_file_whose_write_hangs_holds_up_nobody_else(world: World) -> None:
    """Regression: the mount's lock was held until the file's writer could be told its new name."""
    driver = world.driver
    driver.write("g", b"other")
    file = driver.open("f", os.O_WRONLY | os.O_APPEND)
    world.backend.rules.append(hanging("create", world.released, within=PARTS_FOLDER))
    driver.pwrite(file, len(OLD), NEW)
    save = threading.Thread(target=driver.fs.fsync, args=(CALLER, *file, False))
    move = threading.Thread(target=driver.rename, args=("f", "h"))
    shown = threading.Event()

    def look() -> None:
        driver.size("g")
        shown.set()

    show = threading.Thread(target=look)
    save.start()
    wait_for(lambda: any(op == "create" for op, _ in world.backend.calls), "the save")
    move.start()
    pause(0.3)
    show.start()
    assert shown.wait(10)
    world.released.set()
    for thread in (save, move, show):
        thread.join(60)
    driver.close(file)
    assert world.elsewhere.read("h") == OLD + NEW
