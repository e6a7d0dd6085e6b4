"""Promises of docs/SEMANTICS.md that no other test holds; every promise names a test."""

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.fuse.kernel.operations import ROOT_NODE, Caller, SetAttributes
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.linux.processes import wait_for_exit
from bootseer.store.backend import FileInfo
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for
from tests.fuse.striped.support.harness import CALLER, UNIT, Driver, refused_with, storage_on
from tests.fuse.striped.support.stored import find_garbage
from tests.support.named_tests import check_promises

OLD = random.Random(1).randbytes(5 * UNIT + 3)
NEW = random.Random(2).randbytes(7 * UNIT + 5)


@pytest.fixture
def one(tmp_path: Path) -> Driver:
    """Node with the default grace."""
    return Driver(storage_on(tmp_path / "stored", grace_s=30.0))


@pytest.fixture
def two(tmp_path: Path) -> Driver:
    """Another node on the same storage."""
    return Driver(storage_on(tmp_path / "stored"))


def test_every_paragraph_names_a_test_that_exists() -> None:
    text = (REPOSITORY / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
    check_promises(text.partition("\n## ")[2])


def test_fsync_publishes_what_was_written_so_far(one: Driver, two: Driver) -> None:
    file = one.open("f", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, OLD)
    with pytest.raises(OSError):
        two.read("f")
    one.fs.fsync(CALLER, *file, False)
    assert two.read("f") == OLD
    one.pwrite(file, len(OLD), NEW)
    assert two.read("f") == OLD
    one.close(file)
    wait_for(lambda: two.read("f") == OLD + NEW, "the commit")


def test_many_fsyncs_do_not_pile_up_parts(one: Driver, two: Driver, tmp_path: Path) -> None:
    file = one.open("log", os.O_WRONLY | os.O_CREAT)
    expected = b""
    for number in range(60):
        line = b"%d\n" % number * 100
        one.pwrite(file, len(expected), line)
        expected += line
        one.fs.fsync(CALLER, *file, True)
    one.close(file)
    assert two.read("log") == expected
    one.fs.destroyed()
    # One segment for each unit of the file, not for each fsync.
    folders = list((tmp_path / "stored" / PARTS_FOLDER).iterdir())
    assert len(folders) <= len(expected) // UNIT + 1


def test_closing_a_copy_of_the_descriptor_does_not_empty_the_file(one: Driver, two: Driver) -> None:
    one.write("f", OLD)
    # As a shell does for `command > f`: open, dup2 and close before it runs the command.
    file = one.open("f", os.O_WRONLY | os.O_TRUNC)
    one.fs.flush(CALLER, *file)
    assert two.read("f") == OLD
    one.close(file)
    wait_for(lambda: two.read("f") == b"", "the commit")


def test_what_was_written_since_a_file_was_emptied_stays(one: Driver) -> None:
    """The shell does so for `(sleep 9) > log & echo one > log; echo two >> log`."""
    one.write("log", b"old")
    held = one.open("log", os.O_WRONLY | os.O_TRUNC)
    one.fs.flush(CALLER, *held)
    one.write("log", b"one")
    one.write("log", b"two", os.O_APPEND)
    one.fs.fsync(CALLER, *held, False)
    assert one.read("log") == b"onetwo"
    one.rename("log", "log.1")
    assert one.read("log.1") == b"onetwo"
    one.fs.release(*held, 0)
    assert one.read("log.1") == b"onetwo"


def test_what_is_published_after_a_file_was_emptied_and_closed_stays(one: Driver) -> None:
    """At the end of a process, which closes its files one after another.

    The kernel tells later for which of them it was the last descriptor.
    """
    emptied = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    written = one.open("f", os.O_WRONLY)
    one.pwrite(written, 0, OLD)
    one.fs.flush(CALLER, *emptied)
    one.fs.flush(CALLER, *written)
    one.fs.release(*emptied, 0)
    one.fs.release(*written, 0)
    assert one.read("f") == OLD


def test_who_opens_a_new_file_and_writes_nothing_does_not_empty_it(one: Driver) -> None:
    """The shell does so for `exec 3> log; exec 4>> log; echo one >&3; exec 3>&- 4>&-`."""
    written = one.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    other = one.open("log", os.O_WRONLY | os.O_APPEND)
    one.pwrite(written, 0, OLD)
    one.close(written)
    one.close(other)
    assert one.read("log") == OLD


def test_who_makes_a_file_anew_and_writes_nothing_does_not_empty_it(
    one: Driver, two: Driver
) -> None:
    """Regression (exerciser): a rename published the empty file."""
    two.write("f", OLD)
    first = one.open("f", os.O_WRONLY | os.O_TRUNC)
    one.pwrite(first, 0, NEW)
    two.unlink("f")
    second = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    one.close(first)
    one.rename("f", "g")
    one.close(second)
    assert (one.read("g"), two.read("g")) == (NEW, NEW)


def test_what_was_created_since_a_file_was_emptied_stays(one: Driver, two: Driver) -> None:
    one.write("f", b"")
    held = one.open("f", os.O_WRONLY | os.O_TRUNC)
    two.unlink("f")
    one.write("f", b"created anew")
    one.rename("f", "g")
    assert two.read("g") == b"created anew"
    one.close(held)
    assert two.read("g") == b"created anew"


def test_an_ordinary_file_that_others_gave_its_old_name_is_read(one: Driver, two: Driver) -> None:
    one.write("f", b"ordinary")
    held = one.open("f", os.O_RDONLY)
    one.rename("f", "g")
    two.rename("g", "f")
    assert one.read("f") == b"ordinary"
    assert one.pread(held, 0, 99) == b"ordinary"


def test_another_node_sees_a_commit_at_its_next_open(one: Driver, two: Driver) -> None:
    one.write("f", OLD)
    assert two.read("f") == OLD
    one.write("f", NEW)
    # Without waiting: attributes may be a second old, but never those of an open.
    assert two.read("f") == NEW
    one.unlink("f")
    with refused_with(errno.ENOENT):
        two.open("f", os.O_RDONLY)


@pytest.mark.parametrize("ended_by", ["the name is gone", "a file is opened to read"])
def test_who_gave_up_writing_a_file_reads_it_at_once(
    one: Driver, two: Driver, ended_by: str
) -> None:
    """A process that opens a file for writing is told to look its name up again, and may not do
    so."""
    for name in ("f", "other"):
        one.write(name, OLD)
        assert one.read(name) == OLD
    node = one.node("f")
    with refused_with(errno.ESTALE):
        one.fs.open(CALLER, node, os.O_WRONLY)
    if ended_by == "the name is gone":
        two.unlink("f")
        with refused_with(errno.ENOENT):
            one.node("f")
        two.write("f", NEW)
    else:
        one.fs.open(CALLER, node, os.O_RDONLY)
    one.fs.open(CALLER, one.node("f"), os.O_RDONLY)


def test_who_gave_up_writing_a_file_never_writes_another(one: Driver, two: Driver) -> None:
    """Regression (exerciser): bytes written to "f" replaced "g", which had been "f"."""
    one.write("f", OLD)
    with refused_with(errno.ESTALE):
        one.fs.open(CALLER, one.node("f"), os.O_WRONLY)
    # As rename(2) does.
    one.node("f")
    one.rename("f", "g")
    two.write("f", b"of another node")
    one.write("f", NEW)
    assert (one.read("f"), one.read("g")) == (NEW, OLD)
    assert (two.read("f"), two.read("g")) == (NEW, OLD)


def test_a_child_that_was_refused_to_cut_the_file_publishes_nothing(
    one: Driver, two: Driver
) -> None:
    """Regression (exerciser): it had written nothing, and its exit published its parent's half."""
    one.write("f", OLD)
    file = one.open("f", os.O_WRONLY | os.O_TRUNC)
    parent, child = CALLER.with_lock_owner(1), CALLER.with_lock_owner(2)
    one.fs.write(parent, *file, 0, memoryview(NEW), 0)
    with refused_with(errno.EOPNOTSUPP):
        one.fs.setattr(child, file[0], SetAttributes(size_bytes=UNIT, handle=file[1]))
    one.fs.flush(child, *file)
    assert two.read("f") == OLD
    one.fs.flush(parent, *file)
    assert two.read("f") == NEW
    one.fs.release(*file, 0)


def test_a_file_that_differs_by_its_bytes_alone_is_another_one(
    one: Driver, two: Driver, tmp_path: Path
) -> None:
    """Two saves of the same size within one tick of the storage's clock."""
    read = []
    for content in (b"old", b"new"):
        one.write("f", content)
        os.utime(tmp_path / "stored" / "f", ns=(0, 10**18))
        read.append((two.read("f"), one.read("f")))
    assert read == [(b"old", b"old"), (b"new", b"new")]


def test_readers_on_other_nodes_have_the_grace(one: Driver, two: Driver) -> None:
    one.write("f", OLD)
    file = two.open("f", os.O_RDONLY)
    one.write("f", NEW)
    assert two.pread(file, 0, len(OLD)) == OLD
    two.close(file)


def test_after_the_grace_a_reader_gets_an_error_and_never_other_bytes(
    one: Driver, two: Driver
) -> None:
    two.write("f", OLD)
    file = one.open("f", os.O_RDONLY)
    two.write("f", NEW)  # this node's grace is zero
    with refused_with(errno.EIO):
        one.pread(file, 0, len(OLD))
    one.close(file)
    assert one.read("f") == NEW


def test_a_directory_with_an_unfinished_file_cannot_be_renamed(one: Driver) -> None:
    one.mkdir("d")
    file = one.open("d/f", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, NEW)
    with refused_with(errno.EBUSY):
        one.rename("d", "e")
    with refused_with(errno.ENOTEMPTY):
        one.rmdir("d")
    one.fs.fsync(CALLER, *file, False)
    one.rename("d", "e")
    one.pwrite(file, len(NEW), OLD)
    one.close(file)
    assert one.read("e/f") == NEW + OLD


def test_renaming_a_file_that_is_being_written(one: Driver, two: Driver) -> None:
    one.write("f", OLD)
    file = one.open("f.tmp", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, NEW)
    one.rename("f.tmp", "f")
    assert two.read("f") == NEW
    one.pwrite(file, len(NEW), b"more")
    one.close(file)
    wait_for(lambda: two.read("f") == NEW + b"more", "the commit")
    assert two.names("") == ["f"]


def test_unlinking_a_file_that_is_being_written(one: Driver, two: Driver) -> None:
    file = one.open("f", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, NEW)
    one.unlink("f")
    one.pwrite(file, len(NEW), NEW)
    one.close(file)
    assert two.names("") == one.names("") == []
    # The threads of its parts remove them.
    wait_for(lambda: not find_garbage(one.storage.backend, ""), "the end of the parts")
    one.fs.destroyed()


def test_a_file_that_was_closed_just_before_the_unmount_is_there(one: Driver, two: Driver) -> None:
    """Regression: empty files were lost now and then.

    The kernel drops the release of a file without writes if the server has not read it by then.
    """
    two.write("emptied", b"old")
    for name in ("made", "emptied"):
        one.fs.flush(CALLER, *one.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    one.fs.all_closed()
    one.fs.destroyed()
    assert one.fs.files.unwritten == []
    assert (two.read("made"), two.read("emptied")) == (b"", b"")


def test_an_unmount_names_no_file_whose_process_was_killed_before(one: Driver) -> None:
    """Regression: whether it named the file depended on whether its release was read in time."""
    file = one.open("f", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, NEW)
    with subprocess.Popen(["sleep", "600"]) as killed:
        killed.kill()
        assert wait_for_exit(killed.pid, 60)
        one.fs.flush(Caller(0, 0, killed.pid), *file)
    one.fs.all_closed()
    one.fs.destroyed()
    assert one.fs.files.unwritten == []


def test_a_file_that_was_emptied_twice_and_removed_is_empty_for_who_emptied_it(one: Driver) -> None:
    """Regression (exerciser): its size was that of the removed file."""
    one.write("f", OLD)
    files = [one.open("f", os.O_RDWR | os.O_TRUNC) for _ in range(2)]
    one.unlink("f")
    for node, handle in files:
        assert one.fs.getattr(CALLER, node, handle)[0].size_bytes == 0
        assert one.fs.getattr(CALLER, node, None)[0].size_bytes == 0


@pytest.mark.parametrize("last", ["flush", "fsync", "release"])
def test_a_request_that_comes_after_the_end_of_a_mount_publishes_nothing(
    one: Driver, two: Driver, last: str
) -> None:
    """Regression: the written bytes are gone then, and an empty file replaced the old one."""
    one.write("f", OLD)
    file = one.open("f", os.O_WRONLY | os.O_TRUNC)
    one.pwrite(file, 0, NEW)
    one.fs.destroyed()
    if last == "release":
        one.fs.release(*file, 0)
    elif last == "fsync":
        one.fs.fsync(CALLER, *file, False)
    else:
        one.fs.flush(CALLER, *file)
    assert two.read("f") == OLD


def test_the_parts_of_a_replaced_file_go_although_its_folder_was_renamed(
    one: Driver, two: Driver
) -> None:
    one.mkdir("d")
    one.write("d/f", OLD)
    one.write("d/f", NEW)
    one.rename("d", "e")
    one.storage.close()
    assert find_garbage(two.storage.backend, "e") == []
    assert two.read("e/f") == NEW


def test_a_file_without_a_name_is_read_back_from_a_folder_that_was_renamed(one: Driver) -> None:
    """Regression (exerciser): EIO, since its parts had moved with the folder."""
    one.mkdir("d")
    file = one.open("d/f", os.O_RDWR | os.O_CREAT)
    one.pwrite(file, 0, OLD)
    one.unlink("d/f")
    with refused_with(errno.EBUSY):
        one.rename("d", "e")
    one.mkdir("other")
    with refused_with(errno.ENOTEMPTY):
        one.rename("other", "d")
    with refused_with(errno.ENOTEMPTY):
        one.rmdir("d")
    one.fs.fsync(CALLER, *file, False)
    with refused_with(errno.ENOTEMPTY):
        one.rmdir("d")
    one.rename("d", "e")
    assert one.pread(file, 0, len(OLD) + 1) == OLD
    one.pwrite(file, len(OLD), NEW)
    one.fs.fsync(CALLER, *file, False)
    assert one.pread(file, 0, len(OLD + NEW) + 1) == OLD + NEW
    one.close(file)
    assert one.names("e") == []
    wait_for(lambda: not find_garbage(one.storage.backend, ""), "the end of its parts")
    one.rmdir("e")


def test_two_generations_of_a_file_outlive_its_folder(one: Driver) -> None:
    """Regression: their shared parts were moved out of the folder only once, or not at all."""
    one.mkdir("d")
    one.write("d/f", OLD)
    before = one.open("d/f", os.O_RDONLY)
    one.write("d/f", NEW, os.O_APPEND)
    after = one.open("d/f", os.O_RDONLY)
    one.unlink("d/f")
    one.rmdir("d")
    assert one.pread(before, 0, len(OLD) + 1) == OLD
    assert one.pread(after, 0, len(OLD + NEW) + 1) == OLD + NEW
    one.close(before)
    one.close(after)


@pytest.mark.parametrize("flags", [os.O_APPEND, os.O_TRUNC], ids=["append", "anew"])
def test_a_file_whose_parts_are_written_is_not_renamed_into_another_folder(
    one: Driver, two: Driver, flags: int
) -> None:
    """Regression (exerciser): a small file that had been appended to could not be read any more."""
    one.mkdir("d")
    one.write("f", b"small")
    file = one.open("f", os.O_WRONLY | flags)
    start = 5 if flags == os.O_APPEND else 0
    one.pwrite(file, start, OLD)
    with refused_with(errno.EXDEV):
        one.rename("f", "d/f")
    assert (two.read("f"), two.names("d")) == (b"small", [])
    one.pwrite(file, start + len(OLD), NEW)
    one.close(file)
    assert two.read("f") == b"small"[:start] + OLD + NEW


@pytest.mark.parametrize("old", [b"small", OLD], ids=["plain", "striped"])
def test_a_reader_keeps_its_size_when_what_another_node_put_there_is_renamed(
    one: Driver, two: Driver, old: bytes
) -> None:
    """Regression (exerciser): SIGBUS for a process that had mapped it."""
    one.write("a", old)
    file = one.open("a", os.O_RDONLY)
    one.rename("a", "b")
    two.truncate("b", 0)
    one.rename("b", "c")
    assert one.fs.getattr(CALLER, file[0], None)[0].size_bytes == len(old)
    assert one.size("c") == 0
    assert one.read("c") == b""
    one.close(file)


def test_a_name_that_the_kernel_has_kept_is_looked_up_once_more_at_most(
    one: Driver, two: Driver
) -> None:
    """Regression (exerciser): ESTALE for the program, since the kernel asks only once more."""
    one.write("a", b"old")
    kept = one.node("a")
    reader = one.open("a", os.O_RDONLY)
    two.write("a", b"by another node")
    one.rename("a", "b")
    one.rename("b", "a")
    with refused_with(errno.ESTALE):
        one.fs.open(CALLER, kept, os.O_WRONLY | os.O_TRUNC)
    node = one.node("a")
    writer = (node, one.fs.open(CALLER, node, os.O_WRONLY | os.O_TRUNC).handle)
    one.pwrite(writer, 0, b"new")
    one.close(writer)
    one.close(reader)
    assert two.read("a") == b"new"


def test_a_listing_is_not_believed_against_an_open(one: Driver, two: Driver) -> None:
    """Regression: ESTALE for the program, since the second lookup was answered from the listing."""
    one.write("f", b"old")
    kept = one.node("f")
    one.names("")
    two.write("f", NEW)
    with refused_with(errno.ESTALE):
        one.fs.open(CALLER, kept, os.O_RDONLY)
    one.fs.open(CALLER, one.node("f"), os.O_RDONLY)
    assert one.read("f") == NEW


@pytest.mark.parametrize("is_new", [False, True], ids=["overwritten", "new"])
@pytest.mark.parametrize("how", ["lookup", "listing"])
def test_who_looks_while_a_file_is_published_sees_no_more_of_before(
    one: Driver, monkeypatch: pytest.MonkeyPatch, is_new: bool, how: str
) -> None:
    """The kernel keeps an answer for a second, also beyond the close."""
    if not is_new:
        one.write("f", b"old")
    file = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    one.pwrite(file, 0, NEW)
    backend = one.storage.tree.backend
    closes = iter([file])

    def then_close(look: Callable[[str], Any]) -> Callable[[str], Any]:
        def look_and_close(path: str) -> Any:
            try:
                found = look(path)
                return found if isinstance(found, FileInfo) else list(found)
            finally:
                for one_file in closes:
                    one.close(one_file)

        return look_and_close

    looks = "stat" if how == "lookup" else "list"
    monkeypatch.setattr(backend, looks, then_close(getattr(backend, looks)))
    if how == "listing":
        assert one.names("") == ["f"]
    found = one.fs.lookup(CALLER, ROOT_NODE, b"f").attributes
    assert not list(closes)
    assert found is not None
    assert found.size_bytes == len(NEW)


@pytest.mark.parametrize("written", [b"", b"by the second"])
def test_of_two_that_empty_a_file_the_first_shows_no_other_content(
    one: Driver, written: bytes
) -> None:
    """Regression (exerciser): it showed the size of the file that both had emptied."""
    one.write("f", b"old content")
    first = one.open("f", os.O_RDWR | os.O_TRUNC)
    second = one.open("f", os.O_WRONLY | os.O_TRUNC)
    one.pwrite(second, 0, written)
    one.close(second)
    assert one.fs.getattr(CALLER, first[0], None)[0].size_bytes == 0
    assert one.pread(first, 0, 99) == b""
    one.close(first)
    assert one.read("f") == written


@pytest.mark.parametrize("old", [b"small", OLD], ids=["plain", "striped"])
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_adding_to_a_file_that_is_gone(one: Driver, two: Driver, old: bytes, how: str) -> None:
    """Regression (state machine): EIO, since the file to add to could not be read."""
    one.write("f", old)
    one.write("other", b"other")
    file = one.open("f", os.O_RDWR | os.O_APPEND)
    if how == "unlink":
        one.unlink("f")
    else:
        one.rename("other", "f")
    one.pwrite(file, len(old), b"more")
    one.fs.fsync(CALLER, *file, False)
    assert one.pread(file, len(old), 9) == b"more"
    one.close(file)
    assert two.names("") == (["other"] if how == "unlink" else ["f"])
    assert how == "unlink" or two.read("f") == b"other"


def test_a_new_file_is_seen_here_at_once_and_elsewhere_when_closed(
    one: Driver, two: Driver
) -> None:
    file = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    one.pwrite(file, 0, b"abc")
    assert one.names("") == ["f"]
    assert one.size("f") == 3
    assert two.names("") == []
    with refused_with(errno.EEXIST):
        one.fs.create(CALLER, 1, b"f", 0o644, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    one.close(file)
    assert two.names("") == ["f"]


def test_small_files_are_ordinary_files(one: Driver, tmp_path: Path) -> None:
    one.write("small", b"x" * UNIT)
    one.write("large", b"x" * (UNIT + 1))
    assert (tmp_path / "stored" / "small").read_bytes() == b"x" * UNIT
    assert (tmp_path / "stored" / "large").stat().st_size < UNIT


def test_garbage_of_a_crash_is_named_and_nothing_else(one: Driver, two: Driver) -> None:
    one.write("f", OLD)
    file = one.open("g", os.O_WRONLY | os.O_CREAT)
    one.pwrite(file, 0, NEW)
    backend = two.storage.backend

    def is_whole() -> bool:
        # All three parts exist: from here on the writer makes no names.
        found = find_garbage(backend, "")
        return bool(found) and len(list(backend.list(found[0].path))) == 3

    wait_for(is_whole, "the third part")
    found = find_garbage(backend, "")
    assert len(found) == 1
    backend.delete(found[0].path, recursive=True)
    assert two.read("f") == OLD


def test_a_folder_with_an_unfinished_file_is_not_replaced(one: Driver) -> None:
    """Regression (exerciser): the folder and the file were gone."""
    one.mkdir("d")
    one.mkdir("e")
    file = one.open("d/f", os.O_WRONLY | os.O_CREAT)
    with refused_with(errno.ENOTEMPTY):
        one.rename("e", "d")
    one.pwrite(file, 0, NEW)
    one.close(file)
    assert one.read("d/f") == NEW


def test_a_close_without_a_write_succeeds_whatever_became_of_the_file(
    one: Driver, two: Driver
) -> None:
    """Regression (exerciser): ESTALE once the name of the file was given to another one."""
    one.write("f", OLD)
    one.write("other", b"other")
    file = one.open("f", os.O_RDWR | os.O_APPEND)
    two.write("f", NEW)
    one.rename("other", "f")
    one.close(file)
    assert two.read("f") == b"other"


def test_a_listed_size_is_one_that_the_file_had(one: Driver, two: Driver) -> None:
    """Regression (exerciser): a listing showed the layout's size for a file without a layout."""
    two.write("f", OLD)
    assert one.names("") == ["f"]
    two.write("f", b"")
    assert one.size("f") in (len(OLD), 0)


def test_a_small_file_that_is_appended_to_can_be_renamed(one: Driver, two: Driver) -> None:
    one.write("log", b"first ")
    unwritten = one.open("log", os.O_WRONLY | os.O_APPEND)
    file = one.open("log", os.O_WRONLY | os.O_APPEND)
    one.pwrite(file, 0, b"second ")
    one.rename("log", "log.1")
    one.pwrite(file, 0, b"third")
    with pytest.raises(OSError):
        two.read("log")
    one.close(file)
    assert two.read("log.1") == b"first second third"
    # Opened before and written now: it would lose the other writer's bytes.
    with refused_with(errno.ESTALE):
        one.pwrite(unwritten, 0, b"x")
    one.fs.release(*unwritten, 0)


def test_a_size_is_shown_before_the_close_before_it_is_complete(one: Driver) -> None:
    """The kernel reports the last close after close(2) has returned, here after truncate(2)."""
    emptied = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    one.fs.flush(CALLER, *emptied)
    one.truncate("f", 5)
    assert one.size("f") == 5
    one.fs.release(*emptied, 0)
    assert (one.size("f"), one.read("f")) == (5, bytes(5))


def test_a_late_close_does_not_hide_a_truncation(
    one: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the close is published before later changes."""
    emptied = one.open("f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    one.fs.flush(CALLER, *emptied)
    close = threading.Thread(target=one.fs.release, args=(*emptied, 0))
    published, shown, cut, done = (threading.Event() for _ in range(4))
    show = one.fs.files.show_published

    def published_late(node: Any, view: Any) -> None:
        if threading.current_thread() is close:
            published.set()
            cut.wait(0.3)
            show(node, view)
            shown.set()
            # The handle is closed by this, and the node's file is looked up again.
            done.wait(0.3)
        else:
            show(node, view)
            cut.set()
            shown.wait(60)

    monkeypatch.setattr(one.fs.files, "show_published", published_late)
    close.start()
    assert published.wait(60)
    one.truncate("f", 5)
    done.set()
    close.join(60)
    assert one.size("f") == 5


def test_what_is_shown_is_at_most_a_second_old(tmp_path: Path, two: Driver) -> None:
    """The kernel keeps an answer as long as it is told; when it asks again, the storage is
    asked."""
    now_s = 100.0
    storage = storage_on(tmp_path / "stored")
    fs = Driver(storage, clock=lambda: now_s).fs
    two.write("f", b"old")
    listing = fs.opendir(CALLER, ROOT_NODE, 0).handle
    now_s = 100.75
    seen = fs.lookup(CALLER, ROOT_NODE, b"f")
    assert seen.attributes is not None
    # It came from the listing.
    assert seen.entry_ttl_s == seen.attributes_ttl_s == 0.25
    two.write("f", b"newer")
    with refused_with(errno.ESTALE):
        fs.getattr(CALLER, seen.attributes.node, None)
    again = fs.lookup(CALLER, ROOT_NODE, b"f")
    assert again.attributes is not None
    assert (again.attributes.size_bytes, again.attributes_ttl_s) == (5, 1.0)
    fs.releasedir(ROOT_NODE, listing)
    fs.destroyed()
    storage.close()


def test_two_writers_of_a_new_name_see_their_own_sizes(one: Driver) -> None:
    first = one.open("f", os.O_RDWR | os.O_CREAT)
    second = one.open("f", os.O_WRONLY | os.O_TRUNC)
    one.pwrite(second, 0, b"second")
    assert one.fs.getattr(CALLER, first[0], None)[0].size_bytes == 0
    assert one.fs.getattr(CALLER, second[0], None)[0].size_bytes == 6
    one.pwrite(first, 0, b"1")
    assert one.fs.getattr(CALLER, first[0], None)[0].size_bytes == 1
    one.close(first)
    assert one.read("f") == b"1"
    one.close(second)
    assert one.read("f") == b"second"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
@pytest.mark.parametrize("change", ["overwritten", "renamed", "renamed over", "unlinked"])
def test_a_file_that_changes_while_it_is_opened_is_read_whole(
    one: Driver, monkeypatch: pytest.MonkeyPatch, flags: int, change: str
) -> None:
    """The change comes after the file was found, and before it counts as open."""
    one.write("f", b"old" * 100)
    one.write("other", b"other" * 100)
    open_view, changes = one.storage.reader.open, iter([change])

    def open_late(view: Any) -> Any:
        if view.path == "f" and next(changes, None):
            if change == "overwritten":
                one.write("f", b"new" * 100)
            elif change == "renamed":
                one.rename("f", "g")
                one.rename("other", "f")
            elif change == "renamed over":
                one.rename("other", "f")
            else:
                one.unlink("f")
                one.write("f", b"anew" * 100)
        return open_view(view)

    monkeypatch.setattr(one.storage.reader, "open", open_late)
    file = one.open("f", flags)
    assert not list(changes)
    size = one.fs.getattr(CALLER, *file)[0].size_bytes
    read = one.pread(file, 0, 1000)
    one.close(file)
    assert read in (b"old" * 100, b"new" * 100, b"other" * 100, b"anew" * 100)
    assert len(read) == size


@pytest.mark.parametrize("thread", [0, 77], ids=["unseen", "seen"])
@pytest.mark.parametrize("names", [("d/f", "e/f"), ("d/f", "d/f")], ids=["alike", "same"])
def test_writers_that_open_at_once_get_nodes_of_their_own(
    one: Driver, names: tuple[str, str], thread: int
) -> None:
    """The calls are the kernel's when it is sent to look up again; other pid namespaces have thread
    0."""
    one.mkdir("d")
    one.mkdir("e")
    for name in set(names):
        one.write(name, b"old")
    callers = [Caller(0, 0, thread), Caller(0, 0, thread + 1 if thread else 0)]
    found: list[tuple[int, int] | None] = [None, None]
    for attempt in range(2):
        nodes = []
        for name, caller in zip(names, callers, strict=True):
            directory, base = one.parent(name)
            attributes = one.fs.lookup(caller, directory, base).attributes
            assert attributes is not None
            nodes.append(attributes.node)
        for number, (node, caller) in enumerate(zip(nodes, callers, strict=True)):
            if found[number] is None:
                try:
                    opened = one.fs.open(caller, node, os.O_WRONLY | os.O_TRUNC)
                except OSError as error:
                    if error.errno != errno.ESTALE or attempt:
                        raise
                else:
                    found[number] = node, opened.handle
    for number, file in enumerate(found):
        assert file is not None
        one.pwrite(file, 0, b"new" * (number + 1))
        assert one.fs.getattr(CALLER, file[0], None)[0].size_bytes == 3 * (number + 1)
        assert one.read(names[number]) in (b"old", b"new")
    for number, file in enumerate(found):
        assert file is not None
        one.close(file)
        assert one.read(names[number]) == b"new" * (number + 1)
