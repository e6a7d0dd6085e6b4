"""Which event of a process waited for which other: read off the order of its events. Pure.

Every span has two events, its begin and its end. The processes of a start run one program, so most
have the same spans in the same order: the same *shape*. Dependencies are found once for a shape,
and all its processes are computed as columns. The rules:

- a span begins after the siblings that had ended by then; the time since the last of them ended (or
  since the parent began) is its *lag*, work that no span names;
- a span that encloses others ends after them, and a lag;
- a span without others inside ends when its own duration is over;
- a barrier ends for all when the last process has arrived at it;
- a process that gives up at a barrier waits for as long as it is willing to: no other process
  decides that.

So what overlapped in the measured start may overlap in a replay, and what came after stays after.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from bootseer.profile.model.tracks import Span
from bootseer.timeline.otlp import START

# A begin is read off one clock and a duration off another: what follows may begin a little before.
_TOLERANCE_S = 0.001
ORIGIN = -1
"""Stands for the event that a process's first span begins after: one of who started it, or zero."""


def begin_of(span: int) -> int:
    """The number of the event at which a span begins."""
    return 2 * span


def end_of(span: int) -> int:
    """The number of the event at which a span ends."""
    return 2 * span + 1


class Label(NamedTuple):
    """Names a piece of time so that it can be compared among processes."""

    name: str
    """The stage; with `kind` "before" or "after" the stage next to the unnamed time."""
    kind: str = "in"
    """`in` the stage, `before` it began, or `after` the last stage inside it had ended."""
    occurrence: int = 0
    """How many stages of this name the process had had before."""

    def __str__(self) -> str:
        if self == SCHEDULING:
            return "scheduling"
        name = f"{self.name} ({self.occurrence + 1})" if self.occurrence else self.name
        return name if self.kind == "in" else f"{self.kind} {name}"


SCHEDULING = Label(START, "before")
"""From the begin of the start as a whole until the launcher of a node ran."""


class Step(NamedTuple):
    """One event, and what it waited for."""

    event: int
    after: int
    """The event that it directly followed; `ORIGIN` for a process's first one."""
    others: tuple[int, ...]
    """Events of the same process that must have come before, too."""
    label: Label
    """Of the time between `after` and the event."""


class Shape:
    """The spans of a process without their times: names, nesting and the order of events."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.names = tuple(span.name for span in spans)
        self.parents = tuple(span.parent for span in spans)
        self.is_barrier = tuple(bool(span.barrier) for span in spans)
        self.is_missed = tuple(bool(span.missed_barrier) for span in spans)
        self.waits = tuple(bool(span.waited_for) for span in spans)
        self.order = _order(spans)
        barriers = self.is_barrier, self.is_missed
        self._key = (self.names, self.parents, *barriers, self.waits, self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def occurrences(self) -> tuple[int, ...]:
        """For each span how many earlier ones have its name."""
        counts: dict[str, int] = {}
        found = []
        for name in self.names:
            found.append(counts.get(name, 0))
            counts[name] = found[-1] + 1
        return tuple(found)

    def label(self, span: int, kind: str = "in") -> Label:
        """The label of a span of this shape."""
        return Label(self.names[span], kind, self.occurrences[span])

    def waited_stage(self, span: int) -> str:
        """The stage of the other node that a span of this shape waits for: its parent's name."""
        parent = self.parents[span]
        return self.names[parent if parent >= 0 else span]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All events in an order in which each comes after those that it waited for."""
        # Ends that nothing else of the same parent has begun after: what comes next waits for them.
        ended: dict[int, list[int]] = {}
        waited: dict[int, list[int]] = {}
        steps = []
        for event in self.order:
            span, is_end = divmod(event, 2)
            parent = self.parents[span]
            if not is_end:
                before = ended.setdefault(parent, [])
                waited[span] = list(before)
                start = begin_of(parent) if parent >= 0 else ORIGIN
                steps.append(_step(event, before, start, self.label(span, "before")))
                continue
            inside = ended.get(span, [])
            kind = "after" if inside else "in"
            steps.append(_step(event, inside, begin_of(span), self.label(span, kind)))
            siblings = ended.setdefault(parent, [])
            siblings[:] = [one for one in siblings if one not in waited[span]]
            siblings.append(event)
        return tuple(steps)


def _step(event: int, before: list[int], start: int, label: Label) -> Step:
    if not before:
        return Step(event, start, (), label)
    return Step(event, before[-1], tuple(before[:-1]), label)


def _order(spans: Sequence[Span]) -> tuple[int, ...]:
    events = []
    for number, span in enumerate(spans):
        # At one instant: ends first, inner before outer; then begins; then ends of empty spans.
        end_s = span.end_s - _TOLERANCE_S
        events.append((span.begin_s, 1, number, begin_of(number)))
        end = (span.begin_s, 2, number) if end_s <= span.begin_s else (end_s, 0, -number)
        events.append((*end, end_of(number)))
    events.sort()
    return tuple(event for *_, event in events)
