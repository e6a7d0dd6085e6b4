"""Which NameNode of several is asked next, and how long it may take. Any thread.

The one that answered last comes first. One that is silent (its host is dead, or it hangs) leaves
time for the others, and for another round: none may be active for a while.
"""

import time
from collections.abc import Iterator

CONNECT_S = 5.0
"""For a connection, where there are others: TCP asks three times meanwhile."""


class Turns:
    """Of one cluster's NameNodes, which are counted from 0."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first = 0

    def shares(self, count: int, end_s: float, *, is_last: bool) -> Iterator[tuple[int, float]]:
        """One round: whom to ask, and until when (monotonic). `is_last`: there is no other one."""
        first = self.first
        for turn in range(count):
            left_count = count - turn
            now_s = time.monotonic()
            until_s = now_s + max(0.0, end_s - now_s) / (left_count if is_last else 2 * left_count)
            yield (first + turn) % count, until_s if count > 1 else end_s
