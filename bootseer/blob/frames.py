"""Frames of a blob: their table, the frames that cover a range, and bounded decompression.

Pure; any thread. Decompression releases the GIL.
"""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from operator import attrgetter, sub
from typing import overload

import zstandard

from bootseer.base.content_digest import content_digest
from bootseer.blob.tree import Blob, Frame
from bootseer.errors import CorruptError

FRAME_STREAM_BYTES_MAX = 64 * 1024 * 1024
"""Largest content of a frame, which bounds the memory of one decompression."""

_local = threading.local()


class FrameTable(Sequence[Frame]):
    """Sequence of a blob's consecutive frames from offset 0, stored as columns. Immutable."""

    def __init__(
        self, lengths: "array[int]", stream_lengths: "array[int]", digests: bytes | memoryview
    ) -> None:
        """Create the table; `digests` has 32 bytes per frame.

        Raises: CorruptError for an empty or too large frame.
        """
        if not len(lengths) == len(stream_lengths) == len(digests) / 32:
            raise CorruptError("the columns of a frame table differ in length")
        if lengths and not 0 < min(stream_lengths) <= max(stream_lengths) <= FRAME_STREAM_BYTES_MAX:
            raise CorruptError("a frame is empty or too large")
        # zstd expands incompressible data by at most a 256th and a header.
        if lengths and not 0 < min(lengths) <= max(lengths) <= 2 * FRAME_STREAM_BYTES_MAX:
            raise CorruptError("a compressed frame is empty or too large")
        self.offsets = array("Q", accumulate(lengths, initial=0))
        self.stream_offsets = array("Q", accumulate(stream_lengths, initial=0))
        self.digests = digests

    @property
    def lengths(self) -> Iterator[int]:
        """Compressed length of each frame."""
        return map(sub, islice(self.offsets, 1, None), self.offsets)

    @property
    def stream_lengths(self) -> Iterator[int]:
        """Length of each frame's content."""
        return map(sub, islice(self.stream_offsets, 1, None), self.stream_offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> list[Frame]: ...
    def __getitem__(self, index: int | slice) -> Frame | list[Frame]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, stream_offset = self.offsets[index], self.stream_offsets[index]
        return Frame(
            offset,
            self.offsets[index + 1] - offset,
            stream_offset,
            self.stream_offsets[index + 1] - stream_offset,
            bytes(self.digests[32 * index : 32 * index + 32]),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(Frame.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(bytes(self.digests))


def frames_for(blob: Blob, stream_offset: int, length: int) -> range:
    """Return the numbers of the frames that cover `[stream_offset, stream_offset + length)`.

    The range is cut at the end of the stream; the result is empty for an empty range.
    """
    frames = blob.frames
    if length <= 0 or not frames:
        return range(0)
    last = min(stream_offset + length, blob.stream_length) - 1
    if last < stream_offset:
        return range(0)
    if isinstance(frames, FrameTable):
        starts = frames.stream_offsets
        return range(bisect_right(starts, stream_offset) - 1, bisect_right(starts, last))
    key = attrgetter("stream_offset")
    return range(
        bisect_right(frames, stream_offset, key=key) - 1, bisect_right(frames, last, key=key)
    )


def decode_frame(frame: Frame, data: bytes | memoryview) -> bytes:
    """Return the frame's content from its stored bytes `data`, after verifying their digest.

    Raises: CorruptError if `data` is not exactly the stored frame.
    """
    if len(data) != frame.length:
        raise CorruptError(
            f"the frame at offset {frame.offset} has {len(data)} bytes instead of {frame.length}"
        )
    if content_digest(data) != frame.digest:
        raise CorruptError(f"the frame at offset {frame.offset} does not match its digest")
    try:
        if zstandard.frame_content_size(data) != frame.stream_length:
            raise CorruptError(f"the frame at offset {frame.offset} announces a wrong length")
        content = _decompressor().decompress(
            data, max_output_size=frame.stream_length, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"the frame at offset {frame.offset} cannot be decompressed: {error}"
        ) from error
    if len(content) != frame.stream_length:
        raise CorruptError(f"the frame at offset {frame.offset} has a wrong length")
    return content


def _decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor, since two threads must not share one."""
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


# ---- documents that are one frame ----------------------------------------------------------------

# A few kilobytes of zstd can expand to gigabytes. So a frame must announce the size of its content,
# which is compared with the document's limit and with the compressed size before decompression.

RATIO_MAX = 64
"""Largest ratio of decompressed to compressed size; lists of paths and numbers have 5 to 20."""
FREE_BYTES = 2**22
"""Decompressed size up to which any ratio is accepted."""
LINE_BYTES_MAX = 2**23
"""Longest line of a document of lines: a path of the deepest tree, each byte escaped, fits."""


def expand(data: bytes | memoryview, what: str, size_max: int, ratio_max: int = RATIO_MAX) -> bytes:
    """Return the content of a frame, at most `size_max` bytes; `what` names it in messages.

    Raises: CorruptError.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= min(size_max, max(FREE_BYTES, ratio_max * len(data))):
            raise CorruptError(
                f"{what} of {len(data)} bytes announces no size, or one that is absurd: {size}"
            )
        content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{what} cannot be decompressed: {error}") from error
    if len(content) != size:
        raise CorruptError(f"{what} has {len(content)} bytes where it announces {size}")
    return content


def expand_lines(data: bytes | memoryview, what: str, size_max: int) -> bytes:
    """Return the content of a frame of lines, none longer than `LINE_BYTES_MAX`; see `expand`."""
    text = expand(data, what, size_max)
    # From one line's end to the last one in reach, so that short lines are not looked at singly.
    start = 0
    while len(text) - start > LINE_BYTES_MAX:
        end = text.rfind(b"\n", start, start + LINE_BYTES_MAX + 1)
        if end < 0:
            raise CorruptError(f"{what} has a line of more than {LINE_BYTES_MAX} bytes")
        start = end + 1
    return text
