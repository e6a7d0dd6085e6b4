"""The trace of one launch: which ranges of which files it read first, in order, with times.

Alone owns the trace format (docs/format/trace.md) and the log that a running server appends to.
`Trace` and the codec are pure. `AccessLog` may be appended to from any thread; it lies in shared
anonymous memory, so that what a killed worker recorded is still there for the next one.
"""

import json
import mmap
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import zstandard
from msgspec import Struct

from bootseer.blob.index.zstd_frame import expand
from bootseer.blob.tree import Tree
from bootseer.checked_json import count_in, parse
from bootseer.errors import CorruptError, UnknownFormatError

_FORMAT = "bootseer-trace"
_VERSION = 1
_DECODED_BYTES_MAX = 256 * 2**20
"""A million accesses take about 30 MB."""
_LINE_BYTES_MAX = 2**23
"""A path of a megabyte, each byte of it escaped."""

_AHEAD_NS = 2**62
"""Added to the time of what was handed to the kernel unasked: was it wanted? Nobody knows."""

_FILE_BYTES_MAX = 2**62
"""More than any file system holds, and in whole pages still a signed number of 64 bits."""

ACCESS_COUNT_MAX = 2**20
"""A log that is full takes no more: a start that reads a million ranges is no start."""

_ENTRY = struct.Struct("<IIQQ")
# Of another shape it is refused where it is, before an object is made of it.
_ROWS = msgspec.json.Decoder(tuple[int, int, int, int])
# count, closed, start on the monotonic clock
_LOG_HEADER = struct.Struct("<IIQ")


class Access(NamedTuple):
    """`length` bytes at `offset` of file number `file`, `after_ns` after the start."""

    file: int
    offset: int
    length: int
    time_ns: int

    @property
    def is_ahead(self) -> bool:
        """Whether the server handed it to the kernel unasked."""
        return self.time_ns >= _AHEAD_NS

    @property
    def after_ns(self) -> int:
        """When it happened, after the start."""
        return self.time_ns - _AHEAD_NS if self.is_ahead else self.time_ns


class TracedFile(Struct, frozen=True):
    """A file by path and content, so that a trace outlives the image it was made with."""

    path: bytes
    digest: bytes


class Trace(Struct, frozen=True):
    """What one launch read."""

    index_digest: str
    workload: str
    node: str
    started_ns: int
    """Wall clock, ns since 1970."""
    ended: str
    """What ended the record: "ready", "window" or "unmount"."""
    readahead_bytes: int
    """The kernel's read-ahead while recording; a replay must use the same."""
    files: tuple[TracedFile, ...]
    accesses: tuple[Access, ...]
    """In the order in which they happened; no range twice."""


class AccessLog:
    """Accesses as the kernel asked for them: (inode, offset, length, time). About 1 us each."""

    def __init__(self, capacity: int = ACCESS_COUNT_MAX) -> None:
        """Make it before any fork whose children shall append. Untouched memory costs nothing."""
        self.capacity = capacity
        self._map = mmap.mmap(-1, _LOG_HEADER.size + capacity * _ENTRY.size)
        self._lock = threading.Lock()
        _LOG_HEADER.pack_into(self._map, 0, 0, 0, time.monotonic_ns())

    @property
    def started_ns(self) -> int:
        """When the log was made, on the monotonic clock."""
        started: int = _LOG_HEADER.unpack_from(self._map, 0)[2]
        return started

    @property
    def is_open(self) -> bool:
        """Whether it still takes accesses."""
        return not _LOG_HEADER.unpack_from(self._map, 0)[1]

    def close(self) -> bool:
        """Take no more, in no process. True for the caller that closed it."""
        with self._lock:
            count, closed, started_ns = _LOG_HEADER.unpack_from(self._map, 0)
            _LOG_HEADER.pack_into(self._map, 0, count, 1, started_ns)
            return not closed

    def __len__(self) -> int:
        count: int = _LOG_HEADER.unpack_from(self._map, 0)[0]
        return count

    def append_ahead(self, inode: int, offset: int, length: int) -> None:
        """As `append`, of what is handed to the kernel unasked."""
        self.append(inode, offset, length, _AHEAD_NS)

    def append(self, inode: int, offset: int, length: int, added_ns: int = 0) -> None:
        """Does nothing when the log is closed or full."""
        now_ns = time.monotonic_ns() + added_ns
        with self._lock:
            count, closed, started_ns = _LOG_HEADER.unpack_from(self._map, 0)
            if closed or count >= self.capacity:
                return
            position = _LOG_HEADER.size + count * _ENTRY.size
            _ENTRY.pack_into(self._map, position, inode, length, offset, now_ns - started_ns)
            # The entry before the count: a process killed between the two loses only this one.
            _LOG_HEADER.pack_into(self._map, 0, count + 1, 0, started_ns)

    def entries(self) -> list[tuple[int, int, int, int]]:
        """(inode, offset, length, ns since the log was made), in order."""
        end = _LOG_HEADER.size + len(self) * _ENTRY.size
        return [
            (inode, offset, length, time_ns)
            for inode, length, offset, time_ns in _ENTRY.iter_unpack(
                self._map[_LOG_HEADER.size : end]
            )
        ]


def accesses_of(
    tree: Tree, entries: Iterable[tuple[int, int, int, int]]
) -> tuple[tuple[TracedFile, ...], tuple[Access, ...]]:
    """Files and first accesses from a log's entries. Pure.

    A range that was asked for again (dropped from the page cache meanwhile) counts once.
    """
    numbers: dict[int, int] = {}
    files: list[TracedFile] = []
    accesses: dict[tuple[int, int, int], Access] = {}
    for inode, offset, length, time_ns in entries:
        number = numbers.get(inode)
        if number is None:
            number = numbers[inode] = len(files)
            files.append(TracedFile(tree.path(inode), tree.inode(inode).digest or b""))
        key = (number, offset, length)
        if key not in accesses:
            accesses[key] = Access(number, offset, length, time_ns)
    return tuple(files), tuple(accesses.values())


def renumbered(
    old: Tree, new: Tree, entries: Iterable[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """The entries of a log that was kept for `old`, with the inodes that `new` has at their paths;
    those of paths that it lacks are left out. Pure."""
    numbers: dict[int, int | None] = {}
    found = []
    for inode, offset, length, time_ns in entries:
        if inode not in numbers:
            numbers[inode] = new.resolve(old.path(inode))
        number = numbers[inode]
        if number is not None:
            found.append((number, offset, length, time_ns))
    return found


def encode(trace: Trace) -> bytes:
    """The trace as zstd-compressed JSON lines. Deterministic."""
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "index": trace.index_digest,
        "workload": trace.workload,
        "node": trace.node,
        "started_ns": trace.started_ns,
        "ended": trace.ended,
        "readahead_bytes": trace.readahead_bytes,
        "file_count": len(trace.files),
        "access_count": len(trace.accesses),
    }
    # JSON has no bytes: a path that is not UTF-8 travels as lone surrogates, escaped.
    lines = [json.dumps(header)]
    lines += [
        json.dumps([file.path.decode("utf-8", "surrogateescape"), file.digest.hex()])
        for file in trace.files
    ]
    lines += [f"[{a.file},{a.offset},{a.length},{a.time_ns}]" for a in trace.accesses]
    text = "\n".join(lines) + "\n"
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode("ascii"))


def decode(data: bytes) -> Trace:
    """Raises: CorruptError; UnknownFormatError for another kind or version."""
    head, _, rest = expand(data, "a trace", _DECODED_BYTES_MAX).partition(b"\n")
    header = parse(head, _LINE_BYTES_MAX, "a trace")
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise UnknownFormatError("this is no trace of Bootseer")
    if header.get("version") != _VERSION:
        raise UnknownFormatError(
            f"the trace has version {str(header.get('version'))[:20]}; "
            f"this release reads {_VERSION}"
        )
    try:
        return _decode_lines(header, rest)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"a trace makes no sense: {error}") from error


def _decode_lines(header: dict[str, Any], text: bytes) -> Trace:
    file_count = count_in(header, "file_count", "a trace", ACCESS_COUNT_MAX)
    access_count = count_in(header, "access_count", "a trace", ACCESS_COUNT_MAX)
    *lines, rest = text.split(b"\n", file_count)
    # Counted before an object is made for each: a line may hold several.
    if len(lines) != file_count or {rest.count(b"\n"), rest.count(b"[")} != {access_count}:
        raise ValueError("its line count is wrong")
    files = []
    for line in lines:
        path, digest_hex = parse(line, _LINE_BYTES_MAX, "a file of a trace")
        digest = bytes.fromhex(digest_hex)
        if len(digest) not in (0, 32):
            raise ValueError("a digest has a wrong length")
        files.append(TracedFile(path.encode("utf-8", "surrogateescape"), digest))
    if len(set(files)) != file_count:
        raise ValueError("it names a file twice")
    accesses = []
    for file, offset, length, time_ns in _ROWS.decode_lines(rest):
        if not 0 <= file < file_count or length <= 0:
            raise ValueError("an access is of no file or of no length")
        if offset < 0 or offset + length > _FILE_BYTES_MAX or not 0 <= time_ns < 2**63:
            raise ValueError("an access reaches beyond what any file can have")
        accesses.append(Access(file, offset, length, time_ns))
    for key in ("index", "workload", "node", "ended"):
        if not isinstance(header.get(key), str):
            raise TypeError(f"{key} is no string")
    return Trace(
        header["index"],
        header["workload"],
        header["node"],
        count_in(header, "started_ns", "a trace", 2**63),
        header["ended"],
        count_in(header, "readahead_bytes", "a trace"),
        tuple(files),
        tuple(accesses),
    )
