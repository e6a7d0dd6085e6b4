"""Which of a block's DataNodes a read goes to: the one with the fewest of ours under way.

Blocks lie on different DataNodes, so what is read in parallel loads them evenly that way. One that
is slower than others, or failed, is left alone for a while where there is another one. Owns what is
under way at each, and what is known of it. Thread-safe.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from msgspec import Struct

from bootseer.store.opened import Attempt

Address = tuple[str, int]

# Then it has a new chance: what is lost by it is one late read.
_AVOIDED_S = 60.0


class Replica(Struct, frozen=True):
    """A DataNode that has a block."""

    address: Address
    is_far: bool = False
    """Whether another one is nearer to us, by what the NameNode says."""


class Replicas:
    """The DataNodes of one cluster."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: defaultdict[Address, list[Attempt]] = defaultdict(list)
        self._slow_until_s: dict[Address, float] = {}
        self._failed_until_s: dict[Address, float] = {}

    def begin(self, replicas: tuple[Replica, ...], attempt: Attempt) -> Address | None:
        """The best one for `attempt`, counted until `end`; None where each has failed lately."""
        now_s = self._clock()
        with self._lock:
            usable = [
                each for each in replicas if self._failed_until_s.get(each.address, 0.0) <= now_s
            ]
            if not usable:
                return None
            best = min(usable, key=lambda each: self._rank(each, now_s)).address
            self._under_way[best].append(attempt)
            return best

    def end(self, address: Address, attempt: Attempt) -> None:
        """`attempt` is over."""
        with self._lock:
            self._under_way[address].remove(attempt)
            if attempt.is_late:
                self._slow_until_s[address] = self._clock() + _AVOIDED_S

    def failed(self, address: Address) -> None:
        """It did not give what it was asked for."""
        with self._lock:
            self._failed_until_s[address] = self._clock() + _AVOIDED_S

    def _rank(self, replica: Replica, now_s: float) -> tuple[bool, bool, int]:
        under_way = self._under_way[replica.address]
        # A read that is late is asked for again at once, before it has ended.
        is_slow = self._slow_until_s.get(replica.address, 0.0) > now_s or any(
            attempt.is_late for attempt in under_way
        )
        return is_slow, replica.is_far, len(under_way)
