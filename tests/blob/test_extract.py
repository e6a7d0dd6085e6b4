"""Extraction: exact attributes, whole or not at all, and what is refused."""

import io
import os
import stat
from pathlib import Path

import pytest

from bootseer.blob.extract import extract
from bootseer.blob.pack import pack_directory
from bootseer.blob.read import ReadBlob
from bootseer.blob.tree import Inode, Tree, build_tree
from bootseer.errors import (
    AlreadyExistsError,
    CorruptError,
    InvalidInputError,
    PermissionDeniedError,
)

DIR = Inode(stat.S_IFDIR | 0o755)


def packed(root: Path) -> tuple[Tree, ReadBlob]:
    sink = io.BytesIO()
    tree = pack_directory(root, sink)
    blob = sink.getvalue()
    return tree, lambda number, offset, length: blob[offset : offset + length]


def unused(number: int, offset: int, length: int) -> bytes:
    raise AssertionError("nothing should be read")


def make_source(root: Path) -> None:
    (root / "a/deep/er").mkdir(parents=True)
    (root / "a/file").write_bytes(b"content")
    (root / "a/deep/large").write_bytes(os.urandom(40_000_000))
    (root / "a/deep/er/empty").touch()
    os.link(root / "a/file", root / "zz-link")
    (root / "link").symlink_to("a/file")
    os.mkfifo(root / "fifo")
    with (root / "sparse").open("wb") as f:
        f.seek(5_000_000)
        f.write(b"x")
        f.truncate(9_000_000)
    (root / "a/file").chmod(0o4751)
    os.utime(root / "a/file", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "a", ns=(1, 5_000_000_007))
    (root / "a/deep").chmod(0o2570)


def state(root: Path) -> dict[str, object]:
    """Everything that must be equal, path by path."""
    found: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        name = str(path.relative_to(root))
        status = path.lstat()
        first = inodes.setdefault(status.st_ino, name)
        content: object = None
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        xattrs = [
            (n, os.getxattr(path, n, follow_symlinks=False))
            for n in sorted(os.listxattr(path, follow_symlinks=False))
        ]
        nlink = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        found[name] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev,
            nlink, first, content, xattrs,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_gives_back_exactly_what_was_packed(tmp_path: Path, threads: int, in_place: bool) -> None:
    make_source(tmp_path / "in")
    before = state(tmp_path / "in")
    tree, read = packed(tmp_path / "in")
    target = tmp_path / "sub/out"
    if in_place:
        target.mkdir(parents=True)
    done: list[int] = []
    result = extract(
        tree, read, target, threads=threads, in_place=in_place, on_progress=done.append
    )
    assert state(target) == before
    assert sum(done) == result.content_bytes == 40_000_000 + 7 + 4096
    assert (target / "sparse").lstat().st_blocks * 512 < 1_000_000
    assert os.listdir(tmp_path / "sub") == ["out"]


def test_a_damaged_blob_leaves_nothing(tmp_path: Path) -> None:
    make_source(tmp_path / "in")
    tree, read = packed(tmp_path / "in")

    def damaged(number: int, offset: int, length: int) -> bytes:
        data = bytearray(read(number, offset, length))
        if offset <= 20_000_000 < offset + length:
            data[20_000_000 - offset] ^= 1
        return bytes(data)

    with pytest.raises(CorruptError):
        extract(tree, damaged, tmp_path / "out/x")
    assert os.listdir(tmp_path / "out") == []
    (tmp_path / "in-place").mkdir()
    with pytest.raises(CorruptError):
        extract(tree, damaged, tmp_path / "in-place", in_place=True)
    assert os.listdir(tmp_path / "in-place") == []
    with pytest.raises(CorruptError):
        extract(tree, lambda *_: b"", tmp_path / "out/x")


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


def test_limits_and_devices(tmp_path: Path) -> None:
    tree = build_tree([(b"null", 1)], [DIR, Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3))], [])
    with pytest.raises(PermissionDeniedError, match="null"):
        extract(tree, unused, tmp_path / "out")
    with pytest.raises(InvalidInputError, match="names"):
        extract(tree, unused, tmp_path / "out", max_files=0)
    if os.geteuid():
        pytest.skip("making device nodes needs root")
    extract(tree, unused, tmp_path / "out", allow_devices=True)
    assert (tmp_path / "out/null").lstat().st_rdev == os.makedev(1, 3)
