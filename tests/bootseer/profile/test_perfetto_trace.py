"""A start as a trace for Perfetto, decoded by its own schema."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages

from bootseer.profile.model.analysis import StartModel
from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.tracks import Span, Track
from bootseer.profile.views.perfetto_trace import Slice, share_out, to_perfetto
from testbed.starts.generate import Recipe, node_name, tracks


@given(st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(0, 20))))
def test_on_a_track_stages_lie_within_each_other_or_follow(
    spans: list[tuple[int, int | None]],
) -> None:
    slices = [
        Slice("s", begin, None if length is None else begin + length) for begin, length in spans
    ]
    found = share_out(slices)
    assert sorted(map(repr, slices)) == sorted(repr(one) for track in found for one in track)
    for track in found:
        for one, other in pairwise(track):
            assert one.begin_ns <= other.begin_ns
        for number, one in enumerate(track):
            for other in track[number + 1 :]:
                assert one.until <= other.begin_ns or other.until <= one.until


def _decoded(found: list[Track]) -> tuple[dict[int, str], dict[int, list[tuple[int, int, str]]]]:
    """Names of tracks, and for each its slices as begin, end and name."""
    trace = messages.Trace()
    trace.ParseFromString(to_perfetto(StartModel(StartGraph(found)).graph))
    names: dict[int, str] = {}
    slices: dict[int, list[tuple[int, int, str]]] = {}
    running: dict[int, list[tuple[int, str]]] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            names[one.uuid] = one.process.process_name or one.name
            continue
        event = packet.track_event
        stack = running.setdefault(event.track_uuid, [])
        if event.type == messages.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((packet.timestamp, event.name))
        else:
            begin, name = stack.pop()
            slices.setdefault(event.track_uuid, []).append((begin, packet.timestamp, name))
    assert not any(running.values())
    return names, slices


def test_every_stage_is_on_a_track_of_its_process() -> None:
    names, slices = _decoded(list(tracks(Recipe(3, 2, clock_s={node_name(1): 3600.0}))))
    processes = [name for name in names.values() if name.startswith("node")]
    assert sorted(processes) == [node_name(number) for number in range(3)]
    assert sum(name == "rank 1, train.py" for name in names.values()) == 3
    # The image and the checkpoint mount overlap.
    assert sum(name == "launcher, beside (1)" for name in names.values()) == 3
    assert {name for found in slices.values() for *_, name in found} >= {"image", "ready"}
    # Of the node whose clock is an hour ahead, too.
    assert max(end for found in slices.values() for _, end, _ in found) < 120 * 10**9


def test_figures_and_open_stages() -> None:
    spans = [Span("start", 0, 2, evidence={"psi.io_s": 0.5}), Span("hangs", 1, 2, 0, is_open=True)]
    trace = messages.Trace()
    trace.ParseFromString(to_perfetto(StartModel(StartGraph([Track("a", spans)])).graph))
    begun = {
        packet.track_event.name: packet.track_event
        for packet in trace.packet
        if packet.track_event.name
    }
    (note,) = begun["start"].debug_annotations
    assert (note.name, note.double_value) == ("psi.io_s", 0.5)
    ends = [p for p in trace.packet if p.track_event.type == messages.TrackEvent.TYPE_SLICE_END]
    assert len(ends) == 1
