"""Combination of the inodes of several trees into one tree, column by column.

No Python object is made per inode. Pure. One caller.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct

from bootseer.blob.build import ColumnValues, make_tree
from bootseer.blob.columns import SECTIONS, Columns
from bootseer.blob.tree import Blob, Inode, Tree
from bootseer.blob.xattr_codec import Xattrs
from bootseer.errors import CorruptError

_T = TypeVar("_T")
_NO_XATTRS: Xattrs = ()


class Selection(Struct, frozen=True):
    """Selection of inodes and names for the new tree."""

    root: Inode
    """Attributes of the root directory, which is not taken from any tree."""
    inodes: Sequence[int]
    """Other inodes by their numbers in `CombinedInodes`, by new number 1, 2..."""
    names: Sequence[bytes]
    """Names, sorted by the new number of their directory, then by name."""
    parents: Iterable[int]
    """New number of the directory of each name."""
    targets: Iterable[int]
    """New number of the inode of each name."""


class CombinedInodes:
    """Inodes of several trees, numbered consecutively from the first tree's on."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._trees = trees
        self.first = list(accumulate((tree.inode_count for tree in trees), initial=0))
        """Number of each tree's root, followed by the number of all inodes."""

    def tree(
        self,
        wanted: Selection,
        *,
        mode: Callable[[int], int],
        mtime_ns: Callable[[int], int],
        xattrs: Callable[[Xattrs], Xattrs],
    ) -> Tree:
        """Return the wanted tree; the functions map modes, times and extended attributes.

        The tree has the blobs that its files need, in the order of the trees. Raises: CorruptError.
        """
        root, inodes = wanted.root, wanted.inodes
        extent_counts, extents = self._extents(inodes)
        blobs, blob_of_extent = self._used_blobs(extents)

        def column(section: str, first: int) -> Iterable[int]:
            return chain((first,), map(self._joined(section).__getitem__, inodes))

        def referred(values: Callable[[Columns], Iterable[_T]], first: _T) -> Iterable[_T]:
            joined = list(chain.from_iterable(values(tree.columns) for tree in self._trees))
            return chain((first,), map(joined.__getitem__, inodes))

        def of_extents(section: str) -> Iterable[int]:
            return map(self._joined(section).__getitem__, extents)

        numbers = {
            "name_parent": wanted.parents,
            "name_inode": wanted.targets,
            "mode": map(mode, column("mode", root.mode)),
            "uid": column("uid", root.uid),
            "gid": column("gid", root.gid),
            "mtime_ns": map(mtime_ns, column("mtime_ns", root.mtime_ns)),
            "size_bytes": column("size_bytes", root.size_bytes),
            "rdev": column("rdev", root.rdev),
            "extent_count": chain((0,), extent_counts),
            "extent_file_offset": of_extents("extent_file_offset"),
            "extent_blob": blob_of_extent,
            "extent_blob_offset": of_extents("extent_blob_offset"),
            "extent_length": of_extents("extent_length"),
        }
        values = ColumnValues(
            numbers,
            wanted.names,
            referred(_links, b""),
            map(xattrs, referred(_xattrs, _NO_XATTRS)),
            referred(_digests, b""),
        )
        return make_tree(values, len(inodes) + 1, blobs)

    def mtime_ns(self, number: int) -> int:
        """Return the modification time of one inode."""
        tree = bisect_right(self.first, number) - 1
        return self._trees[tree].columns.mtime_ns[number - self.first[tree]]

    def _joined(self, section: str) -> "array[int]":
        """Return a column of all trees as one array."""
        joined = array(SECTIONS[section][1])
        column = attrgetter(section)
        for tree in self._trees:
            joined.extend(column(tree.columns))
        return joined

    def _extents(self, inodes: Iterable[int]) -> tuple["array[int]", "array[int]"]:
        """Return the number of extents of each inode, and the numbers of all these extents.

        Extents of all trees are numbered consecutively, as inodes are.
        """
        starts = array("Q")
        before = 0
        for tree in self._trees:
            # The last element of `extent_start` is the number of extents.
            starts.extend(before + start for start in tree.columns.extent_start[:-1])
            before += len(tree.columns.extent_length)
        starts.append(before)
        counts, found = array("I"), array("Q")
        for number in inodes:
            first, end = starts[number], starts[number + 1]
            counts.append(end - first)
            if first != end:
                found.extend(range(first, end))
        return counts, found

    def _used_blobs(self, extents: "array[int]") -> tuple[list[Blob], Iterable[int]]:
        """Return the blobs of the extents, each once, and the index of each extent's blob."""
        blobs = [blob for tree in self._trees for blob in tree.blobs]
        joined = array("I")
        before = 0
        for tree in self._trees:
            if max(tree.columns.extent_blob, default=-1) >= len(tree.blobs):
                raise CorruptError("an extent lies in a blob that is not there")
            joined.extend(before + number for number in tree.columns.extent_blob)
            before += len(tree.blobs)
        used: list[Blob] = []
        by_digest: dict[str, int] = {}
        positions = {}
        for number in sorted(set(map(joined.__getitem__, extents))):
            blob = blobs[number]
            if blob.digest not in by_digest:
                by_digest[blob.digest] = len(used)
                used.append(blob)
            positions[number] = by_digest[blob.digest]
        return used, map(positions.__getitem__, map(joined.__getitem__, extents))


def _links(columns: Columns) -> Iterable[bytes]:
    return map([b"", *columns.links].__getitem__, columns.link)


def _xattrs(columns: Columns) -> Iterable[Xattrs]:
    return map([(), *columns.xattr_sets].__getitem__, columns.xattr)


def _digests(columns: Columns) -> Iterable[bytes]:
    heap = columns.digests
    digests = [b"", *(heap[start : start + 32] for start in range(0, len(heap), 32))]
    return map(digests.__getitem__, columns.digest)
