"""Which names and pages the kernel is to have before a start asks for them, and when. Pure.

A bundle says which bytes a start wants by their places in streams. Here they are pages of files
again, in the order of use, with the names on the way to them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.prefetch.bundle.format import BundleFrame
from bootseer.prefetch.index.stream_contents import PAGE_BYTES, Pages, StreamContents

_LISTED_NAMES_MAX = 1024
_LISTED_SHARE = 8
"""A directory is listed, which takes two requests, rather than asked for each name that is wanted,
if it has at most so many names, or so many for each that is wanted."""

_EXTENT_COUNT_MAX = 100_000
"""So much of a bundle is handed over: far more than a start needs, and what comes first was wanted
first."""
_WINDOW_MAX = 64
"""Pieces of 20 KB on average: two milliseconds' work, and a hundredth of a large start."""
_MARKED_MIN = 8
"""In a window of this many pieces or more, one amid them is kept back: when it is asked for, the
next window is due, and there is time to hand it over."""


class PreloadPlan(Struct, frozen=True):
    """What to tell the kernel of a bundle's files."""

    pieces: tuple[Pages, ...]
    """The pages to preload, in the order of use."""
    places: dict[int, tuple[list[int], list[int]]]
    """Inode -> where in the file its pieces begin, ascending, and their numbers."""
    names: tuple[bytes, ...]
    """Paths, parents before children, in the order of use: those that end with a slash are
    directories to list, others are to be looked up."""

    def number_at(self, inode: int, offset: int) -> int:
        """The number of the piece with this byte of a file, or of the one before it; -1: there is
        none."""
        found = self.places.get(inode)
        if found is None:
            return -1
        starts, numbers = found
        return numbers[max(bisect_right(starts, offset) - 1, 0)]


def plan_preload(tree: Tree, frames: Iterable[BundleFrame]) -> PreloadPlan:
    """What `frames`, in their order, mean for the kernel's caches of `tree`. Pure.

    Raises: CorruptError for a tree whose contents make no sense.
    """
    contents = StreamContents(tree)
    pieces: list[Pages] = []
    extents = (extent for frame in frames for extent in frame.extents)
    run_blob, run_start, run_end = -1, 0, 0
    for blob, offset, length in islice(extents, _EXTENT_COUNT_MAX):
        if blob != run_blob or offset != run_end:
            run_blob, run_start = blob, offset
        run_end = offset + length
        # A frame may end amid a page, whose beginning is then in the one before.
        start = max(run_start, offset - PAGE_BYTES + 1)
        for pages in contents.pages(blob, start, run_end - start):
            if pages.blob_offset + pages.length > offset:
                pieces.append(pages)
    places: dict[int, tuple[list[int], list[int]]] = {}
    for number in sorted(range(len(pieces)), key=lambda number: pieces[number].file_offset):
        starts, numbers = places.setdefault(pieces[number].inode, ([], []))
        starts.append(pieces[number].file_offset)
        numbers.append(number)
    return PreloadPlan(tuple(pieces), places, tuple(_names(tree, pieces)))


def _names(tree: Tree, pieces: Iterable[Pages]) -> Iterator[bytes]:
    wanted: dict[int, set[int]] = {}
    for inode in dict.fromkeys(pages.inode for pages in pieces):
        directory = tree.parent(inode)
        if directory not in wanted:
            above = 0
            for number in _way_to(tree, directory):
                if number:
                    wanted[above].add(number)
                wanted.setdefault(number, set())
                above = number
        wanted[directory].add(inode)
    for directory, inodes in wanted.items():
        first, end = tree.span(directory)
        if end - first <= max(_LISTED_NAMES_MAX, _LISTED_SHARE * len(inodes)):
            yield tree.path(directory) + b"/"
        else:
            yield from map(tree.path, sorted(inodes))


def _way_to(tree: Tree, directory: int) -> Sequence[int]:
    """The root first, the directory itself last."""
    found = [directory]
    while found[-1]:
        found.append(tree.parent(found[-1]))
    return found[::-1]


class PreloadWindow:
    """How far ahead of a start its bundle's pieces are handed to the kernel. Not thread-safe.

    As the kernel reads files ahead: what is read one after the other in the order of the bundle
    makes the window grow, from one piece on. So what is handed over and not needed is less than
    what is, and a start still shows what its bundle has too much.
    """

    def __init__(self, count: int) -> None:
        """`count`: of all pieces."""
        self._count = count
        self._handed = bytearray(count)
        self._next = 0
        self._size = 1
        self._marker = -1

    def is_handed(self, number: int) -> bool:
        """Whether `after` gave out this piece. May be asked by any thread."""
        return bool(self._handed[number])

    def after(self, number: int) -> list[int]:
        """Which pieces to hand over now that this one was asked for; itself first."""
        if self._handed[number]:
            return []
        if number == self._marker:
            start = self._next
            self._size = min(2 * self._size, _WINDOW_MAX)
        elif number < self._next:
            # Left out before, as it seemed not to be needed.
            return self._take([number])
        else:
            start = number + 1
            is_near = number - self._next <= self._size
            self._size = min(2 * self._size, _WINDOW_MAX) if is_near and self._next else 1
        self._next = stop = min(start + self._size, self._count)
        self._marker = (start + stop) // 2 if stop - start >= _MARKED_MIN else -1
        return self._take([number, *(n for n in range(start, stop) if n != self._marker)])

    def _take(self, numbers: list[int]) -> list[int]:
        found = [number for number in numbers if not self._handed[number]]
        for number in found:
            self._handed[number] = 1
        return found
