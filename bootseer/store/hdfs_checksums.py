"""The checksums that a writer gives HDFS, which every reader of a file checks. Pure."""

import struct
from collections.abc import Callable
from functools import cache
from zlib import crc32 as slow_crc32

from msgspec import Struct

try:
    from isal.isal_zlib import crc32
except ImportError:  # another processor
    crc32 = slow_crc32

_REVERSED_POLYNOMIAL = 0x82F63B78


class ChecksumKind(Struct, frozen=True):
    """One per so many bytes. Copies of a file are compared by these, so the kind matters."""

    number: int
    """ChecksumTypeProto."""
    piece_bytes: int
    add: Callable[[memoryview, int], int]
    """The checksum of what had the given one, and of what follows."""


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32C (Castagnoli), 10 MB/s."""
    table, checksum = _table(), before ^ 0xFFFFFFFF
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_REVERSED_POLYNOMIAL if byte & 1 else 0)
    return byte


@cache
def _table() -> tuple[int, ...]:
    return tuple(map(_row, range(256)))


LARGE = ChecksumKind(1, 16 << 10, crc32)
"""For bytes that have checksums of ours: computed by the processor's instructions."""
STANDARD = ChecksumKind(2, 512, crc32c)
"""As HDFS's own clients have them by default."""


def checksums_of(data: list[memoryview], kind: ChecksumKind) -> bytes:
    """Those of what `data` holds together, as a packet has them."""
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
