"""A start as a trace for Perfetto, and as rows for DuckDB and pandas."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli.command_tree import cli
from bootseer.report.explain import StartModel
from bootseer.report.export import Slice, share_out, to_trace
from bootseer.report.graph import StartGraph, Track, TrackSpan
from bootseer.report.sources import TimelineFolder, find_start
from bootseer.timeline import Timeline
from testbed.starts.generate import Recipe, node_name, tracks
from testbed.starts.timelines import write_timelines


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


def _trace(found: list[Track]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(to_trace(StartModel(StartGraph(found)).graph))[
        "traceEvents"
    ]
    return events


def test_every_stage_is_on_a_track_of_its_process() -> None:
    events = _trace(list(tracks(Recipe(3, 2, clock_s={node_name(1): 3600.0}))))
    names: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            names[event["name"]].append(event["args"]["name"])
    assert sorted(names["process_name"]) == [node_name(number) for number in range(3)]
    assert names["thread_name"].count("rank 1, train.py") == 3
    # The image and the checkpoint mount overlap.
    assert names["thread_name"].count("launcher, beside (1)") == 3
    slices = [event for event in events if event["ph"] == "X"]
    assert {one["name"] for one in slices} >= {"image", "ready"}
    threads = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {one["tid"] for one in slices} == threads
    # Of the node whose clock is an hour ahead, too.
    assert max(one["ts"] + one["dur"] for one in slices) < 120 * 10**6


def test_figures_and_open_stages() -> None:
    spans = [
        TrackSpan("start", 0, 2, evidence={"psi.io_s": 0.5}),
        TrackSpan("hangs", 1, 2, 0, is_open=True),
    ]
    found = {one["name"]: one for one in _trace([Track("a", spans)]) if one["ph"] != "M"}
    assert found["start"]["args"] == {"psi.io_s": 0.5}
    assert found["hangs"]["ph"] == "B"
    assert "dur" not in found["hangs"]


def test_rows_have_every_stage_and_the_imports(tmp_path: Path) -> None:
    write_timelines(tmp_path, Recipe(4, 2), job="j", submission="s")
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node="n-9", rank=2)
    timeline.span("é", {"yes": True, "many": 2**60}).end(error=OSError("no"))
    timeline.span("open")
    timeline.event("bootseer.imports", '[["torch",0,1,2]]')
    path = tmp_path / "rows.jsonl"
    words = ["--timeline-dir", str(tmp_path), "report", "j", "--rows", str(path)]
    done = CliRunner().invoke(cli, [*words, "--trace", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stages = find_start(TimelineFolder(tmp_path), "j").stages()
    assert sum(row["kind"] == "stage" for row in rows) == len(stages)
    seconds = sum(row["seconds"] or 0 for row in rows)
    assert round(seconds, 3) == round(
        sum(((one.end_ns or one.start_ns) - one.start_ns) / 1e9 for one in stages), 3
    )
    (failed,) = [row for row in rows if row["name"] == "é"]
    assert (failed["failed"], failed["message"]) == (True, "OSError: no")
    assert failed["attributes"]["many"] == 2**60
    (still,) = [row for row in rows if row["name"] == "open"]
    assert still["ended_ns"] is still["seconds"] is None
    (event,) = [row for row in rows if row["kind"] == "event"]
    assert (event["node"], event["message"]) == ("n-9", '[["torch",0,1,2]]')
