"""The map of a cached stream: which of its sectors are here, shared by all processes of the node.

Alone owns what the bytes of `present` mean (docs/format/cache.md). Reading and marking are single
operations on mapped memory; any thread, any process. `suspect` and `clear_suspects` read what they
change: within a process their caller keeps `mark` away meanwhile, and between processes a mark
that gets lost costs one more fetch.
"""

import errno
import mmap
import os
from collections.abc import Iterator

from bootseer.prefetch.cache.files import (
    CLEAN_OFFSET,
    HEADER_BYTES,
    SECTOR_BYTES,
    SUSPECT_OFFSET,
    Header,
)

ABSENT, PRESENT, SUSPECT = b"\0", b"\1", b"\2"
"""What the map says of a sector. Suspect: it was written before a crash of the machine."""

_COUNT_BYTES = 2**18

_ROOM_BYTES = 2**16
"""Bytes of the map that are allocated at once: the marks of 32 MiB of the stream."""


def map_bytes(stream_length: int) -> int:
    """The length of the map of a stream."""
    return HEADER_BYTES + -(-stream_length // SECTOR_BYTES)


class Presence:
    """A mapped `present`, with its header."""

    def __init__(self, mapped: mmap.mmap, stream_length: int, fd: int = -1) -> None:
        """`mapped` has `map_bytes(stream_length)` bytes. `fd`: of its file, which is closed with
        it; -1: the map is in memory only."""
        self._map = mapped
        self._stream_length = stream_length
        self._fd = fd
        self._has_room = bytearray(-(-len(mapped) // _ROOM_BYTES))

    # ---- room on the disk -----------------------------------------------------------------

    def make_room(self, offset: int, length: int) -> None:
        """Allocate what `mark` will write to: writing to a hole of a mapped file on a full disk is
        SIGBUS, and all of the map at once would be two gigabytes of a stream that only says that it
        has a terabyte. Raises: OSError."""
        start, stop = self._slice(offset, length)
        first, end = start // _ROOM_BYTES, -(-stop // _ROOM_BYTES)
        while (first := self._has_room.find(0, first, end)) >= 0:
            if self._fd >= 0:
                begin = first * _ROOM_BYTES
                count = min(_ROOM_BYTES, len(self._map) - begin)
                os.posix_fallocate(self._fd, begin, count)
            self._has_room[first] = 1

    # ---- the header -----------------------------------------------------------------------

    def begin(self, header: Header, *, durable: bool) -> None:
        """Write the header, `durable` where the disk may have one that says clean: "not clean" must
        be there before a sector is marked."""
        self._map[:HEADER_BYTES] = header.encode()
        if durable:
            self._map.flush()

    def end(self) -> None:
        """Make the map durable and then call it clean."""
        self._map.flush()
        self._map[CLEAN_OFFSET : CLEAN_OFFSET + 4] = b"\1\0\0\0"
        self._map.flush()

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_suspect(self) -> bool:
        """Whether there may be suspect sectors."""
        return self._map[SUSPECT_OFFSET] != 0

    @is_suspect.setter
    def is_suspect(self, value: bool) -> None:
        self._map[SUSPECT_OFFSET] = value

    # ---- sectors --------------------------------------------------------------------------

    def _slice(self, offset: int, length: int) -> tuple[int, int]:
        # As `sectors_of` has it: each page of a bundle comes here several times.
        start = HEADER_BYTES + offset // SECTOR_BYTES
        return start, HEADER_BYTES - -(offset + length) // SECTOR_BYTES

    def lacks(self, offset: int, length: int) -> bool:
        """Whether any sector of `[offset, offset + length)` is absent."""
        # As `_slice` has it, likewise.
        start = HEADER_BYTES + offset // SECTOR_BYTES
        stop = HEADER_BYTES - -(offset + length) // SECTOR_BYTES
        return self._map.find(ABSENT, start, stop) >= 0

    def lacks_all(self, offset: int, length: int) -> bool:
        """Whether none of them is present."""
        return self._map.find(PRESENT, *self._slice(offset, length)) < 0

    def doubts(self, offset: int, length: int) -> bool:
        """Whether any of them is suspect."""
        return self._map.find(SUSPECT, *self._slice(offset, length)) >= 0

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The absent parts as (offset, length), ascending; nothing there may be suspect."""
        position, stop = self._slice(offset, length)
        while (gap := self._map.find(ABSENT, position, stop)) >= 0:
            position = self._map.find(PRESENT, gap, stop)
            if position < 0:
                position = stop
            start = (gap - HEADER_BYTES) * SECTOR_BYTES
            end = min((position - HEADER_BYTES) * SECTOR_BYTES, self._stream_length)
            yield start, end - start

    def here(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The present parts as (offset, length), ascending."""
        position, stop = self._slice(offset, length)
        marks = [mark for mark in (ABSENT, SUSPECT) if self._map.find(mark, position, stop) >= 0]
        while (found := self._map.find(PRESENT, position, stop)) >= 0:
            ends = (self._map.find(mark, found, stop) for mark in marks)
            position = min((end for end in ends if end >= 0), default=stop)
            start = (found - HEADER_BYTES) * SECTOR_BYTES
            end = min((position - HEADER_BYTES) * SECTOR_BYTES, self._stream_length)
            yield start, end - start

    def next_suspect(self, offset: int) -> int | None:
        """Where the first suspect sector at or behind `offset` begins."""
        found = self._map.find(SUSPECT, HEADER_BYTES + offset // SECTOR_BYTES)
        return None if found < 0 else (found - HEADER_BYTES) * SECTOR_BYTES

    def mark(self, offset: int, length: int) -> None:
        """They are here, and verified. There must be room (`make_room`)."""
        start, stop = self._slice(offset, length)
        self._map[start:stop] = PRESENT * (stop - start)

    def clear(self, offset: int, length: int) -> None:
        """They are not here, or not as they were written."""
        self._clear(PRESENT, offset, length)
        self._clear(SUSPECT, offset, length)

    def mark_suspect(self, offset: int, length: int) -> None:
        """They were here once. There must be room."""
        start, stop = self._slice(offset, length)
        self._map[start:stop] = SUSPECT * (stop - start)

    def suspect(self, offset: int, length: int) -> None:
        """Believe none of those that are here."""
        start, stop = self._slice(offset, length)
        # What is a hole of the map stays one.
        if self._map.find(PRESENT, start, stop) >= 0:
            self._map[start:stop] = self._map[start:stop].replace(PRESENT, SUSPECT)

    def clear_suspects(self, offset: int, length: int) -> None:
        """What is suspect is absent."""
        self._clear(SUSPECT, offset, length)

    def _clear(self, mark: bytes, offset: int, length: int) -> None:
        # What is a hole of the map stays one.
        start, stop = self._slice(offset, length)
        others = [
            other
            for other in (ABSENT, PRESENT, SUSPECT)
            if other != mark and self._map.find(other, start, stop) >= 0
        ]
        while (first := self._map.find(mark, start, stop)) >= 0:
            ends = (self._map.find(other, first, stop) for other in others)
            start = min((end for end in ends if end >= 0), default=stop)
            self._map[first:start] = ABSENT * (start - first)

    def count_bytes(self) -> int:
        """How much of the stream is here and verified."""
        if self._fd >= 0:
            return count_present(self._fd, self._stream_length)
        # In pieces, so that no reader waits for long.
        starts = range(HEADER_BYTES, len(self._map), _COUNT_BYTES)
        here = sum(self._map[start : start + _COUNT_BYTES].count(PRESENT) for start in starts)
        return _bytes_of(here, self._map[-1:], self._stream_length)


def count_present(fd: int, stream_length: int) -> int:
    """How much of the stream is here, by the file of its map; goes past the file's holes.

    Raises: OSError.
    """
    end = map_bytes(stream_length)
    here = 0
    position = HEADER_BYTES
    while position < end:
        try:
            position = max(position, os.lseek(fd, position, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        stop = min(os.lseek(fd, position, os.SEEK_HOLE), end)
        while position < stop:
            piece = os.pread(fd, min(_COUNT_BYTES, stop - position), position)
            if not piece:
                return _bytes_of(here, b"", stream_length)
            here += piece.count(PRESENT)
            position += len(piece)
    return _bytes_of(here, os.pread(fd, 1, end - 1), stream_length)


def _bytes_of(present_count: int, last: bytes, stream_length: int) -> int:
    """The bytes of so many sectors that are here; `last`: what the map says of the last one."""
    beyond = -stream_length % SECTOR_BYTES if last == PRESENT and stream_length else 0
    return SECTOR_BYTES * present_count - beyond
