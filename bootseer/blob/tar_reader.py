"""A strict streaming parser of tar archives: ustar, GNU and PAX, sparse files of all four kinds.

What it makes of odd archives is what container engines make of them (Go's archive/tar): they ignore
global extended headers. It hands out the very bytes it has read beside what they mean, so that a
caller can copy an archive unchanged. Reads forward only, with bounded memory. One thread.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from bootseer.blob.tar_header import BLOCK
from bootseer.errors import CorruptError, UnsupportedError

EXTENDED_BYTES_MAX = 16 * 1024 * 1024
"""Of all extended headers and long names of one member, and of its sparse map: hostile lengths must
not fill the memory."""
PATH_BYTES_MAX = 4096
"""PATH_MAX of Linux. Nothing unpacks what is longer, and each folder of a path costs its length."""
SEGMENT_COUNT_MAX = 2**18
"""Of one sparse file, for the same reason."""

_READ_BYTES = 1024 * 1024
_ZERO_BLOCK = bytes(BLOCK)
_TIME_NS_MAX = 2**63 - 1
_KINDS = {
    b"0": stat.S_IFREG,
    b"\0": stat.S_IFREG,
    b"7": stat.S_IFREG,
    b"S": stat.S_IFREG,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
    # A directory with the list of its names as content (GNU incremental dump).
    b"D": stat.S_IFDIR,
}
_WITHOUT_CONTENT = b"123456"
_XATTR = b"SCHILY.xattr."


class Readable(Protocol):
    """All that a tar is read from needs."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most `size` and maybe fewer; b"" at the end."""
        ...


@dataclass(slots=True)
class Member:
    """One member, except for its content, which follows in the stream."""

    raw: bytes
    """All header blocks, extended ones and sparse maps included."""
    path: bytes
    """As in the archive."""
    mode: int
    """With the file type; for a hard link, that of a regular file."""
    uid: int
    gid: int
    mtime_ns: int
    rdev: int
    link: bytes
    is_hard_link: bool
    is_label: bool
    """A volume label (GNU): nothing that would be unpacked."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    stored_bytes: int
    """Of content in the stream, without padding."""
    size_bytes: int
    """Of the file: more than is stored if it is sparse."""
    segments: list[tuple[int, int]] | None
    """Of a sparse file, the (offset, length) that are stored, one after the other."""


class TarReader:
    """Iterates over members. Between two, the caller must `take` the content and its padding."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._buffer = memoryview(b"")
        self._position = 0
        self.rest = b""
        """After the last member: the block or blocks that ended the archive."""

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises: CorruptError where the archive is cut off."""
        data = self.take_up_to(count)
        if len(data) != count:
            raise CorruptError(f"the tar archive is cut off at byte {self._position}")
        return data

    def take_up_to(self, count: int) -> bytes:
        """The next `count` bytes, fewer only at the end of the stream."""
        if len(self._buffer) >= count:
            data = bytes(self._buffer[:count])
            self._buffer = self._buffer[count:]
        else:
            pieces = [bytes(self._buffer)]
            missing = count - len(self._buffer)
            self._buffer = memoryview(b"")
            while missing:
                piece = self._stream.read(max(missing, _READ_BYTES))
                if not piece:
                    break
                if len(piece) > missing:
                    self._buffer = memoryview(piece)[missing:]
                    piece = piece[:missing]
                pieces.append(piece)
                missing -= len(piece)
            data = b"".join(pieces)
        self._position += len(data)
        return data

    def skip(self, count: int) -> None:
        """Go past the next `count` bytes. Raises: CorruptError where the archive is cut off."""
        left = count - len(self._buffer)
        if left < 0:
            self._buffer = self._buffer[count:]
        else:
            self._buffer = memoryview(b"")
            while left:
                piece = self._stream.read(max(left, _READ_BYTES))
                if not piece:
                    raise CorruptError(
                        f"the tar archive is cut off at byte {self._position + count - left}"
                    )
                if len(piece) > left:
                    self._buffer = memoryview(piece)[left:]
                left -= min(len(piece), left)
        self._position += count

    @property
    def position(self) -> int:
        """Offset in the stream of the next byte."""
        return self._position

    def __iter__(self) -> Iterator[Member]:
        raw: list[bytes] = []
        local: dict[bytes, bytes] = {}
        sparse: list[tuple[int, int]] = []
        long_name = long_link = b""
        extended_bytes = 0
        while True:
            block = self.take_up_to(BLOCK)
            if not block or block == _ZERO_BLOCK:
                if raw:
                    raise CorruptError("the tar archive ends after an extended header")
                if not block and not self._position:
                    raise CorruptError("not a tar archive: it is empty")
                self.rest = block
                return
            if len(block) < BLOCK:
                raise CorruptError(f"the tar archive is cut off at byte {self._position}")
            _check_sum(block, self._position - BLOCK)
            raw.append(block)
            kind = block[156:157]
            if kind in b"xXgLK":
                size = _number(block[124:136])
                if not 0 <= size <= EXTENDED_BYTES_MAX:
                    raise CorruptError(f"an extended tar header claims {size} bytes")
                extended_bytes += BLOCK + size
                if extended_bytes > EXTENDED_BYTES_MAX:
                    raise CorruptError(
                        f"the extended tar headers at byte {self._position} are too long"
                    )
                raw.append(self.take(size + -size % BLOCK))
                body = raw[-1][:size]
                if kind == b"L":
                    long_name = body.split(b"\0", 1)[0]
                elif kind == b"K":
                    long_link = body.split(b"\0", 1)[0]
                elif kind != b"g":
                    local.update(_records(body, sparse))
                continue
            if kind == b"M":
                raise UnsupportedError("the tar archive is one of several volumes: join them first")
            member = self._member(block, raw, local, sparse, long_name, long_link)
            raw, local, sparse, long_name, long_link = [], {}, [], b"", b""
            extended_bytes = 0
            yield member

    def _member(
        self,
        block: bytes,
        raw: list[bytes],
        records: dict[bytes, bytes],
        sparse: list[tuple[int, int]],
        long_name: bytes,
        long_link: bytes,
    ) -> Member:
        kind = block[156:157]
        path = long_name or _field(block, 0, 100)
        if not long_name and block[257:263] == b"ustar\0" and block[345]:
            path = _field(block, 345, 155) + b"/" + path
        link = long_link or _field(block, 157, 100)
        stored = _number(block[124:136])
        uid, gid = _number(block[108:116]), _number(block[116:124])
        mtime_ns = _bounded_time(_number(block[136:148]) * 10**9)
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
        if records:
            path = records.get(b"path", path)
            link = records.get(b"linkpath", link)
            stored = _decimal(records, b"size", stored)
            uid, gid = _decimal(records, b"uid", uid), _decimal(records, b"gid", gid)
            if b"mtime" in records:
                mtime_ns = _bounded_time(_time(records[b"mtime"]))
            xattrs = _xattrs(records)
        file_type = _KINDS.get(kind, stat.S_IFREG)
        # Archives older than POSIX mark a directory by its name only.
        if kind == b"\0" and path.endswith(b"/"):
            file_type = stat.S_IFDIR
        if kind in _WITHOUT_CONTENT:
            stored = 0
        if stored < 0 or not 0 <= uid < 2**32 or not 0 <= gid < 2**32:
            raise CorruptError(f"the tar member {path!r} has an impossible size or owner")
        member = Member(
            raw=b"",
            path=path,
            mode=file_type | (_number(block[100:108]) & 0o7777),
            uid=uid,
            gid=gid,
            mtime_ns=mtime_ns,
            rdev=_device(block) if kind in (b"3", b"4") else 0,
            link=link,
            is_hard_link=kind == b"1",
            is_label=kind == b"V",
            xattrs=xattrs,
            stored_bytes=stored,
            size_bytes=stored,
            segments=None,
        )
        if kind == b"S":
            self._old_sparse(member, block, raw)
        elif stat.S_ISREG(file_type) and any(key.startswith(b"GNU.sparse.") for key in records):
            self._pax_sparse(member, records, sparse, raw)
        if member.segments is not None:
            _check_segments(member)
        if max(len(member.path), len(member.link)) > PATH_BYTES_MAX:
            raise CorruptError(
                f"a name or link in the tar archive is longer than {PATH_BYTES_MAX} bytes: "
                f"{member.path[:80]!r}"
            )
        member.raw = b"".join(raw)
        return member

    def _old_sparse(self, member: Member, block: bytes, raw: list[bytes]) -> None:
        """GNU's own format: four segments in the header, 21 in each extension block."""
        segments = _sparse_entries(block[386:482])
        more = block[482]
        while more:
            extension = self.take(BLOCK)
            raw.append(extension)
            segments += _sparse_entries(extension[:504])
            more = extension[504]
            if len(segments) > SEGMENT_COUNT_MAX:
                raise CorruptError(f"the sparse map of {member.path!r} is too long")
        member.size_bytes = _number(block[483:495])
        member.segments = segments

    def _pax_sparse(
        self,
        member: Member,
        records: dict[bytes, bytes],
        sparse: list[tuple[int, int]],
        raw: list[bytes],
    ) -> None:
        """PAX 0.0 (repeated records), 0.1 (one record), 1.0 (the map precedes the content)."""
        member.path = records.get(b"GNU.sparse.name", member.path)
        size = _decimal(records, b"GNU.sparse.size", member.size_bytes)
        member.size_bytes = _decimal(records, b"GNU.sparse.realsize", size)
        if records.get(b"GNU.sparse.major") == b"1":
            member.segments = self._sparse_map(member, raw)
        elif b"GNU.sparse.map" in records:
            text = records[b"GNU.sparse.map"]
            numbers = [_integer(number) for number in text.split(b",")] if text else []
            if len(numbers) % 2 or len(numbers) > 2 * SEGMENT_COUNT_MAX:
                raise CorruptError(f"the sparse map of {member.path!r} is cut off or too long")
            member.segments = list(zip(numbers[::2], numbers[1::2], strict=True))
        else:
            member.segments = sparse

    def _sparse_map(self, member: Member, raw: list[bytes]) -> list[tuple[int, int]]:
        blocks: list[bytes] = []
        length = found = 0
        wanted = 1
        while found < wanted:
            # A number has at most 20 digits: without this, each block of a map without line ends
            # would be searched again and again.
            if length >= member.stored_bytes or length > (found + 1) * 21 + BLOCK:
                raise CorruptError(f"the sparse map of {member.path!r} is malformed")
            # What is missing takes at least two bytes a number.
            missing = max((wanted - found) * 2, 1)
            block = self.take(
                min(missing + -missing % BLOCK, member.stored_bytes + -member.stored_bytes % BLOCK)
            )
            raw.append(block)
            blocks.append(block)
            length += len(block)
            found += block.count(b"\n")
            if wanted == 1 and found:
                wanted = 1 + 2 * _integer(b"".join(blocks).split(b"\n", 1)[0])
                if wanted > 1 + 2 * SEGMENT_COUNT_MAX:
                    raise CorruptError(f"the sparse map of {member.path!r} is too long")
        text = b"".join(blocks)
        member.stored_bytes -= len(text)
        numbers = [_integer(line) for line in text.split(b"\n", wanted)[1:wanted]]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _check_sum(block: bytes, position: int) -> None:
    """Unsigned as POSIX says, or signed as some old tars did."""
    text = block[148:156].strip(b" \0")
    expected = int(text, 8) if text and not text.strip(b"01234567") else -1
    total = sum(block) - sum(block[148:156]) + 256
    if expected != total and expected != total - 256 * sum(byte > 127 for byte in block):
        raise CorruptError(f"not a tar header at byte {position}: its checksum is wrong")


def _field(block: bytes, start: int, length: int) -> bytes:
    return block[start : start + length].split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    """Octal, or base 256 where the first bit is set (GNU)."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    try:
        if text.isdigit():
            return int(text, 8)
    except ValueError:
        pass
    raise CorruptError(f"{field!r} is not a number of a tar header")


def _integer(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise CorruptError(f"{text[:40]!r} is not a number of a tar header")
    return int(text)


def _decimal(records: dict[bytes, bytes], keyword: bytes, otherwise: int) -> int:
    text = records.get(keyword)
    return otherwise if text is None else _integer(text)


def _time(text: bytes) -> int:
    """Decimal seconds as nanoseconds, exactly; further digits are dropped."""
    negative = text.startswith(b"-")
    seconds, _, fraction = text.removeprefix(b"-").partition(b".")
    if len(fraction) > 40 or (fraction and not fraction.isdigit()):
        raise CorruptError(f"{text[:40]!r} is not a time of a tar header")
    value = _integer(seconds) * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return -value if negative else value


def _bounded_time(time_ns: int) -> int:
    """What 64 bits cannot hold (Go's zero time, year 1) becomes the epoch, as with containerd."""
    return time_ns if -_TIME_NS_MAX <= time_ns <= _TIME_NS_MAX else 0


def _device(block: bytes) -> int:
    major, minor = _number(block[329:337]), _number(block[337:345])
    if not 0 <= major < 2**12 or not 0 <= minor < 2**20:
        raise CorruptError(f"the tar archive holds an impossible device {major}:{minor}")
    return os.makedev(major, minor)


def _sparse_entries(area: bytes) -> list[tuple[int, int]]:
    found = []
    for start in range(0, len(area), 24):
        entry = area[start : start + 24]
        if not entry[0]:
            break
        found.append((_number(entry[:12]), _number(entry[12:])))
    return found


def _check_segments(member: Member) -> None:
    position = stored = 0
    for offset, length in member.segments or ():
        if offset < position or length < 0:
            raise CorruptError(f"the sparse map of {member.path!r} is not in order")
        position = offset + length
        stored += length
    if position > member.size_bytes or stored != member.stored_bytes:
        raise CorruptError(f"the sparse map of {member.path!r} does not fit its size")


def _records(body: bytes, sparse: list[tuple[int, int]]) -> dict[bytes, bytes]:
    """The records of an extended header; the repeated ones of PAX sparse 0.0 go to `sparse`."""
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
            offset = _integer(value)
        elif keyword == b"GNU.sparse.numbytes":
            sparse.append((offset, _integer(value)))
        if value or keyword.startswith(_XATTR):
            found[keyword] = value
        else:
            # As if the header's own field had never been replaced.
            found.pop(keyword, None)
        position = end
    return found


def _xattrs(records: dict[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(
        sorted(
            (key[len(_XATTR) :].replace(b"%3D", b"=").replace(b"%25", b"%"), value)
            for key, value in records.items()
            if key.startswith(_XATTR)
        )
    )
