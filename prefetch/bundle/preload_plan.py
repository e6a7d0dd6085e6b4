"""Which names and pages the kernel is to have before a start asks for them. Pure.

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
        """Of the piece with this byte of a file, or of the one before it; -1: there is none."""
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
