"""Sectors of tar streams, and marks of taken sectors.

Marks take memory for what was taken, not for the stream's length: an index may say that a stream
has a terabyte. Pure; a `SectorMarks` is for one thread at a time.
"""

from collections.abc import Iterator

SECTOR_BYTES = 512
"""Unit of tar: every file in a tar stream begins on a multiple of it."""

_BLOCK_SECTORS = 2048
"""A megabyte of the stream."""


def sectors_of(offset: int, length: int) -> tuple[int, int]:
    """Return the half-open range of sectors that `[offset, offset + length)` touches."""
    return offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES)


class SectorMarks:
    """Marks of the sectors of one stream; none is taken at first."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}

    def gaps(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the sectors of `[first, stop)` that are not taken, as half-open ranges."""
        found: list[tuple[int, int]] = []
        for start, end in self._gaps(first, stop):
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
        return found

    def _gaps(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        for number, start, end in _parts(first, stop):
            base = number * _BLOCK_SECTORS
            marks = self._blocks.get(number)
            if marks is None:
                yield base + start, base + end
                continue
            while (gap := marks.find(0, start, end)) >= 0:
                start = marks.find(1, gap, end)
                if start < 0:
                    start = end
                yield base + gap, base + start

    def take(self, first: int, stop: int) -> None:
        """Mark `[first, stop)`."""
        for number, start, end in _parts(first, stop):
            marks = self._blocks.get(number)
            if marks is None:
                marks = self._blocks[number] = bytearray(_BLOCK_SECTORS)
            marks[start:end] = b"\1" * (end - start)


def _parts(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(block, first, stop within it) of a range."""
    while first < stop:
        number, start = divmod(first, _BLOCK_SECTORS)
        end = min(_BLOCK_SECTORS, stop - first + start)
        yield number, start, end
        first += end - start
