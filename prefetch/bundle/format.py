"""Format of a bundle: the hot bytes of an image for one workload, in the order of use.

A header says which bytes of which streams each frame holds. The frames are independent zstd frames,
distributed in turn to a few objects, the *parts* (docs/format/bundle.md). Pure, but for
`write_bundle`, which writes to file objects. Frozen values; thread-safe, except that a
`SectorMarks` is for one thread at a time.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO, NamedTuple

import zstandard
from msgspec import Struct

from bootseer.base.content_digest import content_digest
from bootseer.blob.frames import expand
from bootseer.errors import CorruptError, UnknownFormatError

SECTOR_BYTES = 512
"""Unit of tar: every file in a tar stream begins on a multiple of it."""
_BLOCK_SECTORS = 2048
"""Sectors of one block of `SectorMarks`: a megabyte of the stream."""

FRAME_STREAM_BYTES = 512 * 1024
"""Uncompressed bytes of a frame: a fault waits a few milliseconds for a frame of this size, and
larger frames hardly compress better."""

PART_COUNT = 8
"""Objects of a bundle. The servers of a store send several objects in parallel, so that the frames
that a start needs first come from all of them at once."""
_PART_COUNT_MAX = 256

_LEVEL = 10
"""zstd level: a bundle is compressed once, in the background, and read at every later start."""

_MAGIC = b"BSBUNDLE"
_VERSION = 1
# magic, version, parts, index digest, length of the tables as stored, raw, frames, extents
_HEAD = struct.Struct("<8sII32sIIII")
_CHECK_BYTES = 32
HEADER_BYTES_MIN = _HEAD.size + _CHECK_BYTES
HEADER_BYTES_MAX = 64 * 2**20
_FRAME = struct.Struct("<III32s")
_EXTENT = struct.Struct("<QII")
_FRAME_STREAM_BYTES_MAX = 16 * 2**20
EXTENT_COUNT_MAX = 2**20
"""The most extents of a bundle: 4 GiB, if they have 4 KiB each. A start reads some thousands. The
decoded extents take ten times the memory of their table."""
FRAME_COUNT_MAX = 2**17
"""The most frames of a bundle: 64 GiB of frames as `write_bundle` makes them."""
_FRAME_STORED_BYTES_MAX = 2 * _FRAME_STREAM_BYTES_MAX


def sectors_of(offset: int, length: int) -> tuple[int, int]:
    """Return the half-open range of sectors that `[offset, offset + length)` touches."""
    return offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES)


class SectorMarks:
    """Set of taken sectors of one stream, empty at first.

    Takes memory for taken sectors only: an index may announce a stream of a terabyte.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the sectors of `[first, stop)` that are not taken, as half-open ranges."""
        found: list[tuple[int, int]] = []
        for start, end in self._gaps(first, stop):
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
        return found

    def _gaps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        for number, start, end in _parts(first, stop):
            base = number * _BLOCK_SECTORS
            marks = self._blocks.get(number)
            if marks is None:
                yield base + start, base + end
                continue
            while (gap := marks.find(0, start, end)) >= 0:
                start = marks.find(1, gap, end)
                if start < 0:
                    start = end
                yield base + gap, base + start

    def take(self, first: int, stop: int) -> None:
        """Take the sectors `[first, stop)`."""
        for number, start, end in _parts(first, stop):
            marks = self._blocks.get(number)
            if marks is None:
                marks = self._blocks[number] = bytearray(_BLOCK_SECTORS)
            marks[start:end] = b"\1" * (end - start)


def _parts(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a range of sectors by block: (block, first in the block, stop in it)."""
    while first < stop:
        number, start = divmod(first, _BLOCK_SECTORS)
        end = min(_BLOCK_SECTORS, stop - first + start)
        yield number, start, end
        first += end - start


class BundleExtent(NamedTuple):
    """Range of the stream of blob number `blob`.

    It begins at a sector boundary, and ends at one or at the end of the stream.
    """

    blob: int
    offset: int
    length: int


class BundleFrame(Struct, frozen=True):
    """Frame of a bundle: `length` stored bytes at `offset` of a part."""

    part: int
    offset: int
    length: int
    stream_length: int
    digest: bytes
    """Content digest of the stored (compressed) bytes."""
    extents: tuple[BundleExtent, ...]
    positions: tuple[int, ...]
    """Offset of each extent in the frame's content. A bundle as stored has no gaps between them; in
    a translated one (`bundle.similar`) some of the content may belong to no extent."""


class Bundle(Struct, frozen=True):
    """Decoded header of a bundle."""

    index_digest: str
    header_bytes: int
    frames: tuple[BundleFrame, ...]

    @property
    def size_bytes(self) -> int:
        """Stored size of header and parts."""
        return self.header_bytes + sum(frame.length for frame in self.frames)

    @property
    def stream_bytes(self) -> int:
        return sum(frame.stream_length for frame in self.frames)


def plan_frames(
    ranges: Iterable[tuple[int, int, int]],
    stream_lengths: Sequence[int],
    frame_bytes: int = FRAME_STREAM_BYTES,
) -> list[tuple[BundleExtent, ...]]:
    """Return the extents of each frame of a new bundle. Pure.

    `ranges` are (blob, offset, length) in the order of use. They are widened to whole sectors,
    which costs nothing since tar pads files to sectors. No sector is taken twice. At most
    `EXTENT_COUNT_MAX` extents are returned.
    """
    seen = [SectorMarks() for _ in stream_lengths]
    frames: list[tuple[BundleExtent, ...]] = []
    current: list[BundleExtent] = []
    room = frame_bytes
    extent_count = 0
    for blob, offset, length in ranges:
        sectors = sectors_of(offset, length)
        gaps = seen[blob].gaps(*sectors)
        seen[blob].take(*sectors)
        for first, stop in gaps:
            while first < stop:
                end = min(stop, first + room // SECTOR_BYTES)
                start = first * SECTOR_BYTES
                piece = min(end * SECTOR_BYTES, stream_lengths[blob]) - start
                last = current[-1] if current else None
                if last and last.blob == blob and last.offset + last.length == start:
                    current[-1] = BundleExtent(blob, last.offset, last.length + piece)
                elif extent_count == EXTENT_COUNT_MAX:
                    return [*frames, tuple(current)] if current else frames
                else:
                    current.append(BundleExtent(blob, start, piece))
                    extent_count += 1
                room -= piece
                if room < SECTOR_BYTES:
                    frames.append(tuple(current))
                    current, room = [], frame_bytes
                first = end
    if current:
        frames.append(tuple(current))
    return frames


def write_bundle(
    index_digest: str,
    frames: Sequence[tuple[BundleExtent, ...]],
    read: Callable[[int, int, int], bytes],
    parts: Sequence[BinaryIO],
) -> bytes:
    """Write the frames to `parts`, in turn, and return the header. Deterministic.

    `read(blob, offset, length)` returns bytes of a blob's stream.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    tables: list[bytes] = []
    extents: list[bytes] = []
    for number, members in enumerate(frames):
        content = b"".join(read(*extent) for extent in members)
        stored = compressor.compress(content)
        parts[number % len(parts)].write(stored)
        digest = content_digest(stored)
        tables.append(_FRAME.pack(len(stored), len(content), len(members), digest))
        extents += [_EXTENT.pack(e.offset, e.blob, e.length) for e in members]
    raw = b"".join(tables + extents)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        len(parts),
        bytes.fromhex(index_digest.removeprefix("sha256:")),
        len(packed),
        len(raw),
        len(frames),
        len(extents),
    )
    return head + packed + hashlib.sha256(head + packed).digest()


def decode_header(header: bytes, index_digest: str, stream_lengths: Sequence[int]) -> Bundle:
    """Decode the header of a bundle, and check it against the image that the bundle is to serve.

    Pure. Raises: CorruptError if the header is damaged or belongs to another image;
    UnknownFormatError.
    """
    if len(header) < HEADER_BYTES_MIN or not header.startswith(_MAGIC):
        raise UnknownFormatError("this is no bundle of Bootseer")
    (_, version, part_count, index, stored_length, raw_length, frame_count, extent_count) = (
        _HEAD.unpack_from(header)
    )
    if version != _VERSION:
        raise UnknownFormatError(f"the bundle has version {version}; this release reads 1")
    if len(header) != HEADER_BYTES_MIN + stored_length or len(header) > HEADER_BYTES_MAX:
        raise CorruptError("the bundle's header has a wrong length")
    if hashlib.sha256(header[:-_CHECK_BYTES]).digest() != header[-_CHECK_BYTES:]:
        raise CorruptError("the bundle's header does not match its checksum")
    if index.hex() != index_digest.removeprefix("sha256:"):
        raise CorruptError("the bundle belongs to another image")
    if not 0 < part_count <= _PART_COUNT_MAX:
        raise CorruptError("the bundle has an impossible number of parts")
    if raw_length != frame_count * _FRAME.size + extent_count * _EXTENT.size:
        raise CorruptError("the bundle's tables have a wrong length")
    if frame_count > FRAME_COUNT_MAX or extent_count > EXTENT_COUNT_MAX:
        raise CorruptError("the bundle's tables are absurdly large")
    raw = expand(header[_HEAD.size : -_CHECK_BYTES], "the bundle's tables", HEADER_BYTES_MAX)
    if len(raw) != raw_length:
        raise CorruptError("the bundle's tables have a wrong length")
    frames = tuple(_frames(raw, frame_count, extent_count, part_count, stream_lengths))
    # No sector is in a bundle twice.
    if sum(frame.stream_length for frame in frames) > sum(stream_lengths):
        raise CorruptError("the bundle has more bytes than the image")
    return Bundle(index_digest, len(header), frames)


def _frames(
    raw: bytes,
    frame_count: int,
    extent_count: int,
    part_count: int,
    stream_lengths: Sequence[int],
) -> Iterator[BundleFrame]:
    table_bytes = frame_count * _FRAME.size
    extents = [
        BundleExtent(blob, start, length)
        for start, blob, length in _EXTENT.iter_unpack(memoryview(raw)[table_bytes:])
    ]
    for extent in extents:
        if extent.blob >= len(stream_lengths):
            raise CorruptError("the bundle names a blob that the image does not have")
        end = extent.offset + extent.length
        at_end = end == stream_lengths[extent.blob]
        if (
            not extent.length
            or end > stream_lengths[extent.blob]
            or extent.offset % SECTOR_BYTES
            or (end % SECTOR_BYTES and not at_end)
        ):
            raise CorruptError("an extent of the bundle lies outside its stream")
    taken = 0
    ends = [0] * part_count
    tables = _FRAME.iter_unpack(raw[:table_bytes])
    for number, (length, stream_length, count, digest) in enumerate(tables):
        members = tuple(extents[taken : taken + count])
        taken += count
        if (
            not 0 < length <= _FRAME_STORED_BYTES_MAX
            or stream_length > _FRAME_STREAM_BYTES_MAX
            or not members
            or sum(extent.length for extent in members) != stream_length
        ):
            raise CorruptError("a frame of the bundle has an impossible length")
        part = number % part_count
        positions = tuple(accumulate([e.length for e in members[:-1]], initial=0))
        yield BundleFrame(part, ends[part], length, stream_length, digest, members, positions)
        ends[part] += length
    if taken != extent_count:
        raise CorruptError("extents of the bundle belong to no frame")


def decode_frame(frame: BundleFrame, stored: bytes | memoryview) -> bytes:
    """Decompress a frame whose digest has been checked. Raises: CorruptError."""
    # The header bounds the size of the content, so that no ratio of compression is too high.
    content = expand(stored, "a frame of the bundle", frame.stream_length, frame.stream_length)
    if len(content) != frame.stream_length:
        raise CorruptError("a frame of the bundle has a wrong length")
    return content
