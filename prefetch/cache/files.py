"""What the files of the node cache have in common: sectors, locks, and the map's header.

Alone owns the header of `present` (docs/format/cache.md) and how a stream's folder is locked.
Stateless; any thread.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.errors import DeadlineError, from_oserror
from bootseer.linux.locks import lock_file

SECTOR_BYTES = 512
"""Tar's own unit: every file in a tar stream begins on a multiple of it."""

HEADER_BYTES = 64
CLEAN_OFFSET = 12
SUSPECT_OFFSET = 40
# magic, version, clean flag, boot id, stream length, "some sectors are to be verified".
_HEADER = struct.Struct("<8sII16sQI")
_MAGIC = b"BSPRESNT"
_VERSION = 2

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a full disk says."""
NO_DISK = (*FULL, errno.EROFS)
"""The disk takes nothing: no reason to fail for who could do without a cache."""

LOCK_S = 60.0
"""An fsync of gigabytes takes that long on a slow disk."""


def sectors_of(offset: int, length: int) -> tuple[int, int]:
    """The half-open range of sectors that `[offset, offset + length)` touches."""
    return offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES)


class Header(NamedTuple):
    """The first bytes of `present`, decoded."""

    is_clean: bool
    boot: bytes
    stream_length: int
    is_suspect: bool
    """Some sectors may have been lost by a crash and are not verified yet."""

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        packed = _HEADER.pack(
            _MAGIC, _VERSION, self.is_clean, self.boot, self.stream_length, self.is_suspect
        )
        return packed.ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> Header | None:
    """Decodes a header; None for bytes that are no header of this version."""
    if len(data) < _HEADER.size:
        return None
    magic, version, clean, boot, length, suspect = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return None
    return Header(clean == 1, boot, length, suspect != 0)


@contextlib.contextmanager
def alone(path: Path, timeout_s: float, doing: str) -> Iterator[None]:
    """The only process of this node that is `doing` what the lock file `path` stands for; the file
    goes with it. A killed holder lets go.

    Raises: DeadlineError when another one is still at it after `timeout_s`; BootseerError.
    """
    try:
        fd = lock_file(path, timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"another process was still {doing} after {timeout_s:g} s") from error
    except OSError as error:
        raise from_oserror(error, f"lock {path}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def locked(directory: Path, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Alone in opening, closing or removing the stream in `directory`, which is made if needed.

    Held for as long as a map is looked at or one fsync takes, never for a transfer.
    Raises: TimeoutError where it is held for `timeout_s`; OSError.
    """
    fd = lock_file(directory / "lock", timeout_s)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_if_there(directory: Path) -> Iterator[None]:
    """As `locked`, for who removes the stream: nothing is made.

    Raises: FileNotFoundError where there is no such folder; OSError.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = lock_file(Path("lock"), LOCK_S, folder=folder)
    finally:
        os.close(folder)
    try:
        yield
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data` at `offset`. Raises: OSError."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.pwrite(fd, view[position:], offset + position)
