"""Two trees over the nodes of a job, along which an object's chunks travel from the store.

Chunk c travels in tree c % 2. Nodes are numbered in the order of their topology, and a tree is a
binary search tree over these numbers: inner nodes are the odd numbers in tree 0 and the even ones
in tree 1, so that who is inner in one tree is a leaf of the other, and every node sends about as
many bytes as it receives (P. Sanders, J. Speck, J. Träff: Two-tree algorithms for full bandwidth
broadcast, reduction and scan, 2009).

A tree is split where racks meet as long as its part has several racks. A rack's nodes are
therefore entered at most four times over both trees, and left as often: its uplink carries each
object at most twice. Pure.
"""

import itertools
from collections.abc import Sequence

TREE_COUNT = 2
STORE = -1
"""The number that stands for the store: the parent of a root."""

Place = tuple[str, ...]
"""Switches of a node, the topmost first."""


class Trees:
    """Parents and children of each node in both trees. Immutable."""

    def __init__(self, node_count: int, places: Sequence[Place] = ()) -> None:
        """Lay out the trees over nodes 0 to `node_count` - 1.

        Args:
            node_count: At least 1.
            places: Place of each node, or nothing where nobody knows them.
        """
        self.node_count = node_count
        cuts = _cuts(places)
        bounds = [0, *(cut for cut, _ in cuts), node_count]
        self._racks = [
            range(first, end)
            for first, end in itertools.pairwise(bounds)
            for _ in range(first, end)
        ]
        self._parents = [_parents(node_count, tree, cuts) for tree in range(TREE_COUNT)]
        self._children: list[list[list[int]]] = []
        for parents in self._parents:
            children: list[list[int]] = [[] for _ in range(node_count)]
            for node, parent in enumerate(parents):
                if parent != STORE:
                    children[parent].append(node)
            self._children.append(children)

    def parent(self, tree: int, node: int) -> int:
        """Return the parent of `node`, or STORE."""
        return self._parents[tree][node]

    def children(self, tree: int, node: int) -> Sequence[int]:
        """Return the children of `node`, at most two."""
        return self._children[tree][node]

    def ancestors(self, tree: int, node: int) -> list[int]:
        """Return the nodes between `node` and the store, the parent first."""
        found = []
        while (node := self._parents[tree][node]) != STORE:
            found.append(node)
        return found

    def stand_in(self, tree: int, node: int) -> int:
        """Return the node that feeds `node` instead of a parent that is lost, or STORE.

        A lost node leaves two places free: one at its parent, and one at its parent in the other
        tree, which is always below one of its children. That child takes the first place, the
        other child the second, so that nobody feeds more than two.
        """
        parent = self._parents[tree][node]
        if parent == STORE:
            return STORE
        free = self._parents[1 - tree][parent]
        below = free
        while below not in (STORE, node, parent):
            below = self._parents[tree][below]
        return free if below == parent else self._parents[tree][parent]

    def top(self, tree: int, count: int) -> list[int]:
        """Return the `count` nodes nearest to the root, or some more, the root first."""
        found = [self.root(tree)]
        for node in found:
            if len(found) < count:
                found += self._children[tree][node]
        return found

    def rack(self, node: int) -> range:
        """Return the nodes of the same place, `node` among them."""
        return self._racks[node]

    def root(self, tree: int) -> int:
        """Return the node that reads the store."""
        return self._parents[tree].index(STORE)


def chunks_of(tree: int, chunk_count: int) -> int:
    """Return how many of an object's chunks travel in a tree."""
    return len(range(tree, chunk_count, TREE_COUNT))


def _cuts(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Return each n whose place differs from that of n - 1, with the level at which it does."""
    cuts = []
    for n in range(1, len(places)):
        before, here = places[n - 1], places[n]
        if before != here:
            same = (a == b for a, b in zip(before, here, strict=False))
            cuts.append((n, next((i for i, is_same in enumerate(same) if not is_same), 99)))
    return cuts


def _parents(count: int, tree: int, cuts: Sequence[tuple[int, int]]) -> list[int]:
    parents = [STORE] * count
    parts = [(0, count, STORE, cuts)]
    while parts:
        low, high, parent, cuts = parts.pop()
        node = _inner(low, high, 1 - tree, cuts)
        parents[node] = parent
        if low < node:
            parts.append((low, node, node, [cut for cut in cuts if cut[0] < node]))
        if node + 1 < high:
            parts.append((node + 1, high, node, [cut for cut in cuts if cut[0] > node + 1]))
    return parents


def _inner(low: int, high: int, parity: int, cuts: Sequence[tuple[int, int]]) -> int:
    """Return the node that splits `low` to `high` - 1: near the middle, or beside a cut near it."""
    middle = (low + high) // 2
    cut = min(cuts, key=lambda one: (one[1], abs(one[0] - middle)), default=(middle, 0))[0]
    # Both neighbours of a cut are there; a part of one node has no choice.
    return next((n for n in (cut, cut - 1) if n % 2 == parity and low <= n < high), low)
