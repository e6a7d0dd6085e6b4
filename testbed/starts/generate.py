"""Generates starts of any size with known, injected faults. Pure but for the seed.

A node schedules, serves an image, sets up an environment while a checkpoint is mounted, and runs
its ranks, which import, meet, load, compile and take a step. Durations are log-normal: a part
common to the stage and the node, and a smaller part for the rank. A fault changes durations *and*
the kernel figures that such a fault shows; the figures of healthy nodes are noisy, too. A node may
have several faults. `hard` generates starts as irregular as real ones.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from bootseer.report.graph import Track, TrackSpan

Cause = Literal[
    "slow disk",
    "slow network",
    "cold cache",
    "stolen CPU",
    "late scheduling",
    "slow import",
    "lease",
]
CAUSES: tuple[Cause, ...] = (
    "slow disk",
    "slow network",
    "cold cache",
    "stolen CPU",
    "late scheduling",
    "slow import",
)

# Seconds of each stage on a healthy node.
_IMAGE_S, _ENVIRONMENT_S, _CHECKPOINT_S = 8.0, 3.0, 1.5
_IMPORTS = {"import torch": 2.5, "import transformers": 1.6, "import datasets": 0.7}
_LOAD_S, _COMPILE_S, _BATCH_S, _STEP_S = 12.0, 20.0, 2.0, 1.2
_RANK_SHARE = 0.3
"""Spread among the ranks of a node, as a share of the spread among nodes."""


@dataclass(frozen=True)
class InjectedFault:
    """Cause that makes a node slower than the others."""

    node: str
    cause: Cause
    severity: float = 2.0
    """Factor by which the waits for the broken resource are longer."""


@dataclass(frozen=True)
class Irregularities:
    """Irregularities that make a start hard to explain. Shares are shares of nodes unless noted."""

    tail_share: float = 0.0
    """Share of ranks' stages that take several times as long, without a noted reason."""
    hiccup_share: float = 0.0
    """Share of launchers' stages that take several times as long, without a noted reason."""
    blind_share: float = 0.0
    """Nodes that note no figures of the kernel."""
    silent_share: float = 0.0
    """Nodes on which only the launcher notes anything."""
    misleading_share: float = 0.0
    """Nodes with the figures of a fault that are no slower."""
    optional_count: int = 0
    """Imports that some ranks note and others do not, since they take about the least noted
    time."""
    clock_s: float = 0.0
    """Standard deviation of the clocks in seconds."""


@dataclass(frozen=True)
class Recipe:
    """Description of a start to generate."""

    node_count: int
    rank_count: int = 8
    faults: tuple[InjectedFault, ...] = ()
    noise: float = 0.05
    """Standard deviation of the logarithm of durations among nodes."""
    clock_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which the clocks of some nodes are ahead, by node."""
    filler_count: int = 0
    """Number of further short stages of each rank, such as imports."""
    seed: int = 0
    irregular: Irregularities = Irregularities()


def node_name(number: int) -> str:
    """Return the name of a generated node."""
    return f"node{number:05d}"


def some_faults(
    count: int, node_count: int, seed: int = 0, severity: float = 2.0
) -> list[InjectedFault]:
    """Return faults of all causes in turn on randomly chosen nodes."""
    chosen = random.Random(seed).sample(range(node_count), count)
    return [
        InjectedFault(node_name(node), CAUSES[number % len(CAUSES)], severity)
        for number, node in enumerate(chosen)
    ]


def hard(node_count: int, fault_count: int, seed: int, rank_count: int = 8) -> Recipe:
    """Return the recipe of an irregular start; every sixth faulty node has two faults."""
    chance = random.Random(f"hard {seed}")
    nodes = chance.sample(range(node_count), fault_count)
    faults = [
        InjectedFault(node_name(node), cause, chance.uniform(1.5, 4.0))
        for number, node in enumerate(nodes)
        for cause in chance.sample(CAUSES, 2 if number % 6 == 5 else 1)
    ]
    irregular = Irregularities(
        tail_share=0.005,
        hiccup_share=0.0001,
        blind_share=0.05,
        silent_share=0.005,
        misleading_share=0.02,
        optional_count=6,
        clock_s=0.5,
    )
    far = {node_name(chance.randrange(node_count)): 3600.0}
    return Recipe(node_count, rank_count, tuple(faults), 0.1, far, seed=seed, irregular=irregular)


class GeneratedStart:
    """Generated start, and the truth about it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        faults: dict[str, dict[Cause, float]] = {}
        for fault in recipe.faults:
            faults.setdefault(fault.node, {})[fault.cause] = fault.severity
        names = map(node_name, range(recipe.node_count))
        self._nodes = [_Node(recipe, name, faults.get(name, {})) for name in names]
        # No rank leaves a barrier before the last one has come: three rounds over all ranks.
        for name in ("init_process_group", "first collective", "first step"):
            ranks = [rank for node in self._nodes for rank in node.ranks]
            for rank in ranks:
                rank.work_until(name)
            last = max(rank.now for rank in ranks)
            for rank in ranks:
                rank.leave(name, last)
        self.lost_s: dict[str, dict[Cause, float]] = {
            node.name: node.lost_s for node in self._nodes if node.faults
        }
        """Seconds that each fault cost its node: the launcher's, and the mean of its ranks."""
        self.hiccups = {node.name for node in self._nodes if node.had_hiccup}
        """Nodes whose launcher was slow once, without a noted reason."""

    def tracks(self, nodes: slice = slice(None)) -> Iterator[Track]:
        """Yield the processes of these nodes, with all times by their nodes' clocks."""
        for node in self._nodes[nodes]:
            yield from node.tracks()


def tracks(recipe: Recipe) -> Iterator[Track]:
    """Yield the processes of a start, with all times by their nodes' clocks."""
    return GeneratedStart(recipe).tracks()


class _Node:
    def __init__(self, recipe: Recipe, name: str, faults: Mapping[Cause, float]) -> None:
        self.recipe = recipe
        self.name = name
        self.faults = faults
        self.lost_s: dict[Cause, float] = {}
        self.had_hiccup = False
        self.random = random.Random(f"{recipe.seed} {name}")
        irregular = recipe.irregular
        self._is_blind = self.random.random() < irregular.blind_share
        self._is_silent = self.random.random() < irregular.silent_share
        self._is_misleading = self.random.random() < irregular.misleading_share
        self._ahead_s = recipe.clock_s.get(name, 0.0) + self.random.gauss(0, irregular.clock_s)
        begin = 5.0 * self.noise()
        if late := self._slower("late scheduling"):
            begin += 10.0 * (late + 1)
            self.lost_s["late scheduling"] = 10.0 * (late + 1)
        image = self.stage("image", _IMAGE_S, begin + 0.2, disk=0.3, net=0.6, size=2e9)
        mounted = self.stage("checkpoint mount", _CHECKPOINT_S, begin + 0.05, net=0.7)
        set_up = self.stage("environment", _ENVIRONMENT_S, image.end_s + 0.05, net=0.5, size=5e8)
        self.launched = max(set_up.end_s, mounted.end_s) + 0.05
        self.spans = [TrackSpan("start", begin, self.launched), mounted, image, set_up]
        self.ranks = [_Rank(self, rank) for rank in range(recipe.rank_count)]

    def _slower(self, cause: Cause) -> float:
        """Return the additional share of time that waits for the broken resource take."""
        return self.faults.get(cause, 1.0) - 1

    def noise(self, share: float = 1.0) -> float:
        return math.exp(self.random.gauss(0, self.recipe.noise * share))

    def stage(
        self,
        name: str,
        typical_s: float,
        begin: float,
        *,
        disk: float = 0.0,
        net: float = 0.0,
        cpu: float = 0.0,
        size: float = 0.0,
        share: float = 1.0,
        parent: int = 0,
    ) -> TrackSpan:
        """Return a stage that waits these shares of its time for disk, network and processor."""
        base = typical_s * self.noise(share)
        noisy, irregular = self.random.uniform, self.recipe.irregular
        tail = irregular.hiccup_share if parent == 0 else irregular.tail_share
        if tail and self.random.random() < tail:
            base *= min(20.0, 1.2 * self.random.paretovariate(1.5))
            self.had_hiccup |= parent == 0
        evidence: dict[str, float] = {
            "psi.io_s": base * disk * noisy(0.3, 0.6),
            "psi.cpu_s": base * noisy(0.0, 0.05),
            "cpu.steal_s": base * noisy(0.0, 0.01),
            "tcp.retransmits": float(int(noisy(0, 3))),
            "faults.major": float(int(noisy(0, 40))),
            "net.rx_bytes": noisy(1e4, 3e5) * base,
        }
        extra: dict[Cause, float] = {
            "slow disk": base * disk * self._slower("slow disk"),
            "slow network": base * net * self._slower("slow network"),
            "cold cache": base * net * self._slower("cold cache") if size else 0.0,
            "stolen CPU": base * (cpu or 0.1) * self._slower("stolen CPU"),
            "slow import": base * 2 * self._slower("slow import") * name.startswith("import "),
        }
        if self._is_misleading:
            evidence["tcp.retransmits"] = float(int(noisy(20, 200)))
        evidence["psi.io_s"] += extra["slow disk"] * noisy(0.6, 1.0)
        evidence["tcp.retransmits"] += int(extra["slow network"] * noisy(20, 60))
        evidence["cpu.steal_s"] += extra["stolen CPU"] * noisy(0.5, 0.9)
        evidence["net.rx_bytes"] += extra["slow import"] * 3e6
        evidence["faults.major"] += int(extra["slow import"] * noisy(200, 600))
        if self._is_blind:
            evidence = {}
        if size:
            is_cold = "cold cache" in self.faults
            evidence["bootseer.bytes"] = size * noisy(0.9, 1.1) * (1.0 if is_cold else 0.1)
        for cause, seconds in extra.items():
            if seconds:
                counted = seconds if parent == 0 else seconds / self.recipe.rank_count
                self.lost_s[cause] = self.lost_s.get(cause, 0.0) + counted
        end = begin + base + sum(extra.values())
        return TrackSpan(name, begin, end, parent, evidence=evidence)

    def tracks(self) -> Iterator[Track]:
        yield Track(self.name, [_moved(span, self._ahead_s) for span in self.spans])
        for rank in () if self._is_silent else self.ranks:
            yield Track(
                self.name,
                [_moved(span, self._ahead_s) for span in rank.spans],
                role="train.py",
                rank=rank.number,
                process=f"rank{rank.number}",
            )


class _Rank:
    def __init__(self, node: _Node, number: int) -> None:
        self.node = node
        self.number = number
        self.spans: list[TrackSpan] = []
        self.now = node.launched + 0.05 * node.noise()

    def work_until(self, barrier: str) -> None:
        if barrier == "init_process_group":
            for name, seconds in _IMPORTS.items():
                self._do(name, seconds, cpu=0.7)
            for number in range(self.node.recipe.filler_count):
                self._note(f"import module{number}", 0.01)
            for number in range(self.node.recipe.irregular.optional_count):
                seconds = 0.1 * self.node.noise()
                if seconds >= 0.1:
                    self._note(f"import optional{number}", seconds)
        elif barrier == "first collective":
            self._do("load checkpoint", _LOAD_S, disk=0.6)
        else:
            self._do("compile", _COMPILE_S, cpu=0.9)
            self._do("first batch", _BATCH_S, cpu=0.5)
        self._arrived = self.now

    def _do(self, name: str, seconds: float, *, disk: float = 0.0, cpu: float = 0.0) -> None:
        begin = self.now + 0.002 * self.node.noise()
        span = self.node.stage(
            name, seconds, begin, disk=disk, cpu=cpu, share=1 + _RANK_SHARE, parent=-1
        )
        self.spans.append(span)
        self.now = span.end_s

    def _note(self, name: str, seconds: float) -> None:
        """Add a stage that was noted at its end only, and so has no figures."""
        self._do(name, seconds, cpu=0.9)
        self.spans[-1] = replace(self.spans[-1], evidence={})

    def leave(self, barrier: str, last: float) -> None:
        latency = 0.3 if barrier == "init_process_group" else 0.02
        latency += _STEP_S if barrier == "first step" else 0.0
        self.now = last + latency + 0.001 * abs(self.node.random.gauss(0, 1))
        self.spans.append(TrackSpan(barrier, self._arrived, self.now, barrier=f"{barrier}:world"))
        if barrier == "first step":
            self.spans.append(TrackSpan("ready", self.now, self.now))


def _moved(span: TrackSpan, seconds: float) -> TrackSpan:
    if not seconds:
        return span
    return replace(span, begin_s=span.begin_s + seconds, end_s=span.end_s + seconds)
