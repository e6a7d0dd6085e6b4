"""Placement of files that are written at the same time, spread evenly over the DataNodes.

HDFS chooses DataNodes at random. With eight parts on four DataNodes the busiest one gets three or
four parts, and a striped file is as slow as its slowest part, whenever it is written or read. So
HDFS is asked to choose, for each file of a group, among the DataNodes with the fewest open files.
`ServerChooser` counts open files by DataNode for all groups of a backend; a `PlacedGroup` counts
its closed files too until the whole group is closed.

Thread-safe, except `PlacedWriter`, which belongs to one thread.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from bootseer.store.backend import Backend, FileGroup, Piece, Writer
from bootseer.store.hdfs.writer import HdfsWriter

# Files are placed one at a time, so that each choice takes the earlier ones into account. The
# others wait, up to the second limit, as long as one after another is placed: on a busy node eight
# placements were seen to take longer than the first limit.
TURN_MAX_S = 2.0
_ALL_WAIT_MAX_S = 10.0
# Time for which it is assumed that there are no servers other than the known ones.
_ALL_KNOWN_S = 60.0
# Time for which a server is avoided that was chosen but did not take the file: it is dead, and HDFS
# takes about ten minutes to notice.
_AVOIDED_S = 600.0

Group = tuple[str, ...]
"""Servers of one file."""
Place = Callable[[Collection[str]], Group | None]
"""`HdfsWriter.place` of one file; the argument lists servers to avoid."""


class ServerChooser:
    """Number of open files by server, from which the servers of new files are chosen."""

    def __init__(self) -> None:
        self.block_bytes = 0
        """Block size of new files; 0 until it is known."""
        self._open_counts: Counter[str] = Counter()
        self._open_groups: Counter[Group] = Counter()
        self._avoided_until_s: dict[str, float] = {}
        self._all_known_until_s = 0.0
        self._replica_count = 1
        self._turn = threading.Lock()
        self._turn_count = 0
        self._lock = threading.Lock()

    def choose(self, place: Place, *, is_one_rack: bool = False) -> Group:
        """Place a new file; return its servers, which are counted until `release`.

        The result is empty if HDFS does not tell the servers. `is_one_rack` says that all servers
        are in one rack.
        """
        if not self._wait_for_turn():
            return ()
        try:
            for avoid in self._candidate_exclusions(is_one_rack):
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
        """Take the lock for placing one file; return False if HDFS does not answer."""
        end_s = time.monotonic() + _ALL_WAIT_MAX_S
        while True:
            turn_count = self._turn_count
            if self._turn.acquire(timeout=TURN_MAX_S):
                self._turn_count += 1
                return True
            if self._turn_count == turn_count or time.monotonic() > end_s:
                return False

    def count_actual(self, chosen: Group, actual: Group) -> Group:
        """Replace a file's chosen servers by its actual ones in the counts; return the latter."""
        if not chosen or not actual or set(chosen) == set(actual):
            return chosen
        self.release(chosen)
        with self._lock:
            until_s = time.monotonic() + _AVOIDED_S
            self._avoided_until_s.update(dict.fromkeys(set(chosen) - set(actual), until_s))
        self._count(actual)
        return actual

    def release(self, servers: Group) -> None:
        """Stop counting a file."""
        with self._lock:
            self._open_counts.subtract(servers)
            self._open_groups -= Counter([servers])

    def _count(self, servers: Group) -> None:
        with self._lock:
            self._open_counts.update(servers)
            self._open_groups[servers] += 1
            self._replica_count = max(1, len(servers))

    def _candidate_exclusions(self, is_one_rack: bool) -> Iterator[frozenset[str]]:
        """Yield sets of servers to avoid, the best choice first."""
        with self._lock:
            avoided = self._avoided()
            counts = dict(self._open_counts)
            groups = tuple(self._open_groups)
            replica_count = self._replica_count
        is_free = replica_count == 1 or is_one_rack
        if is_free and time.monotonic() >= self._all_known_until_s:
            # Prefer a server that is not known yet to a second file on a known one.
            exclusion = avoided.union(server for server, count in counts.items() if count)
            yield exclusion
            if not exclusion:
                return
        if replica_count > 1 and is_one_rack:
            usable = {server: count for server, count in counts.items() if server not in avoided}
            group = choose_group(usable, groups, replica_count)
            if len(group) == replica_count:
                yield frozenset(counts).difference(group)
        # HDFS puts replicas into several racks, so it must be left a choice of servers.
        kept_count = 1 if replica_count == 1 else max(2 * replica_count, -(-len(counts) // 2))
        least = sorted(count for server, count in counts.items() if server not in avoided)
        limit = max(least[:kept_count], default=0)
        exclusion = avoided.union(server for server, count in counts.items() if count > limit)
        yield exclusion
        if exclusion:
            yield frozenset()

    def _avoided(self) -> frozenset[str]:
        now_s = time.monotonic()
        for server in [each for each, until_s in self._avoided_until_s.items() if until_s <= now_s]:
            del self._avoided_until_s[server]
        return frozenset(self._avoided_until_s)


class PlacedGroup(FileGroup):
    """Group of HDFS files that are placed on different servers as far as possible."""

    def __init__(
        self,
        backend: Backend,
        chooser: ServerChooser,
        create: Callable[[str], HdfsWriter],
        is_one_rack: Callable[[], bool],
    ) -> None:
        super().__init__(backend)
        self._chooser = chooser
        self._create = create
        self._is_one_rack = is_one_rack
        self._stored_on: list[Group] = []
        """Servers of the closed files of the group. They count, since otherwise the last files of a
        group would be placed where short files have just been closed."""

    @property
    def block_bytes(self) -> int:
        return self._chooser.block_bytes

    def create(self, path: str, *, is_checked: bool = False) -> "PlacedWriter":
        writer = self._create(path)
        if is_checked:
            writer.expect_checksums()
        servers = self._chooser.choose(writer.place, is_one_rack=self._is_one_rack())
        return PlacedWriter(writer, servers, self, path)

    def end(self) -> None:
        while self._stored_on:
            self._chooser.release(self._stored_on.pop())

    def count_actual(self, path: str, writer: HdfsWriter, chosen: Group) -> Group:
        """Count a file on its actual servers once its first bytes are written.

        They may differ from the chosen ones, of which one may be dead.
        """
        if not self._chooser.block_bytes:
            self._chooser.block_bytes = self.backend.stat(path).block_bytes
        return self._chooser.count_actual(chosen, writer.servers()) if chosen else chosen

    def stop_counting(self, servers: Group, *, is_stored: bool) -> None:
        """Note that a file on `servers` is no longer open."""
        if is_stored:
            self._stored_on.append(servers)
        else:
            self._chooser.release(servers)


class PlacedWriter(Writer):
    """Writer of a file that the placement counts while the file is open."""

    def __init__(self, inner: HdfsWriter, servers: Group, group: PlacedGroup, path: str) -> None:
        self._inner = inner
        self._servers: Group | None = servers
        """None once the file is no longer counted."""
        self._group = group
        self._path = path
        self._is_counted = False

    def write(self, data: Piece) -> None:
        self._inner.write(data)
        self._count_actual()

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        self._inner.write_all(pieces, note_progress)
        self._count_actual()

    def keep_alive(self) -> None:
        self._inner.keep_alive()

    def close(self) -> None:
        self._inner.close()
        self._stop_counting(is_stored=True)

    def abort(self) -> None:
        self._stop_counting(is_stored=False)
        self._inner.abort()

    def abandon(self) -> bool:
        self._stop_counting(is_stored=False)
        return self._inner.abandon()

    @property
    def is_buffered(self) -> bool:
        return self._inner.is_buffered

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def _count_actual(self) -> None:
        if not self._is_counted and self._servers is not None:
            self._is_counted = True
            self._servers = self._group.count_actual(self._path, self._inner, self._servers)

    def _stop_counting(self, *, is_stored: bool) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            self._group.stop_counting(servers, is_stored=is_stored)


def choose_group(counts: Mapping[str, int], groups: Iterable[Group], size: int) -> Group:
    """Return `size` of the servers with the fewest files, at random among equals. Pure.

    Args:
        counts: Number of files by server.
        groups: Servers of each existing file.
        size: Number of servers to choose; fewer are returned if there are fewer.

    Files with a common server are connected. When a server is slow, its files are read from their
    other replicas, whose servers pass files of their own on to further replicas, along the
    connections. If two files were on the same two servers, one server would have to serve both. So
    servers are chosen that connect as many files as possible: eight files with two replicas each on
    eight servers form one ring.
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
