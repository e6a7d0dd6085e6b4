"""Which pages of a file are in the page cache.

Alone owns the two system calls for that, cachestat(2) for "any at all?" (Linux 6.5) and mincore(2)
for "which?". Neither reads anything. Stateless; any thread.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from bootseer.prefetch.warm.record import Range

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The same number on every architecture: it is newer than the common table.
_SYS_CACHESTAT = 451
_PROT_READ, _MAP_SHARED = 1, 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_CAP_FOWNER = 3
# What one mincore(2) is asked about: its vector takes a byte per page.
_SPAN_BYTES = 2**30
_LOWEST_BIT = bytes(value & 1 for value in range(256))


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    c_int = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.syscall.restype = ctypes.c_long
    return libc


def cached_page_count(fd: int, found: Range) -> int | None:
    """How many pages of a range are cached; None where the kernel does not say."""
    asked = _CachestatRange(found.offset, found.length)
    answer = _Cachestat()
    result = _libc().syscall(
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_int(fd),
        ctypes.byref(asked),
        ctypes.byref(answer),
        ctypes.c_uint(0),
    )
    return int(answer.cached) if result == 0 else None


def may_ask(status: os.stat_result, is_writable: Callable[[], bool]) -> bool:
    """Whether mincore(2) tells the truth about a file: to its owner and to who may write it.

    To all others it says that every page is cached (Linux 5.2, against spying by page cache).
    """
    return status.st_uid == os.geteuid() or _has_fowner() or is_writable()


@cache
def _has_fowner() -> bool:
    try:
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    capabilities = next((line for line in lines if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(capabilities.split()[1], 16) >> _CAP_FOWNER & 1)


def cached_ranges(fd: int) -> tuple[Range, ...] | None:
    """The cached parts of an open file, in whole pages but for its end; None where the kernel does
    not tell us. Raises: OSError."""
    status = os.fstat(fd)
    size_bytes = status.st_size
    if not may_ask(status, lambda: os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)):
        return None
    # Most files of a large tree are not cached at all, and one call is a fifth of mapping one.
    if not size_bytes or cached_page_count(fd, Range(0, size_bytes)) == 0:
        return ()
    ranges: list[Range] = []
    for offset in range(0, size_bytes, _SPAN_BYTES):
        length = min(_SPAN_BYTES, size_bytes - offset)
        for start, end in _runs(_resident(fd, offset, length)):
            first = offset + start * PAGE_BYTES
            last = min(offset + end * PAGE_BYTES, size_bytes)
            if ranges and ranges[-1].end == first:
                first = ranges.pop().offset
            ranges.append(Range(first, last - first))
    return tuple(ranges)


def _resident(fd: int, offset: int, length: int) -> bytes:
    libc = _libc()
    address = libc.mmap(None, length, _PROT_READ, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
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
    """Where the ones are: [start, end). Pure."""
    runs = []
    start = vector.find(1)
    while start >= 0:
        end = vector.find(0, start)
        if end < 0:
            end = len(vector)
        runs.append((start, end))
        start = vector.find(1, end)
    return runs
