"""Which NameNode of several is asked next, and how long it may take. Any thread.

The one that answered last comes first. One that is silent (its host is dead, or it hangs) leaves
time for the others, and for another round: none may be active for a while.
"""

import time
from collections.abc import Iterator

CONNECT_S = 5.0
"""The deadline of a connection where other NameNodes are left: TCP asks three times meanwhile."""


class Failover:
    """The order in which the NameNodes of one cluster are asked; they are counted from 0."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first = 0

    def shares(self, count: int, end_s: float, *, is_last: bool) -> Iterator[tuple[int, float]]:
        """Yields for one round each NameNode to ask and its deadline on the monotonic clock.

        `is_last`: no further round follows.
        """
        first = self.first
        for turn in range(count):
            left_count = count - turn
            now_s = time.monotonic()
            until_s = now_s + max(0.0, end_s - now_s) / (left_count if is_last else 2 * left_count)
            yield (first + turn) % count, until_s if count > 1 else end_s
