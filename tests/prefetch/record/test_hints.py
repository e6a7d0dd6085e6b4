"""Lists of a start's reads, from other tools and for them."""

import json
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.errors import InvalidInputError
from bootseer.prefetch.record import hints as hint_lists
from bootseer.prefetch.record.hints import (
    ENDED,
    Hint,
    HintedTrace,
    find_file,
    parse,
    plain_lines,
    trace_of,
)
from bootseer.prefetch.record.hotset import merge_traces
from bootseer.prefetch.record.trace import Access, decode, encode
from testbed.bounded import run_bounded

INDEX = "sha256:" + "1" * 64
HUGE = 2**40


def link(target: bytes) -> Inode:
    return Inode(stat.S_IFLNK | 0o777, link_target=target)


def file(*extents: Extent, size: int) -> Inode:
    return Inode(0o100644, size_bytes=size, extents=extents, digest=b"%032d" % size)


DIRECTORY = Inode(0o40755)
NAMES = {
    b"usr": DIRECTORY,
    b"usr/lib": DIRECTORY,
    b"usr/lib/libc.so": file(Extent(0, 0, 512, 10_000), size=10_000),
    b"usr/lib/libc.so.6": link(b"libc.so"),
    b"lib": link(b"usr/lib"),
    b"abs": link(b"/lib/../lib/libc.so.6"),
    b"up": link(b"../../../usr/lib/libc.so"),
    b"loop": link(b"loop"),
    b"ping": link(b"pong"),
    b"pong": link(b"ping"),
    b"dangling": link(b"nowhere"),
    b"empty": file(size=0),
    b"sparse": file(Extent(HUGE - 100, 0, 20_480, 100), size=HUGE),
    b"with space 1 2": file(Extent(0, 0, 40_960, 5), size=5),
    b"vast": file(Extent(0, 1, 0, HUGE), size=HUGE),
}


def tree_of_names() -> Tree:
    blobs = [
        Blob("sha256:" + c * 64, 0, (), "sha256:" + c * 64, size)
        for c, size in (("a", 2**20), ("b", HUGE))
    ]
    names = [(path, number) for number, path in enumerate(NAMES, 1)]
    return build_tree(names, [DIRECTORY, *NAMES.values()], blobs)


TREE = tree_of_names()
LIBC = TREE.resolve(b"usr/lib/libc.so")


def hinted(text: bytes) -> HintedTrace:
    found = trace_of(parse(text), TREE, index_digest=INDEX, workload="w", node="n", started_ns=7)
    assert decode(encode(found.trace)) == found.trace
    return found


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (b"/usr/lib/libc.so", Hint(b"/usr/lib/libc.so")),
        (b"a 4096 10", Hint(b"a", 4096, 10)),
        (b"a\t4096\t10", Hint(b"a", 4096, 10)),
        (b"with space 1 2\t0\t5", Hint(b"with space 1 2", 0, 5)),
        (b"with space", Hint(b"with space")),
        (b"a b c", Hint(b"a b c")),
        (b"\xff\xfe\r", Hint(b"\xff\xfe")),
        (b'{"path":"a/b","manifestDigest":"sha256:x","layerIndex":2}', Hint(b"a/b")),
        (b'{"path":"a\\udcff"}', Hint(b"a\xff")),
    ],
)
def test_lines(line: bytes, hint: Hint) -> None:
    assert parse(line) == parse(b"\n" + line + b"\n\n") == [hint]


def test_comments_and_empty_lines_are_skipped() -> None:
    assert parse(b"# hot files\n\n  \na\n#b\n") == [Hint(b"a")]


@pytest.mark.parametrize(
    "text",
    [
        b"a\t1",
        b"a\t1\t2\t3",
        b"a\t-1\t2",
        b"a\t1\tx",
        b"a\t1\t" + b"9" * 19,
        b"a\t1\t" + b"9" * 5000,
        b'{"path":"a"}\nplain',
        b'{"path":7}',
        b'{"paths":"a"}',
        b'{"path":"a"}\n' + b"[" * 100_000,
        b" " * (64 * 2**20 + 1),
    ],
    ids=lambda text: str(text[:20]),
)
def test_what_is_no_list_says_so(text: bytes) -> None:
    with pytest.raises(InvalidInputError, match="list"):
        parse(text)


def test_too_many_lines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_lists, "ACCESS_COUNT_MAX", 3)
    assert len(parse(b"a\n" * 3)) == 3
    with pytest.raises(InvalidInputError, match="more than 3 lines"):
        parse(b"a\n" * 4)


@settings(max_examples=120)
@given(st.binary() | st.lists(st.binary(), max_size=5).map(b"\n".join) | st.just(b'{"'))
def test_noise_is_a_list_or_refused(noise: bytes) -> None:
    try:
        hinted(noise)
    except InvalidInputError:
        pass


@pytest.mark.parametrize(
    "path",
    [
        b"usr/lib/libc.so",
        b"/usr/lib/libc.so",
        b"./usr//lib/./libc.so",
        b"usr/lib/libc.so.6",
        b"lib/libc.so.6",
        b"abs",
        b"up",
        b"../../usr/lib/../lib/libc.so",
    ],
)
def test_paths_lead_through_links_inside_the_image(path: bytes) -> None:
    assert find_file(TREE, path) == LIBC


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"/",
        b"usr",
        b"nowhere",
        b"loop",
        b"ping",
        b"dangling",
        b"usr/lib/libc.so/x",
        b"a" * 9999,
        b"../etc/passwd",
        b"\0",
        b"usr/lib/libc.so\0",
    ],
    ids=lambda path: repr(path[:20]),
)
def test_what_is_no_file_of_the_image(path: bytes) -> None:
    assert find_file(TREE, path) is None
    assert hinted(b"usr/lib/libc.so\n" + path.replace(b"\0", b"\0x")).unknown_count <= 1


def test_a_list_becomes_a_trace_in_its_order() -> None:
    found = hinted(
        b"sparse\nempty\nabs\t4096\t100\nnowhere\nwith space 1 2\t0\t99\nabs\nlib/libc.so\n"
    )
    trace = found.trace
    assert [f.path for f in trace.files] == [b"sparse", b"usr/lib/libc.so", b"with space 1 2"]
    assert trace.accesses == (
        Access(0, HUGE - 100, 100, 0),
        Access(1, 4096, 100, 1),
        Access(2, 0, 5, 2),
        Access(1, 0, 10_000, 3),
    )
    assert (found.unknown_count, found.content_bytes) == (1, 10_205)
    assert (trace.ended, trace.started_ns) == (ENDED, 7)


def test_too_much_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="names more than 4 GiB"):
        hinted(b"vast")
    assert hinted(b"vast\t0\t4294967296").content_bytes == 2**32


def test_a_hot_set_is_printed_and_read_again() -> None:
    hot = merge_traces(INDEX, "w", [hinted(b"abs\nwith space 1 2\nsparse").trace])
    lines = b"".join(plain_lines((one.path, one.offset, one.length) for one in hot.ranges))
    assert lines.splitlines()[0] == b"/usr/lib/libc.so\t0\t12288"
    again = merge_traces(INDEX, "w", [hinted(lines).trace])
    assert again == hot
    odd = [(path, 0, 4096) for path in (b"a\nb", b"a\tb", b"#")]
    assert list(plain_lines(odd)) == [b"/#\t0\t4096\n"]
    assert parse(b"/#\t0\t4096\n") == [Hint(b"/#", 0, 4096)]


def test_records_of_estargz_are_read() -> None:
    entries = [
        {"path": "usr/lib/libc.so", "manifestDigest": INDEX, "layerIndex": 0},
        {"path": "gone", "manifestDigest": INDEX, "layerIndex": 1},
        {"path": "with space 1 2"},
    ]
    found = hinted("".join(json.dumps(entry) + "\n" for entry in entries).encode())
    assert [f.path for f in found.trace.files] == [b"usr/lib/libc.so", b"with space 1 2"]
    assert found.unknown_count == 1


def test_many_ranges_of_a_file_in_many_pieces() -> None:
    count = 50_000
    pieces = [Extent(8192 * n, 0, 4096 * n, 4096) for n in range(count)]
    blob = Blob(INDEX, 0, (), INDEX, 4096 * count)
    tree = build_tree([(b"f", 1)], [DIRECTORY, file(*pieces, size=8192 * count)], [blob])
    hints = [Hint(b"f", 8192 * n, 4096) for n in range(0, count, 2)]

    def looked_up() -> None:
        found = trace_of(hints, tree, index_digest=INDEX, workload="w", node="n", started_ns=0)
        assert len(found.trace.accesses) == len(hints)

    assert run_bounded(looked_up, cpu_s=20)
