"""What a start touches below a directory: the record, its codec, and how records merge.

Alone owns the format (docs/format/warm.md) and the keys of records in the store. Pure but for the
three functions that are given a store.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import zstandard
from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.base.documents import Count64, DocumentFormat, PathBytes
from bootseer.blob.index.zstd_frame import expand
from bootseer.errors import CorruptError, NotFoundError
from bootseer.store import Store

FILE_COUNT_MAX = 2**18
RANGE_COUNT_MAX = 2**20
ENCODED_BYTES_MAX = 32 * 2**20
_DECODED_BYTES_MAX = 128 * 2**20
_TIME_NS_MAX = 2**63 * 10**9
"""The latest time: 64 bits of seconds, as file systems have them."""
_PATH_BYTES_MAX = 4096
_RANGES_OF_A_FILE_MAX = 2**16


class Range(NamedTuple):
    """Bytes `[offset, offset + length)` of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


class WarmFile(Struct, frozen=True):
    """A file below the directory, and what of it was touched."""

    path: bytes
    """Relative to the directory: plain components only."""
    size_bytes: int
    mtime_ns: int
    ranges: tuple[Range, ...]
    """Sorted and apart. Empty: it was opened, and nothing of it stayed in the page cache."""

    @property
    def range_bytes(self) -> int:
        """How much of it was touched."""
        return sum(found.length for found in self.ranges)


class WarmRecord(Struct, frozen=True):
    """What starts of one workload touched below one directory."""

    identity: str
    """The directory, as `identity_of` names it."""
    workload: str
    method: str
    """How the newest recording knew the files: "fanotify", "inotify" or "residency"."""
    recording_count: int
    recorded_ns: int
    """Wall clock of the newest recording, ns since 1970."""
    files: tuple[WarmFile, ...]
    """The files in the order in which the newest start opened them, where its method knows that."""

    @property
    def range_bytes(self) -> int:
        """How much is worth having early."""
        return sum(file.range_bytes for file in self.files)


class _Header(Struct, frozen=True):
    identity: str
    workload: str
    method: Annotated[str, Meta(max_length=20)]
    recording_count: Count64
    recorded_ns: Count64
    file_count: Annotated[int, Meta(ge=0, le=FILE_COUNT_MAX)]


_HEADER_FORM: DocumentFormat[_Header] = DocumentFormat(
    type=_Header,
    kind="bootseer-warm",
    kind_member="format",
    versions=(1,),
    size_max=64 * 1024,
)
# A path, the file's size and time of change, and by turns offsets and lengths of its ranges.
_Line = tuple[PathBytes, Count64, int, tuple[Count64, ...]]
_LINES_FORM: DocumentFormat[list[_Line]] = DocumentFormat(
    type=list[_Line], size_max=_DECODED_BYTES_MAX
)


def identity_of(directory: str, name: str | None) -> str:
    """Names a directory to all nodes: by its real path, or by the name that the user gave."""
    return f"name:{name}" if name else f"path:{directory}"


def key_of(identity: str, workload: str) -> str:
    """Returns the key of the record in the store, which also names it on a node."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    return f"warm/{digest}/{workload}"


def normalized(ranges: Iterable[Range], gap_bytes: int = 0) -> tuple[Range, ...]:
    """Sorted, and joined where they touch or leave at most `gap_bytes` between them. Pure."""
    joined: list[Range] = []
    for found in sorted(ranges):
        if joined and found.offset <= joined[-1].end + gap_bytes:
            last = joined[-1]
            joined[-1] = Range(last.offset, max(last.end, found.end) - last.offset)
        else:
            joined.append(found)
    return tuple(joined)


def without(ranges: Iterable[Range], known: Iterable[Range]) -> tuple[Range, ...]:
    """What of `ranges` is not in `known`; both sorted and apart. Pure."""
    left: list[Range] = []
    known = tuple(known)
    position = 0
    for found in ranges:
        start = found.offset
        while position < len(known) and known[position].end <= start:
            position += 1
        at = position
        while at < len(known) and known[at].offset < found.end:
            if known[at].offset > start:
                left.append(Range(start, known[at].offset - start))
            start = max(start, known[at].end)
            at += 1
        if start < found.end:
            left.append(Range(start, found.end - start))
    return tuple(left)


def merge(old: WarmRecord | None, new: WarmRecord) -> WarmRecord:
    """The union of both. Pure.

    A file that has another size or time of change in `new` counts with what `new` says alone: it
    is another file. Too many files: those of `old` go first.
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
    """As many of `files`, from the first on, as a record may hold. Pure.

    A file in absurdly many pieces is taken as one.
    """
    kept: list[WarmFile] = []
    range_count = 0
    for file in files:
        if len(file.ranges) > _RANGES_OF_A_FILE_MAX:
            first, last = file.ranges[0], file.ranges[-1]
            file = replace(file, ranges=(Range(first.offset, last.end - first.offset),))
        range_count += len(file.ranges)
        if len(kept) == FILE_COUNT_MAX or range_count > RANGE_COUNT_MAX:
            break
        kept.append(file)
    return tuple(kept)


def encode(record: WarmRecord) -> bytes:
    """The record as zstd-compressed JSON lines. Deterministic."""
    header = _Header(
        record.identity,
        record.workload,
        record.method,
        record.recording_count,
        record.recorded_ns,
        len(record.files),
    )
    # JSON has no bytes: a path that is not UTF-8 travels as lone surrogates, escaped.
    lines = [_HEADER_FORM.encode(header).decode("ascii")]
    for file in record.files:
        path = json.dumps(file.path.decode("utf-8", "surrogateescape"))
        numbers = ",".join(f"{offset},{length}" for offset, length in file.ranges)
        lines.append(f"[{path},{file.size_bytes},{file.mtime_ns},[{numbers}]]")
    text = "\n".join(lines) + "\n"
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode("ascii"))


def decode(data: bytes, identity: str, workload: str) -> WarmRecord:
    """The record of `identity` and `workload`.

    Raises: CorruptError, also for the record of another directory; UnknownFormatError.
    """
    if len(data) > ENCODED_BYTES_MAX:
        raise CorruptError(f"a warm record of {len(data)} bytes is absurdly large")
    text = expand(data, "a warm record", _DECODED_BYTES_MAX)
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
    ranges = tuple(map(Range, numbers[::2], numbers[1::2]))
    end = -1
    for found in ranges:
        if found.offset <= end or found.length == 0 or found.end > size_bytes:
            raise ValueError("ranges overlap, are empty or lie outside their file")
        end = found.end
    return WarmFile(path, size_bytes, mtime_ns, ranges)


def read_record(store: Store, identity: str, workload: str) -> WarmRecord | None:
    """None where there is none yet. Raises: as `decode`, UnavailableError, DeadlineError."""
    try:
        data = store.read(key_of(identity, workload), 0, ENCODED_BYTES_MAX + 1)
    except NotFoundError:
        return None
    return decode(data, identity, workload)


def publish_record(store: Store, record: WarmRecord) -> None:
    """Store the record in place of what was there. Raises: BootseerError."""
    store.publish(key_of(record.identity, record.workload), encode(record), replace=True)


def delete_record(store: Store, identity: str, workload: str) -> None:
    """Deletes a record, so that the next start records anew. A missing one is no error."""
    store.delete(key_of(identity, workload))
