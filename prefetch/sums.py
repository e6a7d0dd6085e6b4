"""The log of checksums: what was written to a cached stream, so that it can be verified again.

Alone owns the file `sums` of a stream (docs/format/cache.md): records of 32 bytes, appended after
the data that they are about. Needed only after a crash of the machine, when some of what was
written is on the disk and some is not. `Sums` is immutable; the functions keep no state.
"""

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from bootseer.prefetch.cache_files import SECTOR_BYTES

RECORD_STREAM_BYTES_MAX = 256 * 1024
"""A read of lost data verifies whole records: a quarter of a megabyte takes less than a millisecond
from a fast disk, and a record for each costs 0.01 %."""

_RECORD = struct.Struct("<QQQQ")
RECORD_BYTES = _RECORD.size
_CHECKED = struct.Struct("<QQQ")
_SEED = 0x53_4D_55_53_53_42
"""Without it, a page of zeros might check."""


class Sum(NamedTuple):
    """The checksum of `[offset, offset + length)` of a stream."""

    offset: int
    length: int
    content: int


def encode_sums(offset: int, data: memoryview) -> bytes:
    """The records of a write of `data`; begins on a sector, and ends on one or with its stream."""
    records = []
    for start in range(0, len(data), RECORD_STREAM_BYTES_MAX):
        piece = data[start : start + RECORD_STREAM_BYTES_MAX]
        fields = offset + start, len(piece), xxh3_64_intdigest(piece)
        records.append(_RECORD.pack(*fields, xxh3_64_intdigest(_CHECKED.pack(*fields), _SEED)))
    return b"".join(records)


def append_sums(fd: int, records: bytes) -> None:
    """Append to a log that is open with O_APPEND.

    A record never straddles two blocks of a disk, since its size divides theirs: it is there or it
    is not, also on a full one. Raises: OSError.
    """
    written = os.write(fd, records)
    while written < len(records):
        written += os.write(fd, records[written:])


class Sums:
    """The records of a log by offset."""

    def __init__(self, log: bytes, stream_length: int) -> None:
        """What does not check is left out: the last records before a crash, and lost pages."""
        self._sums = sorted(_decode(log, stream_length))
        self._starts = array("Q", (one.offset for one in self._sums))

    def __iter__(self) -> Iterator[Sum]:
        return iter(self._sums)

    def covering(self, offset: int, length: int) -> Iterator[Sum]:
        """Those that are about any of `[offset, offset + length)`."""
        i = bisect_left(self._starts, max(0, offset - RECORD_STREAM_BYTES_MAX))
        while i < len(self._sums) and self._starts[i] < offset + length:
            one = self._sums[i]
            if one.offset + one.length > offset:
                yield one
            i += 1


def _decode(log: bytes, stream_length: int) -> Iterator[Sum]:
    whole = memoryview(log)[: len(log) // RECORD_BYTES * RECORD_BYTES]
    for *fields, check in _RECORD.iter_unpack(whole):
        offset, length, content = fields
        if (
            xxh3_64_intdigest(_CHECKED.pack(offset, length, content), _SEED) == check
            and 0 < length <= RECORD_STREAM_BYTES_MAX
            and offset % SECTOR_BYTES == 0
            and (offset + length == stream_length or length % SECTOR_BYTES == 0)
            and offset + length <= stream_length
        ):
            yield Sum(offset, length, content)


def matches(data: bytes, expected: Sum) -> bool:
    """Whether `data` is what was written."""
    return len(data) == expected.length and xxh3_64_intdigest(data) == expected.content
