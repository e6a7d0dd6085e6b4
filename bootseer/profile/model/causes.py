"""Why a node was slower than its peers, from the figures noted beside its stages. Pure (no I/O).

Each figure is compared with the median of the same stage on the other nodes. A cause needs a figure
that explains a share of the lost seconds (pressure and stolen time are seconds themselves) or that
is many times as large as elsewhere. Where no figure does, the cause is unknown, and said to be.
"""

import math
import statistics
from collections.abc import Iterator, Mapping

from msgspec import Struct

from bootseer.profile.model.graph import Group, StartGraph
from bootseer.profile.model.peers import Outlier
from bootseer.profile.model.shape import SCHEDULING, Label

# Names of the figures, as `bootseer.profile.collect` notes them.
STEAL_S, THROTTLED_S = "cpu.steal_s", "cpu.throttled_s"
CPU_S, IO_S, MEMORY_S = "psi.cpu_s", "psi.io_s", "psi.memory_s"
RETRANSMITS, RECEIVED = "tcp.retransmits", "net.rx_bytes"
FAULTS, DISK = "faults.major", "disk.read_bytes"
MOVED = "bootseer.bytes"

# A figure in seconds explains a delay when it accounts for a quarter of it.
_SHARE_MIN = 0.25
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
    if stolen >= _SHARE_MIN * lost:
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
        if (pressure := more(figure)) >= _SHARE_MIN * lost:
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
