"""Lookups in the tree model against a plain dict, and trees that are refused."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.errors import InvalidInputError

DIR = Inode(stat.S_IFDIR | 0o755)
FILE = Inode(stat.S_IFREG | 0o644)
DIGEST = "sha256:" + "0" * 64
BLOB = Blob(DIGEST, 100, [Frame(0, 50, 0, 1000, bytes(32))], DIGEST, 1000)


def small() -> Tree:
    names = [(b"", 0), (b"b", 1), (b"a", 2), (b"b/z", 3), (b"b/a", 2), (b"b/c", 4), (b"b/c/d", 5)]
    link = Inode(stat.S_IFLNK | 0o777, link_target=b"../a")
    return build_tree(names, [DIR, DIR, FILE, link, DIR, FILE], [BLOB])


def test_walk_goes_parents_first_and_siblings_sorted() -> None:
    assert [path for path, _ in small().walk()] == [
        b"", b"a", b"b", b"b/a", b"b/c", b"b/c/d", b"b/z",
    ]  # fmt: skip


def test_lookup_resolve_parent_path_and_link_count() -> None:
    tree = small()
    assert tree.lookup(0, b"a") == 2
    assert tree.lookup(0, b"zz") is None
    assert tree.lookup(2, b"x") is None
    assert tree.resolve(b"b/c/d") == 5
    assert tree.resolve(b"") == 0
    assert tree.resolve(b"a/b") is None
    assert tree.parent(4) == 1
    assert tree.parent(1) == 0
    assert tree.parent(0) == 0
    assert tree.path(5) == b"b/c/d"
    assert tree.path(0) == b""
    assert tree.link_count(2) == 2
    assert tree.link_count(1) == 3
    assert tree.link_count(5) == 1
    assert [name.name for name in tree.children(1)] == [b"a", b"c", b"z"]
    assert tree.children(2) == []
    assert tree.inode(3).link_target == b"../a"
    with pytest.raises(IndexError):
        tree.inode(6)


def test_large_directories_are_searched_without_a_dict() -> None:
    names = [(b"%05d" % i, i + 1) for i in range(9000)]
    tree = build_tree(names, [DIR] + [FILE] * 9000, [])
    assert tree.lookup(0, b"08999") == 9000
    assert tree.lookup(0, b"09000") is None
    assert [name.name for name in tree.children(0, 8998, 5)] == [b"08998", b"08999"]
    assert [name.inode for name in tree.children(0, 3, 2)] == [4, 5]
    assert tree.children(0, 9000, 5) == []


@pytest.mark.parametrize(
    ("names", "inodes"),
    [
        ([(b"a/b", 1)], [DIR, FILE]),
        ([(b"a", 1), (b"a/b", 2)], [DIR, FILE, FILE]),
        ([(b"a", 1), (b"b", 1)], [DIR, DIR]),
        ([(b"a", 0)], [DIR]),
        ([(b"a", 1)], [DIR]),
        ([], [DIR, FILE]),
        ([], [FILE]),
        ([], []),
        ([(b"..", 1)], [DIR, FILE]),
        ([(b".", 1)], [DIR, FILE]),
        ([(b"a\0b", 1)], [DIR, FILE]),
        ([(b"a/", 1)], [DIR, FILE]),
        ([(b"/a", 1)], [DIR, FILE]),
        ([(b"a" * 256, 1)], [DIR, FILE]),
        ([(b"a", 1), (b"a", 1)], [DIR, FILE]),
        ([(b"a", 1)], [DIR, Inode(0o644)]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, uid=-1)]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, mtime_ns=2**63)]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, size_bytes=2**63)]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFLNK)]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, link_target=b"x")]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, xattrs=((b"b", b""), (b"a", b"")))]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, size_bytes=9, extents=(Extent(0, 0, 995, 9),))]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, size_bytes=8, extents=(Extent(0, 0, 0, 9),))]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFREG, size_bytes=9, extents=(Extent(0, 1, 0, 9),))]),
        ([(b"a", 1)], [DIR, Inode(stat.S_IFIFO, size_bytes=9, extents=(Extent(0, 0, 0, 9),))]),
    ],
)  # fmt: skip
def test_what_no_file_system_could_hold_is_refused(
    names: list[tuple[bytes, int]], inodes: list[Inode]
) -> None:
    with pytest.raises(InvalidInputError):
        build_tree(names, inodes, [BLOB])


def test_frames_must_follow_one_another() -> None:
    for frames, size in (
        ([Frame(1, 5, 0, 10, bytes(32))], 100),
        ([Frame(0, 5, 0, 10, bytes(32)), Frame(5, 5, 11, 10, bytes(32))], 100),
        ([Frame(0, 5, 0, 10, bytes(31))], 100),
        ([Frame(0, 5, 0, 10, bytes(32))], 4),
    ):
        with pytest.raises(InvalidInputError):
            build_tree([], [DIR], [Blob(DIGEST, size, frames, DIGEST, 10)])
    for digest, stream_digest in (("md5:" + "0" * 64, DIGEST), (DIGEST, "sha256:0")):
        with pytest.raises(InvalidInputError):
            build_tree([], [DIR], [Blob(digest, 100, [], stream_digest, 0)])
    with pytest.raises(InvalidInputError, match="do not make up its stream"):
        build_tree([], [DIR], [Blob(DIGEST, 100, BLOB.frames, DIGEST, 1001)])


def test_a_stream_that_is_stored_nowhere_has_no_frames() -> None:
    inode = Inode(stat.S_IFREG | 0o644, size_bytes=5, extents=(Extent(0, 0, 512, 5),))
    tree = build_tree([(b"f", 1)], [DIR, inode], [Blob(DIGEST, 0, (), DIGEST, 1024)])
    assert tree.blobs[0].stream_length == 1024
    with pytest.raises(InvalidInputError):
        build_tree([(b"f", 1)], [DIR, inode], [Blob(DIGEST, 0, (), DIGEST, 512)])


part = st.binary(min_size=1, max_size=4).filter(
    lambda b: b not in (b".", b"..") and b"/" not in b and b"\0" not in b
)


@given(st.sets(st.lists(part, min_size=1, max_size=4).map(tuple), max_size=20))
def test_lookups_agree_with_a_dict(paths: set[tuple[bytes, ...]]) -> None:
    everything = {p[:i] for p in paths for i in range(1, len(p) + 1)}
    inner = {p[:-1] for p in everything}
    model = {b"/".join(p): i for i, p in enumerate(sorted(everything, reverse=True), start=1)}
    inodes = [DIR] + [DIR if p in inner else FILE for p in sorted(everything, reverse=True)]
    tree = build_tree(model.items(), inodes, [])
    assert dict(tree.walk()) == model | {b"": 0}
    for path, number in model.items():
        assert tree.resolve(path) == number
        assert tree.path(number) == path
        assert tree.resolve(path + b"x") == model.get(path + b"x")
