"""The breakdown of a start: per stage over the nodes, open stages, the command line."""

import json
import subprocess
import sys
from pathlib import Path

from bootseer.report.breakdown import break_down
from bootseer.report.chrome_trace import to_chrome_trace
from bootseer.timeline import Timeline
from bootseer.timeline.otlp import Stage

_S = 10**9


def _stage(name: str, node: str, begin_s: float, end_s: float | None, **attributes: int) -> Stage:
    return Stage(
        name=name,
        trace_id="ab" * 16,
        span_id=f"{node}{name}",
        parent_id="",
        start_ns=int(begin_s * _S),
        end_ns=None if end_s is None else int(end_s * _S),
        attributes={f"bootseer.{key}": value for key, value in attributes.items()},
        resource={"host.name": node, "bootseer.rank": 0, "bootseer.job": "j"},
    )


def test_one_row_per_stage_with_the_slowest_node() -> None:
    breakdown = break_down(
        [
            _stage("start", "a", 100, 110),
            _stage("image", "a", 100, 102, bytes=10),
            _stage("start", "b", 200, 220),
            _stage("image", "b", 201, 207, bytes=20),
            _stage("start", "c", 300, None),
            _stage("image", "c", 300, None),
        ]
    )
    assert breakdown is not None
    assert breakdown.node_count == 3
    (image,) = breakdown.stages
    assert (image.median_s, image.max_s, image.slowest_node) == (4, 6, "b/0")
    assert (image.open_count, image.bytes_moved, image.max_over_median) == (1, 30, 1.5)
    assert breakdown.total is not None
    assert breakdown.total.open_count == 1


def test_no_stages_no_breakdown() -> None:
    assert break_down([]) is None


def test_chrome_trace_has_a_process_per_node() -> None:
    trace = to_chrome_trace([_stage("image", "a", 1, 2), _stage("image", "b", 1, None)])
    assert [event["ph"] for event in trace["traceEvents"]] == ["M", "M", "X", "B"]
    assert trace["traceEvents"][2]["dur"] == 1e6


def _report(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "--timeline-dir", str(directory), "report", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_shows_the_last_start(tmp_path: Path) -> None:
    for attempt in (0, 1):
        timeline = Timeline.start(tmp_path, job="j", attempt=attempt, node="n", rank=0)
        with timeline.span("start") as start:
            timeline.below(start).span(f"image{attempt}").end()
    trace = tmp_path / "trace.json"
    shown = _report(tmp_path, "j", "--trace", str(trace))
    assert shown.returncode == 0, shown.stderr
    assert "image1" in shown.stdout
    assert "image0" not in shown.stdout
    assert json.loads(trace.read_text())["traceEvents"]
    encoded = json.loads(_report(tmp_path, "j", "--attempt", "0", "--json").stdout)
    assert encoded["attempt"] == 0
    assert encoded["stages"][0]["name"] == "image0"


def test_an_unknown_job_is_one_sentence(tmp_path: Path) -> None:
    result = _report(tmp_path, "nobody")
    assert result.returncode == 10
    assert result.stderr.count("\n") == 1
    assert "no timeline of job 'nobody'" in result.stderr
