"""File system of a tree, called directly: against a model, and cache hints for the kernel.

test_mount.py tests it through a real mount.
"""

import errno
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.fuse.kernel.operations import Caller
from bootseer.prefetch.reading.faults import Budget
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.serve.tree_fs import TreeFileSystem

STREAM = bytes(i * 13 % 253 + 1 for i in range(40_000))
DIGEST = "sha256:" + "0" * 64
BLOB = Blob(DIGEST, 100, (Frame(0, 100, 0, len(STREAM), b"f" * 32),), DIGEST, len(STREAM))
ME = Caller(0, 0, 1)
DIRECTORY = Inode(stat.S_IFDIR | 0o755)


class Memory(ImageBytes):
    """Streams in memory."""

    def __init__(self) -> None:
        pass

    def new_budget(self) -> Budget:
        return Budget(1)

    def read(
        self,
        blob: int,
        offset: int,
        length: int,
        *,
        reader: int = -1,
        end: int = 0,
        budget: Budget | None = None,
    ) -> bytes:
        assert blob == 0
        assert offset + length <= end <= len(STREAM)
        return STREAM[offset : offset + length]


def tree_of(*inodes: Inode) -> Tree:
    """Return a tree with a root and the files "0", "1", ..."""
    names = [(b"", 0), *((b"%d" % i, i + 1) for i in range(len(inodes)))]
    return build_tree(names, [DIRECTORY, *inodes], [BLOB])


@st.composite
def files(draw: st.DrawFn) -> Inode:
    """Draw a regular file with holes anywhere."""
    extents = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.sampled_from((0, 1, 512, 4096, 5000)))
        length = draw(st.integers(1, 6000))
        start = draw(st.integers(0, len(STREAM) - length))
        extents.append(Extent(position, 0, start, length))
        position += length
    size = position + draw(st.sampled_from((0, 0, 1, 9000)))
    return Inode(stat.S_IFREG | 0o644, size_bytes=size, extents=tuple(extents))


def content_of(inode: Inode) -> bytes:
    content = bytearray(inode.size_bytes)
    for extent in inode.extents:
        end = extent.file_offset + extent.length
        content[extent.file_offset : end] = STREAM[
            extent.blob_offset : extent.blob_offset + extent.length
        ]
    return bytes(content)


def read(fs: TreeFileSystem, node: int, offset: int, length: int) -> bytes:
    found = fs.read(ME, node, 0, offset, length)
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(found)
    return b"".join(found)


@settings(max_examples=150)
@given(files(), st.integers(0, 40_000), st.integers(1, 40_000))
def test_reads_against_a_model(inode: Inode, offset: int, length: int) -> None:
    accesses: list[tuple[int, int, int]] = []
    fs = TreeFileSystem(tree_of(inode), Memory(), on_access=lambda *a: accesses.append(a))
    expected = content_of(inode)[offset : offset + length]
    assert read(fs, 2, offset, length) == expected
    assert accesses == ([(1, offset, len(expected))] if expected else [])


@settings(max_examples=100)
@given(files(), st.integers(0, 30_000))
def test_holes_against_a_model(inode: Inode, offset: int) -> None:
    fs = TreeFileSystem(tree_of(inode), Memory())
    is_data = bytearray(inode.size_bytes)
    for extent in inode.extents:
        is_data[extent.file_offset : extent.file_offset + extent.length] = b"\1" * extent.length
    for whence, wanted in ((os.SEEK_DATA, 1), (os.SEEK_HOLE, 0)):
        expected = is_data.find(wanted, offset) if offset < inode.size_bytes else -1
        if expected < 0 and whence == os.SEEK_HOLE and offset < inode.size_bytes:
            expected = inode.size_bytes
        if expected < 0:
            with pytest.raises(OSError) as caught:
                fs.lseek(ME, 2, 0, offset, whence)
            assert caught.value.errno == errno.ENXIO
        else:
            assert fs.lseek(ME, 2, 0, offset, whence) == expected


def test_answers_may_be_kept_for_ever() -> None:
    fs = TreeFileSystem(tree_of(Inode(stat.S_IFREG | 0o644)), Memory())
    found, missing = fs.lookup(ME, 1, b"0"), fs.lookup(ME, 1, b"no")
    assert found.attributes is not None
    assert found.attributes.node == 2
    assert missing.attributes is None
    assert min(found.entry_ttl_s, found.attributes_ttl_s, missing.entry_ttl_s) > 86_400
    for call in (
        lambda: fs.open(ME, 2, 0),
        lambda: fs.opendir(ME, 1, 0),
        lambda: fs.getxattr(ME, 2, b"user.x"),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ENOSYS
    assert list(fs.listxattr(ME, 2)) == []


def test_xattrs_of_a_tree_that_has_some() -> None:
    with_one = Inode(stat.S_IFREG | 0o644, xattrs=((b"user.a", b"1"),))
    fs = TreeFileSystem(tree_of(with_one, Inode(stat.S_IFREG | 0o644)), Memory())
    assert fs.getxattr(ME, 2, b"user.a") == b"1"
    assert list(fs.listxattr(ME, 2)) == [b"user.a"]
    assert list(fs.listxattr(ME, 3)) == []
    with pytest.raises(OSError) as caught:
        fs.getxattr(ME, 3, b"user.a")
    assert caught.value.errno == errno.ENODATA


def test_a_large_directory_is_listed_whole_from_any_cookie() -> None:
    count = 2500
    fs = TreeFileSystem(tree_of(*[Inode(stat.S_IFREG | 0o644)] * count), Memory())
    names: list[bytes] = []
    cookie = 0
    while entries := fs.readdir(ME, 1, 0, cookie, plus=True):
        # As if only a few entries had fitted into the reply.
        for entry in entries[:700]:
            names.append(entry.name)
            assert entry.entry is not None
            assert entry.offset > 2
            cookie = entry.offset
    assert names == sorted(b"%d" % i for i in range(count))


def test_owner_and_unknown_nodes() -> None:
    inode = Inode(stat.S_IFREG | 0o644, uid=5, gid=6)
    assert TreeFileSystem(tree_of(inode), Memory()).getattr(ME, 2, None)[0].uid == 5
    fs = TreeFileSystem(tree_of(inode), Memory(), owner=(1000, 1001))
    attributes = fs.getattr(ME, 2, None)[0]
    assert (attributes.uid, attributes.gid) == (1000, 1001)
    for node in (0, 3):
        with pytest.raises(OSError) as caught:
            fs.getattr(ME, node, None)
        assert caught.value.errno == errno.ESTALE
