"""Slow nodes of a start, and the likely cause of each. Pure (no I/O).

A node is named if one of its stages stands out by itself. Where the kernel's figures stand out on
a node, too, less is enough: few nodes show such a figure, so few of them are slow by chance. The
stages in which a node shows the figure of one cause are taken together, whether they were slow or
not, so that a node that always shows the figure is not named for the one stage that was slow.

A cause needs a figure that explains a share of the lost seconds (pressure and stolen time are
seconds themselves) or that is several times as large as in the same stage on the other nodes. If
there is no such figure, the cause is "unknown".
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from bootseer.report.graph import SCHEDULING, Group, Label, StartGraph
from bootseer.report.peers import IMPORT, Comparison, Outlier, process_counts, sigmas_above

# Five sigmas: one in 3.5 million, and 10,000 nodes have half a million intervals.
_SIGMAS_MIN = 5.0
# With a figure that stands out: so many sigmas that this many sound nodes of a start are named. For
# half a million intervals this would be five sigmas, too. Durations are not quite log-normal, hence
# a least number for starts of a few nodes.
_FALSE_MAX = 0.05
_SIGMAS_WITH_FIGURE_MIN = 3.0
# Stolen time and pressure of less are noise.
_FIGURE_BASE_S = 0.25

# Names of the figures, as `bootseer.timeline.kernel_figures` writes them.
STEAL_S, THROTTLED_S = "cpu.steal_s", "cpu.throttled_s"
CPU_S, IO_S, MEMORY_S = "psi.cpu_s", "psi.io_s", "psi.memory_s"
RETRANSMITS, RECEIVED = "tcp.retransmits", "net.rx_bytes"
FAULTS, DISK = "faults.major", "disk.read_bytes"
MOVED = "bootseer.bytes"

# A figure in seconds explains a delay when it accounts for a quarter of it.
_EXPLAINED_MIN = 0.25
_TIMES_MIN = 3.0
_MOVED_MIN = 16 * 1024 * 1024


class Cause(Struct, frozen=True):
    """Name of a cause, and its evidence in words."""

    name: str
    evidence: str = ""


class Straggler(Struct, frozen=True):
    """Node that was slower than its peers, with the likeliest cause."""

    node: str
    cause: Cause
    lost_s: float
    """Excess seconds of the worst interval."""
    outliers: tuple[Outlier, ...] = field(name="stages")


class _Sign(NamedTuple):
    """Figure that shows a cause."""

    cause: str
    figures: tuple[str, ...]
    """Seconds, which add up; or a count, and further ones for the sentence."""
    least: float
    """Smallest count that says anything; 0 for seconds."""
    sentence: str


_SIGNS = (
    _Sign("stolen CPU", (STEAL_S, THROTTLED_S), 0.0, "{more:.1f} s stolen or throttled"),
    # Modules are small: a few thousand are some megabytes.
    _Sign(
        "slow import",
        (RECEIVED, FAULTS),
        1024 * 1024,
        "{mb:.0f} MB came over the network, {last:.0f} major faults",
    ),
    _Sign("cold cache", (MOVED,), _MOVED_MIN, "{mb:.0f} MB fetched, median {peers_mb:.0f} MB"),
    _Sign(
        "slow network",
        (RETRANSMITS,),
        10,
        "{own:.0f} TCP retransmissions, median {peers:.0f}",
    ),
    *(
        _Sign(cause, (figure,), 0.0, f"{{more:.1f}} s more pressure than the median ({figure})")
        for cause, figure in (
            ("slow disk", IO_S),
            ("busy CPU", CPU_S),
            ("short memory", MEMORY_S),
        )
    ),
)


class _Figure(NamedTuple):
    """Figure of one stage."""

    by_node: Mapping[str, float]
    """Median of each node's ranks."""
    median: float


class Evidence:
    """Figures of a start's stages by node. Medians are computed once."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._counts = process_counts(graph.groups)
        self._figures: dict[tuple[Label, str, str], _Figure] = {}

    def gather(self, comparisons: Iterable[Comparison]) -> None:
        """Compute the figures that `find_stragglers` looks at in these comparisons."""
        for one in comparisons:
            for sign in _SIGNS if _is_in_stage(one) else ():
                for name in _shown_by(sign, one.label):
                    self.figure(one.label, one.role, name)

    def of(self, outlier: Outlier, figure: str) -> tuple[float, float]:
        """Return a figure of the outlier's stage: its node's median, and that of the others."""
        by_node, median = self.figure(outlier.label, outlier.role, figure)
        if len(self._nodes) == 2:
            median = next((one for node, one in by_node.items() if node != outlier.node), 0.0)
        return by_node.get(outlier.node, 0.0), median

    def figure(self, label: Label, role: str, figure: str) -> _Figure:
        """Return a figure of a stage by node, and its median over all processes."""
        key = (label._replace(kind="in"), role, figure)
        if key not in self._figures:
            self._figures[key] = self._medians(label, role, figure)
        return self._figures[key]

    def _medians(self, label: Label, role: str, figure: str) -> _Figure:
        values: dict[str, list[float]] = defaultdict(list)
        for group in self._graph.groups:
            span = _span(group, label) if group.role == role else None
            column = group.evidence[span].get(figure) if span is not None else None
            for node, value in zip(group.nodes, column or (), strict=False):
                if value == value:  # not NaN; a call of isnan would take as long as all the rest
                    values[node].append(value)
        everything = [value for found in values.values() for value in found]
        if label.name.startswith(IMPORT):
            # Quick imports are not written, and have no figures.
            everything += [0.0] * (self._counts[role] - len(everything))
        by_node = {node: _median(found) for node, found in values.items()}
        return _Figure(by_node, _median(everything) if everything else 0.0)


def _median(values: list[float]) -> float:
    # `statistics.median` takes three times as long for the ranks of a node.
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _span(group: Group, label: Label) -> int | None:
    wanted = label.name, label.occurrence
    pairs = zip(group.shape.names, group.shape.occurrences, strict=True)
    return next((span for span, found in enumerate(pairs) if found == wanted), None)


def find_stragglers(
    comparisons: Iterable[Comparison],
    evidence: Evidence,
    waiting: Mapping[str, int],
    least_s: float,
) -> list[Straggler]:
    """Return the slow nodes, the one that lost most first.

    Args:
        comparisons: All intervals in which a node may stand out.
        evidence: Figures of the same start.
        waiting: Number of nodes that waited for a lease or a publication, by the node they waited
            for.
        least_s: Smallest excess that is worth reporting.
    """
    comparisons = list(comparisons)
    outliers: dict[str, list[Outlier]] = {}
    for one in comparisons:
        for node, sigmas in one.sigmas.items():
            if sigmas >= _SIGMAS_MIN and one.is_much_slower(node, least_s):
                outliers.setdefault(node, []).append(one.outlier(node))
    found = []
    for node, same in outliers.items():
        same.sort(key=lambda outlier: -outlier.excess_s)
        cause = cause_of(same[0], evidence, waiting)
        found.append(Straggler(node, cause, same[0].excess_s, tuple(same)))
    found += _with_figures(comparisons, evidence, least_s, outliers)
    return sorted(found, key=lambda straggler: -straggler.lost_s)


def _with_figures(
    comparisons: Iterable[Comparison],
    evidence: Evidence,
    least_s: float,
    named: Iterable[str],
) -> Iterator[Straggler]:
    """Yield the nodes that are slow where they show a cause's figure; without those in `named`."""
    shown: dict[tuple[str, _Sign], list[Comparison]] = {}
    for one in comparisons:
        if _is_in_stage(one):
            for sign in _SIGNS:
                for node in _showing(one, sign, evidence):
                    shown.setdefault((node, sign), []).append(one)
    if not shown:
        return
    chance = statistics.NormalDist().inv_cdf(1 - min(0.5, _FALSE_MAX / len(shown)))
    least = min(_SIGMAS_MIN, max(_SIGMAS_WITH_FIGURE_MIN, chance))
    slow: dict[str, tuple[float, _Sign]] = {}
    for (node, sign), same in shown.items():
        # Stouffer's method: the sum of independent deviations, by that sum's own deviation.
        sigmas = sum(one.sigmas[node] for one in same) / math.sqrt(len(same))
        if sigmas >= max(least, slow.get(node, (0.0,))[0]):
            slow[node] = sigmas, sign
    for node in slow.keys() - set(named):
        _, sign = slow[node]
        much = [one.outlier(node) for one in shown[node, sign] if one.is_much_slower(node, least_s)]
        if much:
            much.sort(key=lambda outlier: -outlier.excess_s)
            cause = _explanation(sign, much[0], evidence)
            yield Straggler(node, cause, much[0].excess_s, tuple(much))


def _showing(compared: Comparison, sign: _Sign, evidence: Evidence) -> Iterator[str]:
    """Yield the nodes whose figure stands out in a stage by itself."""
    for name in _shown_by(sign, compared.label):
        by_node, median = evidence.figure(compared.label, compared.role, name)
        if sign.least:
            least = max(sign.least, _TIMES_MIN * median)
            found = [node for node, own in by_node.items() if own >= least]
        elif max(by_node.values(), default=0.0) < median + _FIGURE_BASE_S:
            continue
        else:
            found = [
                node
                for node, sigmas in sigmas_above(by_node, _FIGURE_BASE_S).items()
                if sigmas >= _SIGMAS_MIN
                and by_node[node] - median
                >= _EXPLAINED_MIN * (compared.seconds.get(node, 0.0) - compared.peers_s)
            ]
        yield from (node for node in found if node in compared.seconds)


def _is_in_stage(compared: Comparison) -> bool:
    # Of two nodes nobody knows which figure is usual.
    return compared.label.kind == "in" and len(compared.seconds) > 2


def _shown_by(sign: _Sign, label: Label) -> tuple[str, ...]:
    """Return the figures by which a cause shows in a stage."""
    if not _may_show(sign, label):
        return ()
    return sign.figures[:1] if sign.least else sign.figures


def _may_show(sign: _Sign, label: Label) -> bool:
    return sign.cause != "slow import" or label.name.startswith(IMPORT)


def cause_of(outlier: Outlier, evidence: Evidence, waiting: Mapping[str, int]) -> Cause:
    """Return the likeliest cause of an outlier; `waiting` as for `find_stragglers`."""
    if outlier.label == SCHEDULING:
        return Cause("late scheduling", f"began {outlier.excess_s:.1f} s after the median node")
    if outlier.label.kind == "before":
        return Cause("unknown")  # figures are of stages, not of the time between them
    for sign in _SIGNS:
        if _may_show(sign, outlier.label) and _explains(sign, outlier, evidence):
            return _explanation(sign, outlier, evidence)
    moved, peers_moved = evidence.of(outlier, MOVED)
    if not moved:
        # Without the stage's own byte count, take the node's received bytes.
        moved, peers_moved = evidence.of(outlier, RECEIVED)
    if moved >= _MOVED_MIN and peers_moved:
        rate, usual = moved / outlier.seconds, peers_moved / max(outlier.peers_s, 0.001)
        if rate <= usual / 2:
            return Cause("slow network", f"{rate / 1e6:.0f} MB/s, median {usual / 1e6:.0f} MB/s")
    if waiting.get(outlier.node):
        return Cause("lease", f"{waiting[outlier.node]} nodes waited for it")
    return Cause("unknown")


def _explains(sign: _Sign, outlier: Outlier, evidence: Evidence) -> bool:
    if sign.least:
        own, peers = evidence.of(outlier, sign.figures[0])
        return own >= max(sign.least, _TIMES_MIN * peers)
    return _more(sign, outlier, evidence) >= _EXPLAINED_MIN * outlier.excess_s


def _more(sign: _Sign, outlier: Outlier, evidence: Evidence) -> float:
    pairs: Sequence[tuple[float, float]] = [evidence.of(outlier, one) for one in sign.figures]
    return sum(own - peers for own, peers in pairs)


def _explanation(sign: _Sign, outlier: Outlier, evidence: Evidence) -> Cause:
    own, peers = evidence.of(outlier, sign.figures[0])
    last, _ = evidence.of(outlier, sign.figures[-1])
    sentence = sign.sentence.format(
        more=_more(sign, outlier, evidence),
        own=own,
        peers=peers,
        mb=own / 1e6,
        peers_mb=peers / 1e6,
        last=last,
    )
    return Cause(sign.cause, sentence)
