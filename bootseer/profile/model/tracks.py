"""What one process of one node did in a start, span by span. Pure (no I/O).

The launcher of a node and each Python process below it have a track of their own. Times are seconds
by the node's clock, counted from an instant that the caller chooses for the whole start.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from bootseer.timeline.otlp import (
    BARRIER,
    PARENT,
    PROCESS,
    ROLE,
    START,
    WAITED_FOR,
    Stage,
    Value,
)

LAUNCHER = "launcher"
"""The role of `bootseer run` itself."""
UNWATCHED = "python"
"""The role of training code that is not watched, and calls `bootseer.stage()` by itself."""
CONTROL_PLANE, KUBELET = "control plane", "kubelet"
BEFORE_LAUNCHER = (KUBELET, CONTROL_PLANE)
"""Roles of those that a node's launcher waited for, the last one first; also the names of their
processes. The times of the control plane are of its own clock."""
ADAPTER = "bootseer.adapter"
"""Resource attribute of stages that other programs noted: the adapter that took them in."""
NO_RANK = -1

_NOTHING: Mapping[str, Value] = MappingProxyType({})


# Millions of them come and go, and none is part of a circle.
class Span(Struct, frozen=True, gc=False):
    """One stage of one process."""

    name: str
    begin_s: float
    end_s: float
    parent: int = -1
    """Index of the span of the same track that this one lies within; -1 where there is none."""
    barrier: str = ""
    """Spans of one start with the same barrier end together, after the last of them began."""
    missed_barrier: str = ""
    """The barrier at which this process gave up waiting. The span's end compares no clocks and
    releases no other process."""
    waited_for: str = ""
    """The node whose stage with the name of this span's parent was waited for: the node holds the
    lease, or publishes what this node uses."""
    is_open: bool = False
    """The stage never ended: `end_s` is the last instant that its process noted anything."""
    evidence: Mapping[str, Value] = _NOTHING
    """What was noted with the stage; of it the graph keeps the numbers: pressure, faults, bytes."""
    notes: tuple[str, ...] = ()
    """What went wrong, and which way was taken instead of the ordinary one."""
    has_failed: bool = False


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
    task: int = 0
    """The rank that the process was given: a launcher's, too, is one of the tasks of the job."""


class Heading(Struct, frozen=True):
    """What a start is called, by its earliest stage."""

    began_ns: int
    job: str
    submission: str
    attempt: int
    trace_id: str
    restart_count: int
    """How often workers were started again in place since; their later stages are left out."""


def tracks_of(stages: Iterable[Stage], origin_ns: int) -> list[Track]:
    """The tracks of all processes that the stages come from.

    `origin_ns` is the instant that counts as zero, in nanoseconds since 1970.
    """
    by_writer: dict[int, list[Stage]] = {}
    launchers: dict[str, int] = {}
    for stage in stages:
        by_writer.setdefault(id(stage.resource), []).append(stage)
        if stage.name == START:
            launchers[node_of(stage)] = rank_of(stage)
    by_process: dict[tuple[str, str], list[Stage]] = {}
    for same in by_writer.values():
        node, rank = node_of(same[0]), rank_of(same[0])
        resource = same[0].resource
        is_launcher = ROLE not in resource and launchers.get(node, rank) == rank
        process = str(resource.get(PROCESS, "" if is_launcher else f"rank {rank}"))
        by_process.setdefault((node, process), []).extend(same)
    return [
        _track(node, process, found, origin_ns) for (node, process), found in by_process.items()
    ]


def of_the_start(stages: Sequence[Stage]) -> tuple[Sequence[Stage], Heading]:
    """The stages of one node without those of workers that were started again in place since.

    There must be at least one.
    """
    restarts = {id(stage.resource): _whole(stage, "bootseer.restart") for stage in stages}
    # What others know of the time before is no part of it.
    ours = [stage for stage in stages if ADAPTER not in stage.resource]
    first = min(ours or stages, key=lambda stage: stage.start_ns)
    before = restarts[id(first.resource)]
    since = max(restarts.values()) - before
    if since:
        stages = [stage for stage in stages if restarts[id(stage.resource)] <= before]
    heading = Heading(
        first.start_ns,
        str(first.resource.get("bootseer.job", "")),
        str(first.resource.get("bootseer.submission", "")),
        _whole(first, "bootseer.attempt"),
        first.trace_id,
        since,
    )
    return stages, heading


def node_of(stage: Stage) -> str:
    """The node that a stage was noted on."""
    return str(stage.resource.get("host.name", "?"))


def rank_of(stage: Stage) -> int:
    """The rank of the process that noted a stage; `NO_RANK` where it has none."""
    rank = stage.resource.get("bootseer.rank", NO_RANK)
    return rank if isinstance(rank, int) else NO_RANK


def _whole(stage: Stage, name: str) -> int:
    """A count of who wrote the stage; 0 where there is none."""
    value = stage.resource.get(name, 0)
    return value if isinstance(value, int) else 0


def _track(node: str, process: str, stages: list[Stage], origin_ns: int) -> Track:
    spans = _spans(stages, origin_ns)
    task = _whole(stages[0], "bootseer.rank")
    if not process:
        return Track(node, spans, task=task)
    # What the program itself notes says only which process it is.
    resource = max((stage.resource for stage in stages), key=len)
    return Track(
        node=node,
        spans=spans,
        role=str(resource.get(ROLE, UNWATCHED)),
        rank=rank_of(stages[0]),
        process=process,
        parent=str(resource.get(PARENT, "")),
        task=task,
    )


def _spans(stages: list[Stage], origin_ns: int) -> list[Span]:
    last_ns = max(stage.end_ns or stage.start_ns for stage in stages)
    # The longer one first where two begin together: it encloses the other.
    stages.sort(key=lambda one: (one.start_ns, -(one.end_ns or last_ns)))
    places = {stage.span_id: number for number, stage in enumerate(stages)}
    spans = []
    for number, stage in enumerate(stages):
        attributes = stage.attributes
        parent = places.get(stage.parent_id, -1)
        fallback = attributes.get("bootseer.fallback")
        barrier = str(attributes.get(BARRIER, ""))
        spans.append(
            Span(
                stage.name,
                (stage.start_ns - origin_ns) / 1e9,
                ((stage.end_ns or last_ns) - origin_ns) / 1e9,
                parent if parent < number else -1,
                "" if stage.failed else barrier,
                barrier if stage.failed else "",
                str(attributes.get(WAITED_FOR, "")),
                stage.end_ns is None,
                attributes,
                tuple(str(one) for one in (fallback, stage.message) if one),
                stage.failed,
            )
        )
    return spans
