"""The hot set: what later launches should have early, in the order in which they will want it.

Alone owns how traces are merged and what is stored of the result (docs/format/hotset.md). Pure.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from bootseer.base.documents import Count, DocumentFormat
from bootseer.blob.parts import FileParts
from bootseer.blob.tree import Tree
from bootseer.prefetch.record.file_rows import (
    HEADER_BYTES_MAX,
    TracedFile,
    decode_rows,
    encode_rows,
)
from bootseer.prefetch.record.scattered import SCATTERED_COUNT_MAX, scattered_files
from bootseer.prefetch.record.touches import PAGE_BYTES, first_touches
from bootseer.prefetch.record.trace import Trace

SHARED_TRACE_COUNT = 3
"""From this many traces on, what only one of them touched is taken for an accident."""


class _Header(Struct, frozen=True):
    index_digest: str = field(name="index")
    workload: str
    trace_count: Count
    file_count: Annotated[int, Meta(ge=0, le=2**22)]
    row_count: Annotated[int, Meta(ge=0, le=2**22)] = field(name="range_count")


_FORM: DocumentFormat[_Header] = DocumentFormat(
    type=_Header,
    what="a hot set",
    kind="bootseer-hotset",
    kind_member="format",
    versions=(2,),
    size_max=HEADER_BYTES_MAX,
)


class HotRange(Struct, frozen=True):
    """Bytes of one file, by path and content. In whole pages; may reach beyond the file's end."""

    path: bytes
    digest: bytes
    offset: int
    length: int
    trace_count: int
    """How many traces touched it (the most of any of its pages)."""


class HotSet(Struct, frozen=True):
    """Ranges in the order of their (median) first access; no page twice."""

    index_digest: str
    workload: str
    trace_count: int
    ranges: tuple[HotRange, ...]
    scattered: tuple[bytes, ...] = ()
    """Paths of files that were left out, since each start reads other bytes of them. Stored in the
    workload's pointer, not with the ranges."""


def merge(index_digest: str, workload: str, traces: Sequence[Trace]) -> HotSet:
    """The hot set of traces of one workload. Pure; the order of `traces` does not matter.

    The union of what they touched, by page. What comes first is what was touched first at the
    median of those that touched it: positions are compared, not times, since a record over a
    slow network and a replay differ in seconds but not in order.
    """
    scattered = scattered_files(traces)
    by_file: dict[TracedFile, list[tuple[int, int, int]]] = {}
    for trace in traces:
        for file, first, count, position in first_touches(trace):
            run = first, first + count, position - first
            if trace.files[file] not in scattered:
                by_file.setdefault(trace.files[file], []).append(run)
    least = 2 if len(traces) >= SHARED_TRACE_COUNT else 1
    ranked = [
        (median, file.path, file.digest, first, end, count)
        for file, runs in by_file.items()
        for median, first, end, count in _medians(runs)
        if count >= least
    ]
    ranked.sort()
    paths = sorted({file.path for file in scattered})[:SCATTERED_COUNT_MAX]
    return HotSet(index_digest, workload, len(traces), tuple(_joined(ranked)), tuple(paths))


def _medians(runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """The medians of runs (first page, end, position of the first less its page) of one file, those
    of a trace disjoint: parts of equally many, as (median position of the first page, first, end,
    count).

    Within a part all positions grow by one from page to page, so the order of the traces, and with
    it the median, is the same for each page of it.
    """
    begins = sorted((first, shift) for first, _, shift in runs)
    ends = sorted((end, shift) for _, end, shift in runs)
    active: list[int] = []
    """The shifts of the runs that cover `position`, sorted: at most one of each trace."""
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
    """Ranges of parts that follow each other, in rank and in their file; each of `ranked`: median,
    path and digest of the file, first page, end, count."""
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


def stream_ranges(hot: HotSet, tree: Tree) -> Iterable[tuple[int, int, int]]:
    """Where the hot bytes lie: (blob number, offset in its stream, length), in order. Pure.

    Files that the tree does not have, or has with other content, are left out: so a hot set
    serves a rebuilt image as far as it can.
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


def encode(hot: HotSet) -> bytes:
    """The hot set as zstd-compressed JSON lines. Deterministic."""
    numbers: dict[TracedFile, int] = {}
    rows = [
        (numbers.setdefault(file, len(numbers)), one.offset, one.length, one.trace_count)
        for one in hot.ranges
        for file in (TracedFile(one.path, one.digest),)
    ]
    header = _Header(hot.index_digest, hot.workload, hot.trace_count, len(numbers), len(rows))
    return encode_rows(_FORM, header, tuple(numbers), rows)


def decode(data: bytes) -> HotSet:
    """Raises: CorruptError, UnknownFormatError."""
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
