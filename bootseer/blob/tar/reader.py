"""Strict streaming parser of tar archives: ustar, GNU and PAX, with all four sparse formats.

Odd archives are interpreted as by container engines (Go's archive/tar); global extended headers are
ignored. Each member includes its raw header bytes, so that a caller can copy an archive unchanged.
The parser reads forward only, with bounded memory. One thread.
"""

import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.blob.tar import fields as tar_fields
from bootseer.blob.tar.header import BLOCK
from bootseer.errors import CorruptError, UnsupportedError

EXTENDED_BYTES_MAX = 16 * 1024 * 1024
"""Largest size of the extended headers, long names and sparse map of one member, against hostile
lengths."""
PATH_BYTES_MAX = 4096
"""PATH_MAX of Linux; no program unpacks longer paths."""

_READ_BYTES = 1024 * 1024
_ZERO_BLOCK = bytes(BLOCK)
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
    # Directory whose content is the list of its names (GNU incremental dump).
    b"D": stat.S_IFDIR,
}
_WITHOUT_CONTENT = b"123456"
_FIELDS = struct.Struct("<100s8s8s8s12s12s8xc100s6s82x155s12x")
"""Name, mode, owner, group, size, time, kind, link, magic, prefix; without device numbers and
checksum."""

_SEGMENT_COUNT_MAX = 2**18
"""Largest number of segments of one sparse file, against hostile lengths."""

Take = Callable[[int], bytes]
"""Function `take(count)` that returns exactly the next `count` bytes of the archive."""


class ReadableStream(Protocol):
    """Source of a tar archive."""

    def read(self, size: int, /) -> bytes:
        """Return at least one and at most `size` bytes; b"" at the end."""
        ...


class TarMember(Struct, frozen=True, gc=False):
    """Member of an archive without its content, which follows in the stream."""

    raw: bytes
    """All header blocks, including extended headers and sparse maps."""
    path: bytes
    """Path as in the archive."""
    mode: int
    """Mode with the file type; a hard link has the type of a regular file."""
    uid: int
    gid: int
    mtime_ns: int
    rdev: int
    link: bytes
    is_hard_link: bool
    is_label: bool
    """Whether the member is a volume label (GNU), which is not unpacked."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    stored_bytes: int
    """Bytes of content in the stream, without padding."""
    size_bytes: int
    """Size of the file; for a sparse file larger than `stored_bytes`."""
    segments: list[tuple[int, int]] | None
    """Stored segments (offset, length) of a sparse file, in the order of the stream; else None."""


class TarReader:
    """Iterator over the members of an archive.

    After each member the caller must take or skip its content and padding.
    """

    def __init__(self, stream: ReadableStream) -> None:
        self._stream = stream
        self._buffer = b""
        self._taken = 0
        """Number of bytes of the buffer that were taken."""
        self._buffer_start = 0
        """Offset of the buffer in the stream."""
        self._path = b""
        """Path of the current member; b"" if there is none."""
        self.rest = b""
        """Block after the last member that ended the archive; b"" if there was none."""

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises: CorruptError if the archive is cut off."""
        data = self.take_up_to(count)
        if len(data) != count:
            raise self._cut_off()
        return data

    def _cut_off(self) -> CorruptError:
        where = f" in {quoted(self._path)}" if self._path else ""
        return CorruptError(f"the tar archive is cut off at byte {self.position}{where}")

    def take_padding(self, stored_bytes: int) -> bytes:
        """Return the padding after a content of `stored_bytes` bytes.

        The padding of the last member may be missing, as the zero blocks at the end may be: some
        writers omit both, and GNU tar and container engines accept that.
        """
        return self.take_up_to(-stored_bytes % BLOCK)

    def take_up_to(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer only at the end of the stream."""
        start = self._taken
        end = start + count
        if end <= len(self._buffer):
            self._taken = end
            return self._buffer[start:end]
        pieces = [self._buffer[start:]]
        missing = count - len(pieces[0])
        while missing and self._refill(missing):
            self._taken = min(missing, len(self._buffer))
            pieces.append(self._buffer[: self._taken])
            missing -= self._taken
        return b"".join(pieces)

    def view_padded(self, stored_bytes: int) -> bytes | memoryview:
        """Return a content of `stored_bytes` bytes with its padding; see `view`, `take_padding`."""
        padded = stored_bytes + -stored_bytes % BLOCK
        if self._taken + padded <= len(self._buffer):
            return self.view(padded)
        return self.take(stored_bytes) + self.take_padding(stored_bytes)

    def view(self, count: int) -> bytes | memoryview:
        """Return the next `count` bytes, if possible as a view of the buffer without a copy.

        A view keeps the whole buffer in memory. Raises: CorruptError if the archive is cut off.
        """
        start = self._taken
        end = start + count
        if end > len(self._buffer):
            return self.take(count)
        self._taken = end
        return memoryview(self._buffer)[start:end]

    def skip(self, count: int) -> None:
        """Skip the next `count` bytes. Raises: CorruptError if the archive is cut off."""
        left = self._taken + count - len(self._buffer)
        if left <= 0:
            self._taken += count
            return
        while left > 0:
            if not self._refill(left):
                raise self._cut_off()
            self._taken = min(left, len(self._buffer))
            left -= self._taken

    def skip_padded(self, stored_bytes: int) -> None:
        """Skip a content of `stored_bytes` bytes and its padding; see `skip`, `take_padding`."""
        padded = stored_bytes + -stored_bytes % BLOCK
        if self._taken + padded <= len(self._buffer):
            self._taken += padded
            return
        self.skip(stored_bytes)
        self.take_padding(stored_bytes)

    def _refill(self, wanted: int) -> bool:
        """Replace the buffer, which has been taken completely; return False at the end."""
        self._buffer_start += len(self._buffer)
        self._buffer = self._stream.read(max(wanted, _READ_BYTES))
        self._taken = 0
        return bool(self._buffer)

    @property
    def position(self) -> int:
        """Offset in the stream of the next byte."""
        return self._buffer_start + self._taken

    def __iter__(self) -> Iterator[TarMember]:
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
                if not block and not self.position:
                    raise CorruptError("not a tar archive: it is empty")
                self.rest = block
                return
            self._path = b""
            if len(block) < BLOCK:
                raise self._cut_off()
            tar_fields.verify_checksum(block, self.position - BLOCK)
            raw.append(block)
            kind = block[156:157]
            if kind in b"xXgLK":
                size = tar_fields.number(block[124:136])
                if not 0 <= size <= EXTENDED_BYTES_MAX:
                    raise CorruptError(f"an extended tar header claims {size} bytes")
                extended_bytes += BLOCK + size
                if extended_bytes > EXTENDED_BYTES_MAX:
                    raise CorruptError(
                        f"the extended tar headers at byte {self.position} are too long"
                    )
                raw.append(self.take(size + -size % BLOCK))
                body = raw[-1][:size]
                if kind == b"L":
                    long_name = body.split(b"\0", 1)[0]
                elif kind == b"K":
                    long_link = body.split(b"\0", 1)[0]
                elif kind != b"g":
                    local.update(tar_fields.records(body, sparse))
                continue
            if kind == b"M":
                raise UnsupportedError("the tar archive is one of several volumes: join them first")
            member = self._member(block, raw, local, sparse, long_name, long_link)
            raw, local, sparse, long_name, long_link = [], {}, [], b"", b""
            extended_bytes = 0
            self._path = member.path
            yield member

    def _member(
        self,
        block: bytes,
        raw: list[bytes],
        records: dict[bytes, bytes],
        sparse: list[tuple[int, int]],
        long_name: bytes,
        long_link: bytes,
    ) -> TarMember:
        number = tar_fields.number
        name, mode, owner, group, size, time, kind, link, magic, prefix = _FIELDS.unpack(block)
        path = long_name or name.split(b"\0", 1)[0]
        if prefix[0] and not long_name and magic == b"ustar\0":
            path = prefix.split(b"\0", 1)[0] + b"/" + path
        link = long_link or (link.split(b"\0", 1)[0] if link[0] else b"")
        stored, uid, gid = number(size), number(owner), number(group)
        mtime_ns = number(time) * 10**9
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
        is_sparse = False
        if records:
            path = records.get(b"path", path)
            link = records.get(b"linkpath", link)
            stored = tar_fields.decimal(records, b"size", stored)
            uid = tar_fields.decimal(records, b"uid", uid)
            gid = tar_fields.decimal(records, b"gid", gid)
            if b"mtime" in records:
                mtime_ns = tar_fields.decimal_seconds_ns(records[b"mtime"])
            if not tar_fields.is_plain(records):
                xattrs = tar_fields.xattrs(records)
                is_sparse = _is_sparse(records)
        file_type = _KINDS.get(kind, stat.S_IFREG)
        # In archives older than POSIX only the name shows that a member is a directory.
        if kind == b"\0" and path.endswith(b"/"):
            file_type = stat.S_IFDIR
        if kind in _WITHOUT_CONTENT:
            stored = 0
        if stored < 0 or not 0 <= uid < 2**32 or not 0 <= gid < 2**32:
            raise CorruptError(f"the tar member {quoted(path)} has an impossible size or owner")
        sparse_map: _SparseMap | None = None
        if kind == b"S":
            sparse_map = _old_map(path, block, self.take)
        elif is_sparse and stat.S_ISREG(file_type):
            path = records.get(b"GNU.sparse.name", path)
            sparse_map = _pax_map(path, records, sparse, stored, self.take)
            stored -= sum(map(len, sparse_map.blocks))
        if sparse_map is not None:
            _verify_map(sparse_map, path, stored)
            raw += sparse_map.blocks
        if len(path) > PATH_BYTES_MAX or len(link) > PATH_BYTES_MAX:
            raise CorruptError(
                f"a name or link in the tar archive is longer than {PATH_BYTES_MAX} bytes: "
                f"{quoted(path[:80])}"
            )
        return TarMember(
            b"".join(raw),
            path,
            file_type | (number(mode) & 0o7777),
            uid,
            gid,
            tar_fields.bounded_ns(mtime_ns),
            tar_fields.device(block) if kind in (b"3", b"4") else 0,
            link,
            kind == b"1",
            kind == b"V",
            xattrs,
            stored,
            stored if sparse_map is None else sparse_map.size_bytes,
            None if sparse_map is None else sparse_map.segments,
        )


# ---- maps of sparse files: GNU's format, PAX 0.0, 0.1 and 1.0 ------------------------------------


class _SparseMap(Struct, frozen=True):
    """Parts of a sparse file that its archive contains."""

    segments: list[tuple[int, int]]
    """Stored segments (offset, length) in the order of the stream."""
    size_bytes: int
    """Size of the file with its holes."""
    blocks: list[bytes]
    """Blocks of the stream after the header that belong to the map."""


def _is_sparse(records: Mapping[bytes, bytes]) -> bool:
    """Return whether an extended header says that the file is sparse."""
    return any(key.startswith(b"GNU.sparse.") for key in records)


def _old_map(path: bytes, header: bytes, take: Take) -> _SparseMap:
    """Return a map in GNU's format: four segments in the header, 21 in each extension block."""
    segments = _entries(header[386:482])
    blocks: list[bytes] = []
    more = header[482]
    while more:
        blocks.append(take(BLOCK))
        segments += _entries(blocks[-1][:504])
        more = blocks[-1][504]
        if len(segments) > _SEGMENT_COUNT_MAX:
            raise CorruptError(f"the sparse map of {quoted(path)} is too long")
    return _SparseMap(segments, tar_fields.number(header[483:495]), blocks)


def _pax_map(
    path: bytes,
    records: Mapping[bytes, bytes],
    pairs: list[tuple[int, int]],
    stored_bytes: int,
    take: Take,
) -> _SparseMap:
    """Return a map in PAX format: 0.0 (repeated records), 0.1 (one record), 1.0 (in the content).

    `pairs` are the repeated records. `stored_bytes` is the length of the content in the stream,
    including the map of 1.0.
    """
    size = tar_fields.decimal(records, b"GNU.sparse.size", stored_bytes)
    size = tar_fields.decimal(records, b"GNU.sparse.realsize", size)
    if records.get(b"GNU.sparse.major") == b"1":
        segments, blocks = _map_before_content(path, stored_bytes, take)
        return _SparseMap(segments, size, blocks)
    if b"GNU.sparse.map" not in records:
        return _SparseMap(pairs, size, [])
    text = records[b"GNU.sparse.map"]
    numbers = [tar_fields.integer(number) for number in text.split(b",")] if text else []
    if len(numbers) % 2 or len(numbers) > 2 * _SEGMENT_COUNT_MAX:
        raise CorruptError(f"the sparse map of {quoted(path)} is cut off or too long")
    return _SparseMap(list(zip(numbers[::2], numbers[1::2], strict=True)), size, [])


def _verify_map(found: _SparseMap, path: bytes, stored_bytes: int) -> None:
    """Raise CorruptError unless the segments are ordered and fit the file and its content."""
    position = stored = 0
    for offset, length in found.segments:
        if offset < position or length < 0:
            raise CorruptError(f"the sparse map of {quoted(path)} is not in order")
        position = offset + length
        stored += length
    if position > found.size_bytes or stored != stored_bytes:
        raise CorruptError(f"the sparse map of {quoted(path)} does not fit its size")


def _entries(area: bytes) -> list[tuple[int, int]]:
    found = []
    for start in range(0, len(area), 24):
        entry = area[start : start + 24]
        if not entry[0]:
            break
        found.append((tar_fields.number(entry[:12]), tar_fields.number(entry[12:])))
    return found


def _map_before_content(
    path: bytes, stored_bytes: int, take: Take
) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Return the segments and the blocks of a PAX 1.0 map.

    The map consists of decimal lines, the first of which is the number of segments, padded to whole
    blocks.
    """
    blocks: list[bytes] = []
    length = found = 0
    wanted = 1
    while found < wanted:
        # A line has at most 21 bytes. A map with longer lines is refused, so that it is not parsed
        # again for each of its blocks.
        if length >= stored_bytes or length > (found + 1) * 21 + BLOCK:
            raise CorruptError(f"the sparse map of {quoted(path)} is malformed")
        # Each missing number takes at least two bytes.
        missing = max((wanted - found) * 2, 1)
        block = take(min(missing + -missing % BLOCK, stored_bytes + -stored_bytes % BLOCK))
        blocks.append(block)
        length += len(block)
        found += block.count(b"\n")
        if wanted == 1 and found:
            wanted = 1 + 2 * tar_fields.integer(b"".join(blocks).split(b"\n", 1)[0])
            if wanted > 1 + 2 * _SEGMENT_COUNT_MAX:
                raise CorruptError(f"the sparse map of {quoted(path)} is too long")
    text = b"".join(blocks)
    numbers = [tar_fields.integer(line) for line in text.split(b"\n", wanted)[1:wanted]]
    return list(zip(numbers[::2], numbers[1::2], strict=True)), blocks
