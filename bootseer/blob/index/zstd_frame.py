"""One zstd frame that holds a whole document: expanded within limits. Pure; any thread.

A few kilobytes of zstd may expand to gigabytes. So a frame has to say its content's size, which is
compared with what the document may have and with its stored length before anything is allocated.
"""

import zstandard

from bootseer.errors import CorruptError

RATIO_MAX = 64
"""How many times its length a document may expand to: lists of paths and numbers do 5 to 20."""
FREE_BYTES = 2**22
"""The ratio is not applied below this."""


def expand(data: bytes | memoryview, what: str, size_max: int, ratio_max: int = RATIO_MAX) -> bytes:
    """The content of the frame, of at most `size_max` bytes. `what` is for messages.

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
