"""Who has come to which barrier in a replay, and which stages that others wait for have ended.
Pure."""

from array import array
from collections.abc import Sequence

from bootseer.profile.model.graph import Group, StartGraph
from bootseer.profile.model.shape import end_of
from bootseer.profile.model.tracks import LAUNCHER


class Arrivals:
    """Who has arrived at which barrier, and which stages that others wait for have ended."""

    def __init__(self, graph: StartGraph) -> None:
        self._graph = graph
        self._missing: dict[str, int] = {}
        for _, _, keys in graph.barriers():
            for key in keys:
                self._missing[key] = self._missing.get(key, 0) + 1
        self._last: dict[str, tuple[float, float]] = {}
        """The last arrival at each barrier: as measured, and in the replay."""
        self._ended: dict[tuple[str, str], tuple[float, float]] = {}
        self._leaders = {
            (node, parent)
            for group in graph.groups
            for span, nodes in group.waited_for.items()
            for parent in [group.shape.waited_stage(span)]
            for node in nodes
        }
        self._moved = False
        self._gave_up = False

    def has_moved(self) -> bool:
        moved, self._moved = self._moved, False
        return moved

    def give_up(self) -> None:
        self._gave_up = True

    def arrive(
        self, group: Group, span: int, measured: Sequence[float], replayed: Sequence[float]
    ) -> None:
        for key, one, other in zip(group.barriers.get(span, ()), measured, replayed, strict=False):
            known = self._last.get(key, (one, other))
            self._last[key] = max(known[0], one), max(known[1], other)
            self._missing[key] -= 1
            self._moved = True

    def end(self, group: Group, span: int, replayed: Sequence[float]) -> None:
        if group.role != LAUNCHER:
            return
        name = group.shape.names[span]
        for row, node in enumerate(group.nodes):
            if (node, name) in self._leaders:
                measured = group.times[end_of(span)][row]
                self._ended.setdefault((node, name), (measured, replayed[row]))
                self._moved = True

    def released(
        self, group: Group, span: int, arrived: Sequence[float], ready: Sequence[float]
    ) -> "tuple[array[float], array[float]] | None":
        """When each process could go on, as measured and in the replay; None: not known yet."""
        if span in group.barriers:
            keys = group.barriers[span]
            if not self._gave_up and any(self._missing[key] for key in keys):
                return None
            pairs = [self._last[key] for key in keys]
        else:
            stage = group.shape.waited_stage(span)
            leaders = [(node, stage) for node in group.waited_for[span]]
            missing = [node for node, stage in leaders if (node, stage) not in self._ended]
            if not self._gave_up and any(map(self._graph.launcher, missing)):
                return None
            nothing = (float("-inf"), float("-inf"))
            pairs = [
                (max(begin, found[0]), max(now, found[1]))
                for begin, now, one in zip(arrived, ready, leaders, strict=True)
                for found in [self._ended.get(one, nothing)]
            ]
        return array("d", [one for one, _ in pairs]), array("d", [other for _, other in pairs])
