"""Parts of files by bisection, against a look at every extent."""

import stat

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.parts import FileParts
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.prefetch.bundle.bundle_accuracy import accuracy_of
from bootseer.prefetch.record.hints import Hint, trace_of
from bootseer.prefetch.record.hotset import HotRange, HotSet, stream_ranges
from testbed.bounded import run_bounded

DIGEST = "sha256:" + "1" * 64


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_against_all_extents(gaps: list[tuple[int, int]], start: int, end: int) -> None:
    extents = []
    position = 0
    for gap, length in gaps:
        extents.append(Extent(position + gap, 0, 100 + position, length))
        position += gap + length
    expected = []
    for one in extents:
        first, last = max(start, one.file_offset), min(end, one.file_offset + one.length)
        if first < last:
            shift = one.blob_offset - one.file_offset
            expected.append(Extent(first, 0, first + shift, last - first))
    assert list(FileParts(lambda inode: extents).within(1, start, end)) == expected


def in_pieces(count: int) -> Tree:
    extents = tuple(Extent(8192 * n, 0, 4096 * n, 4096) for n in range(count))
    blob = Blob(DIGEST, 0, (), DIGEST, 4096 * count)
    file = Inode(stat.S_IFREG | 0o644, size_bytes=8192 * count, extents=extents)
    return build_tree([(b"f", 1)], [Inode(stat.S_IFDIR | 0o755), file], [blob])


def test_many_ranges_of_a_file_in_many_pieces() -> None:
    count = 50_000
    tree = in_pieces(count)
    ranges = [(8192 * n, 4096) for n in range(0, count, 2)]

    def looked_up() -> None:
        hot = HotSet(DIGEST, "w", 1, tuple(HotRange(b"f", b"", *one, 1) for one in ranges))
        assert len(list(stream_ranges(hot, tree))) == len(ranges)
        entries = [(1, offset, length, 0) for offset, length in ranges]
        aim = accuracy_of(None, [4096 * count], entries, lambda inode: tree.inode(inode).extents)
        assert aim.asked_bytes == 4096 * len(ranges)
        hints = [Hint(b"f", *one) for one in ranges]
        found = trace_of(hints, tree, index_digest=DIGEST, workload="w", node="n", started_ns=0)
        assert len(found.trace.accesses) == len(ranges)

    assert run_bounded(looked_up, cpu_s=20)
