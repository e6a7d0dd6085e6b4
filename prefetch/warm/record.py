"""What a start touches below a directory: the record, its codec, and how records merge.

Alone owns the format (docs/format/warm.md) and the keys of records in the store. Pure but for the
three functions that are given a store.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import zstandard
from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.checked_json import parse
from bootseer.blob.index.zstd_frame import expand
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.store import Store

_FORMAT = "bootseer-warm"
_VERSION = 1
FILE_COUNT_MAX = 2**18
RANGE_COUNT_MAX = 2**20
ENCODED_BYTES_MAX = 32 * 2**20
_DECODED_BYTES_MAX = 128 * 2**20
_LINE_BYTES_MAX = 2**23
"""A file in as many ranges as it is ever stored with takes a hundredth of that."""
_TIME_NS_MAX = 2**63 * 10**9
"""Of 64 bits of seconds, as file systems have them."""
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
    """In the order in which the newest start opened them, where its method knows that."""

    @property
    def range_bytes(self) -> int:
        """How much is worth having early."""
        return sum(file.range_bytes for file in self.files)


def identity_of(directory: str, name: str | None) -> str:
    """Names a directory to all nodes: by its real path, or by the name that the user gave."""
    return f"name:{name}" if name else f"path:{directory}"


def key_of(identity: str, workload: str) -> str:
    """Where the record lies in the store; also names it on a node."""
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
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "identity": record.identity,
        "workload": record.workload,
        "method": record.method,
        "recording_count": record.recording_count,
        "recorded_ns": record.recorded_ns,
        "file_count": len(record.files),
    }
    # JSON has no bytes: a path that is not UTF-8 travels as lone surrogates, escaped.
    lines = [json.dumps(header)]
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
    if text.count(b"\n") > FILE_COUNT_MAX + 1:
        raise CorruptError("a warm record has more lines than any record")
    lines = text.split(b"\n")
    header = parse(lines[0], _LINE_BYTES_MAX, "a warm record")
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise UnknownFormatError("this is no warm record of Bootseer")
    if header.get("version") != _VERSION:
        raise UnknownFormatError(
            f"the warm record has version {str(header.get('version'))[:20]}; "
            f"this release reads {_VERSION}"
        )
    if (header.get("identity"), header.get("workload")) != (identity, workload):
        raise CorruptError("the warm record is of another directory or workload")
    try:
        return _decode_lines(header, lines)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"a warm record makes no sense: {error!r}") from error


def _decode_lines(header: dict[str, Any], lines: list[bytes]) -> WarmRecord:
    file_count = _number(header["file_count"])
    if file_count > FILE_COUNT_MAX or len(lines) != file_count + 2 or lines[-1]:
        raise ValueError("its line count is wrong")
    if not isinstance(header["method"], str):
        raise TypeError("its method is no string")
    files = []
    range_count = 0
    for line in lines[1:-1]:
        text, size_bytes, mtime_ns, numbers = parse(
            line, _LINE_BYTES_MAX, "a file of a warm record"
        )
        if not isinstance(text, str) or not isinstance(numbers, list):
            raise TypeError("a file is no path with ranges")
        path = text.encode("utf-8", "surrogateescape")
        _check_path(path)
        range_count += len(numbers) // 2
        if range_count > RANGE_COUNT_MAX:
            raise ValueError("it has too many ranges")
        ranges = _ranges(numbers, _number(size_bytes))
        if type(mtime_ns) is not int or abs(mtime_ns) >= _TIME_NS_MAX:
            raise ValueError("a time is out of range")
        files.append(WarmFile(path, size_bytes, mtime_ns, ranges))
    return WarmRecord(
        header["identity"],
        header["workload"],
        header["method"][:20],
        _number(header["recording_count"]),
        _number(header["recorded_ns"]),
        tuple(files),
    )


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is out of range")
    return value


def _check_path(path: bytes) -> None:
    parts = path.split(b"/")
    if len(path) > _PATH_BYTES_MAX or b"\0" in path or any(p in (b"", b".", b"..") for p in parts):
        raise ValueError("a path is not plain")


def _ranges(numbers: list[int], size_bytes: int) -> tuple[Range, ...]:
    if len(numbers) % 2:
        raise ValueError("a range has no length")
    ranges = []
    end = -1
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        if _number(offset) <= end or _number(length) == 0 or offset + length > size_bytes:
            raise ValueError("ranges overlap, are empty or lie outside their file")
        end = offset + length
        ranges.append(Range(offset, length))
    return tuple(ranges)


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
    """So that the next start records. A missing one is no error."""
    store.delete(key_of(identity, workload))
