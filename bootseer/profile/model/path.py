"""The critical path of a start, and who held the others at each barrier. Pure (no I/O)."""

from collections.abc import Mapping

from msgspec import Struct

from bootseer.profile.model.graph import Group, Place, StartGraph
from bootseer.profile.model.peers import Peers, Who
from bootseer.profile.model.replay import Piece, ready_spans
from bootseer.profile.model.shape import ORIGIN, Label, Step, end_of


class Segment(Struct, frozen=True):
    """A stretch of the critical path: one piece of time of one process."""

    node: str
    rank: int
    role: str
    label: Label
    begin_s: float
    seconds: float
    is_wait: bool = False
    """What passed between the last arrival at a barrier and its end, or at a barrier at which the
    process gave up."""


class Blame(Struct, frozen=True):
    """Who came last at a barrier, and on what it had spent more time than the others."""

    barrier: str
    node: str
    rank: int
    arrived_s: float
    late_s: float
    """After the median process."""
    lost: tuple[tuple[Label, float], ...]
    """Seconds above the median since the process began or left the barrier before; most first."""


class Walker:
    """Walks back from an event along what it waited for."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._steps: dict[Group, dict[int, Step]] = {}
        self._last: dict[str, tuple[float, Group, int, int]] = {}
        self.arrivals: dict[str, list[float]] = {}
        for group, span, keys in graph.barriers():
            after = self._step(group, end_of(span)).after
            for row, (key, arrived) in enumerate(zip(keys, group.times[after], strict=True)):
                self.arrivals.setdefault(key, []).append(arrived)
                if key not in self._last or arrived > self._last[key][0]:
                    self._last[key] = arrived, group, row, span

    def _step(self, group: Group, event: int) -> Step:
        if group not in self._steps:
            self._steps[group] = {step.event: step for step in group.shape.steps}
        return self._steps[group][event]

    def critical_path(self) -> list[Segment]:
        """From the begin of the start until the last process was ready."""
        ends = [
            (time, group, row, span)
            for group, span in ready_spans(self._graph)
            for row, time in enumerate(group.times[end_of(span)])
        ]
        if not ends:
            return []
        _, group, row, span = max(ends, key=lambda one: one[0])
        return self._back(group, row, end_of(span), stops_at_barrier=False)

    def _back(self, group: Group, row: int, event: int, *, stops_at_barrier: bool) -> list[Segment]:
        found: list[Segment] = []
        # What timelines say may go in a circle: two nodes that waited for each other.
        seen: set[tuple[Group, int, int]] = set()
        while (group, row, event) not in seen:
            seen.add((group, row, event))
            step = self._step(group, event)
            time = group.times[event][row]
            span, is_end = divmod(event, 2)
            key = group.barriers[span][row] if is_end and span in group.barriers else ""
            place: Place | None = None
            if key:
                if stops_at_barrier and found:
                    break
                before, group, row, span = self._last[key]
                event = self._step(group, end_of(span)).after
                found.append(self._segment(group, row, step.label, before, time, is_wait=True))
                continue
            if is_end and span in group.waited_for:
                place = self._leader(group, row, span)
            before = self._before(group, row, step)
            if place is not None and (time_of := _ended(place, group, span)) > before:
                found.append(self._segment(group, row, step.label, time_of, time, is_wait=True))
                name = group.shape.waited_stage(span)
                group, row = place.group, place.row
                event = end_of(group.shape.names.index(name))
                continue
            # Whoever gave up at a barrier did nothing but wait until then.
            is_wait = bool(is_end) and group.shape.is_missed[span]
            found.append(self._segment(group, row, step.label, before, time, is_wait=is_wait))
            if step.after != ORIGIN:
                event = step.after
                continue
            starter = self._graph.started_by(group)[row]
            if starter is None:
                break
            (group, row), event = starter
        return [one for one in reversed(found) if one.seconds > 0]

    def _before(self, group: Group, row: int, step: Step) -> float:
        if step.after != ORIGIN:
            return group.times[step.after][row]
        starter = self._graph.started_by(group)[row]
        if starter is None:
            return 0.0
        place, event = starter
        return place.group.times[event][place.row]

    def _leader(self, group: Group, row: int, span: int) -> Place | None:
        place = self._graph.launcher(group.waited_for[span][row])
        name = group.shape.waited_stage(span)
        return place if place is not None and name in place.group.shape.names else None

    def _segment(
        self,
        group: Group,
        row: int,
        label: Label,
        begin: float,
        end: float,
        *,
        is_wait: bool = False,
    ) -> Segment:
        return Segment(
            group.nodes[row], group.ranks[row], group.role, label, begin, end - begin, is_wait
        )

    def blame(
        self, pieces: Mapping[tuple[Group, int], Piece], peers: Mapping[Who, Peers]
    ) -> list[Blame]:
        """Who held the others at each barrier of several processes, in order of time."""
        found = []
        for key, (arrived, group, row, span) in self._last.items():
            arrivals = sorted(self.arrivals[key])
            if len(arrivals) < 2:
                continue
            event = self._step(group, end_of(span)).after
            lost: dict[Label, float] = {}
            for segment in self._back(group, row, event, stops_at_barrier=True):
                known = peers.get((segment.label, segment.role))
                if known is not None and not segment.is_wait:
                    more = segment.seconds - known.median_s
                    lost[segment.label] = lost.get(segment.label, 0.0) + more
            late = arrived - arrivals[len(arrivals) // 2]
            most = sorted(lost.items(), key=lambda one: -one[1])
            found.append(
                Blame(
                    barrier=key,
                    node=group.nodes[row],
                    rank=group.ranks[row],
                    arrived_s=arrived,
                    late_s=late,
                    lost=tuple(one for one in most if one[1] > 0),
                )
            )
        return sorted(found, key=lambda one: one.arrived_s)


def _ended(place: Place, group: Group, span: int) -> float:
    name = group.shape.waited_stage(span)
    return place.group.times[end_of(place.group.shape.names.index(name))][place.row]
