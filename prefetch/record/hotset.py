"""The hot set: ranges that later launches should have early, merged from traces.

`first_touches` turns a trace into runs of pages, `scattered_files` finds files that each start
reads at other places, `merge_traces` makes the hot set, and `stream_ranges` finds its bytes in the
blobs of an image. docs/format/hotset.md has the stored form. Pure; any thread.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import combinations
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from bootseer.base.documents import Count, DocumentFormat
from bootseer.blob.tree import FileParts, Tree
from bootseer.prefetch.record.file_rows import (
    HEADER_BYTES_MAX,
    TracedFile,
    decode_rows,
    encode_rows,
)
from bootseer.prefetch.record.trace import Trace

PAGE_BYTES = 4096
"""Unit of touches, because the kernel caches whole pages."""

TOUCH_COUNT_MAX = 2**20
"""Pages of one trace that count: 4 GiB. A start reads less; later reads are training. The limit
also bounds the cost of a trace with absurd lengths."""

SHARED_TRACE_COUNT = 3
"""From this number of traces on, a page that only one of them touched is left out."""

SCATTERED_COUNT_MAX = 32
"""Scattered files that a pointer names at most; workloads have one or two."""

_SCATTERED_TRACES_MIN = 3
"""With fewer traces, a start that ended early and one that went on look the same."""
_SCATTERED_PAGES_MIN = 256
"""Below a megabyte the reads cost too little to be left out."""
_SCATTERED_RATIO_MAX = 2.0
"""Starts that read the same file at random read about the same number of pages."""
_SCATTERED_SHARED_MAX = 0.5
"""If two starts share this part of the smaller one's pages, they read a file that is hot."""

_Runs = list[tuple[int, int]]
"""Runs of pages of one file: (first page, end)."""


# ---- touched pages ---------------------------------------------------------------------------


class Touched(NamedTuple):
    """Run of pages of one file that a start touched one after the other."""

    file: int
    """Number of the file in the trace."""
    first: int
    """The first page."""
    page_count: int
    position: int
    """Number of touches before the first page's."""


def first_touches(trace: Trace) -> list[Touched]:
    """Return each page of the trace once, as runs in order of the first touch.

    At most `TOUCH_COUNT_MAX` pages. The time depends on the number of accesses, not of pages.
    """
    by_file: dict[int, list[tuple[int, int, int]]] = {}
    for number, access in enumerate(trace.accesses):
        end = -(-(access.offset + access.length) // PAGE_BYTES)
        by_file.setdefault(access.file, []).append((access.offset // PAGE_BYTES, end, number))
    runs = [
        (number, file, first, end)
        for file, spans in by_file.items()
        for first, end, number in _earliest(spans)
    ]
    runs.sort()
    found: list[Touched] = []
    position = 0
    for _, file, first, end in runs:
        count = min(end - first, TOUCH_COUNT_MAX - position)
        if count <= 0:
            break
        found.append(Touched(file, first, count, position))
        position += count
    return found


def _earliest(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Split overlapping spans (first, end, number) into disjoint ones; the lowest number wins."""
    spans.sort()
    # The spans that begin at or before `position`, the lowest number on top; some have ended.
    active: list[tuple[int, int]] = []
    position = following = 0
    while active or following < len(spans):
        if not active:
            position = max(position, spans[following][0])
        while following < len(spans) and spans[following][0] <= position:
            _, end, number = spans[following]
            heappush(active, (number, end))
            following += 1
        number, end = active[0]
        if end <= position:
            heappop(active)
            continue
        stop = end
        if following < len(spans) and spans[following][0] < end:
            stop = spans[following][0]
        yield position, stop, number
        position = stop


# ---- scattered files -------------------------------------------------------------------------


def scattered_files(traces: Sequence[Trace]) -> frozenset[TracedFile]:
    """Return the files that each start reads at other places, such as samples of a data file.

    A bundle cannot hold the pages of the next start, so the pages of earlier starts must not be
    sent ahead. Preloaded accesses do not count: they only show the contents of an earlier bundle.
    """
    read_runs: dict[TracedFile, list[_Runs]] = {}
    for trace in traces:
        wanted = tuple(access for access in trace.accesses if not access.is_preloaded)
        by_file: dict[int, _Runs] = {}
        for touched in first_touches(replace(trace, accesses=wanted)):
            run = touched.first, touched.first + touched.page_count
            by_file.setdefault(touched.file, []).append(run)
        for number, runs in by_file.items():
            if _page_count(runs) >= _SCATTERED_PAGES_MIN:
                read_runs.setdefault(trace.files[number], []).append(sorted(runs))
    return frozenset(file for file, starts in read_runs.items() if _is_scattered(starts))


def _is_scattered(starts: list[_Runs]) -> bool:
    if len(starts) < _SCATTERED_TRACES_MIN:
        return False
    largest = sorted(starts, key=_page_count)[-_SCATTERED_TRACES_MIN:]
    return all(
        _page_count(more) <= _SCATTERED_RATIO_MAX * _page_count(less)
        and _shared_page_count(less, more) < _SCATTERED_SHARED_MAX * _page_count(less)
        for less, more in combinations(largest, 2)
    )


def _page_count(runs: _Runs) -> int:
    return sum(end - first for first, end in runs)


def _shared_page_count(some: _Runs, others: _Runs) -> int:
    """Return the number of pages that are in both lists of sorted, disjoint runs."""
    count = i = j = 0
    while i < len(some) and j < len(others):
        count += max(0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return count


# ---- the hot set -----------------------------------------------------------------------------


class HotRange(Struct, frozen=True):
    """Bytes of one file, named by path and content; whole pages, maybe beyond the file's end."""

    path: bytes
    digest: bytes
    offset: int
    length: int
    trace_count: int
    """Number of traces that touched the range: the largest number of any of its pages."""


class HotSet(Struct, frozen=True):
    """Ranges in the order of their median first access, without overlaps."""

    index_digest: str
    workload: str
    trace_count: int
    ranges: tuple[HotRange, ...]
    scattered: tuple[bytes, ...] = ()
    """Paths of the scattered files, which are left out. Stored in the workload's pointer instead of
    the hot set's object."""


def merge_traces(index_digest: str, workload: str, traces: Sequence[Trace]) -> HotSet:
    """Return the hot set of the traces of one workload: the union of their pages.

    Pages are ordered by the median of their positions in the traces that have them. Positions
    are compared and not times: a record over a slow network and a replay differ in seconds, but not
    in order. The order of `traces` does not matter.
    """
    scattered = scattered_files(traces)
    by_file: dict[TracedFile, list[tuple[int, int, int]]] = {}
    for trace in traces:
        for file, first, count, position in first_touches(trace):
            run = first, first + count, position - first
            if trace.files[file] not in scattered:
                by_file.setdefault(trace.files[file], []).append(run)
    trace_count_min = 2 if len(traces) >= SHARED_TRACE_COUNT else 1
    ranked = [
        (median, file.path, file.digest, first, end, count)
        for file, runs in by_file.items()
        for median, first, end, count in _medians(runs)
        if count >= trace_count_min
    ]
    ranked.sort()
    paths = sorted({file.path for file in scattered})[:SCATTERED_COUNT_MAX]
    return HotSet(index_digest, workload, len(traces), tuple(_joined(ranked)), tuple(paths))


def _medians(runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Split the runs of one file, from all traces, into parts with their median positions.

    Within a part, positions grow by one from page to page in every trace that covers the part. So
    the order of the traces, and with it the median, is the same for each of its pages.

    Args:
        runs: (first page, end, position of the first page minus its number); the runs of one
            trace do not overlap.

    Yields: (median position of the first page, first page, end, number of traces).
    """
    begins = sorted((first, shift) for first, _, shift in runs)
    ends = sorted((end, shift) for _, end, shift in runs)
    active: list[int] = []
    """Sorted shifts of the runs that cover `position`: at most one for each trace."""
    position = begun = ended = 0
    while ended < len(ends):
        while begun < len(begins) and begins[begun][0] == position:
            insort(active, begins[begun][1])
            begun += 1
        while ended < len(ends) and ends[ended][0] == position:
            active.remove(ends[ended][1])
            ended += 1
        if ended == len(ends):
            return
        stop = ends[ended][0]
        if begun < len(begins):
            stop = min(stop, begins[begun][0])
        if active:
            # The lower median.
            shift = active[(len(active) - 1) // 2]
            yield position + shift, position, stop, len(active)
        position = stop


def _joined(ranked: Iterable[tuple[int, bytes, bytes, int, int, int]]) -> Iterator[HotRange]:
    """Join parts that follow each other both in rank and in their file.

    `ranked`: (median, path, digest, first page, end, number of traces).
    """
    last: tuple[bytes, bytes, int, int, int] | None = None
    for _, path, digest, first, end, count in ranked:
        if last and last[:2] == (path, digest) and last[3] == first:
            last = path, digest, last[2], end, max(last[4], count)
            continue
        if last:
            yield _range_of(*last)
        last = path, digest, first, end, count
    if last:
        yield _range_of(*last)


def _range_of(path: bytes, digest: bytes, first: int, end: int, count: int) -> HotRange:
    return HotRange(path, digest, first * PAGE_BYTES, (end - first) * PAGE_BYTES, count)


def stream_ranges(hot: HotSet, tree: Tree) -> Iterator[tuple[int, int, int]]:
    """Yield the hot bytes as (blob number, offset in the blob's stream, length), in order.

    Files that the tree lacks, or has with other content, are left out: a hot set serves a rebuilt
    image as far as the files are the same.
    """
    known: dict[bytes, int | None] = {}
    parts = FileParts(lambda inode: tree.inode(inode).extents)
    for hot_range in hot.ranges:
        path = hot_range.path
        if path not in known:
            number = tree.resolve(path)
            fits = number is not None and (tree.inode(number).digest or b"") == hot_range.digest
            known[path] = number if fits else None
        number = known[path]
        if number is None:
            continue
        end = hot_range.offset + hot_range.length
        for part in parts.within(number, hot_range.offset, end):
            yield part.blob, part.blob_offset, part.length


# ---- the stored form -------------------------------------------------------------------------


class _HotSetHeader(Struct, frozen=True):
    index_digest: str = field(name="index")
    workload: str
    trace_count: Count
    file_count: Annotated[int, Meta(ge=0, le=2**22)]
    row_count: Annotated[int, Meta(ge=0, le=2**22)] = field(name="range_count")


_FORM: DocumentFormat[_HotSetHeader] = DocumentFormat(
    type=_HotSetHeader,
    what="a hot set",
    kind="bootseer-hotset",
    kind_member="format",
    version=1,
    size_max=HEADER_BYTES_MAX,
)


def encode(hot: HotSet) -> bytes:
    """Return the hot set as zstd-compressed JSON lines. Deterministic."""
    numbers: dict[TracedFile, int] = {}
    rows = []
    for hot_range in hot.ranges:
        number = numbers.setdefault(TracedFile(hot_range.path, hot_range.digest), len(numbers))
        rows.append((number, hot_range.offset, hot_range.length, hot_range.trace_count))
    header = _HotSetHeader(hot.index_digest, hot.workload, hot.trace_count, len(numbers), len(rows))
    return encode_rows(_FORM, header, tuple(numbers), rows)


def decode(data: bytes) -> HotSet:
    """Decode a hot set. Raises: CorruptError; UnknownFormatError for another version."""
    header, files, rows = decode_rows(_FORM, data)
    return HotSet(
        header.index_digest,
        header.workload,
        header.trace_count,
        tuple(
            HotRange(files[file].path, files[file].digest, offset, length, count)
            for file, offset, length, count in rows
        ),
    )
