"""The bundle: the hot bytes of an image for one workload, in the order of use.

Alone owns the format (docs/format/bundle.md): a header that says which bytes of which streams each
frame holds, and independent zstd frames, dealt in turn to a few objects, its *parts*. Pure, but for
`write_bundle`, which writes to file objects. Frozen values; safe from any thread.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO, NamedTuple

import zstandard
from msgspec import Struct

from bootseer.base.content_digest import content_digest
from bootseer.blob.index.zstd_frame import expand
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.bundle.sector_marks import SECTOR_BYTES, SectorMarks, sectors_of

FRAME_STREAM_BYTES = 512 * 1024
"""Raw bytes of a frame: a fault that waits for one waits a few milliseconds, and larger frames
hardly compress better."""

PART_COUNT = 8
"""One object is one stream from one server of the store; several are several, and the frames that a
start wants first come from all of them at once."""
_PART_COUNT_MAX = 256

_LEVEL = 10
"""Written once, in the background, and read by every node at every later launch."""

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
"""The most extents of a bundle: of 4 KiB each that is 4 GiB in pieces; a start reads some
thousands. As objects they take ten times what their table does."""
FRAME_COUNT_MAX = 2**17
"""64 GiB in frames as they are written."""
_FRAME_STORED_BYTES_MAX = 2 * _FRAME_STREAM_BYTES_MAX


class BundleExtent(NamedTuple):
    """`length` bytes at `offset` of the stream of blob number `blob`; begins on a sector, and ends
    on one or with its stream."""

    blob: int
    offset: int
    length: int


class BundleFrame(Struct, frozen=True):
    """`length` stored bytes at `offset` of a part: these extents, one after the other."""

    part: int
    offset: int
    length: int
    stream_length: int
    digest: bytes
    """Content digest of the stored (compressed) bytes."""
    extents: tuple[BundleExtent, ...]
    positions: tuple[int, ...]
    """Where in the frame's content each extent begins. In a frame as stored they follow each other
    without gaps; for a rebuilt image (`rebuilt`) some of the content may have no place."""


class Bundle(Struct, frozen=True):
    """A decoded header."""

    index_digest: str
    header_bytes: int
    frames: tuple[BundleFrame, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the stored size of header and parts."""
        return self.header_bytes + sum(frame.length for frame in self.frames)

    @property
    def stream_bytes(self) -> int:
        """Returns the uncompressed size of all frames."""
        return sum(frame.stream_length for frame in self.frames)


def plan_frames(
    ranges: Iterable[tuple[int, int, int]],
    stream_lengths: Sequence[int],
    frame_bytes: int = FRAME_STREAM_BYTES,
) -> list[tuple[BundleExtent, ...]]:
    """Which extents each frame shall hold. Pure (no I/O).

    `ranges` are (blob, offset, length) in order of use. They are widened to whole sectors (the
    unit of tar, which pads with zeros, so this costs nothing), and no sector comes twice.
    What comes behind the first `EXTENT_COUNT_MAX` extents is left out.
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
    """Deal the frames to `parts`, in turn, and return the header.

    `read(blob, offset, length)` gives bytes of a blob's stream. Deterministic.
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
    """The bundle that `header` describes, checked against the image it is to serve. Pure.

    Raises: CorruptError for anything that does not fit, also another image's bundle;
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
    # No sector comes twice, so there cannot be more.
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
    """The frame's content. `stored` must have been checked against the digest already (the
    transfer does). Raises: CorruptError."""
    # Of its own size the frame's table says what it may be, so zeros may be as small as they like.
    content = expand(stored, "a frame of the bundle", frame.stream_length, frame.stream_length)
    if len(content) != frame.stream_length:
        raise CorruptError("a frame of the bundle has a wrong length")
    return content
