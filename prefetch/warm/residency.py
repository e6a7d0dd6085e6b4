"""Cached pages of a file, found with mincore(2), which reads nothing.

Not the newer cachestat(2): on overlayfs, which caches pages of the lower file, it finds none.
Stateless; any thread.
"""

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

from bootseer.linux.processes import has_capability, is_in_user_namespace
from bootseer.prefetch.warm.record import FileRange

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROT_READ, _MAP_SHARED = 1, 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_CAP_FOWNER = 3
# Bytes that one mincore(2) covers: its vector takes a byte per page.
_SPAN_BYTES = 2**30
_LOWEST_BIT = bytes(value & 1 for value in range(256))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    c_int = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def is_residency_known(fd: int) -> bool:
    """Return whether mincore(2) tells the truth about a file: to its owner and its writers.

    To all others it reports every page as cached (Linux 5.2, against page cache attacks).
    """
    owner = os.fstat(fd).st_uid
    return (
        owner == os.geteuid()
        or (has_fowner() and owner != unmapped_owner())
        or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)
    )


@cache
def unmapped_owner() -> int | None:
    """Return the user id shown for owners outside this user namespace; None in the initial one.

    A capability in the namespace does not apply to their files (capable_wrt_inode_uidgid).
    """
    try:
        if not is_in_user_namespace():
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


@cache
def has_fowner() -> bool:
    """Return whether this process has CAP_FOWNER, which counts as owning every file."""
    return has_capability(_CAP_FOWNER)


def cached_ranges(fd: int) -> tuple[FileRange, ...] | None:
    """Return the cached ranges of an open file, or None if unknown. Raises: OSError."""
    if not is_residency_known(fd):
        return None
    size_bytes = os.fstat(fd).st_size
    ranges: list[FileRange] = []
    for offset in range(0, size_bytes, _SPAN_BYTES):
        length = min(_SPAN_BYTES, size_bytes - offset)
        for start, end in _runs(_resident(fd, offset, length)):
            first = offset + start * PAGE_BYTES
            last = min(offset + end * PAGE_BYTES, size_bytes)
            if ranges and ranges[-1].end == first:
                first = ranges.pop().offset
            ranges.append(FileRange(first, last - first))
    return tuple(ranges)


def is_cached(fd: int, wanted: FileRange) -> bool:
    """Return whether a range is cached, for a file with known residency. Raises: OSError."""
    offset = wanted.offset - wanted.offset % PAGE_BYTES
    return 0 not in _resident(fd, offset, wanted.end - offset)


def _resident(fd: int, offset: int, length: int) -> bytes:
    libc = _libc()
    address = libc.mmap(None, length, _PROT_READ, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        if ctypes.get_errno() == errno.ENODEV:
            # A file that cannot be mapped (FUSE with direct I/O) has no cached pages.
            return bytes(-(-length // PAGE_BYTES))
        raise _error()
    try:
        vector = ctypes.create_string_buffer(-(-length // PAGE_BYTES))
        if libc.mincore(address, length, vector):
            raise _error()
        return vector.raw.translate(_LOWEST_BIT)
    finally:
        libc.munmap(address, length)


def _error() -> OSError:
    code = ctypes.get_errno() or errno.EIO
    return OSError(code, os.strerror(code))


def _runs(vector: bytes) -> list[tuple[int, int]]:
    """Return the runs of ones as (start, end). Pure."""
    runs = []
    start = vector.find(1)
    while start >= 0:
        end = vector.find(0, start)
        if end < 0:
            end = len(vector)
        runs.append((start, end))
        start = vector.find(1, end)
    return runs
