"""Removal of folders that strangers have filled: any depth, any mode, and files that must stay."""

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux import namespaces
from bootseer.linux.removal import empty_directory, remove_tree
from testbed.needs import MissingError, require
from testbed.users import as_ordinary_user, give_to_nobody, make_reachable

_FLAGS = {"immutable": 0x10, "append only": 0x20}


def make_deep(top: Path, levels: int) -> None:
    """Make `levels` directories, each in the one before, with a file in each."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("d" * 20, dir_fd=fd)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        inner = os.open("d" * 20, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def set_flags(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, 0x40086602, flags.to_bytes(8, sys.byteorder))
    except OSError as error:
        raise MissingError(f"this file system has no such flags: {error.strerror}") from error
    finally:
        os.close(fd)


def test_depth_and_length_of_paths_make_no_difference(tmp_path: Path) -> None:
    # Deeper than Python recurses, longer than PATH_MAX, more levels than descriptors.
    make_deep(tmp_path / "deep", 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256 + len(os.listdir("/proc/self/fd")), hard))
    try:
        remove_tree(tmp_path / "deep")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_wide_trees_and_kinds_of_files(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    for folder in range(30):
        (top / f"{folder}/{folder}").mkdir(parents=True)
        for file in range(100):
            (top / f"{folder}/{file}.txt").touch()
    (top / "1/link").symlink_to(outside)
    (top / "1/file-link").symlink_to(outside / "kept")
    os.mkfifo(top / "2/fifo")
    Path(os.fsdecode(os.fsencode(top) + b"/not-utf8-\xff")).mkdir()
    os.link(outside / "kept", top / "3/hard")
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        empty_directory("top", dir_fd=fd)
        assert os.listdir(top) == []
        remove_tree(b"top", dir_fd=fd)
        remove_tree("top", dir_fd=fd)
    finally:
        os.close(fd)
    assert (outside / "kept").stat().st_nlink == 1
    assert os.listdir(tmp_path) == ["outside"]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    with pytest.raises(OSError):
        remove_tree(tmp_path / "link")
    assert (tmp_path / "kept").is_dir()


def test_directories_that_not_even_their_owner_may_enter(tmp_path: Path) -> None:
    """Without root such directories matter; overlayfs leaves one behind each mount."""
    top = tmp_path / "top"
    (top / "a/b/c").mkdir(parents=True)
    (top / "a/b/file").touch()
    make_deep(top / "deep", 150)
    for path, folders, _ in os.walk(top, topdown=False):
        for name in folders:
            os.chmod(os.path.join(path, name), 0)
    top.chmod(0)
    program = "import sys; from bootseer.linux.removal import remove_tree; remove_tree(sys.argv[1])"
    command = [sys.executable, "-c", program, str(top)]
    if os.geteuid() == 0:
        # Nobody's, and run by nobody.
        give_to_nobody(tmp_path)
        make_reachable(tmp_path.parent)
        command = [*as_ordinary_user(), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not top.exists()


@pytest.mark.parametrize("kind", _FLAGS)
@pytest.mark.needs("root", "mount")
def test_files_and_folders_that_were_made_unchangeable(tmp_path: Path, kind: str) -> None:
    top = tmp_path / "top"
    (top / "folder/inner").mkdir(parents=True)
    (top / "folder/file").touch()
    for path in (top / "folder/file", top / "folder/inner", top / "folder", top):
        set_flags(path, _FLAGS[kind])
    remove_tree(top)
    assert not top.exists()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a tree with a directory of the same file system mounted in it, and that directory."""
    require("root")
    kept, point = tmp_path / "kept", tmp_path / "top/a/point"
    kept.mkdir()
    (kept / "file").touch()
    point.mkdir(parents=True)
    namespaces.mount(kept, point, flags=namespaces.MS_BIND)
    yield tmp_path / "top", kept
    namespaces.unmount(point)


@pytest.mark.needs("mount")
def test_what_is_mounted_below_is_left_alone_and_said(mounted: tuple[Path, Path]) -> None:
    top, kept = mounted
    (top / "z/after").mkdir(parents=True)
    (top / "0").touch()
    with pytest.raises(OSError, match="busy"):
        remove_tree(top)
    assert os.listdir(kept) == ["file"]
    assert [path for path, _, _ in os.walk(top)] == [str(top), f"{top}/a", f"{top}/a/point"]
