"""The hot set: what later launches should have early, in the order in which they will want it.

Alone owns how traces are merged and the Parquet table that stores the result
(docs/format/hotset.md). Everything here is pure; pyarrow is imported only by the codec.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from bootseer.blob.index.zstd_frame import FREE_BYTES, RATIO_MAX
from bootseer.blob.parts import FileParts
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.record.scattered import SCATTERED_COUNT_MAX, scattered_files
from bootseer.prefetch.record.touches import PAGE_BYTES, first_touches
from bootseer.prefetch.record.trace import Trace, TracedFile

SHARED_TRACE_COUNT = 3
"""From this many traces on, what only one of them touched is taken for an accident."""

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
