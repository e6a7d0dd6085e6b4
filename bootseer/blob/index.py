"""Codec of tree indexes (docs/format/index.md).

`decode` verifies the checksum and checks the names; other sections are decompressed and checked
when they are first used. Pure; any thread.
"""

import hashlib
import struct
from array import array

import zstandard

from bootseer.blob.columns import LINK_BYTES_MAX, NAME_BYTES_MAX, SECTIONS, Columns, check_names
from bootseer.blob.frames import FrameTable
from bootseer.blob.keys import POINTS
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import CorruptError, UnknownFormatError

MAGIC = b"BOOTTREE"
VERSION = 1

# magic, version, section count, inode count, name count, reserved (0), total length, SHA-256 of
# all bytes of the file with the bytes of this digest as zeros.
_HEADER = struct.Struct("<8sHHIIIQ32s")
# number, codec, raw length, stored length
_SECTION = struct.Struct("<HHQQ")
_RAW, _ZSTD = 0, 1
# Two thirds of an index are digests, which do not compress at any level.
_LEVEL = 3

# Limits of an index: many times the sizes of the largest images, and the most that a hostile index
# can make its reader allocate. Section sizes are checked before a section is decompressed.
COUNT_MAX = 2**22
"""Largest number of inodes, and of names: four times an image of a million files."""
EXTENT_COUNT_MAX = 2**23
FRAME_COUNT_MAX = 2**23
"""Largest number of frames: a terabyte in frames of 128 KiB."""
BLOB_COUNT_MAX = 10_000
"""Largest number of blobs, as in the list of layers of an image's record."""
STREAM_BYTES_MAX = 2**40
"""Longest stream of a blob; larger layers are not unpacked either."""
STREAMS_BYTES_MAX = 2**42
RAW_BYTES_MAX = 2**30
"""Largest size of all sections together; a million files take about 0.2 GiB."""
RATIO_MAX = 256
"""Largest ratio of the sections to the encoded index; an index of a million empty files has 23."""
FREE_BYTES = 2**24
"""Size of the sections up to which any ratio is accepted."""
XATTRS_RATIO_MAX = 32
"""Ratio for extended attributes, which take sixteen times their size as Python objects."""
XATTRS_FREE_BYTES = 2**22
_ALGORITHMS = ("sha256", "blake3", "points")
"""Algorithms of digests; their positions are part of the format."""

ENCODED_BYTES = 33
"""Length of an encoded digest: the number of the algorithm, and 32 bytes."""


def digest(data: bytes) -> str:
    """Return the identity of an encoded index, `sha256:<hex>` of its bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encode(tree: Tree) -> bytes:
    """Return the bytes of an index file. The same tree and zstd library give the same bytes."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    table = []
    stored = []
    for section, (number, _) in SECTIONS.items():
        raw = tree.columns.load(section)
        packed = compressor.compress(raw)
        codec = _ZSTD
        if len(packed) >= len(raw):
            packed, codec = raw, _RAW
        table.append(_SECTION.pack(number, codec, len(raw), len(packed)))
        stored.append(packed)
    body = b"".join(table + stored)
    header = [
        MAGIC,
        VERSION,
        len(table),
        tree.inode_count,
        tree.name_count,
        0,
        _HEADER.size + len(body),
    ]
    checksum = hashlib.sha256(_HEADER.pack(*header, bytes(32)) + body).digest()
    return _HEADER.pack(*header, checksum) + body


def decode(data: bytes, *, is_verified: bool = False, checks_names: bool = True) -> Tree:
    """Return the tree of an index file.

    Args:
        data: The bytes of the file.
        is_verified: Whether the caller has verified the file's digest.
        checks_names: Whether to check the names, which takes more than half of the time. False is
            for callers that know that another process checks them.

    Raises: UnknownFormatError for another kind of file or a later version; CorruptError for a
    damaged one. Contents of inodes are checked when they are read (`Tree.inode`).
    """
    if data[:8] != MAGIC:
        raise UnknownFormatError("not a tree index: the magic number is missing")
    if len(data) < _HEADER.size:
        raise CorruptError("the tree index is cut off in its header")
    header = _HEADER.unpack_from(data)
    _, version, section_count, inode_count, name_count, reserved, total, checksum = header
    if version != VERSION:
        raise UnknownFormatError(
            f"this tree index has version {version}; this release reads version {VERSION}"
        )
    if total != len(data):
        raise CorruptError(f"the tree index has {len(data)} bytes instead of {total}")
    if not is_verified:
        expected = hashlib.sha256(_HEADER.pack(*header[:-1], bytes(32)))
        expected.update(memoryview(data)[_HEADER.size :])
        if expected.digest() != checksum:
            raise CorruptError("the tree index does not match its checksum")
    if reserved or not 0 < inode_count <= COUNT_MAX or name_count > COUNT_MAX:
        raise CorruptError("the tree index announces impossible counts")
    sections = _read_table(memoryview(data), section_count)
    _check_lengths(sections, len(data), inode_count, name_count)

    def load(section: str) -> bytes:
        return _load(section, *sections[section])

    columns = Columns(inode_count, name_count, load)
    blobs = _read_blobs(columns)
    if checks_names:
        check_names(columns)
    return Tree(columns, blobs)


_Stored = tuple[int, int, memoryview]


def _read_table(data: memoryview, section_count: int) -> dict[str, _Stored]:
    """Return the codec, the raw length and the stored bytes of each section."""
    if section_count != len(SECTIONS):
        raise CorruptError(f"{section_count} sections where version 1 has {len(SECTIONS)}")
    position = _HEADER.size
    offset = position + section_count * _SECTION.size
    if offset > len(data):
        raise CorruptError("the tree index is cut off in its section table")
    found = {}
    for name, (expected, _) in SECTIONS.items():
        number, codec, raw_length, stored_length = _SECTION.unpack_from(data, position)
        position += _SECTION.size
        if number != expected or codec not in (_RAW, _ZSTD):
            raise CorruptError(f"the section {name} is missing")
        found[name] = (codec, raw_length, data[offset : offset + stored_length])
        offset += stored_length
    if offset != len(data):
        raise CorruptError("the sections do not add up to the length of the index")
    return found


def _check_lengths(
    sections: dict[str, _Stored], index_bytes: int, inode_count: int, name_count: int
) -> None:
    """Raise CorruptError for sections that would expand beyond the limits."""
    counts = {
        "names": name_count * (NAME_BYTES_MAX + 1),
        "links": inode_count * (LINK_BYTES_MAX + 1),
        "digests": inode_count * 32,
        "blob_digests": BLOB_COUNT_MAX * ENCODED_BYTES,
        "blob_stream_digests": BLOB_COUNT_MAX * ENCODED_BYTES,
        "frame_digests": FRAME_COUNT_MAX * 32,
        "xattrs": XATTRS_FREE_BYTES + XATTRS_RATIO_MAX * len(sections["xattrs"][2]),
    }
    total = 0
    for name, (_, raw_length, _) in sections.items():
        typecode = SECTIONS[name][1]
        limit = array(typecode).itemsize * _entry_count_max(name) if typecode else counts[name]
        if raw_length > limit:
            raise CorruptError(f"the section {name} has an impossible length, {raw_length} bytes")
        total += raw_length
    if total > min(RAW_BYTES_MAX, FREE_BYTES + RATIO_MAX * index_bytes):
        raise CorruptError(
            f"the tree index expands from {index_bytes} to {total} bytes: a decompression bomb"
        )


def _entry_count_max(column: str) -> int:
    if column.startswith("blob_"):
        return BLOB_COUNT_MAX
    if column.startswith("frame_"):
        return FRAME_COUNT_MAX
    is_of_extents = column.startswith("extent_") and column != "extent_count"
    return EXTENT_COUNT_MAX if is_of_extents else COUNT_MAX


def _load(section: str, codec: int, raw_length: int, stored: memoryview) -> bytes:
    if codec == _RAW:
        raw = bytes(stored)
    else:
        try:
            if zstandard.frame_content_size(stored) != raw_length:
                raise CorruptError(f"the section {section} announces a wrong length")
            raw = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=raw_length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise CorruptError(f"the section {section} cannot be decompressed") from error
    if len(raw) != raw_length:
        raise CorruptError(f"the section {section} has a wrong length")
    return raw


def _read_blobs(columns: Columns) -> tuple[Blob, ...]:
    sizes = columns.ints("blob_size_bytes", None)
    counts = columns.ints("blob_frame_count", len(sizes))
    lengths = columns.ints("frame_length", sum(counts))
    stream_lengths = columns.ints("frame_stream_length", len(lengths))
    digests = decode_digests(columns.load("blob_digests"), len(sizes))
    whole_lengths = columns.ints("blob_stream_length", len(sizes))
    whole_digests = decode_digests(columns.load("blob_stream_digests"), len(sizes))
    if any(digest.startswith(POINTS) for digest in whole_digests):
        raise CorruptError("the digest of a stream has an unknown algorithm")
    frame_digests = memoryview(columns.load("frame_digests"))
    if len(frame_digests) != 32 * len(lengths):
        raise CorruptError("a table of digests has a wrong length")
    blobs = []
    first = 0
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        end = first + count
        frames = FrameTable(
            lengths[first:end], stream_lengths[first:end], frame_digests[32 * first : 32 * end]
        )
        if frames.offsets[-1] > size:
            raise CorruptError("the frames of a blob reach beyond its end")
        if not count and (size or digests[i] != whole_digests[i]):
            raise CorruptError("a blob without frames has a size, or a digest of its own")
        stream_length = frames.stream_offsets[-1] if count else whole_lengths[i]
        if stream_length != whole_lengths[i]:
            raise CorruptError("the frames of a blob do not make up its stream")
        if stream_length > STREAM_BYTES_MAX:
            raise CorruptError(f"the stream of a blob has more than {STREAM_BYTES_MAX} bytes")
        blobs.append(Blob(digests[i], size, frames, whole_digests[i], stream_length))
        first = end
    if sum(whole_lengths) > STREAMS_BYTES_MAX:
        raise CorruptError(f"the streams of a tree have more than {STREAMS_BYTES_MAX} bytes")
    return tuple(blobs)


def encode_digest(digest: str) -> bytes:
    """Return the encoded form of a digest.

    Raises: CorruptError unless it is a known algorithm with 64 hex digits.
    """
    algorithm, _, value = digest.partition(":")
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raw = b""
    if algorithm not in _ALGORITHMS or len(raw) != 32 or value != raw.hex():
        raise CorruptError(f"{digest!r} is not a digest like sha256:<64 hex digits>")
    return bytes((_ALGORITHMS.index(algorithm),)) + raw


def decode_digests(encoded: bytes, count: int) -> list[str]:
    """Return the `count` digests in `encoded`. Raises: CorruptError."""
    if len(encoded) != ENCODED_BYTES * count:
        raise CorruptError("a table of digests has a wrong length")
    found = []
    for start in range(0, len(encoded), ENCODED_BYTES):
        number, raw = encoded[start], encoded[start + 1 : start + ENCODED_BYTES]
        if number >= len(_ALGORITHMS):
            raise CorruptError("a digest has an unknown algorithm")
        found.append(f"{_ALGORITHMS[number]}:{raw.hex()}")
    return found
