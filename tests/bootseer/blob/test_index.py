"""The index codec: encoding and decoding are inverse, and damaged or hostile input is refused."""

import hashlib
import stat
import struct
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.blob import index
from bootseer.blob.build import build_tree
from bootseer.blob.read import verify
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.errors import BootseerError, CorruptError, UnknownFormatError
from testbed.bounded import run_bounded
from tests.support.images.forged_index import DEPTH_MAX, SECTIONS, Sections, forge, sections_of

DIR = Inode(stat.S_IFDIR | 0o755)


def sample() -> Tree:
    blobs = [
        Blob(
            "sha256:" + "ab" * 32, 100,
            [Frame(0, 50, 0, 1000, b"f" * 32), Frame(50, 9, 1000, 7, b"g" * 32)],
            "sha256:" + "12" * 32, 1007,
        ),
        Blob("sha256:" + "cd" * 32, 0, [], "sha256:" + "cd" * 32, 9),
    ]  # fmt: skip
    inodes = [
        DIR,
        Inode(stat.S_IFDIR | 0o700, 1, 2, -5, xattrs=((b"user.a", b"\0=\n"), (b"user.b", b""))),
        Inode(
            stat.S_IFREG | 0o644, 2**32 - 1, 0, 2**62, 5000, 0, b"", (),
            (Extent(0, 0, 0, 10), Extent(4990, 0, 990, 10)), b"d" * 32,
        ),
        Inode(stat.S_IFLNK | 0o777, size_bytes=3, link_target=b"a/b"),
        Inode(stat.S_IFCHR | 0o600, rdev=259),
        Inode(stat.S_IFREG, digest=content_digest(b"")),
    ]  # fmt: skip
    names = [(b"d", 1), (b"d/f", 2), (b"z", 2), (b"s", 3), (b"d/c", 4), (b"\xff", 5)]
    return build_tree(names, inodes, blobs)


def everything(tree: Tree) -> object:
    return (
        list(tree.walk()),
        [tree.inode(n) for n in range(tree.inode_count)],
        [
            (b.digest, b.size_bytes, list(b.frames), b.stream_digest, b.stream_length)
            for b in tree.blobs
        ],
    )


def test_a_tree_survives_encoding() -> None:
    tree = sample()
    data = index.encode(tree)
    assert everything(index.decode(data)) == everything(tree)
    assert index.encode(index.decode(data)) == data
    assert index.digest(data) == f"sha256:{hashlib.sha256(data).hexdigest()}"
    empty = build_tree([], [DIR], [])
    assert everything(index.decode(index.encode(empty))) == everything(empty)


def test_any_flipped_byte_and_any_truncation_is_noticed() -> None:
    data = index.encode(sample())
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 + position % 255
        with pytest.raises((CorruptError, UnknownFormatError)):
            index.decode(bytes(damaged))
        with pytest.raises((CorruptError, UnknownFormatError)):
            index.decode(data[:position])
    with pytest.raises(CorruptError):
        index.decode(data + b"x")


def test_other_files_and_later_versions_are_named_as_such() -> None:
    data = index.encode(sample())
    with pytest.raises(UnknownFormatError, match="not a tree index"):
        index.decode(b"something else entirely")
    with pytest.raises(UnknownFormatError, match="version 2"):
        index.decode(data[:8] + b"\x02\x00" + data[10:])


def set_number(section: str, position: int, value: int) -> Callable[[Sections], None]:
    def change(sections: Sections) -> None:
        column = array(SECTIONS[section], sections[section])
        column[position] = value
        sections[section] = column.tobytes()

    return change


def set_bytes(section: str, old: bytes, new: bytes) -> Callable[[Sections], None]:
    def change(sections: Sections) -> None:
        assert old in sections[section]
        sections[section] = sections[section].replace(old, new, 1)

    return change


# Names in (parent, name) order: d, s, z, \xff in the root; c, f in d.
HOSTILE = {
    "size of a blob without frames": set_number("blob_size_bytes", 1, 9),
    "own digest of a blob without frames": set_bytes("blob_digests", b"\xcd", b"\xce"),
    "name with a slash": set_bytes("names", b"f\0", b"/\0"),
    "dot": set_bytes("names", b"f\0", b".\0"),
    "dot dot": set_bytes("names", b"d\0", b"..\0"),
    "empty name": set_bytes("names", b"f\0", b"\0"),
    "no final NUL": set_bytes("names", b"c\0f\0", b"c\0f"),
    "one name more": set_bytes("names", b"f\0", b"f\0g\0"),
    "long name": set_bytes("names", b"f\0", b"f" * 256 + b"\0"),
    "duplicate name": set_bytes("names", b"s\0", b"d\0"),
    "unsorted": set_bytes("names", b"c\0f\0", b"f\0c\0"),
    "parent is a file": set_number("name_parent", 5, 2),
    "parent is nowhere": set_number("name_parent", 5, 99),
    "directory within itself": set_number("name_parent", 0, 1),
    "inode is nowhere": set_number("name_inode", 5, 99),
    "root named": set_number("name_inode", 5, 0),
    "directory with two names": set_number("name_inode", 1, 1),
    "inode without a name": set_number("name_inode", 3, 2),
    "root is a file": set_number("mode", 0, stat.S_IFREG),
    "no file type": set_number("mode", 2, 0o644),
    "bits above the type": set_number("mode", 2, stat.S_IFREG | 0x10000),
    "column cut off": set_bytes("uid", b"\0\0\0\0", b""),
    "huge file": set_number("size_bytes", 2, 2**63),
    "extent beyond the file": set_number("extent_length", 1, 11),
    "empty extent": set_number("extent_length", 1, 0),
    "extents overlap": set_number("extent_file_offset", 1, 9),
    "extent of no blob": set_number("extent_blob", 1, 2),
    "extent in an empty blob": set_number("extent_blob", 1, 1),
    "extent beyond the stream": set_number("extent_blob_offset", 1, 998),
    "extent far beyond the stream": set_number("extent_blob_offset", 1, 2**64 - 1),
    "extent counts": set_number("extent_count", 2, 3),
    "content of a directory": set_number("extent_count", 1, 2),
    "link to nowhere": set_number("link", 3, 2),
    "link of a file": set_number("link", 2, 1),
    "no link": set_number("link", 3, 0),
    "empty link": set_bytes("links", b"a/b", b""),
    "long link": set_bytes("links", b"a/b", b"x" * 4096),
    "xattr nowhere": set_number("xattr", 1, 2),
    "xattrs unsorted": set_bytes("xattrs", b"user.a", b"user.c"),
    "xattrs cut off": set_bytes("xattrs", b"user.b", b"user."),
    "xattr name with NUL": set_bytes("xattrs", b"user.a", b"use\0.a"),
    "digest nowhere": set_number("digest", 2, 3),
    "digests cut off": set_bytes("digests", b"ddd", b""),
    "blob digests cut off": set_bytes("blob_digests", b"\xab", b""),
    "frame digests cut off": set_bytes("frame_digests", b"f", b""),
    "empty frame": set_number("frame_length", 0, 0),
    "huge frame": set_number("frame_stream_length", 0, 2**31),
    "frames beyond the blob": set_number("frame_length", 1, 51),
    "frame counts": set_number("blob_frame_count", 0, 3),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_contents_are_refused(what: str) -> None:
    tree = sample()
    sections = sections_of(tree)
    assert everything(index.decode(forge(sections, 6, 6))) == everything(tree)
    HOSTILE[what](sections)
    with pytest.raises(CorruptError):
        index.decode(forge(sections, 6, 6)).validate()


def test_cycles_and_deep_nesting_are_refused() -> None:
    inodes = [DIR] * 3
    names = [(b"a", 1), (b"a/b", 2)]
    sections = sections_of(build_tree(names, inodes, []))
    sections["name_parent"] = array("I", [1, 2]).tobytes()
    sections["name_inode"] = array("I", [2, 1]).tobytes()
    with pytest.raises(CorruptError, match="one another"):
        index.decode(forge(sections, 3, 2))
    assert index.decode(nested(DEPTH_MAX)).inode_count == DEPTH_MAX + 1
    with pytest.raises(CorruptError, match="deep"):
        index.decode(nested(DEPTH_MAX + 1))


def nested(count: int) -> bytes:
    """Return the index of `count` directories, each in the one before."""
    sections = dict.fromkeys(SECTIONS, b"")
    for name in ("mode", "uid", "gid", "mtime_ns", "size_bytes", "rdev", "link", "xattr", "digest"):
        sections[name] = array(SECTIONS[name], [0] * (count + 1)).tobytes()
    sections["mode"] = array("I", [DIR.mode] * (count + 1)).tobytes()
    sections["extent_count"] = bytes(4 * (count + 1))
    sections["names"] = b"d\0" * count
    sections["name_parent"] = array("I", range(count)).tobytes()
    sections["name_inode"] = array("I", range(1, count + 1)).tobytes()
    return forge(sections, count + 1, count)


def test_absurd_counts_are_refused_before_anything_is_allocated() -> None:
    tree = sample()
    sections = sections_of(tree)
    for counts in ((2**32 - 1, 6), (6, 2**32 - 1), (0, 6)):
        with pytest.raises(CorruptError, match="counts"):
            index.decode(forge(sections, *counts))
    sections["names"] = bytes(2**20)
    data = forge(sections, 6, 6).replace(struct.pack("<Q", 2**20), struct.pack("<Q", 2**60))
    with pytest.raises(CorruptError):
        index.decode(data)


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(SECTIONS)),
    st.integers(0, 400),
    st.binary(max_size=9),
    st.sampled_from([0, 1]),
)
def test_no_contents_make_anything_but_our_errors(
    section: str, position: int, replacement: bytes, codec: int
) -> None:
    tree = sample()
    sections = sections_of(tree)
    raw = sections[section]
    position = min(position, len(raw))
    sections[section] = raw[:position] + replacement + raw[position + len(replacement) :]
    try:
        decoded = index.decode(forge(sections, 6, 6, codec))
        decoded.validate()
        everything(decoded)
        for number in range(decoded.inode_count):
            decoded.path(number)
            decoded.link_count(number)
    except BootseerError:
        pass


def expanding(section: str, count: int) -> bytes:
    """Return an index of one section of zeros, which expands to `count` bytes."""
    sections = sections_of(build_tree([], [DIR], []))
    sections[section] = bytes(count)
    return forge(sections, 1, index.COUNT_MAX if section == "names" else 0)


@pytest.mark.parametrize("section", ["names", "links", "xattrs", "digests", "frame_digests"])
def test_a_small_index_cannot_take_all_memory(section: str) -> None:
    data = expanding(section, 2**27)
    assert len(data) < 10_000

    def read() -> None:
        index.decode(data).validate()

    assert not run_bounded(read, (CorruptError,), memory_bytes=2**26)


@pytest.mark.parametrize("section", ["names", "links", "xattrs"])
def test_a_heap_of_nothing_makes_no_objects(section: str) -> None:
    # Within the limit of an index's expanded size, but each byte of it would be an object.
    sections = sections_of(sample())
    sections[section] = bytes(2**21)

    def read() -> None:
        index.decode(forge(sections, 6, 6)).validate()

    assert not run_bounded(read, (CorruptError,), memory_bytes=2**24)


def test_streams_beyond_all_measure_are_refused() -> None:
    blob = Blob("sha256:" + "0" * 64, 0, (), "sha256:" + "0" * 64, 2**63 - 1)
    with pytest.raises(CorruptError, match="stream"):
        index.decode(index.encode(build_tree([], [DIR], [blob])))
    blobs = [
        Blob(f"sha256:{n:064}", 0, (), f"sha256:{n:064}", index.STREAM_BYTES_MAX) for n in range(5)
    ]
    with pytest.raises(CorruptError, match="streams"):
        index.decode(index.encode(build_tree([], [DIR], blobs)))


def test_a_file_of_nothing_but_holes_is_not_hashed_for_ever() -> None:
    tree = build_tree(
        [(b"f", 1)], [DIR, Inode(stat.S_IFREG, size_bytes=2**62, digest=bytes(32))], []
    )
    with pytest.raises(CorruptError, match="holes"):
        verify(tree, lambda blob, offset, length: b"")


def test_the_regular_tree_of_a_million_files_expands_far_less_than_is_allowed() -> None:
    # Compresses better than any real one: equal attributes, counted names.
    files = 100_000
    names = [(b"", 0)] + [(b"f%07d" % n, n + 1) for n in range(files)]
    tree = build_tree(names, [DIR] + [Inode(stat.S_IFREG | 0o644)] * files, [])
    data = index.encode(tree)
    raw_bytes = sum(map(len, sections_of(tree).values()))
    assert 4 * raw_bytes < index.RATIO_MAX * len(data)
    assert index.decode(data).name_count == files
