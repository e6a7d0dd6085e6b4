"""When a node looks at its timeline to publish it. Pure: the clock and the dice are handed in.

Until the start is ready the waits double, so that one that hangs can be explained from elsewhere,
and ten thousand that hang ask little. Once it is ready they begin anew: other ranks follow soon.
"""

_FIRST_S = 30.0
_LONGEST_S = 900.0
_SETTLE_S = 2.0
_AFTER_READY_S = 600.0
_AT_MOST_S = 24 * 3600.0


class Schedule:
    """The looks at one start on one node."""

    def __init__(self, now_s: float, dice: float) -> None:
        """`dice` in [0, 1): nodes that start at one moment do not look at one."""
        self._wait_s = _FIRST_S
        self._is_ready = False
        self._until_s = now_s + _AT_MOST_S
        self.next_s = now_s + _FIRST_S * (0.5 + 0.5 * dice)

    def ready(self, now_s: float) -> None:
        """A process of the start is ready."""
        if not self._is_ready:
            self._is_ready = True
            self._wait_s = _SETTLE_S
            self._until_s = now_s + _AFTER_READY_S
            self.next_s = now_s + _SETTLE_S

    def looked(self, now_s: float) -> None:
        """It was time, and all was published."""
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)
        self.next_s = now_s + self._wait_s

    @property
    def is_over(self) -> bool:
        """Whether there is no further look."""
        return self.next_s > self._until_s
