"""Compares each piece of time of a process with the same piece of the others. Pure (no I/O).

Durations of one stage among nodes are close to log-normal, with a few nodes far above. So the
middle is the median and the spread the median absolute deviation of logarithms: neither moves with
outliers.
"""

import math
import statistics
from array import array
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.profile.model.graph import Group
from bootseer.profile.model.replay import Change, Piece
from bootseer.profile.model.shape import SCHEDULING, Label

# 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
_MAD_TO_SIGMA = 1.4826
# Durations of less are noise of the scheduler and the clock.
_SHORTEST_S = 0.001
# Nodes count from the first of them where nobody says when the job was submitted: how late one
# began is no ratio of anything.
_SCHEDULING_SHORTEST_S = 3.0
# Of a few nodes the spread is hardly known: of four it is taken for 0.09 at least.
_SPREAD_MIN, _SPREAD_MIN_TIMES_NODES = 0.02, 0.35
# Five sigmas: one in 3.5 million, and 10,000 nodes have half a million pieces of time.
_SIGMAS_MIN = 5.0
_RATIO_MIN = 1.15
_EXCESS_MIN_S = 0.25
# What would not shorten the start by half a percent is not worth a look.
_SHARE_MIN = 0.005
_PEERS_MIN = 3
_SAMPLE_COUNT = 5000

Who = tuple[Label, str]
"""A label, and the role of the processes that it is of."""


class Peers(Struct, frozen=True):
    """One piece of time over all processes."""

    median_s: float
    p99_s: float
    max_s: float
    count: int
    spread: float
    """Standard deviation of the logarithm, robust, and not too small for the number of nodes."""

    shortest_s: float = _SHORTEST_S
    """Differences among shorter times are noise."""

    def sigmas(self, seconds: float) -> float:
        """How many standard deviations so many seconds lie above the median."""
        ratio = max(seconds, self.shortest_s) / max(self.median_s, self.shortest_s)
        return math.log(ratio) / self.spread


class Outlier(Struct, frozen=True):
    """One piece of time in which a node stands out."""

    node: str
    label: Label
    role: str
    seconds: float
    """The median of the node's ranks."""
    peers_s: float
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
    """The spread of each piece of time over all processes that have it."""
    return {
        key: _peers([piece.seconds for piece in same], len(_nodes(same)), _shortest_s(key[0]))
        for key, same in _by_who(pieces).items()
    }


def _by_who(pieces: Iterable[Piece]) -> dict[Who, list[Piece]]:
    found: dict[Who, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(who(piece), []).append(piece)
    return found


def _nodes(pieces: Iterable[Piece]) -> set[str]:
    return {node for group in {piece.group for piece in pieces} for node in group.nodes}


def _shortest_s(label: Label) -> float:
    return _SCHEDULING_SHORTEST_S if label == SCHEDULING else _SHORTEST_S


def _peers(columns: Sequence["array[float]"], node_count: int, shortest_s: float) -> Peers:
    ordered = sorted(value for column in columns for value in column)
    count = len(ordered)
    median = statistics.median(ordered)
    base = math.log(max(median, shortest_s))
    # Every so many of the ordered values have the same quantiles.
    sample = ordered[:: max(1, count // _SAMPLE_COUNT)]
    logs = [abs(math.log(max(value, shortest_s)) - base) for value in sample]
    return Peers(
        median_s=median,
        p99_s=ordered[min(count - 1, math.ceil(0.99 * count) - 1)],
        max_s=ordered[-1],
        count=count,
        spread=max(
            _MAD_TO_SIGMA * statistics.median(logs),
            _SPREAD_MIN,
            _SPREAD_MIN_TIMES_NODES / node_count,
        ),
        shortest_s=shortest_s,
    )


def find_outliers(
    pieces: Iterable[Piece], peers: dict[Who, Peers], ready_s: float
) -> list[Outlier]:
    """The nodes that are slower than the others in some piece of time; the worst first."""
    least_s = max(_EXCESS_MIN_S, _SHARE_MIN * ready_s)
    suspects: dict[tuple[Who, str], list[tuple[float, int]]] = {}
    for key, same in _by_who(pieces).items():
        known = peers[key]
        if known.count < _PEERS_MIN or not _stands_out(known, known.max_s, least_s):
            continue
        nodes = {
            piece.group.nodes[row]
            for piece in same
            for row, seconds in enumerate(piece.seconds)
            if _stands_out(known, seconds, least_s)
        }
        for piece in same:
            for node, rank, seconds in zip(
                piece.group.nodes, piece.group.ranks, piece.seconds, strict=True
            ):
                if node in nodes:
                    suspects.setdefault((key, node), []).append((seconds, rank))
    found = []
    for (key, node), ranks in suspects.items():
        seconds = statistics.median(value for value, _ in ranks)
        if _stands_out(peers[key], seconds, least_s):
            sigmas = peers[key].sigmas(seconds)
            (label, role), rank = key, max(ranks)[1]
            found.append(Outlier(node, label, role, seconds, peers[key].median_s, sigmas, rank))
    return sorted(found, key=lambda one: -one.excess_s)


def _stands_out(peers: Peers, seconds: float, least_s: float) -> bool:
    excess = seconds - peers.median_s
    return (
        excess >= least_s
        and seconds >= _RATIO_MIN * peers.median_s
        and peers.sigmas(seconds) >= _SIGMAS_MIN
    )


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
