"""The hot set: what later launches should have early, in the order in which they will want it.

Alone owns how traces are merged and the Parquet table that stores the result
(docs/format/hotset.md). Everything here is pure; pyarrow is imported only by the codec.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.trace import Trace, TracedFile

PAGE_BYTES = 4096
"""The kernel's unit of caching, and so of what a start can touch."""

SHARED_TRACE_COUNT = 3
"""From this many traces on, what only one of them touched is taken for an accident."""

TOUCH_COUNT_MAX = 2**20
"""Pages of one trace that count, 4 GiB: what comes after is no start. Also bounds what a trace that
claims absurd lengths can cost."""

# A touch as an integer: file, page (offsets end at 2**63, pages of them at 2**51), position.
_PAGE_SHIFT = 20
_FILE_SHIFT = _PAGE_SHIFT + 52
_PAGE_MASK = (1 << _FILE_SHIFT - _PAGE_SHIFT) - 1

_VERSION = b"1"
_RANGE_COUNT_MAX = 2**22


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


def first_touches(trace: Trace) -> Iterator[tuple[int, int]]:
    """Each page of the trace once, as (file's number in the trace, page number), in order; at most
    `TOUCH_COUNT_MAX`. Pure."""
    seen: set[tuple[int, int]] = set()
    for access in trace.accesses:
        first = access.offset // PAGE_BYTES
        end = -(-(access.offset + access.length) // PAGE_BYTES)
        for page in range(first, end):
            key = (access.file, page)
            if key not in seen:
                if len(seen) == TOUCH_COUNT_MAX:
                    return
                seen.add(key)
                yield key


def merge(index_digest: str, workload: str, traces: Sequence[Trace]) -> HotSet:
    """The hot set of traces of one workload. Pure; the order of `traces` does not matter.

    The union of what they touched, by page. What comes first is what was touched first at the
    median of those that touched it: positions are compared, not times, since a record over a
    slow network and a replay differ in seconds but not in order.
    """
    files = sorted({file for trace in traces for file in trace.files}, key=_file_order)
    numbers = {file: number for number, file in enumerate(files)}
    # Every touch of every trace is one integer, of file, page and position from the left: millions
    # of them take a fourth of the time and memory that lists of positions by page would.
    touches: list[int] = []
    for trace in traces:
        shifted = [numbers[file] << _FILE_SHIFT for file in trace.files]
        touches += [
            shifted[file] | page << _PAGE_SHIFT | position
            for position, (file, page) in enumerate(first_touches(trace))
        ]
    touches.sort()
    least = 2 if len(traces) >= SHARED_TRACE_COUNT else 1
    ranked: list[tuple[int, int, int]] = []
    start, count = 0, len(touches)
    while start < count:
        page_key = touches[start] >> _PAGE_SHIFT
        end = start + 1
        while end < count and touches[end] >> _PAGE_SHIFT == page_key:
            end += 1
        if end - start >= least:
            # The lower median of positions, which are sorted.
            median = touches[(start + end - 1) // 2] & (1 << _PAGE_SHIFT) - 1
            ranked.append((median, page_key, end - start))
        start = end
    ranked.sort()
    return HotSet(index_digest, workload, len(traces), tuple(_joined(ranked, files)))


def _joined(
    ranked: Iterable[tuple[int, int, int]], files: Sequence[TracedFile]
) -> Iterator[HotRange]:
    """Ranges of pages that follow each other; each of `ranked`: (median, file and page, count)."""
    last = first = touched = -1
    for _, key, count in ranked:
        if key == last + 1 and key & _PAGE_MASK:
            last, touched = key, max(touched, count)
            continue
        if last >= 0:
            yield _range_of(first, last, touched, files)
        first, last, touched = key, key, count
    if last >= 0:
        yield _range_of(first, last, touched, files)


def _range_of(first: int, last: int, count: int, files: Sequence[TracedFile]) -> HotRange:
    file = files[first >> _FILE_SHIFT - _PAGE_SHIFT]
    offset = (first & _PAGE_MASK) * PAGE_BYTES
    return HotRange(file.path, file.digest, offset, (last - first + 1) * PAGE_BYTES, count)


def _file_order(file: TracedFile) -> tuple[bytes, bytes]:
    return file.path, file.digest


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
        file = pq.ParquetFile(pa.BufferReader(data))
        metadata = file.schema_arrow.metadata or {}
        if b"bootseer.hotset" not in metadata:
            raise UnknownFormatError("this Parquet file is no hot set of Bootseer")
        if metadata[b"bootseer.hotset"] != _VERSION:
            version = metadata[b"bootseer.hotset"].decode("ascii", "replace")
            raise UnknownFormatError(f"the hot set has version {version}; this release reads 1")
        if file.metadata.num_rows > _RANGE_COUNT_MAX:
            raise CorruptError("a hot set has absurdly many ranges")
        table = file.read()
        columns = [
            table.column(name).to_pylist()
            for name in ("path", "digest", "offset", "length", "trace_count")
        ]
        if any(value is None for value in chain.from_iterable(columns)):
            raise CorruptError("a hot set has gaps")
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
