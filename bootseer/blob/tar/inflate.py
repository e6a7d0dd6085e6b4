"""Decompression of layers and archives (gzip, zstd or uncompressed) in pieces.

ISA-L decompresses gzip twice as fast as zlib, which is used on platforms without an ISA-L wheel.
Both verify gzip's checksums. The libraries' file objects are used, not their decompressor objects,
which copy their input several times. The functions are generators: input is read on demand.
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
"""Exceptions of the libraries for bytes that they cannot decompress."""

Read = Callable[[int], bytes]
"""Function `read(size)` that returns the next stored bytes, at most `size`; b"" at the end."""

_WINDOW_BYTES_MAX = 2**27
"""Largest window, that of `zstd --long=27`, which the zstd command accepts without an option."""

_MARK_BYTES = 128
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_MAGIC_BYTES = 5


def decompress(read: Read, name: str) -> Iterator[bytes]:
    """Return an iterator over the uncompressed pieces; `name` is for messages.

    The format is detected by the first bytes, not by the media type, as container engines do.

    Raises: one of `ERRORS`, CorruptError; UnsupportedError for other compressions.
    """
    head = read(PIECE_BYTES)
    # A socket may return fewer bytes than a magic number has.
    while len(head) < _MAGIC_BYTES and (more := read(PIECE_BYTES)):
        head += more
    for magic, other in _OTHERS.items():
        if head.startswith(magic):
            raise UnsupportedError(
                f"the {name} is compressed with {other}; only gzip, zstd and none are read"
            )
    if head.startswith(_GZIP):
        return _gunzip(head, read)
    # Some seekable and chunked zstd files begin with a skippable frame.
    skippable = head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    if head.startswith(_ZSTD) or skippable:
        return _unzstd(head, read)
    return _plain(head, read)


class ExpansionLimits(Struct, frozen=True):
    """Limits on the expansion of one layer or archive, against decompression bombs."""

    bytes_max: int = 2**40
    ratio_max: int = 1100
    """Largest ratio. Deflate cannot exceed 1032, zstd only for data that is nearly all zeros."""
    free_bytes: int = 2**26
    """Expanded size up to which any ratio is accepted."""

    def check(self, stored_bytes: int, expanded_bytes: int, name: str) -> None:
        """Raise CorruptError if the expansion exceeds the limits."""
        if expanded_bytes > min(
            self.bytes_max, max(self.free_bytes, self.ratio_max * stored_bytes)
        ):
            raise CorruptError(
                f"the {name} expands from {stored_bytes} to more than {expanded_bytes} bytes: "
                "a decompression bomb"
            )


class _Whole(io.RawIOBase):
    """File object over `head`, the bytes of `read`, and `end`."""

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
    # The library reads several members, as of pigz and eStargz, and skips zeros after the last one.
    with gzip_library.open(_Whole(head, read)) as file:
        while piece := file.read1(PIECE_BYTES):
            yield piece


def _unzstd(head: bytes, read: Read) -> Iterator[bytes]:
    """Yield the content of all frames. Raises: EOFError if the last frame is cut off.

    The library's reader does not report a frame that is cut off, and its other interface, which
    does, has no limit for the result of one call. So a frame with random content is appended to the
    source. If this content is not the last output, the appended frame was consumed as a part of a
    frame that is cut off. The content is repeated, so that its frame is compressed and does not
    contain the content literally.
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
        raise EOFError("the last zstd frame is cut off")
    if len(last) > _MARK_BYTES:
        yield last[:-_MARK_BYTES]


def _plain(head: bytes, read: Read) -> Iterator[bytes]:
    piece = head
    while piece:
        yield piece
        piece = read(PIECE_BYTES)
