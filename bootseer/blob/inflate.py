"""Decompression of layers and archives: gzip, zstd or none, as pieces. Alone owns the libraries.

ISA-L decompresses gzip twice as fast as zlib; a platform that has no wheel of it has zlib. Both
verify gzip's own checksums. Generators: nothing is read before it is asked for.
"""

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import zstandard

from bootseer.errors import CorruptError, UnsupportedError

gzip_library: Any
try:
    from isal import isal_zlib as gzip_library
except ImportError:
    gzip_library = zlib

PIECE_BYTES = 2**20
ERRORS: tuple[type[Exception], ...] = (zlib.error, gzip_library.error, zstandard.ZstdError)
"""What the libraries raise for bytes that they cannot decompress."""

Read = Callable[[int], bytes]
"""The next stored bytes, at most so many; b"" at the end."""

_WINDOW_BYTES_MAX = 2**27
"""`zstd --long=27`, what the zstd command itself decompresses without being told."""

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


def _gunzip(head: bytes, read: Read) -> Iterator[bytes]:
    """Members one after another, as pigz and eStargz write them; zeros may follow."""
    data = head
    while data:
        member = gzip_library.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(data, PIECE_BYTES)
            data = member.unconsumed_tail
            if piece:
                yield piece
            elif not data and not member.eof:
                data = read(PIECE_BYTES)
                if not data:
                    raise CorruptError("the gzip stream is cut off")
        data = member.unused_data
        padding = not data.startswith(_GZIP[:1])
        while padding and not data.strip(b"\0"):
            data = read(PIECE_BYTES)
            if not data:
                return
        data = data.lstrip(b"\0") if padding else data


def _unzstd(head: bytes, read: Read) -> Iterator[bytes]:
    class _Whole(io.RawIOBase):
        """`head`, then the rest: what a stream_reader reads from."""

        def __init__(self) -> None:
            self.head = head

        def read(self, size: int = -1, /) -> bytes:
            data, self.head = self.head, b""
            return data or read(size)

    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    with decompressor.stream_reader(
        cast(BinaryIO, _Whole()), read_size=PIECE_BYTES, read_across_frames=True
    ) as reader:
        while piece := reader.read(PIECE_BYTES):
            yield piece


def _plain(head: bytes, read: Read) -> Iterator[bytes]:
    piece = head
    while piece:
        yield piece
        piece = read(PIECE_BYTES)
