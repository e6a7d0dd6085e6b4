"""Encoder of the headers of a blob's tar stream (docs/format/blob.md). Pure.

Headers are ustar headers, with PAX extended headers for values that ustar cannot represent, and GNU
long names for names that are both long and not UTF-8. The result does not depend on the clock, the
locale or the machine, so that the same tree gives the same bytes.
"""

import os
import stat
from collections.abc import Sequence

from bootseer.blob.tree import Inode

BLOCK = 512
END = bytes(2 * BLOCK)
"""Two zero blocks end an archive."""

_OCTAL_11_MAX = 8**11 - 1
_OCTAL_7_MAX = 8**7 - 1
_FIELD_NAME_MAX = 100
_TYPES = {
    stat.S_IFREG: b"0",
    stat.S_IFLNK: b"2",
    stat.S_IFCHR: b"3",
    stat.S_IFBLK: b"4",
    stat.S_IFDIR: b"5",
    stat.S_IFIFO: b"6",
}
# User and group names are empty, since other machines have other names.
_MAGIC_AND_OWNER_NAMES = b"ustar\x0000" + bytes(64)
_PAX_NAME = b"././@PaxHeader"
_LONG_NAME = b"././@LongLink"


def padding(length: int) -> bytes:
    """Return the zero bytes that fill the last block of `length` bytes of content."""
    return bytes(-length % BLOCK)


def member_header(
    path: bytes,
    inode: Inode,
    *,
    hard_link_to: bytes | None = None,
    segments: Sequence[tuple[int, int]] | None = None,
) -> bytes:
    """Return all blocks that precede the content of one member.

    `path` is relative, b"" for the root. With `hard_link_to`, the member is another name of that
    path without attributes of its own. With `segments` (offset, length), the file is sparse in PAX
    1.0 form: the last blocks returned are the map, and the content is the segments' bytes, joined.
    """
    records: list[tuple[bytes, bytes]] = []
    long_names = b""
    name = path if path else b"."
    kind = _TYPES[stat.S_IFMT(inode.mode)]
    size = inode.size_bytes if kind == b"0" else 0
    link = inode.link_target
    sparse_map = b""
    if hard_link_to is not None:
        kind, size, link = b"1", 0, hard_link_to
    else:
        if kind == b"5":
            name += b"/"
        if segments is not None:
            sparse_map = _sparse_map(segments)
            size = len(sparse_map) + sum(length for _, length in segments)
            records += [
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", name),
                (b"GNU.sparse.realsize", b"%d" % inode.size_bytes),
            ]
            # Name that a reader without support of sparse files uses, similar to GNU tar's.
            name = b"GNUSparseFile.0/" + os.path.basename(name)[:80]
    if len(name) > _FIELD_NAME_MAX:
        name, long_names = _long(name, b"path", b"L", records, long_names)
    if len(link) > _FIELD_NAME_MAX:
        link, long_names = _long(link, b"linkpath", b"K", records, long_names)
    uid = gid = seconds = 0
    if hard_link_to is None:
        seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
        if nanoseconds or not 0 <= seconds <= _OCTAL_11_MAX:
            records.append((b"mtime", _decimal_time(inode.mtime_ns)))
            seconds = min(max(seconds, 0), _OCTAL_11_MAX)
        uid = _or_record(inode.uid, _OCTAL_7_MAX, b"uid", records)
        gid = _or_record(inode.gid, _OCTAL_7_MAX, b"gid", records)
        for key, value in inode.xattrs:
            records.append((b"SCHILY.xattr." + _escape(key), value))
    size = _or_record(size, _OCTAL_11_MAX, b"size", records)
    device = inode.rdev if kind in (b"3", b"4") else 0
    header = _block(name, inode.mode & 0o7777, uid, gid, size, seconds, kind, link, device)
    return b"".join((long_names, _pax(records) if records else b"", header, sparse_map))


def _long(
    name: bytes,
    keyword: bytes,
    gnu_type: bytes,
    records: list[tuple[bytes, bytes]],
    long_names: bytes,
) -> tuple[bytes, bytes]:
    """Return the header's own field of a long name, and `long_names` with a GNU long name added.

    A UTF-8 name is added to `records` instead.
    """
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        # PAX names must be UTF-8; GNU long names may be any bytes.
        body = name + b"\0"
        long_names += _block(_LONG_NAME, 0o644, 0, 0, len(body), 0, gnu_type, b"", 0)
        long_names += body + padding(len(body))
    else:
        records.append((keyword, name))
    return name[:_FIELD_NAME_MAX], long_names


def _or_record(value: int, limit: int, keyword: bytes, records: list[tuple[bytes, bytes]]) -> int:
    if value <= limit:
        return value
    records.append((keyword, b"%d" % value))
    return 0


def _escape(xattr: bytes) -> bytes:
    # "=" ends a PAX keyword; the escapes are GNU tar's.
    return xattr.replace(b"%", b"%25").replace(b"=", b"%3D")


def _decimal_time(time_ns: int) -> bytes:
    seconds, nanoseconds = divmod(abs(time_ns), 10**9)
    text = b"%s%d.%09d" % (b"-" if time_ns < 0 else b"", seconds, nanoseconds)
    return text.rstrip(b"0").rstrip(b".")


def _sparse_map(segments: Sequence[tuple[int, int]]) -> bytes:
    lines = [b"%d\n" % len(segments)]
    lines += [b"%d\n%d\n" % segment for segment in segments]
    text = b"".join(lines)
    return text + padding(len(text))


def _pax(records: Sequence[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(_record(keyword, value) for keyword, value in sorted(records))
    header = _block(_PAX_NAME, 0o644, 0, 0, len(body), 0, b"x", b"", 0)
    return header + body + padding(len(body))


def _record(keyword: bytes, value: bytes) -> bytes:
    # "<length> <keyword>=<value>\n", where the length includes its own digits.
    rest = len(keyword) + len(value) + 3
    length = rest + len(b"%d" % rest)
    length = rest + len(b"%d" % length)
    return b"%d %s=%s\n" % (length, keyword, value)


def _block(
    name: bytes,
    mode: int,
    uid: int,
    gid: int,
    size: int,
    mtime: int,
    kind: bytes,
    link: bytes,
    device: int,
) -> bytes:
    """Return one ustar header block."""
    fields = b"%s%07o\0%07o\0%07o\0%011o\0%011o\0" % (
        name.ljust(100, b"\0"), mode, uid, gid, size, mtime,
    )  # fmt: skip
    rest = b"%s%s%s%07o\0%07o\0" % (
        kind, link.ljust(100, b"\0"), _MAGIC_AND_OWNER_NAMES, os.major(device), os.minor(device),
    )  # fmt: skip
    # The checksum field itself counts as eight spaces, 256.
    return b"%s%06o\0 %s%s" % (fields, sum(fields) + sum(rest) + 256, rest, bytes(167))
