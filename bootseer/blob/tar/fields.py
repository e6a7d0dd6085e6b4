"""Decoding of the fields of a tar header and of the records of an extended header. Pure.

Odd values are interpreted as by Go's archive/tar, and so by container engines.
"""

import os
import zlib
from collections.abc import Mapping
from functools import lru_cache

from bootseer.base.display import quoted
from bootseer.errors import CorruptError

_TIME_NS_MAX = 2**63 - 1
_XATTR = b"SCHILY.xattr."
_PLAIN = frozenset(
    (
        b"path",
        b"linkpath",
        b"size",
        b"uid",
        b"gid",
        b"uname",
        b"gname",
        b"mtime",
        b"atime",
        b"ctime",
    )
)


def verify_checksum(block: bytes, position: int) -> None:
    """Raise CorruptError unless a header's checksum is right.

    The sum is of unsigned bytes, as POSIX says, or of signed bytes, as in some old archives.
    """
    # The sum of a block of ASCII is less than Adler-32's modulus.
    if block.isascii() and zlib.adler32(block) & 0xFFFF == _adler_of_block(block[148:156]):
        return
    expected = _checksum(block[148:156])
    # The checksum field itself counts as eight spaces.
    total = _sum(block[:148]) + 256 + _sum(block[156:412]) + _sum(block[412:])
    if expected != total and expected != total - 256 * sum(byte > 127 for byte in block):
        raise CorruptError(f"not a tar header at byte {position}: its checksum is wrong")


def _checksum(field: bytes) -> int:
    """Return the value of a checksum field; -1 if it is malformed."""
    digits = field.strip(b" \0")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else -1


@lru_cache(maxsize=4096)
def _adler_of_block(field: bytes) -> int:
    """Return the lower half of the Adler-32 of a block for which this checksum field is right."""
    return _checksum(field) - 256 + _sum(field) + 1


def _sum(part: bytes) -> int:
    """Return the sum of at most 256 bytes, from Adler-32, which contains it plus 1."""
    return (zlib.adler32(part) & 0xFFFF) - 1


@lru_cache(maxsize=1024)
def number(field: bytes) -> int:
    """Return the value of a numeric field: octal, or base 256 if the first bit is set (GNU)."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    digits = field.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    try:
        if digits.isdigit():
            return int(digits, 8)
    except ValueError:
        pass
    raise CorruptError(f"{quoted(field)} is not a number of a tar header")


def integer(digits: bytes) -> int:
    """Return a decimal number of at most 20 digits. Raises: CorruptError."""
    if not digits.isdigit() or len(digits) > 20:
        raise CorruptError(f"{quoted(digits[:40])} is not a number of a tar header")
    return int(digits)


def decimal(found: Mapping[bytes, bytes], keyword: bytes, otherwise: int) -> int:
    """Return the decimal number of an extended header's record, or `otherwise` without one."""
    digits = found.get(keyword)
    return otherwise if digits is None else integer(digits)


def decimal_seconds_ns(digits: bytes) -> int:
    """Return decimal seconds in nanoseconds, exactly; further digits are dropped."""
    seconds, _, fraction = digits.partition(b".")
    if len(fraction) > 40 or (fraction and not fraction.isdigit()):
        raise CorruptError(f"{quoted(digits[:40])} is not a time of a tar header")
    value = integer(seconds.removeprefix(b"-")) * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return -value if digits.startswith(b"-") else value


def bounded_ns(time_ns: int) -> int:
    """Return a time, or the epoch if it does not fit into 64 bits, as containerd does.

    Such a time is Go's zero time in the year 1.
    """
    return time_ns if -_TIME_NS_MAX <= time_ns <= _TIME_NS_MAX else 0


def device(block: bytes) -> int:
    """Return the device number of a header as `st_rdev`."""
    major, minor = number(block[329:337]), number(block[337:345])
    if not 0 <= major < 2**12 or not 0 <= minor < 2**20:
        raise CorruptError(f"the tar archive holds an impossible device {major}:{minor}")
    return os.makedev(major, minor)


def records(body: bytes, sparse: list[tuple[int, int]]) -> dict[bytes, bytes]:
    """Return the records of an extended header; append those of PAX sparse 0.0 to `sparse`."""
    found: dict[bytes, bytes] = {}
    position = 0
    offset = 0
    while position < len(body):
        space = body.find(b" ", position, position + 20)
        digits = body[position : max(space, position)]
        if not digits.isdigit():
            # Some writers pad with NULs instead of giving the exact size.
            if not body[position:].strip(b"\0"):
                break
            raise CorruptError("an extended tar header is malformed")
        end = position + int(digits)
        equals = body.find(b"=", space, end)
        if end > len(body) or end <= space + 1 or equals < 0 or body[end - 1] != 0x0A:
            raise CorruptError("an extended tar header is malformed")
        keyword, value = body[space + 1 : equals], body[equals + 1 : end - 1]
        if keyword == b"GNU.sparse.offset":
            offset = integer(value)
        elif keyword == b"GNU.sparse.numbytes":
            sparse.append((offset, integer(value)))
        if value or keyword.startswith(_XATTR):
            found[keyword] = value
        else:
            # An empty value cancels an earlier record: the header's own field is valid again.
            found.pop(keyword, None)
        position = end
    return found


def is_plain(found: Mapping[bytes, bytes]) -> bool:
    """Return whether all records of an extended header replace fields of the plain header."""
    return found.keys() <= _PLAIN


def xattrs(found: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the extended attributes in an extended header's records, sorted by name."""
    return tuple(
        sorted(
            (key[len(_XATTR) :].replace(b"%3D", b"=").replace(b"%25", b"%"), value)
            for key, value in found.items()
            if key.startswith(_XATTR)
        )
    )
