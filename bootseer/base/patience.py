"""How long this process waits for storage that does not answer, in all its calls together.

Without a limit each call has its own deadline only. A start has one (`limit`): the calls that fail
after a wait use it up, and what is left bounds the next ones. Calls that bring something use up
nothing. The state is the process's, since a start's stages open the same store many times over, in
several threads. Thread-safe.
"""

import math

# What failed sooner cost nobody anything.
_IN_VAIN_S = 0.5


class Patience:
    """Seconds that may be waited in vain."""

    def __init__(self) -> None:
        self.limit_s = math.inf
        """How many there were."""
        self.left_s = math.inf
        """How many there are left; may be below 0."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left: further calls fail at once."""
        return self.left_s <= 0

    def limit(self, seconds: float) -> None:
        """Wait for so long from now on, in all; `math.inf`: without a limit."""
        self.limit_s = self.left_s = seconds

    def spend(self, seconds: float) -> None:
        """Note that so long was waited in vain."""
        if seconds > _IN_VAIN_S:
            self.left_s -= seconds


PATIENCE = Patience()
"""That of this process."""
