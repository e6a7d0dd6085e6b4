"""Which of a block's DataNodes a read goes to: the one from which it should come first.

Blocks lie on different DataNodes, so what is read in parallel loads them evenly that way; one that
is slower than the others gets as much less. Owns what is under way at each, and how fast each was
lately. Thread-safe.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from msgspec import Struct

from bootseer.transfer.attempt import Attempt

Address = tuple[str, int]

REMEMBERED_S = 60.0
"""How long what was learned of a DataNode holds: then it has a new chance."""
_TELLING_BYTES = 256 << 10
"""A read of less is as slow as its way there and back."""
_ALIKE = 3.0
"""DataNodes whose paces differ less are as fast as one another: what is seen of each varies so."""
_PATIENCE_S = 0.1
"""Before the first byte of a read comes, a disk may have to find it."""
_FAR = 4.0
"""A read from another rack counts as so many: the network between racks is shared by all."""


class Replica(Struct, frozen=True):
    """A DataNode that has a block."""

    address: Address
    is_far: bool = False
    """Whether another one is nearer to us, by what the NameNode says."""


class _Read(Struct, eq=False):
    attempt: Attempt
    begun_s: float
    begun_bytes: int
    beside: int
    """How many were under way at the DataNode, this one among them."""


class Replicas:
    """The DataNodes of one cluster."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: defaultdict[Address, list[_Read]] = defaultdict(list)
        self._paces: dict[Address, tuple[float, float]] = {}
        """Seconds per byte of a DataNode that serves one read at a time; until when that holds."""
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
            typical = self._typical(now_s)
            costs = [self._cost(each, typical, now_s) for each in usable]
            address = usable[costs.index(min(costs))].address
            reads = self._under_way[address]
            reads.append(_Read(attempt, now_s, attempt.done_bytes, len(reads) + 1))
            return address

    def end(self, address: Address, attempt: Attempt) -> None:
        """`attempt` is over."""
        now_s = self._clock()
        with self._lock:
            reads = self._under_way[address]
            read = next(each for each in reads if each.attempt is attempt)
            reads.remove(read)
            known = self._known(address, now_s)
            seen = _seen(read, now_s)
            if attempt.is_given_up:
                # It would have taken longer.
                pace = max(known, seen)
            elif attempt.done_bytes - read.begun_bytes >= _TELLING_BYTES:
                pace = (known + seen) / 2 if known else seen
            else:
                return
            self._paces[address] = (pace, now_s + REMEMBERED_S)

    def failed(self, address: Address) -> bool:
        """It did not give what it was asked for. Returns whether that is new: it was not left for
        a failure before."""
        now_s = self._clock()
        with self._lock:
            is_new = self._failed_until_s.get(address, 0.0) <= now_s
            self._failed_until_s[address] = now_s + REMEMBERED_S
            return is_new

    def _cost(self, replica: Replica, typical: float, now_s: float) -> float:
        """How long a read would take there, in reads of a typical DataNode that has nothing else to
        do."""
        reads = self._under_way[replica.address]
        # What has not come yet says how slow it is at least.
        waited = (_seen(read, now_s - _PATIENCE_S) for read in reads)
        pace = max(self._known(replica.address, now_s), *waited, 0.0)
        cost = float(len(reads) + 1)
        if typical and pace > _ALIKE * typical:
            cost *= pace / typical
        return cost * _FAR if replica.is_far else cost

    def _typical(self, now_s: float) -> float:
        """Returns the median pace of the known DataNodes; 0 if none is known."""
        known = sorted(pace for pace, until_s in self._paces.values() if until_s > now_s)
        return known[(len(known) - 1) // 2] if known else 0.0

    def _known(self, address: Address, now_s: float) -> float:
        pace, until_s = self._paces.get(address, (0.0, 0.0))
        return pace if until_s > now_s else 0.0


def _seen(read: _Read, now_s: float) -> float:
    """Seconds per byte that a read shows of its DataNode so far."""
    done_bytes = max(read.attempt.done_bytes - read.begun_bytes, _TELLING_BYTES)
    return (now_s - read.begun_s) / done_bytes / read.beside
