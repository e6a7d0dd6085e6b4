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

    Kept as it is, with an order, and each record is checked when it is asked for: a log of 100,000
    records, as a large layer has, is read in a twentieth of a second.
    """

    def __init__(self, log: bytes, stream_length: int) -> None:
        """What does not check is left out: the last records before a crash, and lost pages."""
        self._log = log[: len(log) // RECORD_BYTES * RECORD_BYTES]
        self._stream_length = stream_length
        fields = array("Q", self._log)
        if sys.byteorder == "big":
            fields.byteswap()
        offsets = fields[0::4]
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        self._order = array("Q", order)
        self._starts = array("Q", map(offsets.__getitem__, order))

    def __iter__(self) -> Iterator[Sum]:
        return iter(self._covering(0, 0, len(self._order)))

    def covering(self, offset: int, length: int) -> list[Sum]:
        """The checksums of any part of `[offset, offset + length)`."""
        first = bisect_left(self._starts, max(0, offset - RECORD_STREAM_BYTES_MAX))
        return self._covering(offset, first, bisect_left(self._starts, offset + length, first))

    def _covering(self, position: int, first: int, stop: int) -> list[Sum]:
        """The checksums among these, in the order of their offsets, that check and end behind
        `position`."""
        found = []
        for number in self._order[first:stop]:
            at = RECORD_BYTES * number
            offset, length, content, check = _RECORD.unpack_from(self._log, at)
            end = offset + length
            if (
                end > position
                and 0 < length <= RECORD_STREAM_BYTES_MAX
                and end <= self._stream_length
                and offset % SECTOR_BYTES == 0
                and (end == self._stream_length or length % SECTOR_BYTES == 0)
                and xxh3_64_intdigest(self._log[at : at + _CHECKED.size], _SEED) == check
            ):
                found.append(Sum(offset, length, content))
        return found


def matches(data: bytes | memoryview, expected: Sum) -> bool:
    """Whether `data` is what was written."""
    return len(data) == expected.length and xxh3_64_intdigest(data) == expected.content
