"""Comparison of the nodes of a start, interval by interval. Pure (no I/O).

Durations of one stage across nodes are close to log-normal, with a few nodes far above. So the
location is the median and the spread the median absolute deviation of the logarithms: outliers move
neither.
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from bootseer.report.graph import SCHEDULING, Group, Label
from bootseer.report.replay import Change, Interval

# 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
_MAD_TO_SIGMA = 1.4826
# Added to durations before taking logarithms: less than this is noise of scheduler and clock.
_BASE_S = 0.001
# Without a submission time, scheduling counts from the first node's begin, which makes ratios
# meaningless; this base keeps differences of up to a second from standing out.
_SCHEDULING_BASE_S = 3.0
# A few nodes say little about the spread: for four, at least 0.09 is assumed.
_SPREAD_MIN, _SPREAD_MIN_TIMES_NODES = 0.02, 0.35
_RATIO_MIN = 1.15
_EXCESS_MIN_S = 0.25
# Smallest excess worth reporting, as a share of an even start.
_SHARE_MIN = 0.005
_PEERS_MIN = 3
IMPORT = "import "

PeerGroup = tuple[Label, str]
"""Intervals that are compared with each other: label, and role of the processes."""


class Peers(Struct, frozen=True):
    """Statistics of one interval over all processes."""

    median_s: float
    """Median; for a start of two nodes, the median of the faster node."""
    p99_s: float
    max_s: float
    count: int


class Outlier(Struct, frozen=True):
    """Interval in which a node is much slower than the others."""

    node: str
    label: Label = field(name="stage")
    role: str
    seconds: float
    """Median of the node's ranks."""
    peers_s: float = field(name="median_s")
    """Median of all nodes."""
    sigmas: float
    """Robust standard deviations above the median, by logarithms."""
    rank: int
    """Slowest rank; -1 if the processes have no ranks."""

    @property
    def excess_s(self) -> float:
        """Seconds above the peers' median."""
        return self.seconds - self.peers_s


def peer_group(interval: Interval) -> PeerGroup:
    """Return the group of intervals that `interval` is compared with."""
    return interval.label, interval.group.role


def compare(intervals: Iterable[Interval]) -> dict[PeerGroup, Peers]:
    """Return the statistics of each interval over all processes that have it."""
    intervals = list(intervals)
    counts = process_counts(interval.group for interval in intervals)
    return {
        key: _peers(same, is_rare=_is_rare(key[0], same, counts[key[1]]))
        for key, same in _by_peer_group(intervals).items()
    }


def process_counts(groups: Iterable[Group]) -> Counter[str]:
    """Return the number of processes of each role."""
    counts: Counter[str] = Counter()
    for group in set(groups):
        counts[group.role] += len(group)
    return counts


def _is_rare(label: Label, intervals: Iterable[Interval], process_count: int) -> bool:
    """Return whether most processes have no such stage because it was too quick to be written.

    Only slow imports are written: a process without one took next to no time for it.
    """
    count = sum(len(interval.seconds) for interval in intervals)
    is_import = label.kind == "in" and label.name.startswith(IMPORT)
    return is_import and 2 * count <= process_count


def _by_peer_group(intervals: Iterable[Interval]) -> dict[PeerGroup, list[Interval]]:
    found: dict[PeerGroup, list[Interval]] = {}
    for interval in intervals:
        found.setdefault(peer_group(interval), []).append(interval)
    return found


def _peers(intervals: Sequence[Interval], *, is_rare: bool) -> Peers:
    ordered = sorted(itertools.chain.from_iterable(one.seconds for one in intervals))
    count = len(ordered)
    of_two = _medians_of_two(intervals)
    return Peers(
        median_s=0.0 if is_rare else min(of_two) if of_two else statistics.median(ordered),
        p99_s=ordered[min(count - 1, math.ceil(0.99 * count) - 1)],
        max_s=ordered[-1],
        count=count,
    )


def _medians_of_two(intervals: Iterable[Interval]) -> Sequence[float]:
    """Return the medians of both nodes of a start with two nodes; empty for other starts."""
    by_node: dict[str, list[float]] = {}
    for interval in intervals:
        for node, seconds in zip(interval.group.nodes, interval.seconds, strict=True):
            by_node.setdefault(node, []).append(seconds)
            if len(by_node) > 2:
                return ()
    return [statistics.median(one) for one in by_node.values()] if len(by_node) == 2 else ()


class Comparison(NamedTuple):
    """Comparison of the nodes in one interval."""

    label: Label
    role: str
    peers_s: float
    """Median of all nodes."""
    seconds: Mapping[str, float]
    """Median of each node's ranks."""
    sigmas: Mapping[str, float]
    """Robust standard deviations of each node above the median, by logarithms."""
    slowest_rank: Mapping[str, int]

    def outlier(self, node: str) -> Outlier:
        """Return the interval of `node`."""
        own = self.seconds[node], self.peers_s, self.sigmas[node], self.slowest_rank[node]
        return Outlier(node, self.label, self.role, *own)

    def is_much_slower(self, node: str, least_s: float) -> bool:
        """Return whether `node` is slower than the median by enough to be worth reporting."""
        return _is_much_slower(self.seconds[node], self.peers_s, least_s)


def least_excess_s(even_s: float) -> float:
    """Return the smallest excess that is worth reporting, for a start of `even_s` seconds.

    `even_s` is the time the start would have taken had no process been slower than the median.
    """
    return max(_EXCESS_MIN_S, _SHARE_MIN * even_s)


def compare_nodes(
    intervals: Iterable[Interval], peers: dict[PeerGroup, Peers], least_s: float
) -> Iterator[Comparison]:
    """Yield the intervals in which a node may stand out by `least_s` seconds."""
    # The timeout of a process that gave up says nothing about its node.
    intervals = [one for one in intervals if not one.group.shape.is_missed[one.event // 2]]
    counts = Counter(
        (group.role, node)
        for group in {interval.group for interval in intervals}
        for node in group.nodes
    )
    for key, same in _by_peer_group(intervals).items():
        # Most intervals are so short or so even that no node stands out.
        if may_stand_out(peers[key], least_s):
            yield from _among_nodes(key, same, counts)


def may_stand_out(peers: Peers, least_s: float) -> bool:
    """Return whether the slowest process of an interval is slower by `least_s` or more."""
    return peers.count >= _PEERS_MIN and _is_much_slower(peers.max_s, peers.median_s, least_s)


def _among_nodes(
    key: PeerGroup, intervals: Iterable[Interval], counts: Mapping[tuple[str, str], int]
) -> Iterator[Comparison]:
    ranks: dict[str, list[tuple[float, int]]] = {}
    for interval in intervals:
        group = interval.group
        for node, rank, seconds in zip(group.nodes, group.ranks, interval.seconds, strict=True):
            ranks.setdefault(node, []).append((seconds, rank))
    label, role = key
    # A slow node slows most of its ranks. Nodes with too few ranks in this interval are left out.
    typical = {
        node: statistics.median_low(found)[0]
        for node, found in ranks.items()
        if 2 * len(found) >= counts[role, node]
    }
    if typical:
        middle_of = min if len(typical) == 2 else statistics.median
        slowest = {node: max(ranks[node])[1] for node in typical}
        sigmas = sigmas_above(typical, base_of(label))
        yield Comparison(label, role, middle_of(typical.values()), typical, sigmas, slowest)


def sigmas_above(values: Mapping[str, float], base: float) -> dict[str, float]:
    """Return by how many robust standard deviations each node's value is above the median.

    Values are compared by logarithms, after `base` was added. Of two nodes each is compared with
    the other, and their spread is not known at all.
    """
    logs = {node: math.log(max(0.0, value) + base) for node, value in values.items()}
    is_pair = len(logs) == 2
    middle = min(logs.values()) if is_pair else statistics.median(logs.values())
    deviation = 0.0 if is_pair else statistics.median(abs(one - middle) for one in logs.values())
    floor = max(_SPREAD_MIN, _SPREAD_MIN_TIMES_NODES / len(logs))
    spread = max(_MAD_TO_SIGMA * deviation, floor)
    return {node: (one - middle) / spread for node, one in logs.items()}


def base_of(label: Label) -> float:
    """Return the seconds to add to durations before ratios are taken."""
    return _SCHEDULING_BASE_S if label == SCHEDULING else _BASE_S


def _is_much_slower(seconds: float, median: float, least_s: float) -> bool:
    return seconds - median >= least_s and seconds >= _RATIO_MIN * median


def without_stragglers(peers: dict[PeerGroup, Peers]) -> Change:
    """Return the change in which no process takes longer than the median for any interval."""

    def change(interval: Interval) -> "array[float] | None":
        median = peers[peer_group(interval)].median_s
        return array("d", map(min, interval.seconds, itertools.repeat(median)))

    return change


def as_its_peers(peers: dict[PeerGroup, Peers], nodes: frozenset[str]) -> Change:
    """Return the change in which `nodes` take no longer than the median for any interval."""
    rows_of: dict[Group, list[int]] = {}

    def change(interval: Interval) -> "array[float] | None":
        group = interval.group
        if (rows := rows_of.get(group)) is None:
            rows = rows_of[group] = _rows(group, nodes)
        if not rows:
            return None
        median = peers[peer_group(interval)].median_s
        changed = array("d", interval.seconds)
        for row in rows:
            changed[row] = min(changed[row], median)
        return changed

    return change


def twice_as_fast(name: str) -> Change:
    """Return the change that halves all time inside stages of this name."""

    def change(interval: Interval) -> "array[float] | None":
        if not _is_within(interval, name):
            return None
        return array("d", [seconds / 2 for seconds in interval.seconds])

    return change


def _is_within(interval: Interval, name: str) -> bool:
    shape = interval.group.shape
    span = interval.event // 2
    # The time before a stage belongs to its parent.
    span = span if interval.label.kind != "before" else shape.parents[span]
    while span >= 0:
        if shape.names[span] == name:
            return True
        span = shape.parents[span]
    return False


def _rows(group: Group, nodes: frozenset[str]) -> list[int]:
    return [row for row, node in enumerate(group.nodes) if node in nodes]
