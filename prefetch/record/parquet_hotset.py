"""Hot sets of version 1, which earlier releases wrote as Parquet (docs/format/hotset.md). Pure.

Alone imports pyarrow, which is not installed with Bootseer: the extra `parquet` has it.
"""

from typing import Any

from bootseer.blob.index.zstd_frame import FREE_BYTES, RATIO_MAX
from bootseer.errors import CorruptError, UnknownFormatError, UnsupportedError

PARQUET_MAGIC = b"PAR1"

_VERSION = b"1"
_RANGE_COUNT_MAX = 2**22
_COLUMN_BYTES_MAX = 2**29
_COLUMNS = ("path", "digest", "offset", "length", "trace_count")

ParquetRange = tuple[bytes, bytes, int, int, int]
"""Path, digest, offset, length and count of traces."""


def read_parquet(data: bytes) -> tuple[str, str, int, list[ParquetRange]]:
    """Digest of the index, workload, count of traces, and ranges.

    Raises: CorruptError; UnknownFormatError; UnsupportedError where pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(
            "this hot set is a Parquet file of an earlier release, which pyarrow reads: "
            "pip install 'bootseer[parquet]'"
        ) from error
    try:
        footer = pq.read_metadata(pa.BufferReader(data))
        metadata = footer.schema.to_arrow_schema().metadata or {}
        if b"bootseer.hotset" not in metadata:
            raise UnknownFormatError("this Parquet file is no hot set of Bootseer")
        if metadata[b"bootseer.hotset"] != _VERSION:
            version = metadata[b"bootseer.hotset"].decode("ascii", "replace")
            raise UnknownFormatError(f"the hot set has version {version} as Parquet, not 1")
        if footer.num_rows > _RANGE_COUNT_MAX:
            raise CorruptError("a hot set has absurdly many ranges")
        _check_sizes(footer, len(data))
        # As dictionaries: a path of a megabyte that a million rows share is stored once.
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["path", "digest"])
        table = file.read(use_threads=False)
        columns = [_values(table.column(name)) for name in _COLUMNS]
        ranges: list[ParquetRange] = list(zip(*columns, strict=True))
        if any(o < 0 or n <= 0 or o + n >= 2**63 for _, _, o, n, _ in ranges):
            raise CorruptError("a hot set has an impossible range")
        return (
            metadata[b"bootseer.index"].decode(),
            metadata[b"bootseer.workload"].decode(),
            int(metadata[b"bootseer.trace_count"]),
            ranges,
        )
    except (CorruptError, UnknownFormatError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"a hot set cannot be read: {error}") from error


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
