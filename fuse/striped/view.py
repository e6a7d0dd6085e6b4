"""Addresses and checks of the stored bytes of one generation of a file.

A `FileView` is the same for a striped file and for an ordinary one, so that one reader serves both:
an ordinary file is cut into the same units, all of them ranges of the one file, without checksums.
Pure, except `new_generation`; thread-safe.
"""

import secrets
from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from bootseer.errors import CorruptError
from bootseer.fuse.striped.layout import (
    DEFAULT_BLOCK_BYTES,
    DEFAULT_STRIPE_UNIT_BYTES,
    PARTS_FOLDER,
    Layout,
    Segment,
    block_checksum,
)
from bootseer.store.backend import FileInfo
from bootseer.transfer.ranges import Chunk


class ByteRange(Struct, frozen=True):
    """Half-open range `[start, end)` of a logical file."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class PartRange(Struct, frozen=True):
    """A run of a logical range that lies contiguously in one part."""

    part: int
    part_offset: int
    length: int


def pieces(segment: Segment, offset: int, length: int) -> Iterator[PartRange]:
    """Yield the ranges of parts that hold a segment's `[offset, offset + length)`, in order."""
    unit, count = segment.stripe_unit_bytes, len(segment.parts)
    position, end = offset, min(offset + length, segment.size_bytes)
    while position < end:
        number, within = divmod(position, unit)
        run = min(unit - within, end - position)
        yield PartRange(number % count, number // count * unit + within, run)
        position += run


def parts_folder(directory: str) -> str:
    """Return the hidden folder beside the files of `directory` ("" is the root)."""
    return f"{directory}/{PARTS_FOLDER}" if directory else PARTS_FOLDER


def new_generation() -> str:
    """Return a random name for a new generation, unique on all nodes."""
    return secrets.token_hex(16)


def generation_folder(directory: str, generation: str) -> str:
    """Return the folder that holds the parts of the segment `generation`."""
    return f"{parts_folder(directory)}/{generation}"


def moved_identity(identity: str, source: str, target: str) -> str:
    """Return a file's identity after a rename; that of an ordinary file begins with its path."""
    begin = f"{source}\0"
    return f"{target}\0{identity[len(begin) :]}" if identity.startswith(begin) else identity


def plain_version(info: FileInfo) -> str:
    """Return the version of a stored file, which differs from that of any other with its name."""
    return f"{info.modified_ns}\0{info.size_bytes}\0{info.version}"


class FileView:
    """Generation of a file: its identity and the addresses of its bytes. Immutable."""

    __slots__ = (
        "_bases",
        "block_bytes",
        "directory",
        "identity",
        "layout",
        "modified_ns",
        "path",
        "size_bytes",
    )

    def __init__(
        self,
        path: str,
        identity: str,
        size_bytes: int,
        modified_ns: int = 0,
        layout: Layout | None = None,
        block_bytes: int = 0,
    ) -> None:
        """Compute the offsets of the segments in the file.

        `identity` differs between any two generations that may be cached at the same time.
        `modified_ns` is that of the file at `path`. `block_bytes` is the size of the blocks in
        which the storage spreads an ordinary file over disks; 0 if the storage does not.
        """
        self.path = path
        self.identity = identity
        self.size_bytes = size_bytes
        self.modified_ns = modified_ns
        self.layout = layout
        self.block_bytes = block_bytes
        self.directory = path.rpartition("/")[0]
        self._bases: list[int] = []
        base = 0
        for segment in layout.segments if layout else ():
            self._bases.append(base)
            base += segment.size_bytes

    @property
    def round_bytes(self) -> int:
        """Size of a round of stripe units, one on each part; 0 for an ordinary file."""
        segments = self.layout.segments if self.layout is not None else ()
        return max((len(one.parts) * one.stripe_unit_bytes for one in segments), default=0)

    @property
    def plain_version(self) -> str:
        """The version of an ordinary file: its identity without the path at the start."""
        return self.identity.partition("\0")[2]

    def renamed(self, path: str) -> "FileView":
        """Return the view of the file at its new `path`, with the identity that it has there."""
        return self._moved(path, moved_identity(self.identity, self.path, path))

    def at_path(self, path: str) -> "FileView":
        """Return the view at a new `path` with the old identity, for readers that are open."""
        return self._moved(path, self.identity)

    def _moved(self, path: str, identity: str) -> "FileView":
        return FileView(
            path, identity, self.size_bytes, self.modified_ns, self.layout, self.block_bytes
        )

    def unit_at(self, offset: int) -> ByteRange:
        """Return the stripe unit that holds byte `offset`: the unit of read-ahead."""
        if self.layout is None:
            return self._aligned(offset, 0, DEFAULT_STRIPE_UNIT_BYTES, self.size_bytes)
        segment, base = self._segment_at(offset)
        return self._aligned(offset, base, segment.stripe_unit_bytes, segment.size_bytes)

    def block_at(self, offset: int) -> ByteRange:
        """Return the block that holds byte `offset`: the least that is fetched and verified."""
        if self.layout is None:
            return self._aligned(offset, 0, DEFAULT_BLOCK_BYTES, self.size_bytes)
        segment, base = self._segment_at(offset)
        return self._aligned(offset, base, segment.block_bytes, segment.size_bytes)

    def source(self, span: ByteRange) -> tuple[str, int]:
        """Return the stored file that holds `span`, a range in one unit, and the offset in it."""
        if self.layout is None:
            return self.path, span.start
        segment, base = self._segment_at(span.start)
        (piece,) = pieces(segment, span.start - base, span.length)
        folder = generation_folder(self.directory, segment.generation)
        return f"{folder}/{segment.parts[piece.part].name}", piece.part_offset

    def source_name(self, span: ByteRange) -> str:
        """Return the name in the statistics of the place that `span` is read from.

        The name is that of the part: the view does not know which server holds the part.
        """
        if self.layout is None:
            return "ordinary files"
        return f"part {self.source(span)[0].rpartition('/')[2]}"

    def digested_units(self, length: int) -> list[Chunk]:
        """Return the stripe units of the first `length` bytes as chunks of the parts.

        The nodes of a start send each other these chunks, which the digests in the layout name. An
        ordinary file has no digests, so the list is empty.
        """
        chunks = []
        position, end = 0, min(length, self.size_bytes)
        while position < end and self.layout is not None:
            unit = self.unit_at(position)
            path, offset = self.source(unit)
            chunks.append(Chunk(path, offset, unit.length, self.digest(unit)))
            position = unit.end
        return chunks

    def digest(self, unit: ByteRange) -> bytes | None:
        """Return the BLAKE3 digest of a whole stripe unit; None for an ordinary file."""
        if self.layout is None:
            return None
        segment, base = self._segment_at(unit.start)
        return segment.digest((unit.start - base) // segment.stripe_unit_bytes)

    def matches(self, info: FileInfo) -> bool:
        """Return whether the stored file `info` is unchanged since this view of it was made.

        An ordinary file has no checksums, and may have been replaced or written in place.
        """
        return self.plain_version == plain_version(info)

    def verify(self, span: ByteRange, data: memoryview) -> None:
        """Check `data`, the bytes of `span` (whole blocks of one unit). Raises: CorruptError."""
        if len(data) != span.length:
            path, _ = self.source(span)
            raise CorruptError(
                f"{path} is shorter than the layout of {self.path} says: "
                f"{len(data)} of {span.length} bytes at {span.start}"
            )
        if self.layout is None:
            return
        segment, base = self._segment_at(span.start)
        first = (span.start - base) // segment.block_bytes
        for index, at in enumerate(range(0, span.length, segment.block_bytes)):
            if block_checksum(data[at : at + segment.block_bytes]) != segment.checksum(
                first + index
            ):
                path, _ = self.source(span)
                raise CorruptError(
                    f"{path} does not match the checksum in the layout of {self.path} "
                    f"at logical offset {span.start + at}"
                )

    def _segment_at(self, offset: int) -> tuple[Segment, int]:
        assert self.layout is not None
        index = bisect_right(self._bases, offset) - 1
        return self.layout.segments[index], self._bases[index]

    @staticmethod
    def _aligned(offset: int, base: int, step: int, size: int) -> ByteRange:
        start = (offset - base) // step * step
        return ByteRange(base + start, base + min(start + step, size))
