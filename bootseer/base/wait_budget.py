"""Budget of seconds that all calls of this process together may wait for storage that fails.

Without a limit each call has only its own deadline. A start sets two limits. Calls that fail after
a wait use the budget up, and the rest bounds the next calls; calls that succeed use up nothing.
Time in which several calls wait at once counts once.
Until the storage has answered for the first time, the calls have a much smaller budget together,
the *first answer's*. A storage that has used it up is away, and no later call asks it
(`AwayError`). Storage where nobody takes connections is away sooner.

The budget belongs to the process, since the stages of a start open the same store many times, in
several threads. Thread-safe.
"""

import math
import threading
import time

from bootseer.errors import DeadlineError, UnavailableError

FIRST_ANSWER_S = 6.0
"""Longest wait of a start for the first answer of its store. TCP sends a lost SYN again after 1 and
3 s, a resolver a lost question after 5 s, a NameNode's pause for garbage collection and a planned
failover end within seconds, and a login to a bucket takes about a second."""
_FIRST_ANSWER_SHARE = 1 / 12
"""The same as a share of the deadline: a longer deadline than usual makes the wait longer, too."""
REFUSED_S = 1.0
"""Time for which a start asks again where nobody takes connections. A load balancer needs less to
find another server; a server that restarts needs more than a start should wait."""
# A call that failed sooner has cost no noticeable time.
_FREE_S = 0.5


class AwayError(DeadlineError):
    """Raised without a request: the storage has not answered earlier calls of this process."""


class RefusedError(UnavailableError):
    """Raised where nobody takes connections."""


def first_answer_s(deadline_s: float) -> float:
    """Return the limit of a start for the first answer of a store with the deadline `deadline_s`.

    Pure.
    """
    return min(deadline_s, max(FIRST_ANSWER_S, _FIRST_ANSWER_SHARE * deadline_s))


class WaitBudget:
    """Seconds that calls may wait without success."""

    def __init__(self) -> None:
        self.limit(math.inf)

    def limit(self, seconds: float, *, first_answer_s: float = math.inf) -> None:
        """Set the budget, and that of the first answer; `math.inf` removes a limit.

        In a forked process, whose parent may have had threads, this comes before anything else.
        """
        self._lock = threading.Lock()
        self._waits: list[tuple[float, float]] = []
        """Times in which calls have waited in vain: disjoint, the earliest first."""
        self._limit_s = self._left_s = seconds
        self._first_limit_s = self._first_left_s = first_answer_s
        self._refused_at_s = math.inf
        self._is_refused = False
        self._is_told = False
        self.is_left_by_neighbours = False
        """Whether the last document that other nodes were asked for did not come from them."""

    @property
    def left_s(self) -> float:
        """Rest of the budget; may be negative."""
        return min(self._left_s, self._first_left_s)

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up, so that further calls fail at once."""
        return self.left_s <= 0

    @property
    def awaits_first_answer(self) -> bool:
        """Whether the limit of the first answer holds: nothing has answered so far."""
        return self._first_left_s < math.inf

    def spend(self, seconds: float) -> None:
        """Subtract the wait of a call that fails now, without what is subtracted already."""
        if seconds <= _FREE_S:
            return
        with self._lock:
            now_s = time.monotonic()
            begun_s = now_s - seconds
            others = [wait for wait in self._waits if wait[1] > begun_s]
            begun_s = min([begun_s, *(begun for begun, _ in others)])
            self._waits = [wait for wait in self._waits if wait[1] <= begun_s]
            self._waits.append((begun_s, now_s))
            seconds = now_s - begun_s - sum(ended - begun for begun, ended in others)
            self._left_s -= seconds
            self._first_left_s -= seconds

    def answered(self) -> None:
        """Note that the storage has answered, which ends the limit of the first answer.

        An answer that comes after the storage was given up changes nothing.
        """
        if self._first_left_s > 0:
            self._first_left_s = math.inf

    def refused_left_s(self) -> float:
        """Note that nobody takes connections; return for how long it is worth to ask again."""
        if not self.awaits_first_answer:
            return self.left_s
        now_s = time.monotonic()
        self._refused_at_s = min(self._refused_at_s, now_s)
        return min(self.left_s, self._refused_at_s + REFUSED_S - now_s)

    def give_up(self) -> None:
        """Take the storage for away, because nobody takes connections, unless it has answered."""
        if self.awaits_first_answer:
            self._is_refused = self._is_refused or self._first_left_s > 0
            self._first_left_s = 0.0

    def wait_longer(self) -> bool:
        """Remove the limit of the first answer, for a caller that has nothing else to ask.

        Return whether the limit had made calls fail.
        """
        if not (self.awaits_first_answer and self._first_left_s <= 0 < self._left_s):
            return False
        self._first_left_s = math.inf
        return True

    def warning(self, error: Exception) -> str:
        """Return "warning: ", the begin of a sentence about `error`.

        Return "" if an earlier warning has told the user that the storage is away.
        """
        is_news = not (self._is_told and isinstance(error, AwayError))
        self._is_told = self._is_told or self.is_spent
        return "warning: " if is_news else ""

    def error(self, prefix: str = "", hint: str = "") -> AwayError:
        """Return the error of a call that is not made, since the budget is spent.

        `prefix` and `hint` are the begin and the end of its message.
        """
        reason = "nobody took a connection"
        if not (self._is_refused and self.awaits_first_answer):
            limit_s = self._first_limit_s if self.awaits_first_answer else self._limit_s
            reason = f"no answer within {limit_s:g} s"
        return AwayError(f"{prefix}{reason}, in earlier calls{hint}")


WAIT_BUDGET = WaitBudget()
"""The budget of this process."""
