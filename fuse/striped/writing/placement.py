"""Spreads the parts that are written at once over the servers of the storage.

HDFS draws a server for each block. Eight parts on four DataNodes so share the busiest one by three
or four, and a striped file is as slow as its slowest part, to write and for ever after to read. So
the storage is asked to choose for each part among the servers that have the fewest open ones.
Owns the count of open parts by server, for all files of a mount. Thread-safe.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

# One part at a time is placed, so that each choice knows those before it. The others wait as long
# as one after another is: on a busy node eight were seen to take longer than a single one may.
TURN_MAX_S = 2.0
_ALL_WAIT_MAX_S = 10.0
# How long it is believed that there are no other servers than those known.
_ALL_KNOWN_S = 60.0
# A server that was chosen and did not take the part is dead, and the storage notices so late.
_SHUNNED_S = 600.0

Group = tuple[str, ...]
"""The servers of one part."""
Place = Callable[[Collection[str]], Group | None]
"""`Writer.place` of one file: the servers, other than those to avoid."""


class Placement:
    """Open parts by server."""

    def __init__(self) -> None:
        self.block_bytes = 0
        """The storage cuts parts into blocks of so many bytes; 0 as long as that is not known."""
        self._open_counts: Counter[str] = Counter()
        self._open_groups: Counter[Group] = Counter()
        self._shunned_until_s: dict[str, float] = {}
        self._all_known_until_s = 0.0
        self._replica_count = 1
        self._turn = threading.Lock()
        self._turn_count = 0
        self._lock = threading.Lock()

    def choose(self, place: Place, *, is_one_rack: bool = False) -> Group:
        """The servers of a new part, counted until `release`; empty where the storage does not say.

        `is_one_rack`: whether any two servers are as far apart as any other two.
        """
        if not self._wait_for_turn():
            return ()
        try:
            for avoid in self._wishes(is_one_rack):
                servers = place(avoid)
                if servers is not None:
                    self._count(servers)
                    return servers
                with self._lock:
                    self._all_known_until_s = time.monotonic() + _ALL_KNOWN_S
            return ()
        finally:
            self._turn.release()

    def _wait_for_turn(self) -> bool:
        """Whether this part is the one to be placed now; no, where the storage does not answer."""
        end_s = time.monotonic() + _ALL_WAIT_MAX_S
        while True:
            turn_count = self._turn_count
            if self._turn.acquire(timeout=TURN_MAX_S):
                self._turn_count += 1
                return True
            if self._turn_count == turn_count or time.monotonic() > end_s:
                return False

    def settle(self, chosen: Group, actual: Group) -> Group:
        """Count the part where it has come to lie in the end; returns that."""
        if not chosen or not actual or set(chosen) == set(actual):
            return chosen
        self.release(chosen)
        with self._lock:
            until_s = time.monotonic() + _SHUNNED_S
            self._shunned_until_s.update(dict.fromkeys(set(chosen) - set(actual), until_s))
        self._count(actual)
        return actual

    def release(self, servers: Group) -> None:
        """A part has ended."""
        with self._lock:
            self._open_counts.subtract(servers)
            self._open_groups -= Counter([servers])

    def _count(self, servers: Group) -> None:
        with self._lock:
            self._open_counts.update(servers)
            self._open_groups[servers] += 1
            self._replica_count = max(1, len(servers))

    def _wishes(self, is_one_rack: bool) -> Iterator[frozenset[str]]:
        """Which servers to avoid: what is best, and what will do where that cannot be had."""
        with self._lock:
            shunned = self._shunned()
            counts = dict(self._open_counts)
            groups = tuple(self._open_groups)
            replica_count = self._replica_count
        is_free = replica_count == 1 or is_one_rack
        if is_free and time.monotonic() >= self._all_known_until_s:
            # Rather a server that is not known yet than a second part for one.
            wish = shunned.union(server for server, count in counts.items() if count)
            yield wish
            if not wish:
                return
        if replica_count > 1 and is_one_rack:
            usable = {server: count for server, count in counts.items() if server not in shunned}
            group = choose_group(usable, groups, replica_count)
            if len(group) == replica_count:
                yield frozenset(counts).difference(group)
        # Replicas are to lie apart (in several racks), so the storage must have a choice.
        kept_count = 1 if replica_count == 1 else max(2 * replica_count, -(-len(counts) // 2))
        least = sorted(count for server, count in counts.items() if server not in shunned)
        limit = max(least[:kept_count], default=0)
        wish = shunned.union(server for server, count in counts.items() if count > limit)
        yield wish
        if wish:
            yield frozenset()

    def _shunned(self) -> frozenset[str]:
        now_s = time.monotonic()
        for server in [each for each, until_s in self._shunned_until_s.items() if until_s <= now_s]:
            del self._shunned_until_s[server]
        return frozenset(self._shunned_until_s)


def choose_group(counts: Mapping[str, int], groups: Iterable[Group], size: int) -> Group:
    """`size` of the servers with the fewest parts, at random where several are as good; fewer, if
    there are no more. `counts`: parts by server; `groups`: those of the parts that there are. Pure.

    Parts are joined by the servers that they share. A slow server's parts are read from their other
    replicas, whose servers hand on parts of their own to others, and so on, as far as parts are
    joined: where two parts lie on the same two servers, the one that is left reads both. So parts
    are joined to as many others as can be: of eight on eight servers, each twice, to one ring.
    """
    heads = {server: server for server in counts}

    def head(server: str) -> str:
        while heads.setdefault(server, server) != server:
            heads[server] = server = heads[heads[server]]
        return server

    for first, *others in filter(None, groups):
        for other in others:
            heads[head(other)] = head(first)
    left = random.sample(sorted(counts), len(counts))
    chosen: list[str] = []
    while left and len(chosen) < size:
        joined = set(map(head, chosen))
        best = min(left, key=lambda server: (counts[server], head(server) in joined))
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)
