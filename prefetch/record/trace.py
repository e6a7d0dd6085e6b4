"""The trace of one launch: which ranges of which files it read first, in order, with times.

Alone owns the trace format (docs/format/trace.md) and the log that a running server appends to.
`Trace` and the codec are pure. `AccessLog` may be appended to from any thread; it lies in shared
anonymous memory, so that what a killed worker recorded is still there for the next one.
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
"""Added to the time of what was handed to the kernel unasked: was it wanted? Nobody knows."""

ACCESS_COUNT_MAX = 2**20
"""A log that is full takes no more: a start that reads a million ranges is no start."""


class _Header(Struct, frozen=True):
    index_digest: str = field(name="index")
    workload: str
    node: str
    started_ns: Count64
    ended: str
    readahead_bytes: Count
    file_count: Annotated[int, Meta(ge=0, le=ACCESS_COUNT_MAX)]
    row_count: Annotated[int, Meta(ge=0, le=ACCESS_COUNT_MAX)] = field(name="access_count")


_FORM: DocumentFormat[_Header] = DocumentFormat(
    type=_Header,
    what="a trace",
    kind="bootseer-trace",
    kind_member="format",
    versions=(1,),
    size_max=HEADER_BYTES_MAX,
)
_ENTRY = struct.Struct("<IIQQ")
# count, closed, start on the monotonic clock
_LOG_HEADER = struct.Struct("<IIQ")


class Access(NamedTuple):
    """`length` bytes at `offset` of file number `file`, `after_ns` after the start."""

    file: int
    offset: int
    length: int
    time_ns: int

    @property
    def is_preloaded(self) -> bool:
        """Whether the server handed it to the kernel unasked."""
        return self.time_ns >= _PRELOADED_NS

    @property
    def after_ns(self) -> int:
        """When it happened, after the start."""
        return self.time_ns - _PRELOADED_NS if self.is_preloaded else self.time_ns


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
    """The accesses in the order in which they happened; no range twice."""


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

    def append_preloaded(self, inode: int, offset: int, length: int) -> None:
        """Appends an access to pages that the kernel was given without asking for them."""
        self.append(inode, offset, length, _PRELOADED_NS)

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
    header = _Header(
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
    """Raises: CorruptError; UnknownFormatError for another version."""
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
