"""Number of bytes of a file in the page cache, by mincore(2).

mincore(2) answers correctly to the owner of a file and to root only.
"""

import ctypes
import mmap
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def cached_bytes(path: Path) -> int:
    """Return how many bytes of a file are cached, in whole pages. Raises: OSError."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return 0
    with path.open("rb") as file:
        # A private mapping may be written to: ctypes tells the address of nothing else.
        mapped = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_PRIVATE)
    found = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    first = ctypes.c_char.from_buffer(mapped)
    try:
        address = ctypes.c_void_p(ctypes.addressof(first))
        if _LIBC.mincore(address, ctypes.c_size_t(size_bytes), found):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    finally:
        del first
        mapped.close()
    return mmap.PAGESIZE * sum(byte & 1 for byte in found.raw)
