"""Makes starts of any size, with injected faults and the truth about them. Pure but for the seed.

A node schedules, serves an image, sets up an environment while a checkpoint is mounted, and runs
its ranks, which import, meet, load, compile and take a step. Durations are log-normal: a part
common to the stage and the node, a smaller one for the rank. A fault changes durations *and* the
figures that a kernel would show beside them; figures are noisy on healthy nodes, too.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bootseer.profile.model.tracks import Span, Track
from bootseer.timeline.otlp import (
    BARRIER,
    PARENT,
    PROCESS,
    ROLE,
    Stage,
    Value,
    encode_end,
    trace_id_of,
)

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

_ZERO_NS = 1_790_000_000 * 10**9
# Seconds of each stage on a healthy node, and which resource it waits for.
_IMAGE_S, _ENVIRONMENT_S, _CHECKPOINT_S = 8.0, 3.0, 1.5
_IMPORTS = {"import torch": 2.5, "import transformers": 1.6, "import datasets": 0.7}
_LOAD_S, _COMPILE_S, _BATCH_S, _STEP_S = 12.0, 20.0, 2.0, 1.2
_RANK_SHARE = 0.3
"""The spread among the ranks of a node, as a share of that among nodes."""


@dataclass(frozen=True)
class Fault:
    """One node that is slower than the others, and why."""

    node: str
    cause: Cause
    severity: float = 2.0
    """How many times as long what waits for the broken resource takes."""


@dataclass(frozen=True)
class Recipe:
    """A start to be made."""

    node_count: int
    rank_count: int = 8
    faults: tuple[Fault, ...] = ()
    noise: float = 0.05
    """Standard deviation of the logarithm of durations among nodes."""
    clock_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by which clocks of nodes are ahead."""
    filler_count: int = 0
    """Further short stages of each rank, as many imports make them."""
    seed: int = 0


def node_name(number: int) -> str:
    """The name of a generated node."""
    return f"node{number:05d}"


def some_faults(count: int, node_count: int, seed: int = 0, severity: float = 2.0) -> list[Fault]:
    """Faults of all causes in turn on nodes chosen at random."""
    chosen = random.Random(seed).sample(range(node_count), count)
    return [
        Fault(node_name(node), CAUSES[number % len(CAUSES)], severity)
        for number, node in enumerate(chosen)
    ]


def tracks(recipe: Recipe) -> Iterator[Track]:
    """The processes of the start, all times by the clock of their node."""
    faults = {fault.node: fault for fault in recipe.faults}
    nodes = [
        _Node(recipe, node_name(number), faults.get(node_name(number)))
        for number in range(recipe.node_count)
    ]
    # Nobody leaves a barrier before the last one came: three rounds over all ranks.
    for name in ("init_process_group", "first collective", "first step"):
        ranks = [rank for node in nodes for rank in node.ranks]
        for rank in ranks:
            rank.work_until(name)
        last = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.leave(name, last)
    for node in nodes:
        yield from node.tracks()


def write_timelines(folder: Path, recipe: Recipe, *, job: str, submission: str = "") -> None:
    """The start as timeline files, one a node, as `bootseer run` writes them below `folder`."""
    trace = trace_id_of(job, 0, submission)
    by_node: dict[str, list[bytes]] = {}
    for track in tracks(recipe):
        by_node.setdefault(track.node, []).extend(_lines(track, trace, job, submission))
    place = folder / job / "0" / submission
    place.mkdir(parents=True, exist_ok=True)
    for node, lines in by_node.items():
        name = f"20261123T{recipe.seed:06}Z-1-{node}-0.jsonl"
        (place / name).write_bytes(b"".join(lines))


def _lines(track: Track, trace: str, job: str, submission: str) -> Iterator[bytes]:
    resource: dict[str, Value] = {"bootseer.job": job, "host.name": track.node}
    if submission:
        resource["bootseer.submission"] = submission
    if track.process:
        resource |= {PROCESS: track.process, PARENT: track.parent, ROLE: track.role}
        resource["bootseer.rank"] = track.rank
    else:
        resource["bootseer.rank"] = 0
    prefix = f"{track.node}{track.process}"
    for number, span in enumerate(track.spans):
        attributes: dict[str, Value] = {**span.evidence}
        if span.barrier:
            attributes[BARRIER] = span.barrier
        begin_ns = _ZERO_NS + round(span.begin_s * 1e9)
        yield encode_end(
            Stage(
                name=span.name,
                trace_id=trace,
                span_id=f"{prefix}{number}",
                parent_id=f"{prefix}{span.parent}" if span.parent >= 0 else "",
                start_ns=begin_ns,
                end_ns=begin_ns + round((span.end_s - span.begin_s) * 1e9),
                attributes=attributes,
                resource=resource,
            )
        )


class _Node:
    def __init__(self, recipe: Recipe, name: str, fault: Fault | None) -> None:
        self.recipe = recipe
        self.name = name
        self.fault = fault
        self.random = random.Random(f"{recipe.seed} {name}")
        self.spans: list[Span] = []
        begin = 5.0 * self.noise()
        if self.is_hit("late scheduling"):
            begin += 10.0 * self._severity
        image = self.stage("image", _IMAGE_S, begin + 0.2, disk=0.3, net=0.6, size=2e9)
        mounted = self.stage("checkpoint mount", _CHECKPOINT_S, begin + 0.05, net=0.7)
        set_up = self.stage("environment", _ENVIRONMENT_S, image.end_s + 0.05, net=0.5, size=5e8)
        self.launched = max(set_up.end_s, mounted.end_s) + 0.05
        self.spans = [Span("start", begin, self.launched), mounted, image, set_up]
        self.ranks = [_Rank(self, rank) for rank in range(recipe.rank_count)]

    @property
    def _severity(self) -> float:
        return self.fault.severity if self.fault else 1.0

    def is_hit(self, cause: Cause) -> bool:
        return self.fault is not None and self.fault.cause == cause

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
    ) -> Span:
        """A stage of which these shares of the time wait for disk, network and processor."""
        base = typical_s * self.noise(share)
        extra = 0.0
        noisy = self.random.uniform
        evidence = {
            "psi.io_s": base * disk * noisy(0.3, 0.6),
            "psi.cpu_s": base * noisy(0.0, 0.05),
            "cpu.steal_s": base * noisy(0.0, 0.01),
            "tcp.retransmits": float(int(noisy(0, 3))),
            "faults.major": float(int(noisy(0, 40))),
            "net.rx_bytes": noisy(1e4, 3e5) * base,
        }
        slower = self._severity - 1
        if self.is_hit("slow disk") and disk:
            extra = base * slower
            evidence["psi.io_s"] += extra * noisy(0.6, 1.0)
        elif self.is_hit("slow network") and net:
            extra = base * slower
            evidence["tcp.retransmits"] += float(int(extra * noisy(20, 60)))
        elif self.is_hit("cold cache") and size:
            extra = base * slower
        elif self.is_hit("stolen CPU") and (cpu or not (disk or net)):
            extra = base * slower
            evidence["cpu.steal_s"] += extra * noisy(0.5, 0.9)
        elif self.is_hit("slow import") and name.startswith("import "):
            extra = base * slower * 2
            evidence["net.rx_bytes"] += extra * 3e6
            evidence["faults.major"] += float(int(extra * noisy(200, 600)))
        if size:
            is_cold = self.is_hit("cold cache")
            evidence["bootseer.bytes"] = size * noisy(0.9, 1.1) * (1.0 if is_cold else 0.1)
        return Span(name, begin, begin + base + extra, parent, evidence=evidence)

    def tracks(self) -> Iterator[Track]:
        ahead = self.recipe.clock_s.get(self.name, 0.0)
        yield Track(self.name, [_moved(span, ahead) for span in self.spans])
        for rank in self.ranks:
            yield Track(
                self.name,
                [_moved(span, ahead) for span in rank.spans],
                role="train.py",
                rank=rank.number,
                process=f"rank{rank.number}",
            )


class _Rank:
    def __init__(self, node: _Node, number: int) -> None:
        self.node = node
        self.number = number
        self.spans: list[Span] = []
        self.now = node.launched + 0.05 * node.noise()

    def work_until(self, barrier: str) -> None:
        if barrier == "init_process_group":
            for name, seconds in _IMPORTS.items():
                self._do(name, seconds, cpu=0.7)
            for number in range(self.node.recipe.filler_count):
                self._do(f"import module{number}", 0.01, cpu=0.9)
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

    def leave(self, barrier: str, last: float) -> None:
        latency = 0.3 if barrier == "init_process_group" else 0.02
        latency += _STEP_S if barrier == "first step" else 0.0
        self.now = last + latency + 0.001 * abs(self.node.random.gauss(0, 1))
        self.spans.append(Span(barrier, self._arrived, self.now, barrier=f"{barrier}:world"))
        if barrier == "first step":
            self.spans.append(Span("ready", self.now, self.now))


def _moved(span: Span, seconds: float) -> Span:
    if not seconds:
        return span
    return Span(
        span.name,
        span.begin_s + seconds,
        span.end_s + seconds,
        span.parent,
        span.barrier,
        span.waited_for,
        span.is_open,
        span.evidence,
    )
