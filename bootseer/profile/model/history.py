"""Compares starts of one job with each other. Pure (no I/O)."""

import statistics
from collections.abc import Sequence

from msgspec import Struct

from bootseer.profile.model.analysis import Summary

_SEEN_MIN = 3
# A stage has got slower when it takes so much more than in the median of the starts before.
_SLOWER_RATIO, _SLOWER_MIN_S = 1.3, 1.0


class Change(Struct, frozen=True):
    """One stage on the critical paths of two starts; 0 where it is not on one of them."""

    stage: str
    before_s: float
    after_s: float

    @property
    def more_s(self) -> float:
        """Seconds that the later start spent more."""
        return self.after_s - self.before_s


def on_path(summary: Summary) -> dict[str, float]:
    """Seconds of the critical path by stage: together the time until ready. What came before the
    first launcher is left out, since not every start tells of it."""
    found: dict[str, float] = {}
    for segment in summary.path:
        name = f"wait at {segment.label}" if segment.is_wait else str(segment.label)
        since_s = segment.begin_s + segment.seconds - summary.before_s
        if since_s > 0:
            found[name] = found.get(name, 0.0) + min(segment.seconds, since_s)
    return found


def compare_starts(before: Summary, after: Summary) -> list[Change]:
    """How two starts differ: the changes add up to the difference of their times until ready."""
    first, second = on_path(before), on_path(after)
    changes = [
        Change(stage, first.get(stage, 0.0), second.get(stage, 0.0))
        for stage in dict.fromkeys([*first, *second])
    ]
    return sorted(changes, key=lambda change: -abs(change.more_s))


class History(Struct, frozen=True):
    """What several starts say together, oldest first."""

    ready_s: tuple[float, ...]
    trend_s: float
    """Seconds by which a start takes longer than the one before: the median of all slopes."""
    slower: tuple[Change, ...]
    """Stages of the newest start that take longer than in the median of the others."""
    repeated: tuple["Repeated", ...]
    """Nodes that were slow in at least half of the starts."""


class Repeated(Struct, frozen=True):
    """A node that is slow again and again."""

    node: str
    start_count: int
    """In how many starts it was."""


def look_back(starts: Sequence[Summary]) -> History:
    """The history of starts, oldest first."""
    ready = [start.ready_s for start in starts]
    slopes = [
        (ready[later] - ready[earlier]) / (later - earlier)
        for earlier in range(len(ready))
        for later in range(earlier + 1, len(ready))
    ]
    counts: dict[str, int] = {}
    for start in starts:
        for one in start.stragglers:
            counts[one.node] = counts.get(one.node, 0) + 1
    often = [
        Repeated(node, count)
        for node, count in counts.items()
        if count >= 2 and 2 * count >= len(starts)
    ]
    return History(
        ready_s=tuple(ready),
        trend_s=statistics.median(slopes) if slopes else 0.0,
        slower=tuple(_slower(starts)),
        repeated=tuple(sorted(often, key=lambda one: -one.start_count)),
    )


def _slower(starts: Sequence[Summary]) -> list[Change]:
    if len(starts) < _SEEN_MIN + 1:
        return []
    *before, newest = (on_path(start) for start in starts)
    found = []
    for stage, seconds in newest.items():
        median = statistics.median(start.get(stage, 0.0) for start in before)
        if seconds >= max(_SLOWER_RATIO * median, median + _SLOWER_MIN_S):
            found.append(Change(stage, median, seconds))
    return sorted(found, key=lambda change: -change.more_s)
