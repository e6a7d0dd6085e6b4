"""Discrete-event simulation of the fan-out: the real plan, simulated clocks, lines and faults.

Each node has a line with a rate both ways. A chunk takes as long as the fuller one of the two lines
needs, shared evenly by the streams that are busy when the chunk begins. Racks have an uplink with a
rate both ways, which is shared in the same way. Between chunks and looks at the clock nothing
happens, so that 10,000 nodes take a minute.
"""

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bootseer.fanout.plan import (
    ASK_S,
    STUCK_S,
    Ask,
    Help,
    Offer,
    Reason,
    SourcePlan,
    Take,
    has_room,
)
from bootseer.fanout.trees import STORE, TREE_COUNT, Trees, chunks_of


@dataclass(frozen=True)
class World:
    """Parameters of one simulation."""

    nodes: int
    chunks: int = 256
    chunk_bytes: int = 65536
    rate: float = 2e6
    """Bytes per second of each line, both ways."""
    hop_s: float = 0.01
    """Time of a message from one node to another, in the network and in both programs."""
    tick_s: float = 0.1
    store_rate: float = 0.0
    """Bytes per second that the store sends; 0: as much as a node."""
    lost: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    hostile: tuple[int, ...] = ()
    """Nodes that claim to have everything, and send wrong bytes, nothing or a drip by turns."""
    fault_s: float = 2.0
    joined_s: dict[int, float] = field(default_factory=dict)
    """Time at which a node begins; 0 for nodes that are not named."""
    absent: tuple[int, ...] = ()
    chunk_cpu_s: float = 0.0
    """CPU of a chunk at each node, on `cores` that all nodes share; 0: each node has its own."""
    cores: int = 2
    outage_s: tuple[float, float] = (0.0, 0.0)
    """Between these times no node reaches another one; all reach the store."""
    racks: int = 1
    uplink_rate: float = 0.0
    """Bytes per second of the uplink of each rack, both ways; 0: without limit."""
    seed: int = 1

    def rack(self, node: int) -> int:
        """Return the rack of a node; STORE is in none of them."""
        return STORE if node == STORE else node * self.racks // self.nodes


@dataclass
class Outcome:
    """Result of one simulation."""

    alone_s: float
    took_s: dict[int, float]
    """Seconds from its beginning until it had everything, for each sound node."""
    first_s: dict[int, float]
    """Seconds until its first chunk."""
    copies: float
    """Bytes that the store sent, by the size of the object."""
    uplink_copies: float
    """Bytes that came by the busiest uplink of a rack, by the size of the object."""
    moves: list[tuple[float, int, int, Take]]

    @property
    def ratio(self) -> float:
        """The slowest node by one node alone."""
        return max(self.took_s.values()) / self.alone_s


@dataclass(slots=True, eq=False)
class _Stream:
    source: "_Node"
    child: "_Node"
    tree: int
    next: int
    """The chunk of the tree that is sent next."""
    leaves_store: bool
    is_help: bool = False
    is_open: bool = True
    is_dripping: bool = False
    is_busy: bool = False
    is_stuck: bool = False
    """Whether the child is gone, and the bytes that were sent last lie in buffers."""
    begun_s: float = 0.0
    took_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Node:
    number: int
    rate: float
    start_s: float
    fault: str = ""
    count: list[int] = field(default_factory=lambda: [0] * TREE_COUNT)
    plans: list[SourcePlan] = field(default_factory=list)
    fed_by: list[_Stream | None] = field(default_factory=lambda: [None] * TREE_COUNT)
    feeds: list[list[_Stream]] = field(default_factory=lambda: [[] for _ in range(TREE_COUNT)])
    helped_by: list[_Stream | None] = field(default_factory=lambda: [None] * TREE_COUNT)
    ahead: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(TREE_COUNT)])
    """First chunk that came from a helper, and the first that did not."""
    dropped: list[float] = field(default_factory=lambda: [0.0] * TREE_COUNT)
    """Chunks that came in part before their source was left."""
    busy_in: int = 0
    busy_out: int = 0
    first_s: float = -1.0

    def sending(self) -> list[_Stream]:
        """Return the streams on which it sends now."""
        return [one for feeds in self.feeds for one in feeds if one.is_busy and not one.is_stuck]

    def receiving(self) -> list[_Stream]:
        """Return the streams on which it receives now."""
        streams = [*self.fed_by, *self.helped_by]
        return [one for one in streams if one is not None and one.is_open and one.is_busy]

    def streams(self, now_s: float) -> int:
        """Return how many it feeds, without those that take nothing."""
        streams = [one for feeds in self.feeds for one in feeds]
        return sum(not one.is_busy or now_s - one.begun_s < STUCK_S for one in streams)


def _share(rate: float, limits: list[float]) -> float:
    """Return a stream's fair share of a line; `limits`: what each stream can take."""
    left = len(limits)
    for limit in sorted(limits):
        if limit >= rate / left:
            return rate / left
        rate, left = rate - limit, left - 1
    return max(limits)


class Simulation:
    """Discrete-event simulation of one object. Not thread-safe."""

    def __init__(self, world: World) -> None:
        self.world = world
        places = [(str(world.rack(node)),) for node in range(world.nodes)]
        self.trees = Trees(world.nodes, places if world.racks > 1 else ())
        self.dice = random.Random(world.seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._event_number = 0
        self._lengths = [chunks_of(tree, world.chunks) for tree in range(TREE_COUNT)]
        self.nodes = [_Node(n, world.rate, world.joined_s.get(n, 0.0)) for n in range(world.nodes)]
        self.store = _Node(STORE, world.store_rate or world.rate, 0.0)
        self.store.count = list(self._lengths)
        self.store_bytes = self._turn = self.helps = 0
        self._crossing: defaultdict[tuple[int, bool], set[_Stream]] = defaultdict(set)
        """Busy streams out of (True) and into each rack."""
        self._free_s = [0.0] * world.cores
        """Times at which the shared cores are free."""
        self._came: Counter[int] = Counter()
        """Chunks that came to each rack by its uplink."""
        self.done_s: dict[int, float] = {}
        self.moves: list[tuple[float, int, int, Take]] = []

    def run(self, limit_s: float = 300.0) -> Outcome:
        """Run until every sound node has everything. Raises: RuntimeError after `limit_s`."""
        world = self.world
        for node in self.nodes:
            if node.number in world.absent:
                node.fault = "absent"
            else:
                self._at(node.start_s, self._begin, node)
        self._at(world.fault_s, self._break)
        if world.outage_s[1]:
            self._at(world.outage_s[0], self._cut)
        for number in world.hostile:
            self.nodes[number].fault = "hostile"
        faulty = {*world.lost, *world.frozen, *world.slow, *world.absent, *world.hostile}
        sound = set(range(world.nodes)) - faulty
        while self._done_count(sound) < len(sound):
            if not self._events or self.now_s > limit_s:
                late = sorted(sound - self.done_s.keys())
                raise RuntimeError(f"not done after {self.now_s:.0f} s: nodes {late[:20]}")
            self.now_s, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        return Outcome(
            alone_s=world.chunks * world.chunk_bytes / world.rate,
            took_s={n: self.done_s[n] - self.nodes[n].start_s for n in sound},
            first_s={n: self.nodes[n].first_s - self.nodes[n].start_s for n in sound},
            copies=self.store_bytes / (world.chunks * world.chunk_bytes),
            uplink_copies=max(self._came.values(), default=0) / world.chunks,
            moves=self.moves,
        )

    def _done_count(self, sound: set[int]) -> int:
        if len(self.done_s) < len(sound):
            return 0
        return len(self.done_s.keys() & sound)

    def _at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (at_s, self._event_number, call, arguments))

    # Nodes

    def _begin(self, node: _Node) -> None:
        for tree in range(TREE_COUNT):
            node.plans.append(
                SourcePlan(
                    self.trees, node.number, tree, chunk_bytes=self.world.chunk_bytes,
                    random=self.dice.random, now_s=self.now_s,
                )
            )  # fmt: skip
        for tree, plan in enumerate(node.plans):
            plan.other = node.plans[1 - tree]
            plan.length = self._lengths[tree]
            self._tick(node, tree)

    def _break(self) -> None:
        for kind in ("lost", "frozen"):
            for number in getattr(self.world, kind):
                self.nodes[number].fault = kind
        for number in self.world.slow:
            self.nodes[number].rate /= 10

    def _cut(self) -> None:
        for node in self.nodes:
            for stream in node.fed_by:
                if stream is not None and stream.source is not self.store:
                    self._lost(stream, Reason.SILENT)

    def _is_cut(self) -> bool:
        return self.world.outage_s[0] <= self.now_s < self.world.outage_s[1]

    def _tick(self, node: _Node, tree: int) -> None:
        if node.fault or node.count[tree] == self._lengths[tree]:
            return
        plan, stream = node.plans[tree], node.fed_by[tree]
        if stream is not None and stream.is_open and not stream.source.fault:
            if stream.is_busy:
                part = min(1.0, (self.now_s - stream.begun_s) / stream.took_s)
                whole = node.count[tree] + node.dropped[tree]
                plan.received(self.now_s, int((whole + part) * self.world.chunk_bytes))
            elif stream.source is not self.store:
                plan.offered(self.now_s, self._offer(stream.source, tree))
        elif stream is not None and stream.is_dripping:
            plan.offered(self.now_s, self._offer(stream.source, tree))
        self._do(node, tree, plan.step(self.now_s))
        self._at(self.now_s + self.world.tick_s, self._tick, node, tree)

    def _do(self, node: _Node, tree: int, step: Ask | Take | Help | None) -> None:
        if isinstance(step, Take):
            self.moves.append((self.now_s, node.number, tree, step))
            self._take(node, tree, step)
        elif isinstance(step, Help):
            self.helps += 1
            stream = _Stream(self.nodes[step.source], node, tree, step.first, False, True)
            node.helped_by[tree], node.ahead[tree] = stream, [step.first, step.first]
            self._at(self.now_s + 3 * self.world.hop_s, self._open, stream)
        elif step is not None:
            asked = [self.nodes[n] for n in step.nodes]
            is_late = any(one.fault in ("lost", "frozen") for one in asked)
            late_s = 3 * self.world.hop_s + 0.1 * is_late
            self._at(self.now_s + late_s, self._answer, node, tree, asked)

    def _answer(self, node: _Node, tree: int, asked: list[_Node]) -> None:
        if node.fault:
            return
        there = [one for one in asked if one.fault == "hostile" or (one.plans and not one.fault)]
        there = [] if self._is_cut() else there
        offers = [self._offer(one, tree) for one in there]
        self._do(node, tree, node.plans[tree].answered(self.now_s, offers))

    def _offer(self, node: _Node, tree: int) -> Offer:
        if node.fault == "hostile":
            return Offer(node.number, self._lengths[tree], 0, (STORE,))
        return node.plans[tree].offer(self.now_s, node.streams(self.now_s))

    def _lost(self, stream: _Stream, reason: Reason) -> None:
        child, tree = stream.child, stream.tree
        if stream.is_open and not child.fault and stream.is_help:
            self._close(stream)
            child.helped_by[tree] = None
            child.plans[tree].help_ended(self.now_s, reason)
        elif stream.is_open and not child.fault:
            self._close(stream)
            child.plans[tree].lost(self.now_s, reason)
            self._do(child, tree, child.plans[tree].step(self.now_s))

    # Streams

    def _take(self, node: _Node, tree: int, step: Take) -> None:
        if (old := node.fed_by[tree]) is not None:
            self._close(old)
        source = self.store if step.source == STORE else self.nodes[step.source]
        stream = _Stream(source, node, tree, node.count[tree], step.leaves_store)
        node.fed_by[tree] = stream
        self._at(self.now_s + 3 * self.world.hop_s, self._open, stream)

    def _open(self, stream: _Stream) -> None:
        source, child = stream.source, stream.child
        if not stream.is_open or child.fault:
            return
        if source is self.store:
            self._feed(stream)
        elif source.fault == "hostile":
            self._turn = (self._turn + 1) % 3
            stream.is_dripping = self._turn == 2
            if self._turn == 0:
                self._at(self.now_s + 0.1, self._lost, stream, Reason.WRONG)
        elif source.fault == "absent" or not source.plans:
            self._lost(stream, Reason.REFUSED)
        elif source.fault or self._is_cut():
            self._at(self.now_s + ASK_S, self._lost, stream, Reason.REFUSED)
        else:
            is_child = self.trees.parent(stream.tree, child.number) == source.number
            if has_room(
                source.streams(self.now_s), is_child=is_child, leaves_store=stream.leaves_store
            ):
                self._feed(stream)
            else:
                self._lost(stream, Reason.BUSY)

    def _feed(self, stream: _Stream) -> None:
        stream.source.feeds[stream.tree].append(stream)
        if stream.source.plans and stream.next == 0:
            stream.source.plans[stream.tree].began(
                self.now_s, stream.child.number, self.now_s - stream.child.start_s
            )
        if stream.source is not self.store and not stream.is_help:
            stream.child.plans[stream.tree].offered(
                self.now_s, self._offer(stream.source, stream.tree)
            )
        self._pump(stream)

    def _close(self, stream: _Stream) -> None:
        if stream.is_open:
            stream.is_open = False
            if stream in stream.source.feeds[stream.tree]:
                stream.source.feeds[stream.tree].remove(stream)
            if stream.is_busy and not stream.is_help:
                part = min(1.0, (self.now_s - stream.begun_s) / stream.took_s)
                stream.child.dropped[stream.tree] += part
            if stream.is_busy and not stream.is_stuck:
                self._set_busy(stream, -1)

    def _pump(self, stream: _Stream) -> None:
        source, child, tree = stream.source, stream.child, stream.tree
        if stream.is_busy or not stream.is_open or source.fault or child.fault:
            return
        if stream.next >= source.count[tree] or stream.next >= self._lengths[tree]:
            return
        stream.is_busy = True
        self._set_busy(stream, 1)
        sent = _share(source.rate, [one.child.rate / one.child.busy_in for one in source.sending()])
        limits = [
            sent if one is stream else one.source.rate / one.source.busy_out
            for one in child.receiving()
        ]
        rate = min(sent, _share(child.rate, limits), self._uplink_share(stream))
        stream.begun_s, stream.took_s = self.now_s, self.world.chunk_bytes / rate
        told = None if source is self.store else self._offer(source, tree)
        self._at(self.now_s + stream.took_s, self._sent, stream, told)

    def _set_busy(self, stream: _Stream, change: int) -> None:
        stream.source.busy_out += change
        stream.child.busy_in += change
        for uplink in self._uplinks(stream):
            if change > 0:
                self._crossing[uplink].add(stream)
            else:
                self._crossing[uplink].discard(stream)

    def _uplinks(self, stream: _Stream) -> list[tuple[int, bool]]:
        """Return the uplinks of a stream, each with whether it leaves the rack."""
        source = self.world.rack(stream.source.number)
        child = self.world.rack(stream.child.number)
        if self.world.racks == 1 or source == child:
            return []
        return [*([] if source == STORE else [(source, True)]), (child, False)]

    def _uplink_share(self, stream: _Stream) -> float:
        """Return what the uplinks leave to a busy stream."""
        rates = [math.inf]
        for uplink in self._uplinks(stream) if self.world.uplink_rate else ():
            limits = [
                math.inf
                if one is stream
                else min(one.source.rate / one.source.busy_out, one.child.rate / one.child.busy_in)
                for one in self._crossing[uplink]
            ]
            rates.append(_share(self.world.uplink_rate, limits))
        return min(rates)

    def _sent(self, stream: _Stream, told: Offer | None) -> None:
        if not stream.is_open or stream.source.fault:
            return
        if stream.child.fault:
            self._set_busy(stream, -1)  # what was sent last lies in buffers
            stream.is_stuck = True
            return
        stream.is_busy = False
        self._set_busy(stream, -1)
        for rack, is_leaving in self._uplinks(stream):
            self._came[rack] += not is_leaving
        stream.next += 1
        if told is None:
            self.store_bytes += self.world.chunk_bytes
        ready_s = self._computed_s() + self.world.hop_s
        self._at(ready_s, self._arrive, stream, stream.next - 1, told)
        self._pump(stream)

    def _computed_s(self) -> float:
        """Return when a core has handled a chunk that comes now."""
        if not self.world.chunk_cpu_s:
            return self.now_s
        free_s = max(self.now_s, heapq.heappop(self._free_s)) + self.world.chunk_cpu_s
        heapq.heappush(self._free_s, free_s)
        return free_s

    def _arrive(self, stream: _Stream, index: int, told: Offer | None) -> None:
        node, tree = stream.child, stream.tree
        if not stream.is_open or node.fault:
            return
        ahead = node.ahead[tree]
        if stream.is_help:
            ahead[1] = index + 1
        elif index == node.count[tree]:
            node.count[tree] += 1
        if ahead[0] <= node.count[tree] < ahead[1]:
            node.count[tree] = ahead[1]
            helper = node.helped_by[tree]
            if not stream.is_help and helper is not None and helper.is_open:
                # The helper goes on alone.
                self._close(stream)
                node.fed_by[tree], node.helped_by[tree], stream = helper, None, helper
                helper.is_help = False
                node.plans[tree].overtook()
        if node.first_s < 0 and tree == 0:
            node.first_s = self.now_s
        plan = node.plans[tree]
        plan.count = node.count[tree]
        if stream.is_help:
            told = None
        else:
            whole = node.count[tree] + node.dropped[tree]
            plan.received(self.now_s, int(whole * self.world.chunk_bytes))
        if told is not None and told.node == plan.source:
            plan.offered(self.now_s, told)
        for other in node.feeds[tree]:
            self._pump(other)
        if node.count[tree] == self._lengths[tree]:
            self._close(stream)
            for one in (node.fed_by[tree], node.helped_by[tree]):
                if one is not None:
                    self._close(one)
            if node.count == self._lengths:
                self.done_s[node.number] = self.now_s
