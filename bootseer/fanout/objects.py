"""Objects that travel by fan-out: a list of chunks, each with its length and digest.

An object's name is the digest of the encoded list, so that whoever knows the name can check the
list, and with it each chunk. docs/format/fanout.md has the bytes. Pure.
"""

import itertools
import struct
from collections.abc import Sequence

from msgspec import Struct

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError, InvalidInputError

DIGEST_BYTES = 32
CHUNK_BYTES_MAX = 16 << 20
CHUNKS_MAX = 1 << 18
_MAGIC = b"BSFANOUT"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")
_RECORD_BYTES = _LENGTH.size + DIGEST_BYTES
LIST_BYTES_MAX = _HEAD.size + CHUNKS_MAX * _RECORD_BYTES


class ChunkList(Struct, frozen=True):
    """Chunks of an object, in the order of its bytes."""

    lengths: tuple[int, ...]
    digests: tuple[bytes, ...]
    offsets: tuple[int, ...]
    """Offset at which each chunk begins, followed by the size of the object."""

    def encode(self) -> bytes:
        """Return the list as it is sent."""
        head = _HEAD.pack(_MAGIC, _VERSION, len(self.lengths))
        pairs = zip(self.lengths, self.digests, strict=True)
        return head + b"".join(_LENGTH.pack(length) + digest for length, digest in pairs)

    @property
    def name(self) -> bytes:
        """The object's name: 32 bytes."""
        return content_digest(self.encode())


def chunk_list(lengths: Sequence[int], digests: Sequence[bytes]) -> ChunkList:
    """Return the list of these chunks. Raises: InvalidInputError."""
    if not 0 < len(lengths) <= CHUNKS_MAX:
        raise InvalidInputError(f"an object has 1 to {CHUNKS_MAX} chunks, not {len(lengths)}")
    if not all(0 < length <= CHUNK_BYTES_MAX for length in lengths):
        raise InvalidInputError(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes")
    offsets = tuple(itertools.accumulate(lengths, initial=0))
    return ChunkList(tuple(lengths), tuple(digests), offsets)


def decode_list(data: bytes, name: bytes) -> ChunkList:
    """Return the list of the object `name`. Raises: CorruptError where `data` is not that list."""
    if len(data) < _HEAD.size or content_digest(data) != name:
        raise CorruptError("a list of chunks does not match the object's name")
    magic, version, count = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise CorruptError("an object's list of chunks is of an unknown kind or version")
    if len(data) != _HEAD.size + count * _RECORD_BYTES:
        raise CorruptError("an object's list of chunks has another length than it says")
    starts = range(_HEAD.size, len(data), _RECORD_BYTES)
    lengths = [_LENGTH.unpack_from(data, start)[0] for start in starts]
    digests = [data[start + _LENGTH.size : start + _RECORD_BYTES] for start in starts]
    try:
        return chunk_list(lengths, digests)
    except InvalidInputError as error:
        raise CorruptError(str(error)) from error
