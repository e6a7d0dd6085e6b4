"""A start as one Parquet file: a row for each stage, a row group for each node.

For DuckDB, pandas or Spark, and to keep a start in one piece: `report` reads it as it reads
timelines. docs/timelines.md has the columns. Needs pyarrow.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bootseer.errors import CorruptError, UnsupportedError, from_oserror
from bootseer.profile.files import StartFiles
from bootseer.timeline.otlp import (
    IMPORTS_EVENT,
    PROCESS,
    ROLE,
    Stage,
    encode_end,
    encode_event,
    encode_start,
)

_KIND = "bootseer.start"
_VERSION = "1"
_NODES_MAX = 100_000
_ROWS_MAX = 1_000_000
_TEXTS = ("job", "submission", "node", "role", "process", "kind", "name", "message")
_MORE_TEXTS = ("trace_id", "span_id", "parent_span_id", "attributes", "resource")
_EVENT = "event"


def _arrow() -> tuple[Any, Any]:
    """Raises: UnsupportedError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "Parquet needs the package pyarrow: pip install 'bootseer[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


def write_parquet(path: Path, start: StartFiles) -> None:
    """Write all stages of a start to a new file. Raises: UnsupportedError; BootseerError."""
    arrow, parquet = _arrow()
    time = arrow.timestamp("ns", tz="UTC")
    schema = arrow.schema(
        [
            *((name, arrow.string()) for name in (*_TEXTS, *_MORE_TEXTS)),
            ("attempt", arrow.int64()),
            ("rank", arrow.int64()),
            ("began", time),
            ("ended", time),
            ("seconds", arrow.float64()),
            ("failed", arrow.bool_()),
        ],
        metadata={"kind": _KIND, "version": _VERSION, "name": start.name},
    )
    try:
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            for node in start.parts(1):
                if rows := list(_rows(node)):
                    writer.write_table(arrow.Table.from_pylist(rows, schema))
    except OSError as error:
        raise from_oserror(error, f"write {path}") from error


def _rows(node: StartFiles) -> Iterator[dict[str, Any]]:
    stages = node.stages()
    for stage in stages:
        yield _row(stage, "stage")
    for body in node.events(IMPORTS_EVENT) if stages else ():
        yield _row(stages[0]._replace(name=IMPORTS_EVENT, message=body, end_ns=None), _EVENT)


def _row(stage: Stage, kind: str) -> dict[str, Any]:
    resource = stage.resource
    return {
        "job": str(resource.get("bootseer.job", "")),
        "submission": str(resource.get("bootseer.submission", "")),
        "attempt": resource.get("bootseer.attempt", 0),
        "node": str(resource.get("host.name", "")),
        "rank": resource.get("bootseer.rank", 0),
        "role": str(resource.get(ROLE, "")),
        "process": str(resource.get(PROCESS, "")),
        "kind": kind,
        "name": stage.name,
        "began": stage.start_ns,
        "ended": stage.end_ns,
        "seconds": None if stage.end_ns is None else (stage.end_ns - stage.start_ns) / 1e9,
        "failed": stage.failed,
        "message": stage.message,
        "trace_id": stage.trace_id,
        "span_id": stage.span_id,
        "parent_span_id": stage.parent_id,
        "attributes": msgspec.json.encode(stage.attributes).decode(),
        "resource": msgspec.json.encode(resource).decode(),
    }


class _Node(Struct, frozen=True):
    file: Any
    """An open `pyarrow.parquet.ParquetFile`."""
    number: int
    modified_ns: int

    @property
    def is_far(self) -> bool:
        return False  # and pyarrow's file is for one thread

    @property
    def size_bytes(self) -> int:
        return int(self.file.metadata.row_group(self.number).total_byte_size)

    @property
    def name(self) -> str:
        return f"-{self.number}-{self.number}-0"

    def read(self) -> bytes:
        """The row group as the lines of a timeline. Raises: CorruptError."""
        if self.file.metadata.row_group(self.number).num_rows > _ROWS_MAX:
            raise CorruptError("a node has more stages than a start can have")
        try:
            group = self.file.read_row_group(self.number, use_threads=False)
            columns = {name: group.column(name) for name in group.column_names}
            for time in ("began", "ended"):
                columns[time] = columns[time].cast("int64")
            rows = zip(*(column.to_pylist() for column in columns.values()), strict=True)
            return b"".join(_line(dict(zip(columns, row, strict=True))) for row in rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"it is no start: {error}") from error


def _line(row: dict[str, Any]) -> bytes:
    stage = Stage(
        row["name"],
        row["trace_id"],
        row["span_id"],
        row["parent_span_id"],
        row["began"],
        row["ended"],
        row["failed"],
        row["message"],
        msgspec.json.decode(row["attributes"], type=dict[str, Any]),
        msgspec.json.decode(row["resource"], type=dict[str, Any]),
    )
    if row["kind"] == _EVENT:
        return encode_event(stage.name, stage, stage.message)
    return encode_start(stage) if stage.end_ns is None else encode_end(stage)


class ParquetFile(Struct, frozen=True):
    """The one start in a file that `write_parquet` has written, for any name of a job."""

    path: Path

    @property
    def where(self) -> str:
        """For messages."""
        return str(self.path)

    def starts(self, job: str) -> list[StartFiles]:
        """Raises: UnsupportedError; CorruptError; NotFoundError, PermissionDeniedError."""
        _, parquet = _arrow()
        try:
            modified_ns = self.path.stat().st_mtime_ns
        except OSError as error:
            raise from_oserror(error, f"read {self.path}") from error
        try:
            file = parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # what pyarrow's own are
            raise CorruptError(f"{self.path} is no Parquet file: {error}") from error
        said = file.schema_arrow.metadata or {}
        submission, _, attempt = said.get(b"name", b"").decode("utf-8", "replace").rpartition(":")
        if (said.get(b"kind"), said.get(b"version")) != (_KIND.encode(), _VERSION.encode()):
            raise CorruptError(f"{self.path} is no start that this release has written")
        count = min(file.num_row_groups, _NODES_MAX)
        nodes = tuple(_Node(file, number, modified_ns) for number in range(count))
        number = int(attempt) if attempt.isdecimal() else 0
        return [StartFiles(number, submission, nodes)] if nodes else []
