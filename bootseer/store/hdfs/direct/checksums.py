"""The checksums that a writer gives HDFS, which every reader of a file checks. Pure."""

import struct
from collections.abc import Callable
from zlib import crc32 as slow_crc32

import google_crc32c
from msgspec import Struct

try:
    from isal.isal_zlib import crc32
except ImportError:  # another processor
    crc32 = slow_crc32


class ChecksumKind(Struct, frozen=True):
    """One per so many bytes. Copies of a file are compared by these, so the kind matters."""

    number: int
    """ChecksumTypeProto."""
    piece_bytes: int
    add: Callable[[memoryview, int], int]
    """The checksum of what had the given one, and of what follows."""


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32C (Castagnoli) of what had the checksum `before`, and of `data` behind it."""
    checksum: int = google_crc32c.extend(before, bytes(data))  # it takes nothing that can change
    return checksum


LARGE = ChecksumKind(1, 16 << 10, crc32)
"""For bytes that have checksums of ours: computed by the processor's instructions."""
STANDARD = ChecksumKind(2, 512, crc32c)
"""As HDFS's own clients have them by default."""


def checksums_of(data: list[memoryview], kind: ChecksumKind) -> bytes:
    """Returns the checksums of the pieces of `data`, in the form of a packet."""
    sums = []
    checksum, room = 0, kind.piece_bytes
    for piece in data:
        rest = piece
        while rest:
            step = rest[:room]
            checksum = kind.add(step, checksum)
            room -= len(step)
            rest = rest[len(step) :]
            if not room:
                sums.append(checksum)
                checksum, room = 0, kind.piece_bytes
    if room < kind.piece_bytes:
        sums.append(checksum)
    return struct.pack(f">{len(sums)}I", *sums)
