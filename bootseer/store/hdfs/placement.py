"""Spread files that are written at once over the DataNodes.

HDFS draws a DataNode for each block. Eight parts on four DataNodes so share the busiest one by
three or four, and a striped file is as slow as its slowest part, to write and for ever after to
read. So HDFS is asked to choose for each file of a group among the DataNodes that have the fewest
open ones. `Placement` counts open files by DataNode for all groups of a backend; a `PlacedGroup`
counts its stored files, too, until all of it is stored.

Thread-safe, but for `PlacedWriter`, which belongs to one thread.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from bootseer.store.backend import Backend, FileGroup, Piece, Writer
from bootseer.store.hdfs.writer import HdfsWriter

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
"""`HdfsWriter.place` of one file: the servers, other than those to avoid."""


class Placement:
    """Open files by server."""

    def __init__(self) -> None:
        self.block_bytes = 0
        """Size of the blocks of new files; 0 as long as it is not known."""
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
        """Yield sets of servers to avoid, the best choice first."""
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


class PlacedGroup(FileGroup):
    """Files of one HDFS that lie on different servers, as far as there are so many."""

    def __init__(
        self,
        backend: Backend,
        placement: Placement,
        create: Callable[[str], HdfsWriter],
        is_one_rack: Callable[[], bool],
    ) -> None:
        super().__init__(backend)
        self._placement = placement
        self._create = create
        self._is_one_rack = is_one_rack
        self._stored_on: list[Group] = []
        """Servers of the files that are closed: without them, the last files of a group would be
        placed where short ones have just ended."""

    @property
    def block_bytes(self) -> int:
        return self._placement.block_bytes

    def create(self, path: str, *, is_checked: bool = False) -> "PlacedWriter":
        writer = self._create(path)
        if is_checked:
            writer.expect_checksums()
        servers = self._placement.choose(writer.place, is_one_rack=self._is_one_rack())
        return PlacedWriter(writer, servers, self, path)

    def end(self) -> None:
        while self._stored_on:
            self._placement.release(self._stored_on.pop())

    def settle(self, path: str, writer: HdfsWriter, chosen: Group) -> Group:
        """Count a file, which has taken its first bytes, where it has come to lie: a server that
        was chosen may be dead unnoticed."""
        if not self._placement.block_bytes:
            self._placement.block_bytes = self.backend.stat(path).block_bytes
        return self._placement.settle(chosen, writer.servers()) if chosen else chosen

    def leave(self, servers: Group, *, is_stored: bool) -> None:
        """Count a file less that is open on `servers`."""
        if is_stored:
            self._stored_on.append(servers)
        else:
            self._placement.release(servers)


class PlacedWriter(Writer):
    """A writer whose file counts in the placement while it is open."""

    def __init__(self, inner: HdfsWriter, servers: Group, group: PlacedGroup, path: str) -> None:
        self._inner = inner
        self._servers: Group | None = servers
        """None once the file does not count any more."""
        self._group = group
        self._path = path
        self._is_settled = False

    def write(self, data: Piece) -> None:
        self._inner.write(data)
        self._settle()

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        self._inner.write_all(pieces, note_progress)
        self._settle()

    def keep_alive(self) -> None:
        self._inner.keep_alive()

    def close(self) -> None:
        self._inner.close()
        self._leave(is_stored=True)

    def abort(self) -> None:
        self._leave(is_stored=False)
        self._inner.abort()

    def abandon(self) -> bool:
        self._leave(is_stored=False)
        return self._inner.abandon()

    @property
    def is_buffered(self) -> bool:
        return self._inner.is_buffered

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def _settle(self) -> None:
        if not self._is_settled and self._servers is not None:
            self._is_settled = True
            self._servers = self._group.settle(self._path, self._inner, self._servers)

    def _leave(self, *, is_stored: bool) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            self._group.leave(servers, is_stored=is_stored)


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
