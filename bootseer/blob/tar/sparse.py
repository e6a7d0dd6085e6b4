"""Parser of the maps of sparse files in tar archives: GNU's format, PAX 0.0, 0.1 and 1.0.

Sizes of hostile maps are checked before they take memory. One thread.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.blob.tar import fields as tar_fields
from bootseer.blob.tar.header import BLOCK
from bootseer.errors import CorruptError

SEGMENT_COUNT_MAX = 2**18
"""Largest number of segments of one sparse file, against hostile lengths."""

Take = Callable[[int], bytes]
"""Function `take(count)` that returns exactly the next `count` bytes of the archive."""


class SparseMap(Struct, frozen=True):
    """Parts of a sparse file that its archive contains."""

    segments: list[tuple[int, int]]
    """Stored segments (offset, length) in the order of the stream."""
    size_bytes: int
    """Size of the file with its holes."""
    blocks: list[bytes]
    """Blocks of the stream after the header that belong to the map."""


def is_sparse(records: Mapping[bytes, bytes]) -> bool:
    """Return whether an extended header says that the file is sparse."""
    return any(key.startswith(b"GNU.sparse.") for key in records)


def old_map(path: bytes, header: bytes, take: Take) -> SparseMap:
    """Return a map in GNU's format: four segments in the header, 21 in each extension block."""
    segments = _entries(header[386:482])
    blocks: list[bytes] = []
    more = header[482]
    while more:
        blocks.append(take(BLOCK))
        segments += _entries(blocks[-1][:504])
        more = blocks[-1][504]
        if len(segments) > SEGMENT_COUNT_MAX:
            raise CorruptError(f"the sparse map of {quoted(path)} is too long")
    return SparseMap(segments, tar_fields.number(header[483:495]), blocks)


def pax_map(
    path: bytes,
    records: Mapping[bytes, bytes],
    pairs: list[tuple[int, int]],
    stored_bytes: int,
    take: Take,
) -> SparseMap:
    """Return a map in PAX format: 0.0 (repeated records), 0.1 (one record), 1.0 (in the content).

    `pairs` are the repeated records. `stored_bytes` is the length of the content in the stream,
    including the map of 1.0.
    """
    size = tar_fields.decimal(records, b"GNU.sparse.size", stored_bytes)
    size = tar_fields.decimal(records, b"GNU.sparse.realsize", size)
    if records.get(b"GNU.sparse.major") == b"1":
        segments, blocks = _map_before_content(path, stored_bytes, take)
        return SparseMap(segments, size, blocks)
    if b"GNU.sparse.map" not in records:
        return SparseMap(pairs, size, [])
    text = records[b"GNU.sparse.map"]
    numbers = [tar_fields.integer(number) for number in text.split(b",")] if text else []
    if len(numbers) % 2 or len(numbers) > 2 * SEGMENT_COUNT_MAX:
        raise CorruptError(f"the sparse map of {quoted(path)} is cut off or too long")
    return SparseMap(list(zip(numbers[::2], numbers[1::2], strict=True)), size, [])


def verify(found: SparseMap, path: bytes, stored_bytes: int) -> None:
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
            if wanted > 1 + 2 * SEGMENT_COUNT_MAX:
                raise CorruptError(f"the sparse map of {quoted(path)} is too long")
    text = b"".join(blocks)
    numbers = [tar_fields.integer(line) for line in text.split(b"\n", wanted)[1:wanted]]
    return list(zip(numbers[::2], numbers[1::2], strict=True)), blocks
