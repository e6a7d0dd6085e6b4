"""What one process of one node did in a start, span by span. Pure (no I/O).

The launcher of a node and each Python process below it have a track of their own. Times are seconds
by the node's clock, counted from an instant that the caller chooses for the whole start.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from bootseer.timeline.otlp import BARRIER, PARENT, PROCESS, ROLE, START, WAITED_FOR, Stage

LAUNCHER = "launcher"
"""The role of `bootseer run` itself."""
NO_RANK = -1

_NOTHING: Mapping[str, float] = MappingProxyType({})


class Span(Struct, frozen=True):
    """One stage of one process."""

    name: str
    begin_s: float
    end_s: float
    parent: int = -1
    """Index of the span of the same track that this one lies within; -1 where there is none."""
    barrier: str = ""
    """Spans of one start with the same barrier end together, after the last of them began."""
    waited_for: str = ""
    """The node whose stage with the name of this span's parent was waited for: the node holds the
    lease, or publishes what this node uses."""
    is_open: bool = False
    """The stage never ended: `end_s` is the last instant that its process noted anything."""
    evidence: Mapping[str, float] = _NOTHING
    """Figures of the node and of the stage: pressure, faults, bytes; `causes` reads them."""


class Track(Struct, frozen=True):
    """The spans of one process in order of their begin; an enclosing span precedes the enclosed."""

    node: str
    spans: Sequence[Span]
    role: str = LAUNCHER
    """What the process is: processes are compared with those of the same role."""
    rank: int = NO_RANK
    process: str = ""
    parent: str = ""
    """The process that started this one; empty: the launcher."""


def tracks_of(stages: Iterable[Stage], origin_ns: int) -> list[Track]:
    """The tracks of all processes that the stages come from.

    `origin_ns` is the instant that counts as zero, in nanoseconds since 1970.
    """
    stages = list(stages)
    launchers = {node_of(stage): rank_of(stage) for stage in stages if stage.name == START}
    by_process: dict[tuple[str, str], list[Stage]] = {}
    for stage in stages:
        node, rank = node_of(stage), rank_of(stage)
        # Training code that is not watched, and calls bootseer.stage() by itself.
        other = "" if launchers.get(node, rank) == rank else f"rank {rank}"
        process = str(stage.resource.get(PROCESS, other))
        by_process.setdefault((node, process), []).append(stage)
    return [
        _track(node, process, found, origin_ns) for (node, process), found in by_process.items()
    ]


def node_of(stage: Stage) -> str:
    """The node that a stage was noted on."""
    return str(stage.resource.get("host.name", "?"))


def rank_of(stage: Stage) -> int:
    """The rank of the process that noted a stage; `NO_RANK` where it has none."""
    rank = stage.resource.get("bootseer.rank", NO_RANK)
    return rank if isinstance(rank, int) else NO_RANK


def _track(node: str, process: str, stages: list[Stage], origin_ns: int) -> Track:
    spans = _spans(stages, origin_ns)
    if not process:
        return Track(node, spans)
    # What the program itself notes says only which process it is.
    resource = max((stage.resource for stage in stages), key=len)
    return Track(
        node=node,
        spans=spans,
        role=str(resource.get(ROLE, "python")),
        rank=rank_of(stages[0]),
        process=process,
        parent=str(resource.get(PARENT, "")),
    )


def _spans(stages: list[Stage], origin_ns: int) -> tuple[Span, ...]:
    last_ns = max(stage.end_ns or stage.start_ns for stage in stages)
    # The longer one first where two begin together: it encloses the other.
    ordered = sorted(stages, key=lambda one: (one.start_ns, -(one.end_ns or last_ns)))
    places = {stage.span_id: number for number, stage in enumerate(ordered)}
    return tuple(
        Span(
            name=stage.name,
            begin_s=(stage.start_ns - origin_ns) / 1e9,
            end_s=((stage.end_ns or last_ns) - origin_ns) / 1e9,
            parent=parent if (parent := places.get(stage.parent_id, -1)) < number else -1,
            barrier=str(stage.attributes.get(BARRIER, "")),
            waited_for=str(stage.attributes.get(WAITED_FOR, "")),
            is_open=stage.end_ns is None,
            evidence={
                key: float(value)
                for key, value in stage.attributes.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            },
        )
        for number, stage in enumerate(ordered)
    )
