"""How many references the kernel holds to each node, as the protocol counts them.

Each entry sent adds one, FORGET takes away. Alone decides when a node is unused. Thread-safe.
"""

import threading
from collections.abc import Callable, Iterable


class LookupCounts:
    """The counts, and a call of `dropped(node)` once the kernel cannot name the node any more.

    A node whose count falls to zero while another thread is just looking names up may be that
    thread's answer, not counted yet; so `dropped` waits until no lookup is under way.
    """

    def __init__(self, dropped: Callable[[int], None]) -> None:
        self._dropped = dropped
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._lookups_under_way = 0
        self._zero: set[int] = set()

    def begin(self) -> None:
        """A request that may name nodes starts."""
        with self._lock:
            self._lookups_under_way += 1

    def end(self, nodes: Iterable[int] = ()) -> None:
        """It ended, and its reply names `nodes`. Call before the reply is sent: the kernel may
        forget a node as soon as it knows it."""
        with self._lock:
            self._lookups_under_way -= 1
            counts = self._counts
            for node in nodes:
                counts[node] = counts.get(node, 0) + 1
            if self._zero:
                self._drop_unused()

    def forget(self, node: int, count: int) -> None:
        """The kernel dropped `count` references, or a reply with them did not arrive.

        Nodes that are not known are tolerated: a restarted server has lost its counts.
        """
        with self._lock:
            left = self._counts.get(node, 0) - count
            if left > 0:
                self._counts[node] = left
            elif self._counts.pop(node, None) is not None:
                self._zero.add(node)
            self._drop_unused()

    def _drop_unused(self) -> None:
        # With the lock held: a lookup that began now could be answered with such a node.
        if self._lookups_under_way or not self._zero:
            return
        for node in self._zero:
            if node not in self._counts:
                self._dropped(node)
        self._zero.clear()

    def snapshot(self) -> dict[int, int]:
        """node -> count, of this moment."""
        with self._lock:
            return dict(self._counts)
