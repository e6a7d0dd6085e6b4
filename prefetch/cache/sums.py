"""The log of checksums: what was written to a cached stream, so that it can be verified again.

Alone owns the file `sums` of a stream (docs/format/cache.md): records of 32 bytes, appended after
the data that they are about. `Sums` is immutable; the functions keep no state.
"""

import os
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from bootseer.prefetch.cache.files import SECTOR_BYTES

RECORD_STREAM_BYTES_MAX = 256 * 1024
"""A read verifies whole records: a quarter of a megabyte takes less than a millisecond from a fast
disk, and a record for each costs 0.01 %."""

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
    """The records of a log, or of a part of one, by offset.

    Kept as columns, and each record is checked when it is asked for: a log of 100,000 records, as a
    large layer has, is read in a twentieth of a second.
    """

    def __init__(self, log: bytes, stream_length: int) -> None:
        """What does not check is left out: the last records before a crash, and lost pages."""
        fields = array("Q")
        fields.frombytes(memoryview(log)[: len(log) // RECORD_BYTES * RECORD_BYTES])
        if sys.byteorder == "big":
            fields.byteswap()
        self._fields = fields
        self._stream_length = stream_length
        offsets = fields[0::4]
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        self._order = array("Q", order)
        self._starts = array("Q", map(offsets.__getitem__, order))

    def __iter__(self) -> Iterator[Sum]:
        for number in self._order:
            one = self._sum(number)
            if one is not None:
                yield one

    def covering(self, offset: int, length: int) -> Iterator[Sum]:
        """Those that are about any of `[offset, offset + length)`."""
        i = bisect_left(self._starts, max(0, offset - RECORD_STREAM_BYTES_MAX))
        while i < len(self._starts) and self._starts[i] < offset + length:
            one = self._sum(self._order[i])
            if one is not None and one.offset + one.length > offset:
                yield one
            i += 1

    def _sum(self, number: int) -> Sum | None:
        """The record with this number in the log, if it checks."""
        offset, length, content, check = self._fields[4 * number : 4 * number + 4]
        if (
            xxh3_64_intdigest(_CHECKED.pack(offset, length, content), _SEED) == check
            and 0 < length <= RECORD_STREAM_BYTES_MAX
            and offset % SECTOR_BYTES == 0
            and (offset + length == self._stream_length or length % SECTOR_BYTES == 0)
            and offset + length <= self._stream_length
        ):
            return Sum(offset, length, content)
        return None


def matches(data: bytes, expected: Sum) -> bool:
    """Whether `data` is what was written."""
    return len(data) == expected.length and xxh3_64_intdigest(data) == expected.content
