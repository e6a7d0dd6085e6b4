"""Ranges of files in many pieces, against a comparison with every extent."""

import stat

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.prefetch.record.hotset import HotRange, HotSet, stream_ranges
from testbed.bounded import run_bounded

DIGEST = "sha256:" + "1" * 64


def tree_of(extents: list[Extent], stream_bytes: int) -> Tree:
    blob = Blob(DIGEST, 0, (), DIGEST, stream_bytes)
    size_bytes = extents[-1].file_offset + extents[-1].length if extents else 0
    file = Inode(stat.S_IFREG | 0o644, size_bytes=size_bytes, extents=tuple(extents))
    return build_tree([(b"f", 1)], [Inode(stat.S_IFDIR | 0o755), file], [blob])


def hot_set(*ranges: tuple[int, int]) -> HotSet:
    return HotSet(DIGEST, "w", 1, tuple(HotRange(b"f", b"", *one, 1) for one in ranges))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_against_all_extents(gaps: list[tuple[int, int]], start: int, length: int) -> None:
    extents = []
    position = 0
    for gap, size in gaps:
        extents.append(Extent(position + gap, 0, 100 + position, size))
        position += gap + size
    expected = []
    for one in extents:
        first = max(start, one.file_offset)
        last = min(start + length, one.file_offset + one.length)
        if first < last:
            expected.append((0, first + one.blob_offset - one.file_offset, last - first))
    tree = tree_of(extents, 1000)
    assert list(stream_ranges(hot_set((start, length)), tree)) == expected


def test_many_ranges_of_a_file_in_many_pieces() -> None:
    count = 50_000
    tree = tree_of([Extent(8192 * n, 0, 4096 * n, 4096) for n in range(count)], 4096 * count)
    ranges = [(8192 * n, 4096) for n in range(0, count, 2)]

    def looked_up() -> None:
        assert len(list(stream_ranges(hot_set(*ranges), tree))) == len(ranges)

    assert run_bounded(looked_up, cpu_s=20)
