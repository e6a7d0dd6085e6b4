"""The hot set: what later launches should have early, in the order in which they will want it.

Alone owns how traces are merged and the Parquet table that stores the result
(docs/format/hotset.md). Everything here is pure; pyarrow is imported only by the codec.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.blob.zstd_frame import FREE_BYTES, RATIO_MAX
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.trace import Trace, TracedFile

PAGE_BYTES = 4096
"""The kernel's unit of caching, and so of what a start can touch."""

SHARED_TRACE_COUNT = 3
"""From this many traces on, what only one of them touched is taken for an accident."""

TOUCH_COUNT_MAX = 2**20
"""Pages of one trace that count, 4 GiB: what comes after is no start. Also bounds what a trace that
claims absurd lengths can cost."""

_VERSION = b"1"
_RANGE_COUNT_MAX = 2**22
_COLUMN_BYTES_MAX = 2**29
_COLUMNS = ("path", "digest", "offset", "length", "trace_count")


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


class Touched(NamedTuple):
    """`page_count` pages of file number `file` of a trace, from page `first` on, which a start
    touched one after the other: the first of them as its touch number `position`."""

    file: int
    first: int
    page_count: int
    position: int


def first_touches(trace: Trace) -> list[Touched]:
    """Each page of the trace once, as runs in order; at most `TOUCH_COUNT_MAX` pages. Pure.

    Takes time by the accesses, not by the pages that they claim.
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
    """Which of `spans` (first, end, number) covers each part first, by its number: the same pages
    as disjoint spans."""
    spans.sort()
    # Those that begin at or before `position`, the earliest on top, ended ones among them.
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


def merge(index_digest: str, workload: str, traces: Sequence[Trace]) -> HotSet:
    """The hot set of traces of one workload. Pure; the order of `traces` does not matter.

    The union of what they touched, by page. What comes first is what was touched first at the
    median of those that touched it: positions are compared, not times, since a record over a
    slow network and a replay differ in seconds but not in order.
    """
    by_file: dict[TracedFile, list[tuple[int, int, int]]] = {}
    for trace in traces:
        for file, first, count, position in first_touches(trace):
            run = first, first + count, position - first
            by_file.setdefault(trace.files[file], []).append(run)
    least = 2 if len(traces) >= SHARED_TRACE_COUNT else 1
    ranked = [
        (median, file.path, file.digest, first, end, count)
        for file, runs in by_file.items()
        for median, first, end, count in _medians(runs)
        if count >= least
    ]
    ranked.sort()
    return HotSet(index_digest, workload, len(traces), tuple(_joined(ranked)))


def _medians(runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Of runs (first page, end, position of the first less its page) of one file, those of a trace
    disjoint: parts of equally many, as (median position of the first page, first, end, count).

    Within a part all positions grow by one from page to page, so the order of the traces, and with
    it the median, is the same for each page of it.
    """
    begins = sorted((first, shift) for first, _, shift in runs)
    ends = sorted((end, shift) for _, end, shift in runs)
    active: list[int] = []
    """The shifts of those that cover `position`, sorted: at most one of each trace."""
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
    for hot_range in hot.ranges:
        path = hot_range.path
        if path not in known:
            number = tree.resolve(path)
            fits = number is not None and (tree.inode(number).digest or b"") == hot_range.digest
            known[path] = number if fits else None
        number = known[path]
        if number is None:
            continue
        start, end = hot_range.offset, hot_range.offset + hot_range.length
        for extent in tree.inode(number).extents:
            first = max(start, extent.file_offset)
            last = min(end, extent.file_offset + extent.length)
            if first < last:
                yield extent.blob, extent.blob_offset + first - extent.file_offset, last - first


def _check_sizes(footer: Any, file_bytes: int) -> None:
    """Raises CorruptError for columns that announce more than their file can hold, or that are not
    ours. (Of a damaged footer the description of a single column must not be asked for: pyarrow 26
    ends the process.)"""
    if footer.num_columns != len(_COLUMNS):
        raise CorruptError("a hot set has other columns than it must")
    total = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    if total > min(_COLUMN_BYTES_MAX, max(FREE_BYTES, RATIO_MAX * file_bytes)):
        raise CorruptError(f"a hot set expands from {file_bytes} to {total} bytes")


def _values(column: Any) -> list[Any]:
    """The column as Python's objects; of paths each once."""
    if column.null_count:
        raise CorruptError("a hot set has gaps")
    found: list[Any] = []
    for chunk in column.chunks:
        if not hasattr(chunk, "dictionary"):
            found += chunk.to_pylist()
            continue
        values = chunk.dictionary.to_pylist()
        found += [values[i] for i in chunk.indices.to_pylist()]
    return found


def encode(hot: HotSet) -> bytes:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ranges = hot.ranges
    schema = pa.schema(
        [
            ("path", pa.binary()),
            ("digest", pa.binary()),
            ("offset", pa.int64()),
            ("length", pa.int64()),
            ("trace_count", pa.int32()),
        ],
        metadata={
            b"bootseer.hotset": _VERSION,
            b"bootseer.index": hot.index_digest.encode(),
            b"bootseer.workload": hot.workload.encode(),
            b"bootseer.trace_count": str(hot.trace_count).encode(),
        },
    )
    columns: list[list[Any]] = [
        [r.path for r in ranges],
        [r.digest for r in ranges],
        [r.offset for r in ranges],
        [r.length for r in ranges],
        [r.trace_count for r in ranges],
    ]
    table = pa.table(columns, schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode(data: bytes) -> HotSet:
    """Raises: CorruptError, UnknownFormatError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(pa.BufferReader(data))
        metadata = footer.schema.to_arrow_schema().metadata or {}
        if b"bootseer.hotset" not in metadata:
            raise UnknownFormatError("this Parquet file is no hot set of Bootseer")
        if metadata[b"bootseer.hotset"] != _VERSION:
            version = metadata[b"bootseer.hotset"].decode("ascii", "replace")
            raise UnknownFormatError(f"the hot set has version {version}; this release reads 1")
        if footer.num_rows > _RANGE_COUNT_MAX:
            raise CorruptError("a hot set has absurdly many ranges")
        _check_sizes(footer, len(data))
        # As dictionaries: a path of a megabyte that a million rows share is stored once.
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["path", "digest"])
        table = file.read(use_threads=False)
        columns = [_values(table.column(name)) for name in _COLUMNS]
        ranges = tuple(HotRange(*row) for row in zip(*columns, strict=True))
        if any(r.offset < 0 or r.length <= 0 or r.offset + r.length >= 2**63 for r in ranges):
            raise CorruptError("a hot set has an impossible range")
        return HotSet(
            metadata[b"bootseer.index"].decode(),
            metadata[b"bootseer.workload"].decode(),
            int(metadata[b"bootseer.trace_count"]),
            ranges,
        )
    except (CorruptError, UnknownFormatError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"a hot set cannot be read: {error}") from error
