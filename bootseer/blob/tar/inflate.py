"""Decompression of layers and archives: gzip, zstd or none, as pieces. Alone owns the libraries.

ISA-L decompresses gzip twice as fast as zlib; a platform that has no wheel of it has zlib. Both
verify gzip's own checksums. They are read as files, which write into the piece that is handed on:
objects that decompress what they are given copy that, and the rest of it again and again.
Generators: nothing is read before it is asked for.
"""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import zstandard
from msgspec import Struct

from bootseer.errors import CorruptError, UnsupportedError

gzip_library: Any
deflate_library: Any
try:
    from isal import igzip as gzip_library
    from isal import isal_zlib as deflate_library
except ImportError:
    gzip_library, deflate_library = gzip, zlib

PIECE_BYTES = 2**20
ERRORS: tuple[type[Exception], ...] = (
    zlib.error,
    deflate_library.error,
    gzip.BadGzipFile,
    EOFError,
    zstandard.ZstdError,
)
"""What the libraries raise for bytes that they cannot decompress."""

Read = Callable[[int], bytes]
"""The next stored bytes, at most so many; b"" at the end."""

_WINDOW_BYTES_MAX = 2**27
"""`zstd --long=27`, what the zstd command itself decompresses without being told."""

_MARK_BYTES = 128
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_MAGIC_BYTES = 5


def decompress(read: Read, name: str) -> Iterator[bytes]:
    """The uncompressed pieces. The format is told by the first bytes, as engines do, not by the
    media type. `name` is for messages.

    Raises: one of `ERRORS`, CorruptError; UnsupportedError for other compressions.
    """
    head = read(PIECE_BYTES)
    # A socket may give fewer bytes than it takes to tell.
    while len(head) < _MAGIC_BYTES and (more := read(PIECE_BYTES)):
        head += more
    for magic, other in _OTHERS.items():
        if head.startswith(magic):
            raise UnsupportedError(
                f"the {name} is compressed with {other}; only gzip, zstd and none are read"
            )
    if head.startswith(_GZIP):
        return _gunzip(head, read)
    # Skippable frames come first in some seekable and chunked zstd files.
    skippable = head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    if head.startswith(_ZSTD) or skippable:
        return _unzstd(head, read)
    return _plain(head, read)


class Limits(Struct, frozen=True):
    """What one layer or archive may expand to; a decompression bomb ends there."""

    bytes_max: int = 2**40
    ratio_max: int = 1100
    """Deflate cannot exceed 1032, so only zstd of almost nothing but zeros meets this."""
    free_bytes: int = 2**26
    """The ratio is not applied below this: so much a layer of a few bytes may take of a disk."""

    def check(self, stored_bytes: int, expanded_bytes: int, name: str) -> None:
        """Raises: CorruptError for more than so many stored bytes may become."""
        if expanded_bytes > min(
            self.bytes_max, max(self.free_bytes, self.ratio_max * stored_bytes)
        ):
            raise CorruptError(
                f"the {name} expands from {stored_bytes} to more than {expanded_bytes} bytes: "
                "a decompression bomb"
            )


class _Whole(io.RawIOBase):
    """`head`, then the rest, then `end`, as a file."""

    def __init__(self, head: bytes, read: Read, end: bytes = b"") -> None:
        self._head = head
        self._read = read
        self._end = end

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data, self._head = self._head, b""
        data = data or self._read(size)
        if not data:
            data, self._end = self._end, b""
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._head = data[count:]
        return count


def _gunzip(head: bytes, read: Read) -> Iterator[bytes]:
    """Members one after another, as pigz and eStargz write them; zeros may follow."""
    with gzip_library.open(_Whole(head, read)) as file:
        while piece := file.read1(PIECE_BYTES):
            yield piece


def _unzstd(head: bytes, read: Read) -> Iterator[bytes]:
    """Yield the content of the frames. Raises: EOFError where they end amid a frame.

    The library's reader takes the end of its source for the end of the last frame, and its other
    interface, which tells, has no bound for what one call may return. So a frame with content of
    its own follows the source here: unless that content comes out last, the frame was read as a
    part of one that is cut off. The content repeats itself, so its frame is shorter and nowhere
    holds it as it is.
    """
    mark = os.urandom(_MARK_BYTES // 8) * 8
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    source = _Whole(head, read, zstandard.compress(mark))
    last = b""
    with decompressor.stream_reader(
        cast(BinaryIO, source), read_size=PIECE_BYTES, read_across_frames=True
    ) as reader:
        while piece := reader.read(PIECE_BYTES):
            if len(piece) < _MARK_BYTES:
                last += piece
                continue
            if last:
                yield last
            last = piece
    if not last.endswith(mark):
        raise EOFError("it ends amid a frame: it is cut off")
    if len(last) > _MARK_BYTES:
        yield last[:-_MARK_BYTES]


def _plain(head: bytes, read: Read) -> Iterator[bytes]:
    piece = head
    while piece:
        yield piece
        piece = read(PIECE_BYTES)
