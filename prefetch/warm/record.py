"""Warm records: file ranges that starts read below a directory; merging, codec and keys.

docs/format/warm.md has the format. Pure but for the three functions that take a store.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import zstandard
from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.base.documents import Count64, DocumentFormat, PathBytes
from bootseer.blob.frames import expand_lines
from bootseer.errors import CorruptError, NotFoundError
from bootseer.store import Store

FILE_COUNT_MAX = 2**18
RANGE_COUNT_MAX = 2**20
ENCODED_BYTES_MAX = 32 * 2**20
_DECODED_BYTES_MAX = 128 * 2**20
_TIME_NS_MAX = 2**63 * 10**9
"""File systems have at most 64 bits of seconds."""
_PATH_BYTES_MAX = 4096
_RANGES_OF_A_FILE_MAX = 2**16


class FileRange(NamedTuple):
    """Bytes `[offset, end)` of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class WarmFile(Struct, frozen=True):
    """File below the directory, with the ranges that were read."""

    path: bytes
    """Path relative to the directory, without "." and ".."."""
    size_bytes: int
    mtime_ns: int
    ranges: tuple[FileRange, ...]
    """Sorted and disjoint. Empty if the file was opened, but none of it was in the page cache."""

    @property
    def range_bytes(self) -> int:
        """Return the sum of the ranges' lengths."""
        return sum(found.length for found in self.ranges)


class WarmRecord(Struct, frozen=True):
    """File ranges that starts of one workload read below one directory."""

    identity: str
    """Identity of the directory (`identity_of`)."""
    workload: str
    method: str
    """Method of the newest recording: "fanotify", "inotify" or "residency"."""
    recording_count: int
    recorded_ns: int
    """Wall clock of the newest recording, ns since 1970."""
    files: tuple[WarmFile, ...]
    """Files in the order in which the newest start opened them, if its method tells."""

    @property
    def range_bytes(self) -> int:
        """Return the sum of all files' ranges."""
        return sum(file.range_bytes for file in self.files)


class _WarmHeader(Struct, frozen=True):
    identity: str
    workload: str
    method: Annotated[str, Meta(max_length=20)]
    recording_count: Count64
    recorded_ns: Count64
    file_count: Annotated[int, Meta(ge=0, le=FILE_COUNT_MAX)]


_HEADER_FORM: DocumentFormat[_WarmHeader] = DocumentFormat(
    type=_WarmHeader,
    kind="bootseer-warm",
    kind_member="format",
    version=1,
    size_max=64 * 1024,
)
# Path, size and modification time of a file, and alternating offsets and lengths of its ranges.
_Line = tuple[PathBytes, Count64, int, tuple[Count64, ...]]
_LINES_FORM: DocumentFormat[list[_Line]] = DocumentFormat(
    type=list[_Line], size_max=_DECODED_BYTES_MAX
)


def identity_of(directory: str, name: str | None) -> str:
    """Return the identity of a directory on all nodes: its real path, or the user's name for it."""
    return f"name:{name}" if name else f"path:{directory}"


def key_of(identity: str, workload: str) -> str:
    """Return the key of the record in the store."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    return f"warm/{digest}/{workload}"


def normalized(ranges: Iterable[FileRange], gap_bytes: int = 0) -> tuple[FileRange, ...]:
    """Sort ranges, and join those with at most `gap_bytes` between them. Pure."""
    joined: list[FileRange] = []
    for found in sorted(ranges):
        if joined and found.offset <= joined[-1].end + gap_bytes:
            last = joined[-1]
            joined[-1] = FileRange(last.offset, max(last.end, found.end) - last.offset)
        else:
            joined.append(found)
    return tuple(joined)


def subtract(ranges: Iterable[FileRange], known: Iterable[FileRange]) -> tuple[FileRange, ...]:
    """Return the parts of `ranges` that are not in `known`; both sorted and disjoint. Pure."""
    rest: list[FileRange] = []
    known = tuple(known)
    position = 0
    for found in ranges:
        start = found.offset
        while position < len(known) and known[position].end <= start:
            position += 1
        at = position
        while at < len(known) and known[at].offset < found.end:
            if known[at].offset > start:
                rest.append(FileRange(start, known[at].offset - start))
            start = max(start, known[at].end)
            at += 1
        if start < found.end:
            rest.append(FileRange(start, found.end - start))
    return tuple(rest)


def merge_records(old: WarmRecord | None, new: WarmRecord) -> WarmRecord:
    """Return the union of both records. Pure.

    If size or modification time of a file differ, the ranges of `old` are dropped. If there are too
    many files, those of `old` are dropped first.
    """
    if old is None:
        return new
    before = {file.path: file for file in old.files}
    files = []
    for file in new.files:
        known = before.pop(file.path, None)
        if known and (known.size_bytes, known.mtime_ns) == (file.size_bytes, file.mtime_ns):
            file = replace(file, ranges=normalized((*known.ranges, *file.ranges)))
        files.append(file)
    files += before.values()
    return replace(
        new, recording_count=old.recording_count + new.recording_count, files=bounded(files)
    )


def bounded(files: Iterable[WarmFile]) -> tuple[WarmFile, ...]:
    """Return the first files, as many as a record may hold. Pure.

    A file with too many ranges gets a single range that covers them.
    """
    kept: list[WarmFile] = []
    range_count = 0
    for file in files:
        if len(file.ranges) > _RANGES_OF_A_FILE_MAX:
            first, last = file.ranges[0], file.ranges[-1]
            file = replace(file, ranges=(FileRange(first.offset, last.end - first.offset),))
        range_count += len(file.ranges)
        if len(kept) == FILE_COUNT_MAX or range_count > RANGE_COUNT_MAX:
            break
        kept.append(file)
    return tuple(kept)


def encode(record: WarmRecord) -> bytes:
    """Return the record as zstd-compressed JSON lines. Deterministic."""
    header = _WarmHeader(
        record.identity,
        record.workload,
        record.method,
        record.recording_count,
        record.recorded_ns,
        len(record.files),
    )
    # JSON has no bytes: a path that is not UTF-8 is written with lone surrogates, escaped.
    lines = [_HEADER_FORM.encode(header).decode("ascii")]
    for file in record.files:
        path = json.dumps(file.path.decode("utf-8", "surrogateescape"))
        numbers = ",".join(f"{offset},{length}" for offset, length in file.ranges)
        lines.append(f"[{path},{file.size_bytes},{file.mtime_ns},[{numbers}]]")
    text = "\n".join(lines) + "\n"
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode("ascii"))


def decode(data: bytes, identity: str, workload: str) -> WarmRecord:
    """Decode the record of `identity` and `workload`.

    Raises: CorruptError, also for the record of another directory; UnknownFormatError.
    """
    if len(data) > ENCODED_BYTES_MAX:
        raise CorruptError(f"a warm record of {len(data)} bytes is absurdly large")
    text = expand_lines(data, "a warm record", _DECODED_BYTES_MAX)
    head, _, rest = text.partition(b"\n")
    header = _HEADER_FORM.decode(head, "a warm record")
    if (header.identity, header.workload) != (identity, workload):
        raise CorruptError("the warm record is of another directory or workload")
    lines = rest.splitlines()
    found = _LINES_FORM.decode(b"[%b]" % b",".join(lines), "a warm record")
    if not len(lines) == len(found) == header.file_count:
        raise CorruptError("a warm record has another number of files than it says")
    if sum(len(numbers) // 2 for *_, numbers in found) > RANGE_COUNT_MAX:
        raise CorruptError("a warm record has too many ranges")
    try:
        files = tuple(_file(*line) for line in found)
    except ValueError as error:
        raise CorruptError(f"a warm record makes no sense: {error}") from error
    return WarmRecord(
        identity, workload, header.method, header.recording_count, header.recorded_ns, files
    )


def _file(path: bytes, size_bytes: int, mtime_ns: int, numbers: tuple[int, ...]) -> WarmFile:
    parts = path.split(b"/")
    if len(path) > _PATH_BYTES_MAX or b"\0" in path or any(p in (b"", b".", b"..") for p in parts):
        raise ValueError("a path is not plain")
    if abs(mtime_ns) >= _TIME_NS_MAX:
        raise ValueError("a time is out of range")
    if len(numbers) % 2:
        raise ValueError("a range has no length")
    ranges = tuple(map(FileRange, numbers[::2], numbers[1::2]))
    end = -1
    for found in ranges:
        if found.offset <= end or found.length == 0 or found.end > size_bytes:
            raise ValueError("ranges overlap, are empty or lie outside their file")
        end = found.end
    return WarmFile(path, size_bytes, mtime_ns, ranges)


def read_record(store: Store, identity: str, workload: str) -> WarmRecord | None:
    """Read a record, or return None if there is none.

    Raises: as `decode`; UnavailableError, DeadlineError.
    """
    try:
        data = store.read(key_of(identity, workload), 0, ENCODED_BYTES_MAX + 1)
    except NotFoundError:
        return None
    return decode(data, identity, workload)


def publish_record(store: Store, record: WarmRecord) -> None:
    """Store the record in place of any older one. Raises: BootseerError."""
    store.publish(key_of(record.identity, record.workload), encode(record), replace=True)


def delete_record(store: Store, identity: str, workload: str) -> None:
    """Delete a record, so that the next start records anew. A missing record is no error."""
    store.delete(key_of(identity, workload))
