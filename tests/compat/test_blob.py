"""Files written by every released version stay readable. Never regenerate one: add the next."""

import stat
from pathlib import Path

import pytest

from bootseer.blob.extract.extraction import extract
from bootseer.blob.index import codec as index
from bootseer.blob.read import BlobReader, verify
from bootseer.errors import CorruptError

HERE = Path(__file__).parent
TEXT = b"The quick brown fox jumps over the lazy dog.\n" * 300


@pytest.mark.parametrize("version", [1])
def test_released_versions_of_blob_and_index(version: int, tmp_path: Path) -> None:
    blob = (HERE / f"blob-{version}.tar.zst").read_bytes()
    tree = index.decode((HERE / f"tree-{version}.index").read_bytes())

    def read(number: int, offset: int, length: int) -> bytes:
        assert number == 0
        return blob[offset : offset + length]

    verify(tree, read)
    assert [path for path, _ in tree.walk()] == [
        b"", b"directory", b"directory/file", b"hard-link", b"sparse", b"symlink", b"\xff",
    ]  # fmt: skip
    number = tree.resolve(b"directory/file")
    assert number is not None
    assert number == tree.resolve(b"hard-link")
    inode = tree.inode(number)
    assert inode.mode == stat.S_IFREG | 0o640
    assert (inode.uid, inode.gid) == (1000, 1000)
    assert inode.mtime_ns == 1_700_000_000_123_456_789
    assert inode.xattrs == ((b"user.origin", b"Bootseer 0.1.0"),)
    assert BlobReader(tree, read).read(number, 0, 10**6) == TEXT
    sparse = tree.inode(tree.resolve(b"sparse") or 0)
    assert (sparse.size_bytes, len(sparse.extents)) == (100_000, 1)
    assert tree.inode(tree.resolve(b"symlink") or 0).link_target == b"directory/file"
    extract(tree, read, tmp_path / "out", owners=False)
    assert (tmp_path / "out/sparse").read_bytes() == b"A" * 4096 + bytes(95_904)


def test_a_fixture_that_has_been_damaged_is_noticed() -> None:
    data = bytearray((HERE / "tree-1.index").read_bytes())
    data[-1] ^= 1
    with pytest.raises(CorruptError):
        index.decode(bytes(data))
