"""Extraction restores exact attributes, is whole or absent, and refuses damaged input."""

import os
import random
import signal
import stat
import sys
from pathlib import Path

import pytest

from bootseer.blob.build import build_tree
from bootseer.blob.extract.extraction import extract
from bootseer.blob.tree import Extent, Inode
from bootseer.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidInputError,
    PermissionDeniedError,
    UnavailableError,
)
from testbed.needs import MissingError
from tests.bootseer.blob.trees import make_zoo, packed, reader_of, state

DIR = Inode(stat.S_IFDIR | 0o755)


def unused(number: int, offset: int, length: int) -> bytes:
    raise AssertionError("nothing should be read")


@pytest.mark.parametrize("processes", [1, 3])
def test_gives_back_exactly_what_was_packed(tmp_path: Path, processes: int) -> None:
    make_zoo(tmp_path / "in")
    before = state(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    read = reader_of(blob)
    target = tmp_path / "sub/out"
    done: list[int] = []
    extract(tree, read, target, processes=processes, on_progress=done.append, allow_devices=True)
    assert state(target) == before
    assert sum(done) == sum(tree.columns.extent_length) > 700_000
    assert (target / "sparse").lstat().st_blocks * 512 < 1_000_000
    assert os.listdir(tmp_path / "sub") == ["out"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_damaged_blob_leaves_nothing(tmp_path: Path, processes: int) -> None:
    make_zoo(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    read = reader_of(blob)

    def damaged(number: int, offset: int, length: int) -> bytes:
        data = bytearray(read(number, offset, length))
        if offset <= 200_000 < offset + length:
            data[200_000 - offset] ^= 1
        return bytes(data)

    with pytest.raises(CorruptError):
        extract(tree, damaged, tmp_path / "out/x", allow_devices=True, processes=processes)
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(CorruptError):
        extract(tree, lambda *_: b"", tmp_path / "out/x", allow_devices=True, processes=processes)


def test_only_absent_or_empty_targets(tmp_path: Path) -> None:
    tree = build_tree([], [DIR], [])
    (tmp_path / "full/x").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("full", "file", "link", "dangling"):
        with pytest.raises(AlreadyExistsError, match=name):
            extract(tree, unused, tmp_path / name)
    extract(tree, unused, tmp_path / "empty")


def test_of_two_extractions_to_one_target_one_wins(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x").write_bytes(b"x")
    tree, blob = packed(tmp_path / "in")

    def slow(number: int, offset: int, length: int) -> bytes:
        extract(tree, reader_of(blob), tmp_path / "out")
        return blob[offset : offset + length]

    with pytest.raises(AlreadyExistsError, match="out"):
        extract(tree, slow, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert os.listdir(tmp_path / "out") == ["x"]


def test_devices_are_left_out_with_all_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Inode(stat.S_IFBLK | 0o660, rdev=os.makedev(8, 0))
    names = [(b"a", 1), (b"b", 2), (b"c", 1), (b"d", 2), (b"e", 3)]
    inodes = [DIR, device, Inode(stat.S_IFIFO | 0o644), Inode(stat.S_IFREG | 0o644)]
    extract(build_tree(names, inodes, []), unused, tmp_path / "out", skip_devices=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["b", "d", "e"]
    assert (tmp_path / "out/b").stat().st_nlink == 2
    (line,) = caplog.messages
    assert "1 device nodes" in line


def test_limits_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = build_tree([(b"null", 1)], [DIR, Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3))], [])
    with pytest.raises(PermissionDeniedError, match="null"):
        extract(tree, unused, tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("bootseer.blob.extract.plan.MAX_FILES", 0)
        with pytest.raises(InvalidInputError, match="names"):
            extract(tree, unused, tmp_path / "out")
    if os.geteuid():
        raise MissingError("making device nodes needs root")
    extract(tree, unused, tmp_path / "out", allow_devices=True)
    assert (tmp_path / "out/null").lstat().st_rdev == os.makedev(1, 3)


def _children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def _many_files(directory: Path) -> None:
    """Make several groups of files, and a file of several parts."""
    directory.mkdir()
    generator = random.Random(3)
    for number in range(700):
        folder = directory / str(number % 20)
        folder.mkdir(exist_ok=True)
        (folder / str(number)).write_bytes(generator.randbytes(number * 10))
    (directory / "large").write_bytes(generator.randbytes(100_000) * 400)
    (directory / "large").chmod(0o640)


def test_processes_share_the_work_and_are_gone_afterwards(tmp_path: Path) -> None:
    _many_files(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    before = _children()
    during: set[int] = set()
    asked: list[int] = []

    def read(number: int, offset: int, length: int) -> bytes:
        asked.append(length)
        during.update(_children() - before)
        return blob[offset : offset + length]

    extract(tree, read, tmp_path / "out", processes=3)
    assert state(tmp_path / "out") == state(tmp_path / "in")
    assert len(during) == 3
    assert not _children() - before
    # Frames that two tasks need at different times may be requested twice; they are few.
    assert sum(asked) < 1.2 * len(blob)


def test_a_file_of_this_node_is_read_by_the_workers(tmp_path: Path) -> None:
    _many_files(tmp_path / "in")
    (tmp_path / "in/empty/within").mkdir(parents=True)
    tree, blob = packed(tmp_path / "in")
    (tmp_path / "blob").write_bytes(blob)
    with (tmp_path / "blob").open("rb") as file:
        extract(tree, unused, tmp_path / "out", processes=3, files=[file.fileno()])
    assert state(tmp_path / "out") == state(tmp_path / "in")


def test_workers_find_files_that_lie_in_two_blobs_by_turns(tmp_path: Path) -> None:
    count, short, long = 20, 5_000, 10_000
    contents, packs = [], []
    for number, length in enumerate((long, short)):
        (tmp_path / f"in{number}").mkdir()
        contents.append(random.Random(number).randbytes((count + 1) * length))
        (tmp_path / f"in{number}/file").write_bytes(contents[-1])
        tree, blob = packed(tmp_path / f"in{number}", frame_bytes=4096)
        (tmp_path / f"blob{number}").write_bytes(blob)
        packs.append(tree)
    starts = [tree.columns.extent_blob_offset[0] for tree in packs]
    names, inodes, expected = [], [DIR], {}
    # Written in the order of their long halves, but for the last one, which has none.
    for i in range(count + 1):
        halves = [(1, i * short, short), (0, i * long, long)][: 2 if i < count else 1]
        extents, offset = [], 0
        for number, start, length in halves:
            extents.append(Extent(offset, number, starts[number] + start, length))
            offset += length
        inodes.append(Inode(stat.S_IFREG | 0o644, size_bytes=offset, extents=tuple(extents)))
        names.append((b"%02d" % i, i + 1))
        expected[f"{i:02}"] = b"".join(
            contents[number][start : start + length] for number, start, length in halves
        )
    tree = build_tree(names, inodes, [tree.blobs[0] for tree in packs])
    with (tmp_path / "blob0").open("rb") as one, (tmp_path / "blob1").open("rb") as other:
        files = [one.fileno(), other.fileno()]
        extract(tree, unused, tmp_path / "out", processes=2, files=files)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


def test_what_lies_between_files_and_was_not_asked_for_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcdef":
        (tmp_path / "in" / name).write_bytes(random.Random(name).randbytes(20_000))
    tree, blob = packed(tmp_path / "in", frame_bytes=4096)
    kept = {path: tree.inode(number) for path, number in tree.walk() if path in (b"a", b"c", b"f")}
    less = build_tree(zip(kept, (1, 2, 3), strict=True), [DIR, *kept.values()], tree.blobs)
    asked: list[int] = []

    def read(number: int, offset: int, length: int) -> bytes:
        asked.append(length)
        return blob[offset : offset + length]

    extract(less, read, tmp_path / "out", processes=2)
    assert sum(asked) < 80_000
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "c", "f"]
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "in" / path.name).read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "cut", "unreadable"])
def test_a_damaged_file_of_this_node_leaves_nothing(tmp_path: Path, damage: str) -> None:
    _many_files(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    damaged = bytearray(blob)
    damaged[len(blob) // 2] ^= 1
    content = {"cut": blob[: len(blob) // 2], "flipped": bytes(damaged)}.get(damage, blob)
    (tmp_path / "blob").write_bytes(content)
    expected = UnavailableError if damage == "unreadable" else CorruptError
    with (
        (tmp_path / "blob").open("ab" if damage == "unreadable" else "rb") as file,
        pytest.raises(expected),
    ):
        extract(tree, unused, tmp_path / "out", processes=2, files=[file.fileno()])
    assert sorted(os.listdir(tmp_path)) == ["blob", "in"]


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path) -> None:
    _many_files(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    before = _children()

    def read(number: int, offset: int, length: int) -> bytes:
        for pid in _children() - before:
            os.kill(pid, signal.SIGKILL)
        return blob[offset : offset + length]

    with pytest.raises(UnavailableError, match="killed"):
        extract(tree, read, tmp_path / "out", processes=2)
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert not _children() - before


def test_a_worker_that_cannot_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker may wait for a file system that does not answer."""
    _many_files(tmp_path / "in")
    tree, _ = packed(tmp_path / "in")
    before = _children()
    kill, spared = os.kill, set[int]()

    def spare(pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            spared.add(pid)
            number = signal.SIGSTOP
        kill(pid, number)

    def read(number: int, offset: int, length: int) -> bytes:
        raise UnavailableError("the store is gone")

    monkeypatch.setattr("bootseer.linux.processes.KILLED_S", 0.5)
    monkeypatch.setattr(os, "kill", spare)
    try:
        with pytest.raises(UnavailableError, match="gone"):
            extract(tree, read, tmp_path / "out", processes=2)
        assert spared == _children() - before
        assert caplog.text.count("has not ended") == len(spared) == 2
    finally:
        for pid in spared:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_where_no_process_can_be_started_one_writes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _many_files(tmp_path / "in")
    tree, blob = packed(tmp_path / "in")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    extract(tree, reader_of(blob), tmp_path / "out")
    assert state(tmp_path / "out") == state(tmp_path / "in")
