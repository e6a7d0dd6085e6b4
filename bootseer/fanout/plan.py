"""Plan of one node in one tree of one object: which node it reads from, and when it changes.

Chunks of a tree come in order, so that a node's state is one number, its `count`. With every chunk
and every heartbeat a node sends an `Offer`: its count, how many nodes it feeds, and its *path*, the
nodes between it and the store. No node reads from a node whose path contains it, so that no circle
lasts.

A node begins with its parent in the tree. While the job is younger than `GATHER_S`, it waits for a
parent that has not begun, unless so few nodes answer that the job begins over many seconds. It
leaves its source

- at once, when the source is silent for `SILENCE_S`, closes, refuses or sends wrong bytes;
- for the store, when nothing comes to the nodes above it either, or for `_ABOVE_S`, or when little
  comes while the other tree comes quickly;
- when the source has chunks and sends them slowly, or lacks chunks that its own source has. The
  children of the slow node move; the nodes below them wait for `STARVED_S`. Several objects share
  the node's line: each tree is due its share of it (`Line`);
- for its parent, when the parent works again;
- when the source feeds more than two nodes and another one feeds fewer; where no place is free, for
  a full node below the source, so that the surplus moves down to the nodes that began last.

The children of a node that is lost or slow take the two places that it leaves free
(`Trees.stand_in`), so that nobody feeds more than two and all lines stay full. A node that begins
late takes its chunks from the nodes that began last: only these still have free places. A node
that has one tree whole reads the other one from two nodes (`Help`).

The store is the last resort, since its line is everybody's: nodes nearest to the root go first, and
a node that reads the store looks for a node that is ahead. A node whose moves do not help becomes
patient: its own line is the slow one.

Pure: the clock and the random numbers are passed in. `bench/fanout` simulates 10,000 nodes with
this code.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from msgspec import Struct

from bootseer.fanout.trees import STORE, TREE_COUNT, Trees

HEARTBEAT_S = 0.25
"""Interval of the heartbeats of a source that has nothing to send."""
SILENCE_S = 1.0
"""A source that sends nothing for so long is lost: three heartbeats are missing."""
ASK_S = 0.4
"""Deadline of an answer."""
GATHER_S = 1.5
"""Age of the job up to which a node waits for its parent to begin."""
_SPARSE_S, _SPARSE_MIN_S, _SPARSE_ANSWERS = 5.0, 0.5, 2
"""Time after which all nodes will have begun, as answers foretell, that is too long to wait for a
parent; least age of the job, and answers in a row, that foretell so. Otherwise, of 10,000 nodes
that begin together some would take the few nodes that had begun for all."""
STARVED_S = 2.0
"""Wait of a node until the nodes above it have gone round a slow node."""
STUCK_S = 0.4
"""A child whose chunk takes longer is not counted as fed: it is lost or slow, and there is room for
another one."""
FAIR_STREAMS = 2
"""Nodes that a node feeds in one object when all is well."""
STREAMS_MAX, CHILD_STREAMS_MAX = 3, 5
"""Nodes that a node feeds at most in one object: any nodes, or its children in the trees."""

PATH_MAX = 32
"""Nodes of a path that are sent: trees over 10,000 nodes are half as deep."""

_FIRST_S = 0.6
"""Longest wait for the first bytes of a source that offers chunks."""
_WINDOW_S = 0.6
"""Time over which a rate is measured: some round trips, and much less than a start."""
_LOW_SHARE, _OTHER_SHARE = 0.4, 0.6
"""A rate is low below this share of the best one, or of this share of the other tree's rate: a
source may have been slow from the beginning."""
_FLOOR_BYTES_PER_S = 100_000.0
"""Rate below which a source is slow in any network."""
_LINE_WINDOW_S, _LINE_MEASURE_S = 2.0, 0.1
"""Time over which the rate of a line is measured, since a node that reads the store gets whole
chunks, some at once; and the interval of the measurements."""
_SLACK_CHUNKS, _SLACK_MAX_S = 2.0, 4.0
"""Chunks, and seconds at most, that a source may be late where several objects share a line."""
_LEAD_S = 0.3
"""Lead, at the best rate, that another node must have to be worth a move."""
_SLOW_S = 1.0
"""Time for which a source that has chunks may send them slowly."""
_BEHIND_S, _FIRST_BEHIND_S = 0.3, 1.4
"""Time for which a source may be behind its own source; at the beginning longer, because the source
of the source may lie."""
_REPAIR_S = 0.5
"""Time for which a source that has just moved may catch up."""
_STAND_IN_BEHIND_S, _PARENT_BEHIND_S = 1.5, 0.6
"""Largest lag behind this node of a stand-in, and of a parent that has returned."""
_ASK_PAUSE_S, _CROWDED_PAUSE_S, _STORE_PAUSE_S, _PARENT_PAUSE_S = 0.3, 0.5, 0.5, 0.5
_RETRY_S = 0.15
_PATIENCE_MAX, _LINE_PATIENCE = 8.0, 4.0
_ABOVE_S = 10.0
"""Longest wait of a node that gets nothing while bytes come to the nodes above it. On a slow line a
chunk takes long, and every node that reads the store makes the line slower. The wait is limited,
because a source may lie about the nodes above it."""
_FULL_S = 1.0
"""Wait of a node without a source for room at nodes that are ahead."""
_SETTLED_S = 3.0
"""Time for which a root looks for nodes that began earlier and are ahead."""
_STORE_CROWD = 2
"""Number of other nodes reading a tree from the store that is too many: one is enough."""
_TURN_S, _ALONE_S = 0.25, 0.3
"""Delay of each further level of a tree before its nodes read the store; wait of a node
without any answer."""
_HELP_S = 0.6
"""Time that a tree must still take to be read from two nodes."""
_HELP_PAUSE_S, _HELP_EARLY_S = 0.1, 0.3
"""Pause between questions for a second node, which are short; time for which the other tree may
still take meanwhile."""
_RANDOM_COUNT, _LAST_ASK_COUNT, _READERS_MAX = 6, 16, 4
_TOP_COUNT, _NEWEST_MAX, _SEARCHES_MAX, _FREED_MAX = 7, 4, 4, 8


class Reason(Enum):
    """Reason why a source is left."""

    WRONG = "it sent wrong bytes"
    SILENT = "it was silent"
    IDLE = "it had chunks and sent none"
    CLOSED = "it closed the connection"
    REFUSED = "it could not be reached"
    BUSY = "it feeds enough others"
    SLOW = "it was slow"
    STARVED = "nothing came to it"
    CROWDED = "another one feeds fewer"
    AHEAD = "another node is ahead"
    PARENT = "the own parent is there again"
    CIRCLE = "it is fed by this node"
    WHOLE = "all of it is here"
    OVERTAKEN = "another node has sent the rest"


_BAN_S = {
    Reason.WRONG: math.inf,
    Reason.SILENT: 2.0,
    Reason.IDLE: 20.0,
    Reason.CLOSED: 1.0,
    Reason.REFUSED: 0.5,
    Reason.BUSY: 0.5,
    Reason.SLOW: 10.0,
    Reason.STARVED: 1.0,
    Reason.CIRCLE: 1.0,
}
"""Seconds for which a source that was left is not used again; each time twice as many."""


_FAULTS = frozenset((Reason.WRONG, Reason.SILENT, Reason.IDLE, Reason.SLOW, Reason.STARVED))
"""Reasons for which a source that was left may be faulty."""


class Offer(Struct, frozen=True):
    """State that a node reports: in an answer, and as a source with each chunk."""

    node: int
    count: int
    """Chunks of the tree that it has, from the first one on."""
    streams: int
    """Nodes that it feeds in this object."""
    path: tuple[int, ...]
    """Source of the node, the source of that source, and so on to STORE; empty without a source."""
    is_low: bool = False
    """Whether it receives less than it did."""
    is_line_slow: bool = False
    """Whether both of its sources have chunks that reach it slowly."""
    age_s: float = 0.0
    """Age of the job, as far as the node knows."""
    newest: int = STORE
    """The node that began last, as far as the node knows; STORE: it knows none."""
    newest_age_s: float = 0.0


class Ask(Struct, frozen=True):
    """Ask these nodes for their offers, for `ASK_S` at most, then call `answered`."""

    nodes: tuple[int, ...]


class Take(Struct, frozen=True):
    """Read the chunks from `source` from now on."""

    source: int
    reason: Reason | None
    """Reason for which the last source is left; None at the beginning."""
    leaves_store: bool = False


class Help(Struct, frozen=True):
    """Read the chunks of the tree from `first` on from `source`, too."""

    source: int
    first: int


Step = Ask | Take | Help


def has_room(streams: int, *, is_child: bool, leaves_store: bool) -> bool:
    """Return whether a node that feeds `streams` nodes feeds one more.

    There is always room for the node's own children, and for a node that leaves the store.
    """
    return streams < (CHILD_STREAMS_MAX if is_child or leaves_store else STREAMS_MAX)


class _RateMeter:
    """Rate at which the bytes of a tree arrive."""

    def __init__(self, now_s: float) -> None:
        self.byte_count, self.start_s = 0, now_s
        self.now_s = self.arrived_s = self.good_s = now_s
        """Time of the last measurement, of the last bytes, of the last rate that was not low."""
        self.rate, self.best, self.due = math.inf, 0.0, 0.0
        """Bytes per second: measured, infinite while unknown; the best one; the expected one."""
        self._window = [(now_s, 0)]

    def add(self, now_s: float, byte_count: int) -> None:
        """Note that `byte_count` bytes have arrived altogether."""
        if byte_count > self.byte_count:
            self.byte_count, self.arrived_s = byte_count, now_s

    def measure(
        self,
        now_s: float,
        other: "_RateMeter | None",
        *,
        share: float = math.inf,
        window_s: float = _WINDOW_S,
    ) -> None:
        """Measure the rate over `window_s`.

        `other` is the meter of the other tree; no more than `share` is expected.
        """
        self.now_s, window = now_s, self._window
        window.append((now_s, self.byte_count))
        while len(window) > 2 and window[1][0] <= now_s - window_s:
            window.pop(0)
        span_s = now_s - window[0][0]
        if span_s < 0.9 * window_s:
            self.rate = math.inf
            return
        self.rate = (self.byte_count - window[0][1]) / span_s
        # Forgotten slowly: a line that others use, too, may stay slower than it was at first.
        self.best = max(self.rate, 0.995 * self.best)
        others = 0.0 if other is None else _OTHER_SHARE * other.recent
        self.due = min(max(self.best, others, _FLOOR_BYTES_PER_S), share)
        if not self.is_low:
            self.good_s = now_s

    def restart(self, now_s: float) -> None:
        """Measure another source from now on."""
        self._window = [(now_s, self.byte_count)]
        self.rate = math.inf

    @property
    def recent(self) -> float:
        """Rate as far as it is known: at the beginning and at the end, the mean."""
        if math.isinf(self.rate) or self.now_s - self.arrived_s > _WINDOW_S:
            return self.byte_count / max(_WINDOW_S, self.arrived_s - self.start_s)
        return self.rate

    @property
    def is_low(self) -> bool:
        """Whether less arrives than expected."""
        return self.rate <= _LOW_SHARE * self.due

    @property
    def was_low(self) -> bool:
        """Whether the rate is low, or is unknown and was low before."""
        is_unknown = math.isinf(self.rate)
        return self.is_low or (is_unknown and self.now_s - self.good_s > 2 * _WINDOW_S)


class Line:
    """Line of a node, which the trees of all its objects share. Not thread-safe.

    Where one object travels, a tree should get what it got before. When others begin, it gets less,
    and no source is to blame: each tree has its share of the best rate of the line.
    """

    def __init__(self, now_s: float) -> None:
        self._meter = _RateMeter(now_s)
        self._plans: set[SourcePlan] = set()

    def join(self, plan: "SourcePlan") -> None:
        """Note that a tree begins."""
        self._plans.add(plan)

    def leave(self, plan: "SourcePlan") -> None:
        """Note that a tree is whole, or not wanted any more. Idempotent."""
        self._plans.discard(plan)

    def add(self, now_s: float, byte_count: int) -> None:
        """Note that `byte_count` bytes have come."""
        self._meter.add(now_s, self._meter.byte_count + byte_count)

    def share(self, now_s: float, plan: "SourcePlan") -> float:
        """Return the rate that is due to one of the trees; infinite without other objects."""
        meter = self._meter
        if now_s - meter.now_s >= _LINE_MEASURE_S:
            meter.measure(now_s, None, window_s=_LINE_WINDOW_S)
        if self.is_free_for(plan) or not meter.best:
            return math.inf
        return meter.best / len(self._plans)

    def is_free_for(self, plan: "SourcePlan") -> bool:
        """Return whether no other object than that of `plan` is on its way."""
        return self._plans <= {plan, plan.other}


class _Bans:
    """Sources that are not used for a while."""

    def __init__(self) -> None:
        self._until: dict[int, tuple[float, int]] = {}

    def add(self, now_s: float, node: int | None, reason: Reason, *, has_sent: bool = True) -> None:
        """Ban a node, each time for twice as long; `has_sent`: whether it ever sent bytes."""
        if node is not None and node != STORE and reason in _BAN_S:
            times = self._until.get(node, (0.0, 0))[1]
            if reason is Reason.SILENT and not has_sent:
                reason = Reason.IDLE
            self._until[node] = now_s + _BAN_S[reason] * 2.0 ** min(times, 10), times + 1

    def has(self, now_s: float, node: int) -> bool:
        """Return whether a node is banned."""
        return self._until.get(node, (0.0, 0))[0] > now_s


class SourcePlan:
    """Choice of the node from which one node reads the chunks of one tree. Not thread-safe."""

    def __init__(
        self,
        trees: Trees,
        node: int,
        tree: int,
        *,
        chunk_bytes: float,
        random: Callable[[], float],
        now_s: float,
    ) -> None:
        """Begin. `chunk_bytes` is the mean size; `random` returns numbers in [0, 1)."""
        self.source: int | None = None
        """The node that feeds this one, STORE, or None."""
        self.helper: int | None = None
        """The node that sends the end of the tree meanwhile."""
        self.count = self.length = 0
        """Chunks of the tree that are here, from the first one on; all chunks, 0 while unknown."""
        self.other: SourcePlan | None = None
        """Plan of the other tree, whose rate shows the speed of the node's line."""
        self.line: Line | None = None
        """The node's line, if other objects may share it."""
        self.chunk_bytes = chunk_bytes
        self._trees, self._node, self._tree, self._random = trees, node, tree, random
        self._parent, self._stand_in = trees.parent(tree, node), trees.stand_in(tree, node)
        self._ancestors = trees.ancestors(tree, node)
        self._meter, self._bans = _RateMeter(now_s), _Bans()
        self._offer = Offer(STORE, 0, 0, ())
        """The last offer of the source."""
        self._job_s = self._start_s = self._since_s = self._alive_s = self._offered_s = now_s
        """Times at which the first node began, as far as known; this node began; this node took its
        source; the source last sent anything; the source first had chunks to send."""
        self._flows_s = now_s
        """Time at which the first bytes of the source came."""
        self._above_s = now_s
        """Time at which bytes came last to the nodes above, which may lack the rest of a chunk."""
        self._chunk_s = now_s
        """Time at which the source last got a chunk."""
        self._path_changed_s = self._source_moved_s = now_s
        """Times at which a node of the path, and the source itself, last changed its source."""
        self._source_path: tuple[int, ...] = ()
        self._path_age_s = 0.0
        """Path of the source, and the age of the job when the source said so."""
        self._patience, self._slack_s = 1.0, 0.0
        self._asked: tuple[int, ...] | None = None
        """Nodes that are being asked."""
        self._ask_s = now_s
        """Time from which nodes may be asked again."""
        self._readers: list[int] = []
        """Nodes that read the store."""
        self._freed: list[int] = []
        """Nodes that feed a source which was left as faulty, and so have a place free."""
        self._newest: dict[int, float] = {}
        """Times at which the nodes that began last have begun."""
        self._has_begun = self._has_met_parent = False
        self._sparse_count = 0
        """Answers in a row according to which the others begin over many seconds."""
        # While there is no source:
        self._lost_s, self._depth = now_s, len(self._ancestors)
        self._lost_source: int | None = None
        self._reason: Reason | None = None
        self._is_second_round = self._has_answer = False
        # Search for a node with a free place:
        self._search_count = 0
        self._searched: set[int] = set()

    # Input

    def received(self, now_s: float, byte_count: int) -> None:
        """Note bytes of the source; `byte_count` bytes of the tree have arrived so far."""
        self._alive_s = now_s
        if self._meter.arrived_s <= self._since_s:
            self._flows_s = now_s
        if self.line is not None:
            self.line.add(now_s, byte_count - self._meter.byte_count)
        self._meter.add(now_s, byte_count)

    def offered(self, now_s: float, offer: Offer) -> None:
        """Note an offer of the source."""
        self._alive_s, last = now_s, self._offer
        if offer.count != last.count:
            self._chunk_s = now_s
        self._note_path(now_s, offer)
        if last.count <= self.count < offer.count:
            self._offered_s = now_s
        self._offer = offer
        self._has_met_parent |= offer.node == self._parent
        self._job_s = min(self._job_s, now_s - offer.age_s)
        if self._node in offer.path:
            self.lost(now_s, Reason.CIRCLE)

    def above(self, moved_s: float) -> None:
        """Note when bytes came to the source, or to a node above it, of which none came here."""
        self._above_s = max(self._above_s, moved_s)

    def _note_path(self, now_s: float, offer: Offer) -> None:
        """Note the path of the source, unless a later one is known: answers overtake chunks."""
        if offer.age_s < self._path_age_s:
            return
        last, self._source_path, self._path_age_s = self._source_path, offer.path, offer.age_s
        if offer.path != last:
            self._path_changed_s = now_s
            if offer.path[:1] != last[:1]:
                self._source_moved_s = now_s

    def began(self, now_s: float, node: int, age_s: float = 0.0) -> None:
        """Note that a node began `age_s` ago."""
        if node not in (STORE, self._node):
            self._newest[node] = min(now_s - age_s, self._newest.get(node, math.inf))
            if len(self._newest) > _NEWEST_MAX:
                del self._newest[min(self._newest, key=self._newest.__getitem__)]

    def lost(self, now_s: float, reason: Reason) -> None:
        """Note that the source is gone, or of no use."""
        if reason is not Reason.REFUSED or not self._waits_for_parent(now_s):
            has_sent = self._meter.arrived_s > self._since_s
            self._bans.add(now_s, self.source, reason, has_sent=has_sent)
            self._note_left(reason)
        self._lost_s, self._depth = now_s, len(self._offer.path) or len(self._ancestors)
        self._lost_source, self.source, self._reason = self.source, None, reason
        self._is_second_round, self._has_answer, self._ask_s = False, False, now_s
        self._search_count, self._searched = 0, set()

    def help_ended(self, now_s: float, reason: Reason) -> None:
        """Note that the helper sends no more."""
        self._bans.add(now_s, self.helper, reason)
        self.helper = None

    def overtook(self) -> None:
        """Note that the source has come to where the helper began: the helper is the source."""
        self.source, self.helper = self.helper, None
        self._offer = Offer(self._node if self.source is None else self.source, 0, 0, (STORE,))

    # Output

    @property
    def is_whole(self) -> bool:
        """Whether all chunks of the tree are here."""
        return 0 < self.length == self.count

    def offer(self, now_s: float, streams: int) -> Offer:
        """Return the node's offer; `streams`: nodes that it feeds."""
        newest = max(self._newest, key=self._newest.__getitem__, default=STORE)
        newest_age_s = now_s - self._newest.get(newest, now_s)
        age_s = now_s - self._job_s
        path, is_low, is_line_slow = self.path, False, False
        if not self.is_whole:
            is_low = self.source is None or self._meter.was_low
            is_line_slow = self._is_line_slow
        return Offer(
            self._node, self.count, streams, path, is_low, is_line_slow, age_s, newest, newest_age_s
        )

    @property
    def path(self) -> tuple[int, ...]:
        """The source, the source of that one, and so on to STORE, as far as known."""
        if self.is_whole or self.source == STORE:
            return (STORE,)
        return () if self.source is None else (self.source, *self._offer.path)[:PATH_MAX]

    def step(self, now_s: float) -> Step | None:
        """Return the next step, if any. Call every 0.1 s or so, and after `lost`."""
        self._measure(now_s)
        if self._patience > 1 and now_s - self._since_s > 2.0 and not self._meter.is_low:
            self._patience = 1.0
        if not self._has_begun:
            self._has_begun = True
            return self._take(now_s, self._parent, None)
        self._check_silence(now_s)
        if self._asked is not None or now_s < self._ask_s:
            return None
        if self.source is None:
            if self._search_count:
                return self._ask(now_s, self._unsearched())
            second = [*self._readers, *self._trees.top(self._tree, _TOP_COUNT)]
            if self._is_second_round:
                return self._ask(now_s, second, least=_LAST_ASK_COUNT)
            return self._ask(now_s, self._likely_sources())
        if self._wants_help:
            # Anybody: the nodes around this one are behind as well.
            likely = self._likely_sources() if self._meter.is_low else [self.source]
            return self._ask(now_s, likely, _HELP_PAUSE_S, _LAST_ASK_COUNT)
        if self.source == STORE:
            is_settled = self._parent == STORE and now_s - self._start_s > _SETTLED_S
            if is_settled and not self._meter.is_low:
                return None
            top = self._trees.top(self._tree, _TOP_COUNT)
            pause_s = _STORE_PAUSE_S * (1 + self._random())
            return self._ask(now_s, [*self._readers, *self._likely_sources(), *top], pause_s)
        if now_s - self._since_s < _WINDOW_S and not (self._is_late and self._offer.count):
            return None
        if self._meter.is_low:
            return self._ask(now_s, self._likely_sources(), _ASK_PAUSE_S)
        if self._is_crowded:
            nodes = self._unsearched() if self._search_count else self._likely_sources()
            return self._ask(now_s, nodes, _CROWDED_PAUSE_S * (0.5 + self._random()))
        if self._parent not in (STORE, self.source) and not self._bans.has(now_s, self._parent):
            self._ask_s = now_s + _PARENT_PAUSE_S * (0.5 + self._random())
            self._asked = (self._parent,)
            return Ask(self._asked)
        return None

    def _measure(self, now_s: float) -> None:
        """Measure the rate, and how long a chunk may take where several objects share the line."""
        share = math.inf if self.line is None else self.line.share(now_s, self)
        self._slack_s = min(_SLACK_MAX_S, _SLACK_CHUNKS * self.chunk_bytes / share)
        other = None if self.other is None else self.other._meter
        window_s = max(_WINDOW_S, self._slack_s)
        self._meter.measure(now_s, other, share=share, window_s=window_s)

    def _check_silence(self, now_s: float) -> None:
        if self.source is None or self.source == STORE:
            return
        # At the beginning a source that has chunks must send some: heartbeats do not count.
        is_idle = self._offer.count > self.count and self._meter.arrived_s < self._since_s
        last_s = max(self._since_s, self._offered_s) if is_idle else self._alive_s
        if now_s - last_s > (_FIRST_S if is_idle else SILENCE_S):
            self.lost(now_s, Reason.IDLE if is_idle else Reason.SILENT)

    def answered(self, now_s: float, offers: Iterable[Offer]) -> Step | None:
        """Return the next step after an `Ask`; `offers`: the answers that came in time."""
        by_node = {one.node: one for one in offers}
        for one in by_node.values():
            self._job_s = min(self._job_s, now_s - one.age_s)
            self.began(now_s, one.newest, one.newest_age_s)
        if self._waits_for_parent(now_s):
            share = (len(by_node) + 1) / (len(self._asked or ()) + 1)
            is_sparse = now_s - self._job_s > max(_SPARSE_MIN_S, _SPARSE_S * share)
            self._sparse_count = self._sparse_count + 1 if is_sparse else 0
        else:
            for node in self._asked or ():
                if node not in by_node:
                    self._bans.add(now_s, node, Reason.REFUSED)
        self._asked = None
        readers = [(one.node, *one.path)[-2] for one in by_node.values() if STORE in one.path]
        self._readers = list(dict.fromkeys([*readers, *self._readers]))[:_READERS_MAX]
        if self.source is None:
            return self._find_source(now_s, by_node)
        if self._wants_help:
            first = (self.count + self.length) // 2
            fair = [one for one in by_node.values() if one.streams < FAIR_STREAMS]
            self.helper = self._choose(now_s, fair, min(self.length, first + self._lead))
            if self.helper is not None:
                return Help(self.helper, first)
        if self.source == STORE:
            return self._leave_store(now_s, list(by_node.values()))
        if self._meter.is_low:
            return self._leave_slow_source(now_s, by_node)
        parent = by_node.get(self._parent)
        if parent is not None and self._can_return(now_s, parent):
            return self._take(now_s, self._parent, Reason.PARENT)
        if not self._is_crowded:
            return None
        room, rack = self._offer.streams - 1, self._trees.rack(self._node)
        fewer = [
            one
            for one in by_node.values()
            if not one.is_low
            and one.streams + (one.node not in rack) < room + (self.source not in rack)
        ]
        best = self._choose(now_s, fewer, self.count)
        if best is None and not self._search(now_s, by_node):
            # Full nodes below: the place too many moves down, to where places are free.
            below = [
                one
                for one in by_node.values()
                if not one.is_low
                and one.node in rack
                and one.streams < self._offer.streams
                and one.count + self._lead <= self._offer.count
            ]
            best = self._choose(now_s, below, self.count)
        return None if best is None else self._take(now_s, best, Reason.CROWDED)

    def _leave_store(self, now_s: float, offers: Sequence[Offer]) -> Take | None:
        """Return a node that is ahead, or one nearer to the root that reads the store, too.

        A single node is not believed: another one must be fed by it. But where many read the store,
        nobody is fed by anybody, and the line of the store is what all wait for.
        """
        least_count = self.count - self._lead

        def is_better(one: Offer) -> bool:
            is_reader = one.path == (STORE,) and self._rank(one.node) < self._rank(self._node)
            is_ahead = one.count >= self.count + 2 and not one.is_line_slow
            return is_ahead or (is_reader and one.count >= least_count)

        def has_witness(one: Offer) -> bool:
            fed_count = max(1, min(self.count, one.count - self._lead))
            return any(one.node in child.path and child.count >= fed_count for child in offers)

        is_crowded = sum(one.path == (STORE,) for one in offers) >= _STORE_CROWD
        better = [one for one in offers if is_better(one) and (is_crowded or has_witness(one))]
        best = self._choose(now_s, better, 0)
        return None if best is None else self._take(now_s, best, Reason.AHEAD)

    def _can_return(self, now_s: float, parent: Offer) -> bool:
        """Return whether the parent can feed this node again."""
        if parent.is_low or not self._can_use(now_s, parent):
            return False
        has_place = not self._is_late or parent.streams < FAIR_STREAMS
        return has_place and parent.count + self._chunks_in(_PARENT_BEHIND_S) >= self.count

    def _leave_slow_source(self, now_s: float, offers: dict[int, Offer]) -> Take | None:
        """Return where to go while too little arrives; None: wait for nodes nearer to the store."""
        assert self.source is not None
        lead, answer = self._lead, offers.pop(self.source, None)
        source = answer or self._offer
        self._note_path(now_s, source)
        low_s = now_s - self._meter.good_s
        above_s = min(self._above_s, self._meter.arrived_s + _ABOVE_S)
        starved_s = now_s - max(self._meter.good_s, self._path_changed_s)
        starved_max_s, slack_s = STARVED_S + self._slack_s, self._slack_s
        if now_s - self._chunk_s > starved_max_s:
            # Chunks of the source take long. It is not a node that sends few of those it gets.
            starved_s = min(starved_s, now_s - above_s)
        above = offers.get(source.path[0]) if source.path else None
        is_slow = source.count - self.count >= lead
        patience = self._patience * (_LINE_PATIENCE if self._is_line_slow else 1)
        slow_s = _SLOW_S * patience + slack_s
        # Not since the rate was good: before the source had chunks, none could come.
        if is_slow and now_s - max(self._meter.good_s, self._flows_s) < slow_s:
            return None
        is_gone = answer is None or now_s - self._alive_s > 2 * HEARTBEAT_S
        is_proven = low_s > (_BEHIND_S if self.count else _FIRST_BEHIND_S) + slack_s
        is_behind = (
            above is not None
            and above.count - source.count >= lead
            and now_s - self._source_moved_s > _REPAIR_S + slack_s
            and (is_gone or source.is_line_slow or is_proven)
        )
        # The store has all chunks: a root whose line is slow is behind it.
        is_behind |= source.path == (STORE,) and source.is_line_slow
        if is_slow or is_behind or starved_s > starved_max_s:
            quick = [one for one in offers.values() if not one.is_line_slow]
            best = self._choose(now_s, quick, self.count + lead)
            if self.source == self._parent and self._can_stand_in(now_s, offers):
                best = self._stand_in
            if best is not None:
                return self._leave(now_s, best, Reason.SLOW if is_slow else Reason.STARVED)
        turn_s = STARVED_S + 2 * _TURN_S * len(self._ancestors)
        is_turn = now_s - max(self._meter.arrived_s, self._path_changed_s, above_s) > turn_s
        # Where the source has more, it is more likely the own line.
        is_turn &= not is_slow or low_s > 2 * turn_s * self._patience
        # The other tree shows that the store and this line are not slow: the nodes above are.
        is_late = starved_s > turn_s + slack_s or low_s > 2 * (turn_s + slack_s)
        is_turn |= is_late and self._is_other_tree_better
        return self._leave(now_s, STORE, Reason.STARVED) if is_turn else None

    def _find_source(self, now_s: float, offers: dict[int, Offer]) -> Take | None:
        """Return the next source of a node that has none; None: ask again."""
        self._has_answer |= bool(offers)
        if self._waits_for_parent(now_s):
            if self._parent in offers and self._can_use(now_s, offers[self._parent]):
                return self._take(now_s, self._parent, self._reason)
            self._lost_s, self._ask_s = now_s, now_s + _RETRY_S
            return None
        fed = [one for one in offers.values() if STORE in one.path]
        has_place = self._lost_source == self._parent and self._can_stand_in(now_s, offers)
        if has_place and (self._stand_in != STORE or self.count or not fed):
            return self._take(now_s, self._stand_in, self._reason)
        if self.count == 0:
            # The start has just begun: the nearest ancestor that answers will be fed in time.
            for node in self._ancestors:
                if node in offers and self._can_use(now_s, offers[node]):
                    return self._take(now_s, node, self._reason)
        if self._reason is not Reason.BUSY:
            fed = [one for one in fed if self._lost_source not in one.path]
        best = self._choose(now_s, fed, self.count)
        if best is not None:
            if offers[best].streams >= FAIR_STREAMS and self._search(now_s, offers):
                return None
            return self._take(now_s, best, self._reason)
        if self._is_second_round and now_s - self._lost_s > self._store_wait_s(offers):
            return self._take(now_s, STORE, self._reason)
        self._ask_s = now_s + (_RETRY_S if self._is_second_round else 0.0)
        self._is_second_round = not self._is_second_round
        return None

    def _store_wait_s(self, offers: dict[int, Offer]) -> float:
        """Return how long this node goes without a source before it reads the store."""
        alone_s = _ALONE_S * (1 + 0.3 * len(self._ancestors))
        if any(one.count > self.count for one in offers.values()):
            return _FULL_S
        if not self._has_answer:
            return alone_s
        # The node that is nearest to the root goes first; the others find it ahead.
        others = [n for n, one in offers.items() if self._node not in one.path]
        is_first = all(self._rank(self._node) < self._rank(n) for n in others)
        wait_s = 0.0 if is_first else _TURN_S * (1 + self._depth)
        return max(wait_s, alone_s) if self.count == 0 and self._parent != STORE else wait_s

    # State

    def _waits_for_parent(self, now_s: float) -> bool:
        is_new = self.count == 0 and not self._has_met_parent and self._parent != STORE
        is_banned = self._bans.has(now_s, self._parent)
        is_young = now_s - self._job_s < GATHER_S and self._sparse_count < _SPARSE_ANSWERS
        return is_new and not is_banned and is_young

    @property
    def _is_late(self) -> bool:
        """Whether the node began when the others had long begun."""
        return self._start_s - self._job_s > GATHER_S

    @property
    def _is_crowded(self) -> bool:
        """Whether the source feeds more than it should, and this node has no right to its place."""
        has_own_place = self.source in (self._parent, self._stand_in) and not self._is_late
        is_full = self._offer.streams > FAIR_STREAMS and self._offer.count > self.count + 1
        return is_full and not has_own_place

    @property
    def _is_held_up(self) -> bool:
        """Whether the source has chunks that arrive slowly."""
        has_chunks = self.source == STORE or self._offer.count - self.count >= self._lead
        return self._meter.is_low and has_chunks

    @property
    def _is_line_slow(self) -> bool:
        """Whether the sources of both trees have chunks that arrive slowly."""
        return self._is_held_up and self.other is not None and self.other._is_held_up

    @property
    def _is_other_tree_better(self) -> bool:
        """Whether the other tree comes at a good rate, and much faster than this one."""
        if self.other is None:
            return False
        meter = self.other._meter
        rate = meter.best if self.other.is_whole else meter.recent
        return self._meter.rate <= _LOW_SHARE * rate and rate > _LOW_SHARE * meter.best

    @property
    def _wants_help(self) -> bool:
        """Whether half of the line is free, since the other tree is whole, and this one is not."""
        if self.helper is not None or self.other is None or not self.length:
            return False
        if self.other.length - self.other.count > self.other._chunks_in(_HELP_EARLY_S):
            return False
        rate = self._meter.best if math.isinf(self._meter.rate) else self._meter.rate
        return (self.length - self.count) * self.chunk_bytes > _HELP_S * rate

    def _chunks_in(self, seconds: float) -> int:
        """Return how many chunks arrive in a time at the best rate."""
        return math.ceil(seconds * self._meter.best / self.chunk_bytes)

    @property
    def _lead(self) -> int:
        """Number of chunks that another node must be ahead to be worth a move."""
        return max(2, self._chunks_in(_LEAD_S))

    # Choice

    def _rank(self, node: int) -> tuple[int, int]:
        return len(self._trees.ancestors(self._tree, node)), node

    def _can_use(self, now_s: float, offer: Offer) -> bool:
        if offer.node == self.source or self._node in offer.path:
            return False
        is_child, leaves_store = offer.node == self._parent, self.source == STORE
        is_free = has_room(offer.streams, is_child=is_child, leaves_store=leaves_store)
        return is_free and not self._bans.has(now_s, offer.node)

    def _can_stand_in(self, now_s: float, offers: dict[int, Offer]) -> bool:
        """Return whether the stand-in of the parent is fed and not far behind."""
        if self._stand_in == STORE:
            return self._parent != STORE
        offer = offers.get(self._stand_in)
        if offer is None or not self._can_use(now_s, offer):
            return False
        # Where the parent has begun, its other child finds a source, and so the stand-in below it.
        if STORE not in offer.path and not self._has_met_parent:
            return False
        if offer.is_line_slow:
            return False
        return offer.count + self._chunks_in(_STAND_IN_BEHIND_S) >= self.count

    def _choose(self, now_s: float, offers: Iterable[Offer], least_count: int) -> int | None:
        """Return a node that has so many chunks and feeds few; None: there is none.

        The uplinks of racks are full when all is well, so that a node of another rack has to feed
        fewer. Not the one that is furthest: a member who lies would be everybody's choice.
        """
        rack = self._trees.rack(self._node)
        fit = [
            (one.is_low, max(one.streams, 1) + (one.node not in rack), self._random(), one.node)
            for one in offers
            if one.count >= least_count and self._can_use(now_s, one)
        ]
        return min(fit)[-1] if fit else None

    def _search(self, now_s: float, offers: dict[int, Offer]) -> bool:
        """Return whether nodes that began last are asked next: they feed few."""
        self._searched |= offers.keys()
        if self._search_count < _SEARCHES_MAX and self._unsearched():
            self._search_count += 1
            self._ask_s = now_s
            return True
        self._search_count, self._searched = 0, set()
        return False

    def _unsearched(self) -> list[int]:
        return [node for node in self._newest if node not in self._searched]

    def _likely_sources(self) -> list[int]:
        """Return the nodes that are asked first."""
        trees, tree, node, parent = self._trees, self._tree, self._node, self._parent
        likely = [] if self.source is None else [self.source]
        if self._is_late:
            likely += self._newest
        likely += [*self._offer.path[:3], parent, self._stand_in]
        likely += [*self._ancestors[1:3], *self._ancestors[-1:]]
        if parent != STORE:
            likely += trees.children(tree, parent)
        likely += self._freed
        return [*likely, trees.parent(1 - tree, node), *trees.children(tree, node)]

    def _ask(
        self, now_s: float, likely: Iterable[int], pause_s: float = 0.0, least: int = 0
    ) -> Ask:
        """Ask these nodes and some random ones, `least` in all."""

        def is_new(node: int) -> bool:
            is_nobody = node in (STORE, self._node) or node in nodes
            return not is_nobody and not self._bans.has(now_s, node)

        nodes: list[int] = []
        for node in likely:
            if is_new(node):
                nodes.append(node)
        wanted, count = max(len(nodes) + _RANDOM_COUNT, least), self._trees.node_count
        for _ in range(2 * min(wanted, count)):
            node = int(self._random() * count)
            if len(nodes) < wanted and is_new(node):
                nodes.append(node)
        self._ask_s, self._asked = now_s + pause_s, tuple(nodes)
        return Ask(self._asked)

    # Moves

    def _note_left(self, reason: Reason) -> None:
        if self.source is not None and self.source != STORE and reason in _FAULTS:
            parents = [self._trees.parent(tree, self.source) for tree in range(TREE_COUNT)]
            freed = dict.fromkeys([*self._offer.path[:1], *parents, *self._freed])
            self._freed = list(freed)[:_FREED_MAX]

    def _leave(self, now_s: float, source: int, reason: Reason) -> Take:
        self._bans.add(now_s, self.source, reason)
        self._note_left(reason)
        self._patience = min(2 * self._patience, _PATIENCE_MAX)
        return self._take(now_s, source, reason)

    def _take(self, now_s: float, source: int, reason: Reason | None) -> Take:
        leaves_store, self.source = self.source == STORE, source
        self._offer = Offer(source, 0, 0, ())
        self._source_path, self._path_age_s = (), 0.0
        self._alive_s = self._since_s = now_s
        self._ask_s = now_s + _ASK_PAUSE_S
        self._search_count, self._searched = 0, set()
        self._meter.restart(now_s)
        return Take(source, reason, leaves_store)
