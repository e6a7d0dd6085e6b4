"""Hot sets: merging of traces, and the stored result."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode
from bootseer.errors import BootseerError, CorruptError
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.hotset import (
    HotRange,
    HotSet,
    decode,
    encode,
    merge_traces,
    stream_ranges,
)
from bootseer.prefetch.record.trace import Access, Trace
from bootseer.prefetch.record.trace import encode as encode_trace
from testbed.bounded import run_bounded

INDEX = "sha256:" + "1" * 64
PAGE_BYTES = 4096
TOUCH_COUNT_MAX = 2**20
"""Number of pages of one trace that count."""
A, B, C = (TracedFile(name, name * 32) for name in (b"a", b"b", b"c"))
FILES = (A, B, C)


def trace_of(*accesses: tuple[TracedFile, int, int]) -> Trace:
    """Return a trace of accesses (file, first page, page count)."""
    return Trace(
        INDEX,
        "w",
        "n",
        0,
        "ready",
        65536,
        FILES,
        tuple(
            Access(FILES.index(file), page * PAGE_BYTES, count * PAGE_BYTES, i)
            for i, (file, page, count) in enumerate(accesses)
        ),
    )


def pages(hot: HotSet) -> list[tuple[bytes, int]]:
    return [
        (r.path, page)
        for r in hot.ranges
        for page in range(r.offset // PAGE_BYTES, (r.offset + r.length) // PAGE_BYTES)
    ]


def test_one_trace_keeps_its_order_and_joins_neighbours() -> None:
    hot = merge_traces(INDEX, "w", [trace_of((B, 4, 2), (B, 6, 1), (A, 0, 1), (B, 5, 3))])
    assert [(r.path, r.offset // PAGE_BYTES, r.length // PAGE_BYTES) for r in hot.ranges] == [
        (b"b", 4, 3),
        (b"a", 0, 1),
        (b"b", 7, 1),
    ]


def test_union_in_the_order_of_the_median() -> None:
    hot = merge_traces(INDEX, "w", [trace_of((A, 0, 1), (B, 0, 1)), trace_of((A, 0, 1), (C, 0, 1))])
    assert pages(hot) == [(b"a", 0), (b"b", 0), (b"c", 0)]


def test_what_one_of_three_touched_is_dropped() -> None:
    common = (A, 0, 2)
    hot = merge_traces(
        INDEX, "w", [trace_of(common), trace_of(common, (B, 0, 1)), trace_of(common)]
    )
    assert pages(hot) == [(b"a", 0), (b"a", 1)]
    assert hot.ranges[0].trace_count == 3


trace_lists = st.lists(
    st.lists(
        st.tuples(st.sampled_from(FILES), st.integers(0, 6), st.integers(1, 4)), max_size=8
    ).map(lambda accesses: trace_of(*accesses)),
    max_size=5,
)


@settings(max_examples=80)
@given(trace_lists, st.randoms(use_true_random=False))
def test_merge_against_a_model(traces: list[Trace], shuffle: random.Random) -> None:
    hot = merge_traces(INDEX, "w", traces)
    touched = [
        {
            (trace.files[a.file].path, page)
            for a in trace.accesses
            for page in range(a.offset // PAGE_BYTES, (a.offset + a.length) // PAGE_BYTES)
        }
        for trace in traces
    ]
    least = 2 if len(traces) >= 3 else 1
    every = set().union(*touched)
    assert len(pages(hot)) == len(set(pages(hot)))
    assert set(pages(hot)) == {page for page in every if sum(page in t for t in touched) >= least}
    shuffled = list(traces)
    shuffle.shuffle(shuffled)
    assert merge_traces(INDEX, "w", shuffled) == hot


@settings(max_examples=30)
@given(trace_lists)
def test_a_hot_set_survives_encoding(traces: list[Trace]) -> None:
    hot = merge_traces(INDEX, "w", traces)
    data = encode(hot)
    assert decode(data) == hot
    assert encode(hot) == data


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_hot_set_is_refused_or_harmless(data: st.DataObject) -> None:
    good = bytearray(encode(merge_traces(INDEX, "w", [trace_of((A, 0, 2), (B, 0, 1))])))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    try:
        hot = decode(bytes(good))
    except BootseerError:
        return
    assert all(r.offset >= 0 and r.length > 0 for r in hot.ranges)


def test_only_files_with_the_same_content_are_used() -> None:
    digest = "sha256:" + "0" * 64
    blob = Blob(digest, 100, (Frame(0, 100, 0, 1 << 20, b"f" * 32),), digest, 1 << 20)
    tree = build_tree(
        [(b"", 0), (b"a", 1), (b"b", 2)],
        [
            Inode(0o40755),
            Inode(
                0o100644,
                size_bytes=20000,
                extents=(Extent(0, 0, 512, 5000), Extent(8192, 0, 10240, 11808)),
                digest=A.digest,
            ),
            Inode(0o100644, size_bytes=10, extents=(Extent(0, 0, 40960, 10),), digest=b"x" * 32),
        ],
        [blob],
    )
    hot = HotSet(
        INDEX,
        "w",
        1,
        tuple(HotRange(file.path, file.digest, 4096, 4 * PAGE_BYTES, 1) for file in (A, B, C)),
    )
    # b has other content and c is gone; of a: the rest of the first extent, and all of the second.
    assert list(stream_ranges(hot, tree)) == [(0, 4608, 904), (0, 10240, 11808)]


def test_a_trace_costs_by_its_accesses_not_by_the_pages_that_it_claims() -> None:
    """Regression: an access of 2**62 bytes took seconds, and many overlapping ones would take
    days."""
    accesses = [Access(0, PAGE_BYTES * i, 2**61, i) for i in range(20_000)]
    accesses += [Access(1, PAGE_BYTES * 2 * i, PAGE_BYTES, i) for i in range(20_000)]
    trace = Trace(INDEX, "w", "n", 0, "ready", 0, FILES, tuple(accesses))

    def merged() -> None:
        hot = merge_traces(INDEX, "w", [trace] * 3)
        assert len(hot.ranges) == 1
        assert hot.ranges[0].length == TOUCH_COUNT_MAX * PAGE_BYTES

    assert run_bounded(merged, memory_bytes=2**26, cpu_s=5)


@settings(max_examples=80)
@given(trace_lists)
def test_the_pages_of_one_trace_come_in_the_order_of_their_first_touch(
    traces: list[Trace],
) -> None:
    for trace in traces:
        seen: dict[tuple[bytes, int], None] = {}
        for access in trace.accesses:
            first = access.offset // PAGE_BYTES
            for page in range(first, first + access.length // PAGE_BYTES):
                seen.setdefault((trace.files[access.file].path, page))
        assert pages(merge_traces(INDEX, "w", [trace])) == list(seen)


def test_a_path_that_a_million_ranges_share_is_stored_once() -> None:
    path = b"p" * 2**16
    ranges = tuple(HotRange(path, b"", 4096 * i, 4096, 1) for i in range(2**17))
    data = encode(HotSet(INDEX, "w", 1, ranges))
    assert len(data) < 1_000_000

    def read() -> None:
        assert len(decode(data).ranges) == len(ranges)

    assert run_bounded(read, memory_bytes=2**28)


def test_a_trace_is_no_hot_set() -> None:
    with pytest.raises(CorruptError, match="not a hot set"):
        decode(encode_trace(trace_of((A, 0, 1))))
