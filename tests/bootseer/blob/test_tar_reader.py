"""Tar archives that are odd, hostile or broken."""

import io
import os
import stat
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.pack.packing import pack_tar
from bootseer.blob.read import BlobReader, verify
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, UnsupportedError
from testbed.images.odd_tars import pax
from tests.bootseer.blob.trees import reader_of


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: object
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    for key, value in more.items():
        setattr(info, key, value)
    return info


def archive(*entries: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], gnu: bool = False) -> bytes:
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.GNU_FORMAT if gnu else tarfile.PAX_FORMAT
    ) as tar:
        for item in entries:
            info, content = item if isinstance(item, tuple) else (item, b"")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tree_of(data: bytes) -> Tree:
    sink = io.BytesIO()
    tree = pack_tar(io.BytesIO(data), sink, threads=1)
    verify(tree, reader_of(sink.getvalue()))
    return tree


def content_of(data: bytes, path: bytes) -> bytes:
    sink = io.BytesIO()
    tree = pack_tar(io.BytesIO(data), sink, threads=1)
    number = tree.resolve(path)
    assert number is not None
    return BlobReader(tree, reader_of(sink.getvalue())).read(number, 0, 10**9)


def test_a_later_member_replaces_an_earlier_one() -> None:
    data = archive(
        (entry("a"), b"old"), (entry("a"), b"newer"), entry("d/x"), entry("d", tarfile.SYMTYPE, "a")
    )
    assert content_of(data, b"a") == b"newer"
    assert [path for path, _ in tree_of(data).walk()] == [b"", b"a", b"d"]
    assert tree_of(data).inode_count == 3


def test_parents_that_are_not_mentioned_and_directories_that_come_late() -> None:
    tree = tree_of(archive(entry("x/y/z"), entry("x", tarfile.DIRTYPE, mode=0o700)))
    number = tree.resolve(b"x")
    assert number is not None
    assert tree.inode(number).mode == stat.S_IFDIR | 0o700
    assert tree.resolve(b"x/y/z") is not None


def test_names_are_made_relative_and_whiteouts_kept() -> None:
    tree = tree_of(archive(entry("/abs"), entry("./dot//x"),
                           entry("./", tarfile.DIRTYPE, mode=0o711), entry("dot/.wh.y"),
                           entry("dot/.wh..wh..opq")))  # fmt: skip
    assert [path for path, _ in tree.walk()] == [
        b"", b"abs", b"dot", b"dot/.wh..wh..opq", b"dot/.wh.y", b"dot/x",
    ]  # fmt: skip
    assert tree.inode(0).mode == stat.S_IFDIR | 0o711


def test_paths_lead_through_symbolic_links_inside_the_root() -> None:
    tree = tree_of(archive(entry("lib", tarfile.SYMTYPE, "../../usr/lib"), entry("lib/x"),
                           entry("abs", tarfile.SYMTYPE, "/usr"), entry("abs/lib/y")))  # fmt: skip
    assert tree.resolve(b"usr/lib/x") is not None
    assert tree.resolve(b"usr/lib/y") is not None


@pytest.mark.parametrize("name", ["a", "\u00e9", "\u00ff" * 45])
@pytest.mark.parametrize("off", [1, 256, 65521, -65521])
def test_a_header_checksum_that_is_off_is_refused(name: str, off: int) -> None:
    data = archive(entry(name), gnu=True)
    tree_of(data)
    digits = b"%06o" % ((int(data[148:154], 8) + off) % 8**6)
    with pytest.raises(CorruptError, match="checksum"):
        tree_of(data[:148] + digits + data[154:])


def test_hard_links() -> None:
    data = archive((entry("a"), b"1"), entry("b", tarfile.LNKTYPE, "./a"),
                   entry("c", tarfile.LNKTYPE, "b"), (entry("a"), b"2"))  # fmt: skip
    tree = tree_of(data)
    assert tree.resolve(b"b") == tree.resolve(b"c") != tree.resolve(b"a")
    assert content_of(data, b"c") == b"1"
    assert content_of(data, b"a") == b"2"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"x" * 512, "checksum"),
        (b"x" * 100, "cut off"),
        (archive(entry("../x")), r"\.\."),
        (archive(entry("a/../x")), r"\.\."),
        (archive(entry("b", tarfile.LNKTYPE, "a"), entry("a")), "precedes"),
        (archive(entry("b", tarfile.LNKTYPE, "missing")), "precedes"),
        (archive(entry("d", tarfile.DIRTYPE), entry("b", tarfile.LNKTYPE, "d")), "precedes"),
        (archive(entry("a"), entry("a/b")), "a file"),
        (archive(entry("a", tarfile.SYMTYPE, "a"), entry("a/b")), "too many links"),
        (archive(entry("a", tarfile.SYMTYPE, "")), "symbolic link"),
        (archive(entry(".", tarfile.SYMTYPE, "x")), "root"),
        (archive(entry("n" * 256)), "255"),
        (archive((entry("a"), bytes(10_000)))[:5000], "cut off"),
        (archive(entry("a", uid=2**32)), "owner"),
        (archive(entry("a", pax_headers={"size": "-5"})), "number"),
        (archive(entry("a", pax_headers={"mtime": "1e9"})), "number"),
        (archive(entry("a", pax_headers={"GNU.sparse.map": "5,1,2,1", "GNU.sparse.size": "9"})),
         "sparse"),
        (archive(entry("a", pax_headers={"GNU.sparse.map": "1", "GNU.sparse.size": "9"})),
         "sparse"),
        (archive((entry("a", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
                  "GNU.sparse.realsize": "9"}), b"9999999999999999999\n" + bytes(492))),
         "sparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        tree_of(data)


def hostile_map(text: bytes) -> bytes:
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    return archive((entry("a", pax_headers=records), text))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # Three headers of 6 MiB for one member.
        (pax({b"comment": b"x" * 6_000_000}) * 3, "too long"),
        (archive(entry("d/" * 3000)), "longer than 4096"),
        (archive(entry("l", b"2", pax_headers={"linkpath": "x" * 5000})), "longer than 4096"),
        # Each block of the archive was once searched for line ends again and again.
        (hostile_map(b"1" * 8_000_000), "sparse map"),
        (hostile_map(b"300000\n" + b"1\n" * 600_000), "too long"),
        (hostile_map(b"1000\n" + b"1" * 2_000_000), "sparse map"),
        (archive(entry("a", pax_headers={"GNU.sparse.map": "1,1," * 300_000 + "1,1",
                                         "GNU.sparse.size": "9"})), "too long"),
    ],
    ids=["headers", "path", "link", "map", "count", "cut", "pax map"],
)  # fmt: skip
def test_what_would_fill_memory_or_time(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        tree_of(data)


def test_links_through_many_folders_end() -> None:
    chain = [entry(f"l{n}", b"2", link=f"l{n + 1}/" + "x/../" * 500) for n in range(30)]
    with pytest.raises(CorruptError, match="too many links"):
        tree_of(archive(*chain, entry("l30/", b"5"), entry("l30/x/", b"5"), entry("l0/file")))


def test_multi_volume_archives_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="volumes"):
        tree_of(archive(entry("a", b"M")))


def test_times_numbers_and_global_headers() -> None:
    data = archive(
        entry("a", mtime=-1.5), entry("b", pax_headers={"mtime": "1.0000000019"}),
        entry("c", mtime=-62135596800), entry("d", uid=2**31, gid=2**22),
    )  # fmt: skip
    tree = tree_of(data)
    times = [tree.inode(tree.resolve(name) or 0).mtime_ns for name in (b"a", b"b", b"c")]
    assert times == [-1_500_000_000, 1_000_000_001, 0]
    gnu = archive(entry("d", uid=2**31, mtime=-3), gnu=True)
    inode = tree_of(gnu).inode(1)
    assert (inode.uid, inode.mtime_ns) == (2**31, -3_000_000_000)
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"uid": "77", "mtime": "5.5"}
    ) as tar:
        tar.addfile(entry("x"))
        tar.addfile(entry("y", pax_headers={"uid": "78"}))
    tree = tree_of(out.getvalue())
    # Container engines ignore them.
    assert [tree.inode(n).uid for n in (1, 2)] == [0, 78]
    assert tree.inode(2).mtime_ns == 0


def test_labels_and_unknown_types() -> None:
    tree = tree_of(archive(entry("label", b"V"), (entry("odd", b"Z"), b"content"), entry("last")))
    assert [path for path, _ in tree.walk()] == [b"", b"last", b"odd"]


def test_a_short_reading_stream_and_trailing_bytes() -> None:
    data = archive((entry("a"), os.urandom(200_000)), (entry("b"), b"b")) + b"trailing"

    class Dribble(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 777))

    sink = io.BytesIO()
    tree = pack_tar(Dribble(data), sink)
    other = io.BytesIO()
    pack_tar(io.BytesIO(data), other, threads=3)
    assert sink.getvalue() == other.getvalue()
    assert tree.blobs[0].stream_length == len(data)


SEED = archive(
    (entry("dir/a", pax_headers={"SCHILY.xattr.user.x": "y"}), b"content" * 99),
    entry("l", tarfile.SYMTYPE, "n" * 120),
    entry("h", tarfile.LNKTYPE, "dir/a"),
)


def flip(data: bytes, position: int, value: int) -> bytes:
    return data[:position] + bytes([data[position] ^ value]) + data[position + 1 :]


def cut(data: bytes, position: int, value: int) -> bytes:
    return data[:position]


@settings(max_examples=150)
@given(st.sampled_from([flip, cut]), st.integers(0, len(SEED) - 1), st.integers(1, 255))
def test_damage_is_an_error_of_ours_or_a_valid_tree(
    damage: Callable[[bytes, int, int], bytes], position: int, value: int
) -> None:
    try:
        tree_of(damage(SEED, position, value))
    except BootseerError:
        pass


def test_an_archive_may_end_without_the_blocks_that_end_it() -> None:
    """`umoci insert` also leaves out the last padding; GNU tar and containerd read both."""
    whole = archive(entry("d", tarfile.DIRTYPE), (entry("d/x"), b"hello"))
    assert whole[1024:1029] == b"hello"
    for end in (1029, 1030, 1536):
        assert [path for path, _ in tree_of(whole[:end]).walk()] == [b"", b"d", b"d/x"]
        assert content_of(whole[:end], b"d/x") == b"hello"
    assert [path for path, _ in tree_of(whole[:512]).walk()] == [b"", b"d"]


def test_what_is_cut_off_is_named() -> None:
    whole = archive(entry("d", tarfile.DIRTYPE), (entry("d/\u00e9"), b"hello" * 1000), gnu=True)
    for end in (1024, 1030, 3000, 1024 + 4999):
        with pytest.raises(CorruptError, match=r"cut off at byte \d+ in 'd/\u00e9'"):
            tree_of(whole[:end])
    with pytest.raises(CorruptError, match=r"cut off at byte 700"):
        tree_of(whole[:700])


def test_a_message_shows_names_as_text() -> None:
    with pytest.raises(CorruptError, match=r"holds '\.\./\\n\u00e9\\xff': "):
        tree_of(archive(entry("../\n\u00e9\udcff"), gnu=True))
