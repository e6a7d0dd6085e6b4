"""Plan of one node in one tree of one object: whom to take the chunks from, and when to change.

Chunks of a tree come strictly in order, so that a node's state is one number, its `count`. Each
node tells with every chunk and every heartbeat what it has, how many it feeds and its *path*: who
feeds it, who feeds that one, and so on to the store. A node never takes one that has it in its
path, so that no circle lasts.

A node begins with its parent in the tree. It leaves its source

- at once, when the source is silent for `SILENCE_S`, closes, refuses or sends wrong bytes;
- when bytes come slowly, and the source is to blame. It asks
  its source, that one's own source and some others. The source is to blame when it has chunks and
  does not send them, or its own source has chunks that it does not have. Otherwise somebody nearer
  to the store is to blame, and the children of that node move; those below wait for `STARVED_S`;
- when the source is not its parent, and the parent is there again, or the source feeds more than
  two and another node that is not behind feeds fewer.

A node without a source takes one that is as far as itself; of those it takes one that feeds few.
The store is the last resort, since its line is everybody's: nodes nearest to the root go first, and
whoever reads the store looks for a node that is ahead. A node whose moves do not help becomes
patient: its own line is the slow one.

Pure: the clock and the dice are handed in. `bench/fanout` simulates 10,000 nodes with this code.
"""

import math
from collections.abc import Callable, Iterable
from enum import Enum

from msgspec import Struct

from bootseer.fanout.trees import STORE, Trees

HEARTBEAT_S = 0.25
"""How often a source that has nothing to send says so."""
SILENCE_S = 1.0
"""How long a source may send nothing: three heartbeats get lost before it counts as lost."""
ASK_S = 0.4
"""How long answers are waited for."""
STARVED_S = 2.0
"""How long a node waits for those above it to get round a slow node."""
STUCK_S = 0.4
"""How long a chunk may take before its child does not count as one that is fed: it is lost or
slow, and there is room for another one."""
FAIR_STREAMS = 2
"""Nodes that a node feeds in one object when all is well."""
STREAMS_MAX, HOME_STREAMS_MAX = 3, 5
"""Nodes that a node feeds at most in one object: anybody, or those that it has to take."""

PATH_MAX = 32
"""Nodes of a path that are told: trees over 10,000 nodes are half as deep."""

_FIRST_S = 0.6
"""How long a source that says that it has chunks may take to send the first bytes of one."""
_WINDOW_S = 0.6
"""Over which a rate is measured: some round trips, and much less than a start."""
_LOW_SHARE, _OTHER_SHARE = 0.4, 0.6
"""A rate is low below so much of the best one, or of so much of what the other tree brings: a
source may have been slow from the beginning."""
_FLOOR_BYTES_PER_S = 100_000.0
"""What any line should bring: a source that drips from the beginning is left for this reason."""
_LEAD_S = 0.3
"""How far ahead, at the best rate, another node must be to be worth a move."""
_SLOW_S = 1.0
"""How long a source that has chunks may send them slowly. Longer than it takes the children of a
node with a slow line to see that it is behind: they move, and it stays."""
_REPAIR_S = 0.5
"""How long a source that has just moved is given to catch up."""
_ASK_PAUSE_S, _CROWDED_PAUSE_S, _STORE_PAUSE_S, _RETRY_S = 0.3, 0.5, 0.5, 0.15
_HOME_PAUSE_S, _HOME_BEHIND_S = 0.5, 1.5
"""How often a node that its parent does not feed asks the parent, and how far behind that may be:
only where each is fed by its parent, nobody feeds more than two."""
_PATIENCE_MAX, _CROWDED_FACTOR = 8.0, 1.5
_FULL_S = 1.5
"""How long a node without a source waits for room at those that are ahead."""
_TURN_S, _ALONE_S = 0.25, 0.3
"""How much later the nodes of the next level go to the store; how long a node that begins before
its parent waits for others."""
_TRICKLE_SHARE, _TRICKLE_DEPTH = 0.25, 3
_JOINED_S = 1.5
_RANDOM_COUNT, _LAST_ASK_COUNT, _READERS_MAX = 6, 16, 4


class Reason(Enum):
    """Why a source is left."""

    WRONG = "it sent wrong bytes"
    SILENT = "it was silent"
    CLOSED = "it closed the connection"
    REFUSED = "it could not be reached"
    BUSY = "it feeds enough others"
    SLOW = "it was slow"
    STARVED = "nothing came to it"
    CROWDED = "another one feeds fewer"
    AHEAD = "another node is ahead"
    HOME = "the own parent is there again"
    CIRCLE = "it is fed by this node"


_BAN_S = {
    Reason.WRONG: math.inf,
    Reason.SILENT: 10.0,
    Reason.CLOSED: 1.0,
    Reason.REFUSED: 0.5,
    Reason.BUSY: 0.5,
    Reason.SLOW: 10.0,
    Reason.STARVED: 3.0,
    Reason.CIRCLE: 1.0,
}
"""Seconds for which a source that was left is not taken again; each time twice as many."""


class Offer(Struct, frozen=True):
    """Answer of a node that was asked, or what a source says of itself with each chunk."""

    node: int
    count: int
    """Chunks of the tree that it has, from the first one on."""
    streams: int
    """Nodes that it feeds in this object."""
    path: tuple[int, ...]
    """Who feeds it, who feeds that node, and so on to STORE; empty while nobody feeds it."""
    is_low: bool = False
    """Whether less comes to it than did."""


class Ask(Struct, frozen=True):
    """Ask these nodes for their offers, for `ASK_S` at most, then call `answered`."""

    nodes: tuple[int, ...]


class Take(Struct, frozen=True):
    """Take the chunks from `source` from now on."""

    source: int
    reason: Reason | None
    """Why the last source is left; None at the beginning."""
    reads_store: bool = False
    """Whether the store is left."""


def has_room(streams: int, *, is_home: bool, reads_store: bool) -> bool:
    """Return whether a node that feeds `streams` others takes one more.

    It always has room for its own children, and for a node that leaves the store to the others.
    """
    return streams < (HOME_STREAMS_MAX if is_home or reads_store else STREAMS_MAX)


class _Meter:
    """Rate at which bytes come."""

    def __init__(self, now_s: float) -> None:
        self.byte_count, self.start_s = 0, now_s
        self.now_s = self.arrived_s = self.good_s = now_s
        """Of the last look; of the last bytes; when the rate was last as it should be."""
        self.rate, self.best, self.due = math.inf, 0.0, 0.0
        """Bytes per second: now, infinite while too little is known; at best; as it should be."""
        self._window = [(now_s, 0)]

    def came(self, now_s: float, byte_count: int) -> None:
        """Note that so many bytes have come altogether."""
        if byte_count > self.byte_count:
            self.byte_count, self.arrived_s = byte_count, now_s

    def look(self, now_s: float, other: "_Meter | None") -> None:
        """Measure; `other` is the meter of the other tree."""
        self.now_s, window = now_s, self._window
        window.append((now_s, self.byte_count))
        while len(window) > 2 and window[1][0] <= now_s - _WINDOW_S:
            window.pop(0)
        span_s = now_s - window[0][0]
        if span_s < 0.9 * _WINDOW_S:
            self.rate = math.inf
            return
        self.rate = (self.byte_count - window[0][1]) / span_s
        # Forgotten slowly: a line that others use, too, may stay slower than it was at first.
        self.best = max(self.rate, 0.995 * self.best)
        others = 0.0 if other is None else _OTHER_SHARE * other.recent
        self.due = max(self.best, others, _FLOOR_BYTES_PER_S)
        if not self.is_low:
            self.good_s = now_s

    def begin_anew(self, now_s: float) -> None:
        """Measure another source from now on."""
        self._window = [(now_s, self.byte_count)]
        self.rate = math.inf

    @property
    def recent(self) -> float:
        """Rate as far as it is known: at the end, and at the beginning, the mean."""
        if math.isinf(self.rate) or self.now_s - self.arrived_s > _WINDOW_S:
            return self.byte_count / max(_WINDOW_S, self.arrived_s - self.start_s)
        return self.rate

    @property
    def is_low(self) -> bool:
        """Whether less comes than should."""
        return self.rate <= _LOW_SHARE * self.due


class _Bans:
    """Sources that are not taken for a while."""

    def __init__(self) -> None:
        self._until: dict[int, tuple[float, int]] = {}

    def add(self, now_s: float, node: int | None, reason: Reason) -> None:
        """Ban a node, each time for twice as long."""
        if node is not None and node != STORE and reason in _BAN_S:
            times = self._until.get(node, (0.0, 0))[1]
            self._until[node] = now_s + _BAN_S[reason] * 2.0 ** min(times, 10), times + 1

    def has(self, now_s: float, node: int) -> bool:
        """Whether a node is banned now."""
        return self._until.get(node, (0.0, 0))[0] > now_s


class SourcePlan:
    """Whom one node takes the chunks of one tree from. Not thread-safe."""

    def __init__(
        self,
        trees: Trees,
        node: int,
        tree: int,
        *,
        chunk_bytes: float,
        dice: Callable[[], float],
        now_s: float,
    ) -> None:
        """Begin. `chunk_bytes` is the mean size; `dice` returns random numbers in [0, 1)."""
        self.source: int | None = None
        """Who feeds the node: a node, STORE, or None."""
        self.count = 0
        """Chunks of the tree that are here, from the first one on."""
        self.other: SourcePlan | None = None
        """The plan of the other tree, whose rate tells what the node's line can do."""
        self.is_whole = False
        """Whether all chunks of the tree are here."""
        self.chunk_bytes = chunk_bytes
        self._trees, self._node, self._tree, self._dice = trees, node, tree, dice
        self._home, self._ancestors = trees.parent(tree, node), trees.ancestors(tree, node)
        siblings = trees.children(tree, self._home) if self._home != STORE else ()
        self._is_second = node in siblings[1:]
        self._meter, self._bans = _Meter(now_s), _Bans()
        self._told = Offer(STORE, 0, 0, ())
        """What the source said last."""
        self._start_s = self._since_s = self._alive_s = now_s
        """When the plan began; when the source was taken; when it last gave a sign of life."""
        self._repaired_s = self._source_moved_s = now_s
        """When somebody on the path last moved; when the source itself did."""
        self._patience = self._crowded_patience = 1.0
        self._asked: tuple[int, ...] | None = None
        """Who is being asked."""
        self._ask_s = now_s
        """When somebody may be asked next."""
        self._readers: list[int] = []
        """Nodes that read the store, as others said."""
        # While there is no source:
        self._idle_s, self._idle_depth = now_s, len(self._ancestors)
        self._lost_source: int | None = None
        self._reason: Reason | None = None
        self._round, self._has_answer = -1, False

    # What the node sees

    def alive(self, now_s: float, byte_count: int) -> None:
        """Note a sign of life of the source; `byte_count` bytes of the tree have come so far."""
        self._alive_s = now_s
        self._meter.came(now_s, byte_count)

    def heard(self, now_s: float, told: Offer) -> None:
        """Note what the source says of itself."""
        self._alive_s = now_s
        if told.path != self._told.path:
            self._repaired_s = now_s
            if told.path[:1] != self._told.path[:1]:
                self._source_moved_s = now_s
        self._told = told
        if self._node in told.path:
            self.lost(now_s, Reason.CIRCLE)

    def lost(self, now_s: float, reason: Reason) -> None:
        """Note that the source is gone, or no good."""
        self._bans.add(now_s, self.source, reason)
        self._idle_s, self._idle_depth = now_s, len(self._told.path) or len(self._ancestors)
        self._lost_source, self.source, self._reason = self.source, None, reason
        self._round, self._has_answer, self._ask_s = 0, False, now_s

    def offer(self, streams: int) -> Offer:
        """Return what the node says of itself."""
        if self.is_whole:
            return Offer(self._node, self.count, streams, (STORE,))
        is_low = self.source is None or self._meter.now_s - self._meter.good_s > _WINDOW_S
        return Offer(self._node, self.count, streams, self.path, is_low)

    @property
    def path(self) -> tuple[int, ...]:
        """Who feeds the node, who feeds that one, and so on to STORE, as far as known."""
        if self.source is None or self.source == STORE:
            return () if self.source is None else (STORE,)
        return (self.source, *self._told.path)[:PATH_MAX]

    # What the node does

    def step(self, now_s: float) -> Ask | Take | None:
        """Return what to do now. Call it every 0.1 s or so, and after `lost`."""
        self._meter.look(now_s, None if self.other is None else self.other._meter)
        if self._patience > 1 and now_s - self._since_s > 2.0 and not self._meter.is_low:
            self._patience = 1.0
        is_fed_by_node = self.source is not None and self.source != STORE
        # It has chunks, and sends none: not a sign of life is enough at the beginning.
        is_idle = self._told.count > self.count and self._meter.arrived_s < self._since_s
        silence_s = now_s - (self._since_s if is_idle else self._alive_s)
        if is_fed_by_node and silence_s > (_FIRST_S if is_idle else SILENCE_S):
            self.lost(now_s, Reason.SILENT)
        if self._round < 0:
            self._round = 0
            return self._take(now_s, self._home, None)
        if self._asked is not None or now_s < self._ask_s:
            return None
        if self.source is None:
            return self._ask(now_s, self._known() if self._round == 0 else self._readers)
        if self.source == STORE:
            was_first = self._home == STORE and now_s - self._start_s > _JOINED_S
            if was_first and not self._meter.is_low:
                return None
            pause_s = _STORE_PAUSE_S * (1 + self._dice())
            return self._ask(now_s, [*self._readers, *self._known()], pause_s)
        if now_s - self._since_s < _WINDOW_S:
            return None
        if self._meter.is_low:
            return self._ask(now_s, self._known(), _ASK_PAUSE_S)
        if self.source == self._home:
            return None
        if self._told.streams > FAIR_STREAMS and self._told.count > self.count + 1:
            pause_s = _CROWDED_PAUSE_S * self._crowded_patience * (0.5 + self._dice())
            return self._ask(now_s, self._known(), pause_s)
        if self._home != STORE and not self._bans.has(now_s, self._home):
            self._ask_s, self._asked = now_s + _HOME_PAUSE_S * (0.5 + self._dice()), (self._home,)
            return Ask(self._asked)
        return None

    def answered(self, now_s: float, offers: Iterable[Offer]) -> Take | None:
        """Return what to do, now that these of the asked nodes have answered."""
        by_node = {one.node: one for one in offers}
        for node in self._asked or ():
            if node not in by_node:
                self._bans.add(now_s, node, Reason.REFUSED)
        self._asked = None
        readers = [(one.node, *one.path)[-2] for one in by_node.values() if STORE in one.path]
        self._readers = list(dict.fromkeys([*readers, *self._readers]))[:_READERS_MAX]
        if self.source is None:
            return self._take_first(now_s, by_node)
        if self.source == STORE:
            # A root does not believe a single one: all are below it.
            ahead = [one for one in by_node.values() if one.count >= self.count + 2]
            is_believed = len(ahead) > (self._home == STORE)
            best = self._best(now_s, ahead, 0) if is_believed else None
            return None if best is None else self._take(now_s, best, Reason.AHEAD)
        if self._meter.is_low:
            return self._get_round(now_s, by_node)
        home = by_node.get(self._home)
        behind = math.ceil(_HOME_BEHIND_S * self._meter.best / self.chunk_bytes)
        if (
            home is not None
            and not home.is_low
            and self._may_take(now_s, home)
            and home.count >= self.count - behind
        ):
            return self._take(now_s, self._home, Reason.HOME)
        room = self._told.streams - 1
        fewer = [one for one in by_node.values() if not one.is_low and one.streams < room]
        best = self._best(now_s, fewer, self.count)
        if best is None:
            return None
        self._crowded_patience *= _CROWDED_FACTOR
        return self._take(now_s, best, Reason.CROWDED)

    def _get_round(self, now_s: float, offers: dict[int, Offer]) -> Take | None:
        """Return where to go while too little comes; None: wait for those nearer to the store."""
        assert self.source is not None
        lead, told = self._lead, offers.pop(self.source, self._told)
        low_s = now_s - self._meter.good_s
        starved_s = now_s - max(self._meter.good_s, self._repaired_s)
        above = offers.get(told.path[0]) if told.path else None
        is_slow = told.count - self.count >= lead
        if is_slow and low_s < _SLOW_S * self._patience:
            return None
        is_behind = (
            above is not None
            and above.count - told.count >= lead
            and now_s - self._source_moved_s > _REPAIR_S
        )
        if is_slow or is_behind or starved_s > STARVED_S:
            best = self._best(now_s, offers.values(), self.count + lead)
            if best is not None:
                return self._leave(now_s, best, Reason.SLOW if is_slow else Reason.STARVED)
        depth = len(self._ancestors)
        is_trickle = self._meter.rate <= _TRICKLE_SHARE * self._meter.due
        may_try = is_trickle and depth <= _TRICKLE_DEPTH
        turn_s = 1.5 * depth + 0.75 * self._is_second
        dry_s = now_s - max(self._meter.arrived_s, self._repaired_s)
        is_turn = (may_try and starved_s > turn_s) or dry_s > STARVED_S + 2 * _TURN_S * depth
        # Where the source claims to have more, it is more likely the own line.
        is_turn &= not is_slow or low_s > (STARVED_S + turn_s) * self._patience
        return self._leave(now_s, STORE, Reason.STARVED) if is_turn else None

    def _take_first(self, now_s: float, offers: dict[int, Offer]) -> Take | None:
        """Return the next source of a node that has none; None: ask again."""
        self._has_answer |= bool(offers)
        if self.count == 0:
            # All have just begun: the nearest ancestor that is there will be fed in time.
            for node in self._ancestors:
                if node in offers and self._may_take(now_s, offers[node]):
                    return self._take(now_s, node, self._reason)
        fed = [one for one in offers.values() if one.path and self._lost_source not in one.path]
        best = self._best(now_s, fed, self.count)
        if best is not None:
            return self._take(now_s, best, self._reason)
        idle_s, is_last_round = now_s - self._idle_s, self._round > 0
        if any(one.count > self.count for one in offers.values()):
            is_turn = idle_s > _FULL_S
        elif self._has_answer:
            # The one that is nearest to the root goes first; the others find it ahead.
            others = [n for n, one in offers.items() if self._node not in one.path]
            is_first = all(self._rank(self._node) < self._rank(n) for n in others)
            wait_s = 0.0 if is_first else _TURN_S * (1 + self._idle_depth)
            if self.count == 0 and self._home != STORE:
                wait_s = max(wait_s, _ALONE_S * (1 + 0.3 * len(self._ancestors)))
            is_turn = is_last_round and idle_s > wait_s
        else:
            is_turn = is_last_round and idle_s > _ALONE_S * (1 + 0.3 * len(self._ancestors))
        if is_turn:
            return self._take(now_s, STORE, self._reason)
        self._round = 0 if is_last_round else 1
        self._ask_s = now_s + (_RETRY_S if is_last_round else 0.0)
        return None

    # Choosing

    @property
    def _lead(self) -> int:
        """How many chunks ahead another node is worth a move."""
        return max(2, math.ceil(_LEAD_S * self._meter.best / self.chunk_bytes))

    def _rank(self, node: int) -> tuple[int, int]:
        return len(self._trees.ancestors(self._tree, node)), node

    def _may_take(self, now_s: float, offer: Offer) -> bool:
        if offer.node == self.source or self._node in offer.path:
            return False
        is_home, reads_store = offer.node == self._home, self.source == STORE
        has_place = has_room(offer.streams, is_home=is_home, reads_store=reads_store)
        return has_place and not self._bans.has(now_s, offer.node)

    def _best(self, now_s: float, offers: Iterable[Offer], least_count: int) -> int | None:
        """Return a node that has so many chunks: one that feeds few.

        Not the one that is furthest: a member who lies would be everybody's choice.
        """
        fit = [
            (one.is_low, max(one.streams, 1), self._dice(), one.node)
            for one in offers
            if one.count >= least_count and self._may_take(now_s, one)
        ]
        return min(fit)[-1] if fit else None

    def _known(self) -> list[int]:
        """Return the nodes that are asked first."""
        trees, tree, node, home = self._trees, self._tree, self._node, self._home
        known = [] if self.source is None else [self.source]
        known += [*self._told.path[:3], home, *self._ancestors[1:3], *self._ancestors[-1:]]
        if home != STORE:
            # Whoever feeds the parent in the other tree has room when the parent is lost.
            known += [trees.parent(1 - tree, home), *trees.children(tree, home)]
        return [*known, trees.parent(1 - tree, node), *trees.children(tree, node)]

    def _ask(self, now_s: float, known: Iterable[int], pause_s: float = 0.0) -> Ask:
        """Ask these nodes and some that the dice choose."""

        def is_new(node: int) -> bool:
            is_nobody = node in (STORE, self._node) or node in nodes
            return not is_nobody and not self._bans.has(now_s, node)

        nodes: list[int] = []
        for node in known:
            if is_new(node):
                nodes.append(node)
        least = _LAST_ASK_COUNT if self.source is None and self._round else 0
        wanted, count = max(len(nodes) + _RANDOM_COUNT, least), self._trees.node_count
        for _ in range(2 * min(wanted, count)):
            node = int(self._dice() * count)
            if len(nodes) < wanted and is_new(node):
                nodes.append(node)
        self._ask_s, self._asked = now_s + pause_s, tuple(nodes)
        return Ask(self._asked)

    # Moving

    def _leave(self, now_s: float, source: int, reason: Reason) -> Take:
        self._bans.add(now_s, self.source, reason)
        self._patience = min(2 * self._patience, _PATIENCE_MAX)
        return self._take(now_s, source, reason)

    def _take(self, now_s: float, source: int, reason: Reason | None) -> Take:
        reads_store, self.source = self.source == STORE, source
        self._told = Offer(source, 0, 0, ())
        self._alive_s = self._since_s = now_s
        self._ask_s = now_s + _ASK_PAUSE_S
        self._meter.begin_anew(now_s)
        return Take(source, reason, reads_store)
