"""Budget of seconds that all calls of this process together may wait for storage that fails.

Without a limit each call has only its own deadline. A start sets a limit: calls that fail after a
wait use the budget up, and the rest bounds the next calls. Calls that succeed use up nothing. The
budget belongs to the process, since the stages of a start open the same store many times, in
several threads. Thread-safe.
"""

import math

# A call that failed sooner has cost no noticeable time.
_FREE_S = 0.5


class WaitBudget:
    """Seconds that calls may wait without success."""

    def __init__(self) -> None:
        self.limit_s = math.inf
        """Size of the budget."""
        self.left_s = math.inf
        """Rest of the budget; may be negative."""

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up, so that further calls fail at once."""
        return self.left_s <= 0

    def limit(self, seconds: float) -> None:
        """Set the budget and its rest; `math.inf` removes the limit."""
        self.limit_s = self.left_s = seconds

    def spend(self, seconds: float) -> None:
        """Subtract the wait of a call that failed."""
        if seconds > _FREE_S:
            self.left_s -= seconds


WAIT_BUDGET = WaitBudget()
"""The budget of this process."""
