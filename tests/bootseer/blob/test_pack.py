"""Packing real directories: the same bytes from any number of threads, readable by zstd and tar."""

import os
import subprocess
from pathlib import Path

import pytest

from bootseer.blob import index
from bootseer.blob.read import BlobReader, verify
from bootseer.errors import NotFoundError
from testbed.needs import MissingError
from tests.bootseer.blob.trees import packed, reader_of


def make_files(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/small").write_bytes(b"hello")
    (root / "d/e/large").write_bytes(os.urandom(300_000) + bytes(300_001))
    (root / "empty").write_bytes(b"")
    os.link(root / "d/small", root / "d/link")
    (root / "sym").symlink_to("d/small")


def test_same_bytes_with_any_number_of_threads_and_readable_by_everybody(tmp_path: Path) -> None:
    make_files(tmp_path / "in")
    tree, blob = packed(tmp_path / "in", threads=1)
    assert packed(tmp_path / "in", threads=4)[1] == blob
    assert tree.blobs[0].size_bytes == len(blob)

    def read(number: int, offset: int, length: int) -> bytes:
        assert number == 0
        return blob[offset : offset + length]

    tree = index.decode(index.encode(tree))
    verify(tree, read)
    reader = BlobReader(tree, read)
    large = tree.resolve(b"d/e/large")
    assert large is not None
    expected = (tmp_path / "in/d/e/large").read_bytes()
    assert reader.read(large, 0, 10**6) == expected
    assert reader.read(large, 131_000, 200) == expected[131_000:131_200]
    assert reader.read(large, 10**6, 5) == b""
    assert tree.resolve(b"d/link") == tree.resolve(b"d/small")

    (tmp_path / "blob.zst").write_bytes(blob)
    (tmp_path / "out").mkdir()
    tar = ["tar", "--use-compress-program=zstd", "-xf", str(tmp_path / "blob.zst")]
    subprocess.run(tar, cwd=tmp_path / "out", check=True, timeout=60)
    subprocess.run(["diff", "-r", tmp_path / "in", tmp_path / "out"], check=True, timeout=60)


def test_paths_choose_what_is_packed(tmp_path: Path) -> None:
    make_files(tmp_path)
    tree, _ = packed(tmp_path, paths=[b"d/e/large", b"empty"])
    assert [path for path, _ in tree.walk()] == [b"", b"d", b"d/e", b"d/e/large", b"empty"]
    with pytest.raises(NotFoundError, match="nothing"):
        packed(tmp_path, paths=[b"d/nothing"])
    with pytest.raises(NotFoundError, match="empty is not a directory"):
        packed(tmp_path, paths=[b"empty/x"])
    for path in (b"/etc", b"../x", b"d/../x", b"d//e"):
        with pytest.raises(NotFoundError, match="relative"):
            packed(tmp_path, paths=[path])
    with pytest.raises(NotFoundError, match="missing"):
        packed(tmp_path / "missing")


def test_a_file_from_after_2262_is_packed_as_of_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "later").write_bytes(b"x")
    os.utime(tmp_path / "later", ns=(0, 2**63 + 10**9))
    if (tmp_path / "later").stat().st_mtime_ns < 2**63:
        raise MissingError("this file system has no times after 2262")
    tree, blob = packed(tmp_path)
    number = tree.resolve(b"later")
    assert number is not None
    assert tree.inode(number).mtime_ns == 2**63 - 1
    assert "'later'" in caplog.text
    verify(index.decode(index.encode(tree)), reader_of(blob))
