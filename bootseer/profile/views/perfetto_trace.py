"""A start as a trace that Perfetto opens: protobuf, clocks corrected. Pure (no I/O).

A process track is a node; below it each process has a track, and further ones for stages that
overlap: on one track a slice may lie within another, and Perfetto drops two that overlap otherwise.
Source: perfetto.dev, "Advanced guide to programmatically generating traces".
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bootseer.profile.model.graph import Group, StartGraph
from bootseer.profile.model.shape import begin_of, end_of

_SEQUENCE = 1


class Slice(NamedTuple):
    """A stage on the trace. Nanoseconds since the begin of the start."""

    name: str
    begin_ns: int
    end_ns: int | None
    """None: it never ended."""
    figures: tuple[tuple[str, float], ...] = ()

    @property
    def until(self) -> float:
        """Its end, or infinity."""
        return math.inf if self.end_ns is None else self.end_ns


def to_perfetto(graph: StartGraph) -> bytes:
    """The trace of all processes. Raises: ImportError without the package `perfetto`."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    event = messages.TrackEvent
    parents: dict[str, int] = {}
    uuid = 0
    for group in graph.groups:
        for row, node in enumerate(group.nodes):
            if node not in parents:
                uuid += 1
                parents[node] = uuid
                described = builder.add_packet().track_descriptor
                described.uuid, described.process.pid = uuid, uuid
                described.process.process_name = node
            for number, track in enumerate(share_out(list(_slices(group, row)))):
                uuid += 1
                described = builder.add_packet().track_descriptor
                described.uuid, described.parent_uuid = uuid, parents[node]
                described.name = _title(group, row) + (f", beside ({number})" if number else "")
                for begun, one in _in_order(track):
                    packet = builder.add_packet()
                    packet.trusted_packet_sequence_id = _SEQUENCE
                    packet.timestamp = one.begin_ns if begun else one.end_ns
                    packet.track_event.track_uuid = uuid
                    kind = event.TYPE_SLICE_BEGIN if begun else event.TYPE_SLICE_END
                    packet.track_event.type = kind
                    if begun:
                        packet.track_event.name = one.name
                        for name, value in one.figures:
                            note = packet.track_event.debug_annotations.add()
                            note.name, note.double_value = name, value
    return bytes(builder.serialize())


def share_out(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices, shared out among as few tracks as this takes in order of their begin: two of one
    track follow each other, or one lies within the other. An open one never ends."""
    found: list[tuple[list[Slice], list[float]]] = []
    for one in sorted(slices, key=lambda one: (one.begin_ns, -one.until)):
        track, ends = next(filter(lambda pair: _fits(one, pair[1]), found), ([], []))
        if not track:
            found.append((track, ends))
        track.append(one)
        ends.append(one.until)
    return [track for track, _ in found]


def _fits(one: Slice, ends: list[float]) -> bool:
    """Whether a slice that begins after all others lies within the innermost that has not ended;
    forgets the `ends` of those that have."""
    while ends and ends[-1] <= one.begin_ns:
        ends.pop()
    return not ends or one.until <= ends[-1]


def _in_order(track: Sequence[Slice]) -> Iterator[tuple[bool, Slice]]:
    """Begins and ends in the order of time, the inner one ending first."""
    running: list[Slice] = []
    for one in track:
        while running and running[-1].until <= one.begin_ns:
            yield False, running.pop()
        yield True, one
        running.append(one)
    while running:
        one = running.pop()
        if one.end_ns is not None:
            yield False, one


def _slices(group: Group, row: int) -> Iterator[Slice]:
    for span, name in enumerate(group.shape.names):
        begin, end = (round(group.times[of(span)][row] * 1e9) for of in (begin_of, end_of))
        is_open = row in group.open_spans.get(span, ())
        yield Slice(name, begin, None if is_open else end, tuple(_figures(group, span, row)))


def _figures(group: Group, span: int, row: int) -> Iterator[tuple[str, float]]:
    for name, column in group.evidence[span].items():
        if row < len(column) and not math.isnan(column[row]):
            yield name, column[row]


def _title(group: Group, row: int) -> str:
    rank: Any = group.ranks[row]
    return group.role if rank < 0 else f"rank {rank}, {group.role}"
