"""Compares the pieces of time of a process with those of the others, and says why one is slower.

Durations of one stage among nodes are close to log-normal, with a few nodes far above. So the
middle is the median and the spread the median absolute deviation of logarithms: neither moves with
outliers.

A cause needs a figure that explains a share of the lost seconds (pressure and stolen time are
seconds themselves) or that is many times as large as in the same stage on the other nodes. Where no
figure does, the cause is unknown, and said to be. Pure (no I/O).
"""

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from bootseer.report.graph import SCHEDULING, Group, Label, StartGraph
from bootseer.report.replay import Change, Piece

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


# Names of the figures, as `bootseer.profile.collect` notes them.
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
# Modules are small: some thousand of them are a few megabytes.
_RECEIVED_MIN = 1024 * 1024


class Cause(Struct, frozen=True):
    """A cause in words, and the figures that speak for it."""

    name: str
    evidence: str = ""


class Evidence:
    """The figures of all stages of a start, by node."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._figures: dict[tuple[Label, str, str], tuple[dict[str, float], float]] = {}

    def of(self, outlier: Outlier, figure: str) -> tuple[float, float]:
        """A figure of the outlier's stage: the median of its ranks, and that of all processes."""
        key = (outlier.label._replace(kind="in"), outlier.role, figure)
        if key not in self._figures:
            self._figures[key] = self._medians(outlier, figure)
        by_node, all_nodes = self._figures[key]
        return by_node.get(outlier.node, 0.0), all_nodes

    def _medians(self, outlier: Outlier, figure: str) -> tuple[dict[str, float], float]:
        """The median of each node's ranks, and that of all processes."""
        values: dict[str, list[float]] = {}
        for node, value in self._values(outlier, figure):
            values.setdefault(node, []).append(value)
        everything = [value for found in values.values() for value in found]
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
    """The likeliest cause that a node lost time in a stage.

    `waiting` says how many nodes waited for a lease or a publication of each node.
    """
    if outlier.label == SCHEDULING:
        return Cause("late scheduling", f"began {outlier.excess_s:.1f} s after the median node")
    lost = outlier.excess_s

    def more(figure: str) -> float:
        own, peers = evidence.of(outlier, figure)
        return own - peers

    stolen = more(STEAL_S) + more(THROTTLED_S)
    if stolen >= _EXPLAINED_MIN * lost:
        return Cause("stolen CPU", f"{stolen:.1f} s stolen or throttled")
    is_import = outlier.label.name.startswith("import ")
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
        # Nobody counted what the stage itself moved.
        moved, peers_moved = received, peers_received
    if moved >= _MOVED_MIN and peers_moved:
        rate, usual = moved / outlier.seconds, peers_moved / max(outlier.peers_s, 0.001)
        if rate <= usual / 2:
            return Cause("slow network", f"{rate / 1e6:.0f} MB/s, median {usual / 1e6:.0f} MB/s")
    if waiting.get(outlier.node):
        return Cause("lease", f"{waiting[outlier.node]} nodes waited for it")
    return Cause("unknown")
