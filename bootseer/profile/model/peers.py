"""Compares each piece of time of a process with the same piece of the others. Pure (no I/O).

Durations of one stage among nodes are close to log-normal, with a few nodes far above. So the
middle is the median and the spread the median absolute deviation of logarithms: neither moves with
outliers.
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from bootseer.profile.model.graph import Group
from bootseer.profile.model.replay import Change, Piece
from bootseer.profile.model.shape import SCHEDULING, Label

# 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
_MAD_TO_SIGMA = 1.4826
# Added to durations: differences of less are noise of the scheduler and the clock.
_BASE_S = 0.001
# Nodes count from the first of them where nobody says when the job was submitted: how late one
# began is no ratio of anything.
_SCHEDULING_BASE_S = 3.0
# Of a few nodes the spread is hardly known: of four it is taken for 0.09 at least.
_SPREAD_MIN, _SPREAD_MIN_TIMES_NODES = 0.02, 0.35
# Five sigmas: one in 3.5 million, and 10,000 nodes have half a million pieces of time.
_SIGMAS_MIN = 5.0
_RATIO_MIN = 1.15
_EXCESS_MIN_S = 0.25
# What would not shorten an even start by half a percent is not worth a look.
_SHARE_MIN = 0.005
_PEERS_MIN = 3

Who = tuple[Label, str]
"""A label, and the role of the processes that it is of."""


class Peers(Struct, frozen=True):
    """One piece of time over all processes."""

    median_s: float
    p99_s: float
    max_s: float
    count: int


class Outlier(Struct, frozen=True):
    """One piece of time in which a node stands out."""

    node: str
    label: Label
    role: str
    seconds: float
    """The median of the node's ranks."""
    peers_s: float
    """The median of all nodes."""
    sigmas: float
    rank: int
    """The slowest rank; -1 where there is none."""

    @property
    def excess_s(self) -> float:
        """Seconds above the median of all nodes."""
        return self.seconds - self.peers_s


def who(piece: Piece) -> Who:
    """What the piece is compared with."""
    return piece.label, piece.group.role


def compare(pieces: Iterable[Piece]) -> dict[Who, Peers]:
    """Each piece of time over all processes that have it."""
    return {key: _peers([piece.seconds for piece in same]) for key, same in _by_who(pieces).items()}


def _by_who(pieces: Iterable[Piece]) -> dict[Who, list[Piece]]:
    found: dict[Who, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(who(piece), []).append(piece)
    return found


def _peers(columns: Sequence["array[float]"]) -> Peers:
    ordered = sorted(itertools.chain.from_iterable(columns))
    count = len(ordered)
    return Peers(
        median_s=statistics.median(ordered),
        p99_s=ordered[min(count - 1, math.ceil(0.99 * count) - 1)],
        max_s=ordered[-1],
        count=count,
    )


def find_outliers(pieces: Iterable[Piece], peers: dict[Who, Peers], even_s: float) -> list[Outlier]:
    """The nodes that are slower than the others in some piece of time; the worst first.

    `even_s` is how long the start would have taken if no process had been slower than the median.
    """
    least_s = max(_EXCESS_MIN_S, _SHARE_MIN * even_s)
    found: list[Outlier] = []
    # How long a process waits before it gives up says nothing of its node.
    pieces = [one for one in pieces if not one.group.shape.is_missed[one.event // 2]]
    counts = Counter(
        (group.role, node) for group in {piece.group for piece in pieces} for node in group.nodes
    )
    for key, same in _by_who(pieces).items():
        known = peers[key]
        # Most pieces are so short, or so even, that no node can stand out.
        if known.count >= _PEERS_MIN and _is_much(known.max_s, known.median_s, least_s):
            found += _among_nodes(key, same, counts, least_s)
    return sorted(found, key=lambda one: -one.excess_s)


def _among_nodes(
    key: Who, pieces: Iterable[Piece], counts: Mapping[tuple[str, str], int], least_s: float
) -> Iterator[Outlier]:
    ranks: dict[str, list[tuple[float, int]]] = {}
    for piece in pieces:
        group = piece.group
        for node, rank, seconds in zip(group.nodes, group.ranks, piece.seconds, strict=True):
            ranks.setdefault(node, []).append((seconds, rank))
    label, role = key
    # What ails a node is felt by most of its ranks, also by those that noted nothing.
    typical = {
        node: statistics.median_low(found)[0]
        for node, found in ranks.items()
        if 2 * len(found) >= counts[role, node]
    }
    if not typical:
        return
    base = base_of(label)
    median = statistics.median(typical.values())
    logs = {node: math.log(max(0.0, seconds) + base) for node, seconds in typical.items()}
    middle = statistics.median(logs.values())
    spread = max(
        _MAD_TO_SIGMA * statistics.median(abs(one - middle) for one in logs.values()),
        _SPREAD_MIN,
        _SPREAD_MIN_TIMES_NODES / len(typical),
    )
    for node, seconds in typical.items():
        sigmas = (logs[node] - middle) / spread
        if sigmas >= _SIGMAS_MIN and _is_much(seconds, median, least_s):
            yield Outlier(node, label, role, seconds, median, sigmas, max(ranks[node])[1])


def base_of(label: Label) -> float:
    """What is added to seconds before they are divided by others."""
    return _SCHEDULING_BASE_S if label == SCHEDULING else _BASE_S


def _is_much(seconds: float, median: float, least_s: float) -> bool:
    return seconds - median >= least_s and seconds >= _RATIO_MIN * median


def without_stragglers(peers: dict[Who, Peers]) -> Change:
    """No process takes longer for anything than the median process."""

    def change(piece: Piece) -> "array[float] | None":
        median = peers[who(piece)].median_s
        return array("d", [min(seconds, median) for seconds in piece.seconds])

    return change


def as_its_peers(peers: dict[Who, Peers], nodes: frozenset[str]) -> Change:
    """The named nodes take for nothing longer than the median process."""

    def change(piece: Piece) -> "array[float] | None":
        rows = _rows(piece.group, nodes)
        if not rows:
            return None
        median = peers[who(piece)].median_s
        changed = array("d", piece.seconds)
        for row in rows:
            changed[row] = min(changed[row], median)
        return changed

    return change


def times_as_fast(name: str, factor: float) -> Change:
    """Everything inside the stages of this name takes 1 / factor of its time, on all nodes."""

    def change(piece: Piece) -> "array[float] | None":
        if not _is_within(piece, name):
            return None
        return array("d", [seconds / factor for seconds in piece.seconds])

    return change


def _is_within(piece: Piece, name: str) -> bool:
    """Whether a piece of time is spent in a stage of this name, or in one inside it."""
    shape = piece.group.shape
    span = piece.event // 2
    # The time before a stage begins is its parent's.
    span = span if piece.label.kind != "before" else shape.parents[span]
    while span >= 0:
        if shape.names[span] == name:
            return True
        span = shape.parents[span]
    return False


def _rows(group: Group, nodes: frozenset[str]) -> list[int]:
    return [row for row, node in enumerate(group.nodes) if node in nodes]
