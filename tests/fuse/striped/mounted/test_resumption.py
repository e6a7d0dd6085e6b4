"""A new server of a mount resumes the open files of its predecessor; without a mount."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.fuse.kernel.operations import ROOT_NODE, Caller, SetAttributes
from tests.fuse.striped.support.harness import (
    CALLER,
    UNIT,
    Driver,
    Restartable,
    refused_with,
    storage_on,
)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("size", [100, 3 * UNIT], ids=["plain", "striped"])
def test_a_log_is_written_on_through_any_number_of_restarts(
    tmp_path: Path, size: int, is_read: bool
) -> None:
    """Regression (state machine): a new server took a renewed node for the end of the file's name.

    A file that is read, or may be read for all that a new server knows, gets a new node with each
    `fsync`.
    """
    here = Restartable(tmp_path)
    file = here.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    written = b""
    for number in range(3):
        piece = bytes([65 + number]) * size
        here.pwrite(file, len(written), piece)
        here.fs.fsync(CALLER, *file, False)
        written += piece
        if is_read:
            assert here.read("log") == written
        here.journal.close()
        here = Restartable(tmp_path)
    here.pwrite(file, len(written), b"end")
    here.close(file)
    assert here.read("log") == written + b"end"
    here.fs.destroyed()


def test_what_was_written_since_a_file_was_emptied_stays_after_a_restart(tmp_path: Path) -> None:
    here = Restartable(tmp_path)
    here.write("log", b"old")
    held = here.open("log", os.O_WRONLY | os.O_TRUNC)
    here.fs.flush(CALLER, *held)
    here.write("log", b"one")
    here.journal.close()
    here = Restartable(tmp_path)
    here.close(held)
    assert here.read("log") == b"one"
    here.fs.destroyed()


def test_what_is_written_to_an_unlinked_log_goes_nowhere_after_a_restart(tmp_path: Path) -> None:
    here = Restartable(tmp_path)
    file = here.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    here.pwrite(file, 0, b"first")
    here.fs.fsync(CALLER, *file, False)
    here.unlink("log")
    here.journal.close()
    here = Restartable(tmp_path)
    with refused_with(errno.ESTALE):
        here.pwrite(file, 5, b"second")
    assert here.names("") == []
    here.fs.destroyed()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("flags", [os.O_TRUNC, os.O_CREAT], ids=["emptied", "created"])
def test_who_has_not_written_yet_writes_after_its_folder_was_made_anew(
    tmp_path: Path, flags: int, is_restarted: bool
) -> None:
    """Regression (exerciser): the next server took the name for lost, and refused with ESTALE."""
    here = Restartable(tmp_path)
    elsewhere = Driver(storage_on(tmp_path / "backend"))
    here.mkdir("d")
    if flags & os.O_TRUNC:
        here.write("d/f", b"old")
    file = here.open("d/f", os.O_WRONLY | flags)
    if flags & os.O_TRUNC:
        elsewhere.unlink("d/f")
    elsewhere.rmdir("d")
    with refused_with(errno.ENOENT):
        here.node("d")
    elsewhere.mkdir("d")
    if is_restarted:
        here.journal.close()
        here = Restartable(tmp_path)
    here.pwrite(file, 0, b"new")
    here.close(file)
    assert elsewhere.read("d/f") == b"new"
    here.fs.destroyed()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_failed_writer_of_a_replaced_file_hinders_no_rename(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Regression (state machine): the new file of the name could not be renamed."""
    here = Restartable(tmp_path)
    here.write("a", b"other")
    file = here.open("b", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    here.pwrite(file, 0, b"lost")
    here.journal.close()
    here = Restartable(tmp_path)
    here.rename("a", "b")
    if is_restarted:
        here.journal.close()
        here = Restartable(tmp_path)
    here.rename("b", "c")
    assert here.names("") == ["c"]
    assert here.read("c") == b"other"
    with refused_with(errno.EIO):
        here.fs.fsync(CALLER, *file, False)
    here.fs.destroyed()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("how", ["rename", "unlink"])
def test_a_file_that_two_nodes_replaced_is_emptied_for_nobody(
    tmp_path: Path, how: str, is_restarted: bool
) -> None:
    """Regression (exerciser): the empty file replaced the last one."""
    here = Restartable(tmp_path)
    elsewhere = Driver(storage_on(tmp_path / "backend"))
    here.write("a", b"the first")
    file = here.open("a", os.O_RDWR)
    elsewhere.write("b", b"the second")
    elsewhere.rename("b", "a")
    if how == "rename":
        here.write("c", b"the third")
        here.rename("c", "a")
    else:
        here.unlink("a")
    if is_restarted:
        here.journal.close()
        here = Restartable(tmp_path)
    here.fs.setattr(CALLER, file[0], SetAttributes(size_bytes=0, handle=file[1]))
    here.pwrite(file, 0, b"nobody sees it")
    assert here.pread(file, 0, 99) == b"nobody sees it"
    here.close(file)
    assert here.names("") == (["a"] if how == "rename" else [])
    assert how == "unlink" or elsewhere.read("a") == b"the third"
    here.fs.destroyed()


def test_a_journal_that_a_full_disk_has_torn_is_begun_anew(tmp_path: Path) -> None:
    """Otherwise the next line would follow a part of a line."""
    here = Restartable(tmp_path, retry_s=0.0)
    here.write("a", b"content")
    files = [here.open("a", os.O_RDONLY)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "journal").stat().st_size + 10, hard))
    try:
        files.append(here.open("a", os.O_RDONLY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    files.append(here.open("a", os.O_RDONLY))
    here.journal.close()
    here = Restartable(tmp_path)
    for file in files:
        assert here.pread(file, 0, 9) == b"content"
    here.fs.destroyed()


def test_a_writer_that_was_about_to_open_goes_on_with_the_next_server(tmp_path: Path) -> None:
    """The kernel looks the name up again before it opens a file for writing."""
    here = Restartable(tmp_path)
    here.write("a", b"old")
    caller = Caller(0, 0, 77)

    def look_up() -> int:
        attributes = here.fs.lookup(caller, ROOT_NODE, b"a").attributes
        assert attributes is not None
        return attributes.node

    steps: list[Callable[[], object]] = [lambda: None, look_up]
    for number, step in enumerate(steps):
        with refused_with(errno.ESTALE):
            here.fs.open(caller, look_up(), os.O_WRONLY | os.O_TRUNC)
        step()
        here.journal.close()
        here = Restartable(tmp_path)
        node = look_up()
        handle = here.fs.open(caller, node, os.O_WRONLY | os.O_TRUNC).handle
        here.pwrite((node, handle), 0, b"new%d" % number)
        here.close((node, handle))
        assert here.read("a") == b"new%d" % number
    here.fs.destroyed()
