"""Bounded decompression of a document that is one zstd frame. Pure; any thread.

A few kilobytes of zstd can expand to gigabytes. So a frame must announce the size of its content,
which is compared with the document's limit and with the compressed size before decompression.
"""

import zstandard

from bootseer.errors import CorruptError

RATIO_MAX = 64
"""Largest ratio of decompressed to compressed size; lists of paths and numbers have 5 to 20."""
FREE_BYTES = 2**22
"""Decompressed size up to which any ratio is accepted."""


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
