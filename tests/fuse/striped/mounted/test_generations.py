"""Readers of a file while its next generation is written or refused, on a real mount."""

import contextlib
import errno
import mmap
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.store import open_backend
from testbed.mounts.fuse_mount import run
from testbed.mounts.sweeping import sweep
from testbed.needs import require
from tests.fuse.striped.support.harness import Driver, storage_on
from tests.fuse.striped.support.mounting import MIB, checkpoints

pytestmark = pytest.mark.needs("fuse")

SMALL = random.Random(1).randbytes(100_000)
OLD = random.Random(2).randbytes(9 * MIB + 3)
NEW = random.Random(3).randbytes(15 * MIB + 5)
OLD_FILES = pytest.mark.parametrize("old", [SMALL, OLD], ids=["plain", "striped"])


@pytest.fixture
def elsewhere(url: str) -> Iterator[Driver]:
    """Another node on the same storage."""
    with storage_on(open_backend(url), unit=MIB) as storage:
        driver = Driver(storage)
        yield driver
        driver.fs.destroyed()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Mounted tree of a folder for many tests: its stored path and its mount point."""
    require("fuse")
    path = tmp_path_factory.mktemp("tree")
    (path / "mnt").mkdir()
    with checkpoints(path, path / "mnt", (path / "stored").as_uri()):
        yield path / "stored", path / "mnt"
    sweep(path)


@pytest.fixture
def folder(tree: tuple[Path, Path], request: pytest.FixtureRequest) -> Path:
    """Empty directory in a mounted tree."""
    made = tree[1] / str(abs(hash(request.node.nodeid)))
    made.mkdir()
    return made


@pytest.fixture
def stored(tree: tuple[Path, Path], folder: Path) -> Iterator[Driver]:
    """Another node, which sees the stored files of `folder`."""
    with storage_on(tree[0] / folder.name, unit=MIB) as storage:
        driver = Driver(storage)
        yield driver
        driver.fs.destroyed()


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            os.close(file)


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno == code, caught.value


class Readers:
    """Readers that have opened the old generation of a file, and new readers."""

    def __init__(self, path: Path, old: bytes) -> None:
        self.path = path
        self.old = old
        self.file = os.open(path, os.O_RDONLY)
        self.mapped = mmap.mmap(self.file, 0, prot=mmap.PROT_READ)

    def check(self) -> None:
        """Assert that all readers see the old generation, its size and its bytes."""
        assert os.fstat(self.file).st_size == self.path.stat().st_size == len(self.old)
        # Only the last page was read before.
        assert self.mapped[-10:] == self.old[-10:]
        assert os.pread(self.file, len(self.old) + 10, 0) == self.old
        copied = subprocess.run(["cat", self.path], capture_output=True, check=True)
        assert copied.stdout == self.old
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as new:
            assert new[:] == self.old

    def end(self) -> None:
        assert self.mapped[:] == self.old
        self.mapped.close()
        os.close(self.file)


@pytest.fixture
def readers() -> Iterator[Callable[[Path, bytes], Readers]]:
    made: list[Readers] = []

    def make(path: Path, old: bytes) -> Readers:
        path.write_bytes(old)
        made.append(Readers(path, old))
        return made[-1]

    yield make
    for one in made:
        one.end()


@OLD_FILES
def test_readers_see_the_old_file_until_the_new_one_is_published(
    here: Path, readers: Callable[[Path, bytes], Readers], old: bytes
) -> None:
    path = here / "f"
    reading = readers(path, old)
    with opened(path, os.O_WRONLY | os.O_TRUNC) as file:
        reading.check()
        os.write(file, NEW[: 10 * MIB])
        assert os.fstat(file).st_size == 10 * MIB
        reading.check()
        os.write(file, NEW[10 * MIB :])
        reading.check()
    assert path.stat().st_size == len(NEW)
    assert path.read_bytes() == NEW


@OLD_FILES
def test_readers_see_the_old_end_until_more_is_published(
    here: Path, readers: Callable[[Path, bytes], Readers], old: bytes
) -> None:
    path = here / "f"
    reading = readers(path, old)
    with opened(path, os.O_RDWR | os.O_APPEND) as file:
        os.write(file, b"more")
        assert os.fstat(file).st_size == len(old) + 4
        reading.check()
        os.fsync(file)
        assert path.read_bytes() == old + b"more"
        os.write(file, b"and more")
        assert path.stat().st_size == len(old) + 4
    assert path.read_bytes() == old + b"moreand more"


@OLD_FILES
def test_a_truncation_is_none_of_its_readers(
    folder: Path, readers: Callable[[Path, bytes], Readers], old: bytes
) -> None:
    path = folder / "f"
    reading = readers(path, old)
    with opened(path, os.O_RDWR) as file:
        os.ftruncate(file, 0)
        assert os.fstat(file).st_size == 0
        reading.check()
        os.write(file, b"new")
        reading.check()
    assert path.read_bytes() == b"new"
    other = folder / "g"
    reading = readers(other, old)
    os.truncate(other, 0)
    # This publishes it for new readers.
    assert other.stat().st_size == 0
    assert other.read_bytes() == b""
    assert os.fstat(reading.file).st_size == len(old)
    assert os.pread(reading.file, len(old) + 1, 0) == old


@OLD_FILES
def test_a_refused_write_changes_nothing_for_readers(
    folder: Path, readers: Callable[[Path, bytes], Readers], old: bytes
) -> None:
    path = folder / "f"
    reading = readers(path, old)
    with opened(path, os.O_WRONLY | os.O_TRUNC) as file:
        os.write(file, NEW)
        with refused(errno.EOPNOTSUPP):
            os.pwrite(file, b"x", 0)
        reading.check()
        with refused(errno.EOPNOTSUPP):
            os.close(file)
        reading.check()
    reading.check()


@OLD_FILES
@pytest.mark.parametrize("adds", [False, True], ids=["cut", "added to and cut"])
def test_cut_to_nothing_a_writer_reads_back_no_bytes_of_before(
    folder: Path, old: bytes, adds: bool
) -> None:
    path = folder / "f"
    path.write_bytes(old)
    with opened(path, os.O_RDWR) as file:
        if adds:
            os.pwrite(file, b"more", len(old))
        os.ftruncate(file, 0)
        assert os.pread(file, 100, 0) == b""
        os.write(file, NEW[: 9 * MIB])
        # Sent, but not published.
        with refused(errno.EOPNOTSUPP):
            os.pread(file, 5000, 0)
        assert os.pread(file, 5000, 8 * MIB) == NEW[8 * MIB : 8 * MIB + 5000]
        os.fsync(file)
        assert os.pread(file, 9 * MIB, 0) == NEW[: 9 * MIB]
    assert path.read_bytes() == NEW[: 9 * MIB]


def test_what_is_changed_after_fsync_is_read_back_changed(folder: Path) -> None:
    """The end of a file may be written again after `fsync`, and is then sent."""
    with opened(folder / "f", os.O_RDWR | os.O_CREAT) as file:
        os.write(file, NEW[: 5 * MIB])
        os.fsync(file)
        os.write(file, NEW[5 * MIB : 6 * MIB])
        os.fsync(file)
        os.pwrite(file, bytes(MIB), 5 * MIB)
        os.pwrite(file, NEW[6 * MIB : 10 * MIB], 6 * MIB)
        with refused(errno.EOPNOTSUPP):
            os.pread(file, MIB, 5 * MIB)
        assert os.pread(file, MIB, 3 * MIB) == NEW[3 * MIB : 4 * MIB]
        os.fsync(file)
        assert os.pread(file, 2 * MIB, 5 * MIB) == bytes(MIB) + NEW[6 * MIB : 7 * MIB]


def _across(folder: Path) -> tuple[Path, int]:
    (folder / "d").mkdir()
    return folder / "d" / "f", errno.EXDEV


def _over_a_directory(folder: Path) -> tuple[Path, int]:
    (folder / "d").mkdir()
    return folder / "d", errno.EISDIR


@pytest.mark.parametrize("where", [_across, _over_a_directory], ids=["across", "directory"])
def test_a_refused_rename_publishes_nothing(
    folder: Path, stored: Driver, where: Callable[[Path], tuple[Path, int]]
) -> None:
    path = folder / "f"
    path.write_bytes(OLD)
    target, code = where(folder)
    with opened(path, os.O_WRONLY | os.O_TRUNC) as file:
        os.write(file, NEW[: 10 * MIB])
        with refused(code):
            path.rename(target)
        assert stored.read("f") == OLD
        # The writer can continue.
        os.write(file, NEW[10 * MIB :])
        os.fsync(file)
        assert stored.read("f") == NEW


RENAME_NOREPLACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.renameat2(-100, sys.argv[1].encode(), -100, sys.argv[2].encode(), 1) == -1
assert ctypes.get_errno() == 17, ctypes.get_errno()
"""


def test_a_rename_that_would_replace_publishes_nothing(folder: Path, stored: Driver) -> None:
    (folder / "f").write_bytes(OLD)
    (folder / "g").write_bytes(SMALL)
    with opened(folder / "f", os.O_WRONLY | os.O_TRUNC) as file:
        os.write(file, NEW)
        command = [sys.executable, "-S", "-c", RENAME_NOREPLACE]
        done = run([*command, str(folder / "f"), str(folder / "g")])
        assert done.returncode == 0, done.stderr
        assert stored.read("f") == OLD
        assert stored.read("g") == SMALL


def test_a_file_renamed_while_it_is_written_never_shows_its_old_content(
    here: Path, elsewhere: Driver
) -> None:
    """A temporary file of an earlier attempt is written again, and renamed before its close."""
    (here / "f.tmp").write_bytes(SMALL)
    (here / "f").write_bytes(OLD)
    with opened(here / "f.tmp", os.O_WRONLY | os.O_TRUNC) as file:
        os.write(file, NEW)
        (here / "f.tmp").rename(here / "f")
        assert elsewhere.read("f") == NEW
        assert (here / "f").read_bytes() == NEW
        assert os.listdir(here) == ["f"]
        os.write(file, b"more")
    assert elsewhere.read("f") == NEW + b"more"
    assert elsewhere.names("") == ["f"]


@pytest.mark.parametrize("order", ["write first", "unlink first"])
@pytest.mark.parametrize("size", [100, 9 * MIB + 3], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["striped", "plain"])
def test_an_unlinked_file_is_read_back_by_who_has_it_open(
    tmp_path: Path, mountpoint: Path, layout: str, size: int, order: str
) -> None:
    url = (tmp_path / "stored").as_uri()
    data = NEW[:size]
    with (
        checkpoints(tmp_path, mountpoint, url, layout=layout),
        opened(mountpoint / "f", os.O_RDWR | os.O_CREAT) as file,
    ):
        if order == "write first":
            os.write(file, data)
            os.fsync(file)
            (mountpoint / "f").unlink()
        else:
            (mountpoint / "f").unlink()
            os.write(file, data)
            os.fsync(file)
        assert os.fstat(file).st_size == size
        assert os.pread(file, size + 1, 0) == data
        if layout == "striped" or order == "unlink first":
            os.pwrite(file, b"more", size)
            os.fsync(file)
            assert os.pread(file, size + 9, 0) == data + b"more"
        assert os.listdir(mountpoint) == []
    # Unmounted: the grace for its stored files is over.
    assert [path for path in (tmp_path / "stored").rglob("*") if path.is_file()] == []


@OLD_FILES
@pytest.mark.parametrize("how", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_a_reader_keeps_its_file_through_any_renames(here: Path, old: bytes, how: int) -> None:
    (here / "d").mkdir()
    path = here / "d" / "f"
    path.write_bytes(old)
    # The kernel reads an ordinary file of this node past the server, but not with O_DIRECT.
    with opened(path, os.O_RDONLY | how) as file:
        mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        path.rename(here / "d" / "f.1")
        path.write_bytes(b"another")
        (here / "d" / "f.1").rename(here / "d" / "f.2")
        with opened(here / "d" / "f.2", os.O_RDONLY | how) as second:
            assert os.pread(second, len(old), 0) == old
        (here / "d").rename(here / "e")
        (here / "e" / "f.2").rename(here / "e" / "f.3")
        (here / "e").rename(here / "d")
        path.unlink()
        (here / "d" / "f.3").rename(path)
        assert os.pread(file, len(old), 0) == old
        assert path.read_bytes() == old
        assert mapped[:] == old
        mapped.close()


@pytest.mark.parametrize("change", ["overwritten", "renamed over", "unlinked", "moved away"])
def test_readers_of_an_ordinary_file_keep_it(folder: Path, change: str) -> None:
    """The new file of the name is stored at the same path."""
    (folder / "f").write_bytes(SMALL)
    (folder / "g").write_bytes(b"g" * len(SMALL))
    # O_DIRECT: not past the server.
    with opened(folder / "f", os.O_RDONLY | os.O_DIRECT) as file:
        if change == "overwritten":
            (folder / "f").write_bytes(b"f" * len(SMALL))
        elif change == "renamed over":
            (folder / "g").rename(folder / "f")
        elif change == "unlinked":
            (folder / "f").unlink()
        else:
            (folder / "f").rename(folder / "h")
            (folder / "g").rename(folder / "f")
        assert os.pread(file, len(SMALL) + 1, 0) == SMALL


def test_a_large_ordinary_file_outlives_its_folder(tmp_path: Path, mountpoint: Path) -> None:
    stored = tmp_path / "stored" / "d"
    stored.mkdir(parents=True)
    (stored / "f").write_bytes(OLD)
    with checkpoints(tmp_path, mountpoint, stored.parent.as_uri()):
        with opened(mountpoint / "d" / "f", os.O_RDONLY | os.O_DIRECT) as file:
            (mountpoint / "d" / "f").unlink()
            (mountpoint / "d").rmdir()
            assert os.pread(file, len(OLD) + 1, 0) == OLD
            assert os.listdir(mountpoint) == []
        assert not stored.exists()


def test_who_writes_a_removed_file_does_not_bring_its_folder_back(
    tmp_path: Path, mountpoint: Path
) -> None:
    """Regression: the first part of the file made the folder again, for all nodes."""
    stored = tmp_path / "stored"
    with checkpoints(tmp_path, mountpoint, stored.as_uri()):
        (mountpoint / "d" / "e").mkdir(parents=True)
        with opened(mountpoint / "d" / "e" / "f", os.O_WRONLY | os.O_CREAT) as file:
            (mountpoint / "d" / "e" / "f").unlink()
            (mountpoint / "d" / "e").rmdir()
            (mountpoint / "d").rmdir()
            assert os.write(file, OLD) == len(OLD)
            os.fsync(file)
            assert os.listdir(mountpoint) == []
    assert not (stored / "d").exists()


def test_the_usual_tools_copy_a_file_that_is_overwritten(folder: Path, tmp_path: Path) -> None:
    path = folder / "f"
    path.write_bytes(NEW)
    with opened(path, os.O_WRONLY | os.O_TRUNC) as file:
        os.write(file, OLD)
        shutil.copyfile(path, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == NEW
        packed = subprocess.run(["tar", "-C", folder, "-c", "f"], capture_output=True, check=True)
        assert NEW in packed.stdout
        assert packed.stderr == b""


def test_a_new_file_is_kept_by_those_who_opened_it_before_it_was_whole(folder: Path) -> None:
    path = folder / "f"
    with opened(path, os.O_WRONLY | os.O_CREAT) as file:
        os.write(file, SMALL)
        reader = os.open(path, os.O_RDONLY)
        assert os.pread(reader, len(SMALL) + 1, 0) == SMALL
        os.close(file)
        assert os.pread(reader, len(SMALL) + 1, 0) == SMALL
        path.write_bytes(b"other")
        assert os.pread(reader, len(SMALL) + 1, 0) == SMALL
        assert os.fstat(reader).st_size == len(SMALL)
        os.close(reader)


def test_a_descriptor_is_opened_again_by_its_name_in_proc(folder: Path) -> None:
    path = folder / "f"
    path.write_bytes(b"old ")
    with opened(path, os.O_RDWR | os.O_APPEND) as file:
        with open(f"/proc/self/fd/{file}", "ab", buffering=0) as again:  # noqa: PTH123
            again.write(b"new")
        with open(f"/proc/self/fd/{file}", "rb") as reader:  # noqa: PTH123
            assert reader.read() == b"old new"
    assert path.read_bytes() == b"old new"


def test_the_number_of_a_file_is_that_of_its_name(folder: Path) -> None:
    """Programs that follow a log compare the two."""
    path = folder / "log"
    path.write_bytes(b"old")
    with opened(path, os.O_WRONLY | os.O_APPEND) as file:
        assert os.fstat(file).st_ino == path.stat().st_ino
        os.write(file, b"more")
        assert os.fstat(file).st_ino == path.stat().st_ino
        os.fsync(file)
        assert os.fstat(file).st_ino == path.stat().st_ino
        path.rename(folder / "log.1")
        path.write_bytes(b"next")
        assert os.fstat(file).st_ino == (folder / "log.1").stat().st_ino != path.stat().st_ino


def test_a_new_file_keeps_its_number_when_it_is_published(folder: Path) -> None:
    path = folder / "new"
    with opened(path, os.O_RDWR | os.O_CREAT) as file:
        number = os.fstat(file).st_ino
        for _ in range(2):
            os.write(file, b"some")
            os.fsync(file)
            assert os.fstat(file).st_ino == path.stat().st_ino == number
            (listed,) = os.scandir(folder)
            assert listed.inode() == number
        path.rename(folder / "renamed")
        assert os.fstat(file).st_ino == (folder / "renamed").stat().st_ino == number
    assert (folder / "renamed").stat().st_ino == number


def test_sqlite_keeps_a_small_database(folder: Path) -> None:
    """SQLite stops writing to a file whose inode number has changed."""
    with contextlib.closing(sqlite3.connect(folder / "base")) as base:
        base.execute("create table numbers (number)")
        for number in range(3):
            base.execute("insert into numbers values (?)", [number])
            base.commit()
    with contextlib.closing(sqlite3.connect(folder / "base")) as base:
        assert base.execute("select * from numbers").fetchall() == [(0,), (1,), (2,)]
