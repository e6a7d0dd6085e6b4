"""Tars with arbitrary header fields, and tars written by several tools."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.needs import require

END = bytes(1024)
V7, USTAR, GNU = b"\0" * 8, b"ustar\x0000", b"ustar  \0"
TIME = 1_600_000_000


def block(
    name: bytes,
    kind: bytes = b"0",
    data: bytes = b"",
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = TIME,
    size: int | None = None,
    link: bytes = b"",
    magic: bytes = USTAR,
    device: tuple[int, int] = (0, 0),
    prefix: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """Return one header with exactly these fields, its content and padding.

    `tail` replaces the end of the header from byte 345.
    """
    length = len(data) if size is None else size
    fields = b"".join(
        (
            name.ljust(100, b"\0"),
            _number(mode, 8),
            _number(uid, 8),
            _number(gid, 8),
            _number(length, 12),
            _number(mtime, 12),
            b" " * 8,
            kind,
            link.ljust(100, b"\0"),
            magic,
            bytes(64),
            _number(device[0], 8) if magic != V7 else bytes(8),
            _number(device[1], 8) if magic != V7 else bytes(8),
            (tail or prefix).ljust(167, b"\0"),
        )
    )
    assert len(fields) == 512
    checksum = b"%06o\0 " % sum(fields)
    return fields[:148] + checksum + fields[156:] + data + bytes(-len(data) % 512)


def _number(value: int, width: int) -> bytes:
    """Return a field in octal if it fits, else in base 256 as GNU tar writes it."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    data = value.to_bytes(width, "big", signed=True)
    return bytes([data[0] | 0x80]) + data[1:]


def pax(
    records: Mapping[bytes, bytes] | Sequence[tuple[bytes, bytes]], kind: bytes = b"x"
) -> bytes:
    """Return an extended header with these records, for the header that follows."""
    pairs = records.items() if isinstance(records, Mapping) else records
    body = b""
    for keyword, value in pairs:
        rest = len(keyword) + len(value) + 3
        length = rest + len(str(rest))
        length = rest + len(str(length))
        body += b"%d %s=%s\n" % (length, keyword, value)
    return block(b"pax_global_header" if kind == b"g" else b"PaxHeaders/x", kind, body)


def gnu_long(kind: bytes, value: bytes) -> bytes:
    """Return a GNU long name (`kind` L) or long link (K), for the header that follows."""
    return block(b"././@LongLink", kind, value + b"\0", magic=GNU, mtime=0)


def tool_tar(*command: str | Path, cwd: Path) -> bytes:
    """Return the output of a tar tool. Raises: MissingError if the tool is not installed."""
    require(programs=[str(command[0])])
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
