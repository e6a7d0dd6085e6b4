"""The trace of one launch: the ranges of files that it read, in order, with times.

A running server appends accesses to an `AccessLog`, which becomes a `Trace` when the record ends.
docs/format/trace.md has the stored form. `Trace` and its codec are pure. Any thread may append to
an `AccessLog`; it lies in shared anonymous memory, so that the accesses that a killed worker
recorded are still there for its successor.
"""

import mmap
import struct
import threading
import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from bootseer.base.documents import Count, Count64, DocumentFormat
from bootseer.blob.tree import Tree
from bootseer.prefetch.record.file_rows import (
    HEADER_BYTES_MAX,
    TracedFile,
    decode_rows,
    encode_rows,
)

_PRELOADED_NS = 2**62
"""Added to the time of an access that the server preloaded: the job may not have wanted it."""

ACCESS_COUNT_MAX = 2**20
"""Accesses that a log takes; a start reads far fewer than a million ranges."""


class _TraceHeader(Struct, frozen=True):
    index_digest: str = field(name="index")
    workload: str
    node: str
    started_ns: Count64
    ended: str
    readahead_bytes: Count
    file_count: Annotated[int, Meta(ge=0, le=ACCESS_COUNT_MAX)]
    row_count: Annotated[int, Meta(ge=0, le=ACCESS_COUNT_MAX)] = field(name="access_count")


_FORM: DocumentFormat[_TraceHeader] = DocumentFormat(
    type=_TraceHeader,
    what="a trace",
    kind="bootseer-trace",
    kind_member="format",
    version=1,
    size_max=HEADER_BYTES_MAX,
)
_ENTRY = struct.Struct("<IIQQ")  # inode, length, offset, ns since the log was made
_LOG_HEADER = struct.Struct("<IIQ")  # count, is closed, start in ns of the monotonic clock


class Access(NamedTuple):
    """Read of a range of a file."""

    file: int
    """Number of the file in the trace."""
    offset: int
    length: int
    time_ns: int
    """`after_ns`, plus a constant for a preloaded access."""

    @property
    def is_preloaded(self) -> bool:
        """Whether the server gave the range to the kernel before anybody asked for it."""
        return self.time_ns >= _PRELOADED_NS

    @property
    def after_ns(self) -> int:
        """Return the time of the access in nanoseconds after the start."""
        return self.time_ns - _PRELOADED_NS if self.is_preloaded else self.time_ns


class Trace(Struct, frozen=True):
    """Ranges that one launch read."""

    index_digest: str
    workload: str
    node: str
    started_ns: int
    """Wall clock, ns since 1970."""
    ended: str
    """Reason why the record ended: "ready", "window" or "unmount"."""
    readahead_bytes: int
    """The kernel's read-ahead while recording; a replay must use the same."""
    files: tuple[TracedFile, ...]
    accesses: tuple[Access, ...]
    """Accesses in the order in which they happened; no range twice."""


class AccessLog:
    """Log of the kernel's read requests. Appending takes about 1 us."""

    def __init__(self, capacity: int = ACCESS_COUNT_MAX) -> None:
        """Map the log's memory; untouched pages cost nothing.

        Make the log before forking processes that shall append to it.
        """
        self.capacity = capacity
        self._map = mmap.mmap(-1, _LOG_HEADER.size + capacity * _ENTRY.size)
        self._lock = threading.Lock()
        _LOG_HEADER.pack_into(self._map, 0, 0, 0, time.monotonic_ns())

    @property
    def started_ns(self) -> int:
        """Return the time at which the log was made, on the monotonic clock."""
        started: int = _LOG_HEADER.unpack_from(self._map, 0)[2]
        return started

    @property
    def is_open(self) -> bool:
        """Whether the log still takes accesses."""
        return not _LOG_HEADER.unpack_from(self._map, 0)[1]

    def close(self) -> bool:
        """Close the log for all processes. Return True unless it was closed before."""
        with self._lock:
            count, closed, started_ns = _LOG_HEADER.unpack_from(self._map, 0)
            _LOG_HEADER.pack_into(self._map, 0, count, 1, started_ns)
            return not closed

    def __len__(self) -> int:
        count: int = _LOG_HEADER.unpack_from(self._map, 0)[0]
        return count

    def append_preloaded(self, inode: int, offset: int, length: int) -> None:
        """Append an access to pages that the server gave to the kernel unasked."""
        self.append(inode, offset, length, _PRELOADED_NS)

    def append(self, inode: int, offset: int, length: int, added_ns: int = 0) -> None:
        """Append an access; do nothing if the log is closed or full."""
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
        """Return (inode, offset, length, ns since the log was made) of each access, in order."""
        end = _LOG_HEADER.size + len(self) * _ENTRY.size
        return [
            (inode, offset, length, time_ns)
            for inode, length, offset, time_ns in _ENTRY.iter_unpack(
                self._map[_LOG_HEADER.size : end]
            )
        ]


def accesses_of(
    tree: Tree, entries: Iterable[tuple[int, int, int, int]], *, served: Tree | None = None
) -> tuple[tuple[TracedFile, ...], tuple[Access, ...]]:
    """Return the files and first accesses of a log's entries. Pure.

    A range that was read again, because the page cache had dropped it, counts once.

    Args:
        tree: Tree of the image; its files have digests.
        entries: `AccessLog.entries`.
        served: The tree whose inodes the entries name, if that is not `tree`. Files are then found
            by path, and accesses to paths that `tree` lacks are left out.
    """
    inodes: dict[int, int | None] = {}
    numbers: dict[int, int] = {}
    files: list[TracedFile] = []
    accesses: dict[tuple[int, int, int], Access] = {}
    for logged_inode, offset, length, time_ns in entries:
        if logged_inode not in inodes:
            inodes[logged_inode] = (
                logged_inode if served is None else tree.resolve(served.path(logged_inode))
            )
        inode = inodes[logged_inode]
        if inode is None:
            continue
        number = numbers.get(inode)
        if number is None:
            number = numbers[inode] = len(files)
            files.append(TracedFile(tree.path(inode), tree.inode(inode).digest or b""))
        accesses.setdefault((number, offset, length), Access(number, offset, length, time_ns))
    return tuple(files), tuple(accesses.values())


def encode(trace: Trace) -> bytes:
    """Return the trace as zstd-compressed JSON lines. Deterministic."""
    header = _TraceHeader(
        trace.index_digest,
        trace.workload,
        trace.node,
        trace.started_ns,
        trace.ended,
        trace.readahead_bytes,
        len(trace.files),
        len(trace.accesses),
    )
    return encode_rows(_FORM, header, trace.files, trace.accesses)


def decode(data: bytes) -> Trace:
    """Decode a trace. Raises: CorruptError; UnknownFormatError for another version."""
    header, files, rows = decode_rows(_FORM, data)
    return Trace(
        header.index_digest,
        header.workload,
        header.node,
        header.started_ns,
        header.ended,
        header.readahead_bytes,
        files,
        tuple(map(Access._make, rows)),
    )
