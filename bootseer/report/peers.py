"""Comparison of nodes: finds those that are slower than their peers, and the likely cause. Pure.

Durations of one stage across nodes are close to log-normal, with a few nodes far above. So the
location is the median and the spread the median absolute deviation of the logarithms: outliers move
neither.

A cause needs a figure that explains a share of the lost seconds (pressure and stolen time are
seconds themselves) or that is several times as large as in the same stage on the other nodes. If
there is no such figure, the cause is "unknown".
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from bootseer.report.graph import SCHEDULING, Group, Label, StartGraph
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
# Five sigmas: one in 3.5 million, and 10,000 nodes have half a million intervals.
_SIGMAS_MIN = 5.0
_RATIO_MIN = 1.15
_EXCESS_MIN_S = 0.25
# Smallest excess worth reporting, as a share of an even start.
_SHARE_MIN = 0.005
_PEERS_MIN = 3
_IMPORT = "import "

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
    counts = _process_counts(interval.group for interval in intervals)
    return {
        key: _peers(same, is_rare=_is_rare(key[0], same, counts[key[1]]))
        for key, same in _by_peer_group(intervals).items()
    }


def _process_counts(groups: Iterable[Group]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in set(groups):
        counts[group.role] += len(group)
    return counts


def _is_rare(label: Label, intervals: Iterable[Interval], process_count: int) -> bool:
    """Return whether most processes have no such stage because it was too quick to be written.

    Only slow imports are written: a process without one took next to no time for it.
    """
    count = sum(len(interval.seconds) for interval in intervals)
    is_import = label.kind == "in" and label.name.startswith(_IMPORT)
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


def find_outliers(
    intervals: Iterable[Interval], peers: dict[PeerGroup, Peers], even_s: float
) -> list[Outlier]:
    """Return the intervals in which a node is much slower than its peers, the worst first.

    `even_s` is the time the start would have taken had no process been slower than the median.
    """
    least_s = max(_EXCESS_MIN_S, _SHARE_MIN * even_s)
    found: list[Outlier] = []
    # The timeout of a process that gave up says nothing about its node.
    intervals = [one for one in intervals if not one.group.shape.is_missed[one.event // 2]]
    counts = Counter(
        (group.role, node)
        for group in {interval.group for interval in intervals}
        for node in group.nodes
    )
    for key, same in _by_peer_group(intervals).items():
        known = peers[key]
        # Skip intervals so short or so even that no node can stand out: most are.
        if known.count >= _PEERS_MIN and _is_much(known.max_s, known.median_s, least_s):
            found += _among_nodes(key, same, counts, least_s)
    return sorted(found, key=lambda one: -one.excess_s)


def _among_nodes(
    key: PeerGroup,
    intervals: Iterable[Interval],
    counts: Mapping[tuple[str, str], int],
    least_s: float,
) -> Iterator[Outlier]:
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
    if not typical:
        return
    base = base_of(label)
    logs = {node: math.log(max(0.0, seconds) + base) for node, seconds in typical.items()}
    # Of two nodes each is compared with the other, and their spread is not known at all.
    middle_of = min if len(typical) == 2 else statistics.median
    median, middle = middle_of(typical.values()), middle_of(logs.values())
    deviations = [0.0] if len(typical) == 2 else [abs(one - middle) for one in logs.values()]
    spread = max(
        _MAD_TO_SIGMA * statistics.median(deviations),
        _SPREAD_MIN,
        _SPREAD_MIN_TIMES_NODES / len(typical),
    )
    for node, seconds in typical.items():
        sigmas = (logs[node] - middle) / spread
        if sigmas >= _SIGMAS_MIN and _is_much(seconds, median, least_s):
            yield Outlier(node, label, role, seconds, median, sigmas, max(ranks[node])[1])


def base_of(label: Label) -> float:
    """Return the seconds to add to durations before ratios are taken."""
    return _SCHEDULING_BASE_S if label == SCHEDULING else _BASE_S


def _is_much(seconds: float, median: float, least_s: float) -> bool:
    return seconds - median >= least_s and seconds >= _RATIO_MIN * median


def without_stragglers(peers: dict[PeerGroup, Peers]) -> Change:
    """Return the change in which no process takes longer than the median for any interval."""

    def change(interval: Interval) -> "array[float] | None":
        median = peers[peer_group(interval)].median_s
        return array("d", [min(seconds, median) for seconds in interval.seconds])

    return change


def as_its_peers(peers: dict[PeerGroup, Peers], nodes: frozenset[str]) -> Change:
    """Return the change in which `nodes` take no longer than the median for any interval."""

    def change(interval: Interval) -> "array[float] | None":
        rows = _rows(interval.group, nodes)
        if not rows:
            return None
        median = peers[peer_group(interval)].median_s
        changed = array("d", interval.seconds)
        for row in rows:
            changed[row] = min(changed[row], median)
        return changed

    return change


def times_as_fast(name: str, factor: float) -> Change:
    """Return the change that divides all time inside stages of this name by `factor`."""

    def change(interval: Interval) -> "array[float] | None":
        if not _is_within(interval, name):
            return None
        return array("d", [seconds / factor for seconds in interval.seconds])

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


# Names of the figures, as `bootseer.timeline.kernel_figures` writes them.
STEAL_S, THROTTLED_S = "cpu.steal_s", "cpu.throttled_s"
CPU_S, IO_S, MEMORY_S = "psi.cpu_s", "psi.io_s", "psi.memory_s"
RETRANSMITS, RECEIVED = "tcp.retransmits", "net.rx_bytes"
FAULTS, DISK = "faults.major", "disk.read_bytes"
MOVED = "bootseer.bytes"

# A figure in seconds explains a delay when it accounts for a quarter of it.
_EXPLAINED_MIN = 0.25
_TIMES_MIN = 3.0
_RETRANSMITS_MIN = 10
_MOVED_MIN = 16 * 1024 * 1024
# Modules are small: a few thousand are some megabytes.
_RECEIVED_MIN = 1024 * 1024


class Cause(Struct, frozen=True):
    """Name of a cause, and its evidence in words."""

    name: str
    evidence: str = ""


class Evidence:
    """Figures of a start's stages by node. Medians are computed once."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._counts = _process_counts(graph.groups)
        self._figures: dict[tuple[Label, str, str], tuple[dict[str, float], float]] = {}

    def of(self, outlier: Outlier, figure: str) -> tuple[float, float]:
        """Return a figure of the outlier's stage: its node's median, and that of the others."""
        key = (outlier.label._replace(kind="in"), outlier.role, figure)
        if key not in self._figures:
            self._figures[key] = self._medians(outlier, figure)
        by_node, median = self._figures[key]
        if len(self._nodes) == 2:
            median = next((one for node, one in by_node.items() if node != outlier.node), 0.0)
        return by_node.get(outlier.node, 0.0), median

    def _medians(self, outlier: Outlier, figure: str) -> tuple[dict[str, float], float]:
        values: dict[str, list[float]] = {}
        for node, value in self._values(outlier, figure):
            values.setdefault(node, []).append(value)
        everything = [value for found in values.values() for value in found]
        if outlier.label.name.startswith(_IMPORT):
            # Quick imports are not written, and have no figures.
            everything += [0.0] * (self._counts[outlier.role] - len(everything))
        by_node = {node: statistics.median(found) for node, found in values.items()}
        return by_node, statistics.median(everything) if everything else 0.0

    def _values(self, outlier: Outlier, figure: str) -> Iterator[tuple[str, float]]:
        for group in self._graph.groups:
            if group.role != outlier.role:
                continue
            span = _span(group, outlier)
            column = group.evidence[span].get(figure) if span is not None else None
            for node, value in zip(group.nodes, column or (), strict=False):
                if not math.isnan(value):
                    yield node, value


def _span(group: Group, outlier: Outlier) -> int | None:
    wanted = outlier.label.name, outlier.label.occurrence
    pairs = zip(group.shape.names, group.shape.occurrences, strict=True)
    return next((span for span, found in enumerate(pairs) if found == wanted), None)


def cause_of(outlier: Outlier, evidence: Evidence, waiting: Mapping[str, int]) -> Cause:
    """Return the likeliest cause of an outlier.

    `waiting` is the number of nodes that waited for a lease or a publication, by the node they
    waited for.
    """
    if outlier.label == SCHEDULING:
        return Cause("late scheduling", f"began {outlier.excess_s:.1f} s after the median node")
    if outlier.label.kind == "before":
        return Cause("unknown")  # figures are of stages, not of the time between them
    lost = outlier.excess_s

    def more(figure: str) -> float:
        own, peers = evidence.of(outlier, figure)
        return own - peers

    stolen = more(STEAL_S) + more(THROTTLED_S)
    if stolen >= _EXPLAINED_MIN * lost:
        return Cause("stolen CPU", f"{stolen:.1f} s stolen or throttled")
    is_import = outlier.label.name.startswith(_IMPORT)
    received, peers_received = evidence.of(outlier, RECEIVED)
    if is_import and received >= max(_RECEIVED_MIN, _TIMES_MIN * peers_received):
        faults, _ = evidence.of(outlier, FAULTS)
        return Cause(
            "slow import",
            f"{received / 1e6:.0f} MB came over the network, {faults:.0f} major faults",
        )
    moved, peers_moved = evidence.of(outlier, MOVED)
    if moved >= max(_MOVED_MIN, _TIMES_MIN * peers_moved):
        return Cause(
            "cold cache", f"{moved / 1e6:.0f} MB fetched, median {peers_moved / 1e6:.0f} MB"
        )
    retransmits, peers_retransmits = evidence.of(outlier, RETRANSMITS)
    if retransmits >= max(_RETRANSMITS_MIN, _TIMES_MIN * peers_retransmits):
        return Cause(
            "slow network", f"{retransmits:.0f} TCP retransmissions, median {peers_retransmits:.0f}"
        )
    for figure, name in ((IO_S, "slow disk"), (CPU_S, "busy CPU"), (MEMORY_S, "short memory")):
        if (pressure := more(figure)) >= _EXPLAINED_MIN * lost:
            return Cause(name, f"{pressure:.1f} s more pressure than the median ({figure})")
    if not moved:
        # Without the stage's own byte count, take the node's received bytes.
        moved, peers_moved = received, peers_received
    if moved >= _MOVED_MIN and peers_moved:
        rate, usual = moved / outlier.seconds, peers_moved / max(outlier.peers_s, 0.001)
        if rate <= usual / 2:
            return Cause("slow network", f"{rate / 1e6:.0f} MB/s, median {usual / 1e6:.0f} MB/s")
    if waiting.get(outlier.node):
        return Cause("lease", f"{waiting[outlier.node]} nodes waited for it")
    return Cause("unknown")
