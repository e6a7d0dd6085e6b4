"""Records of a start by NCCL and by programs that write OTLP, in the report.

Without a GPU here, NCCL's lines have the form of its src/init.cc; OTLP follows its specification.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.others.nccl import parse_nccl
from bootseer.report.others.placing import ForeignStages
from bootseer.report.others.spans import parse_spans
from tests.bootseer.report.others.conftest import Start, path_of, rows_of

MakeStart = Callable[..., Start]
_BEGAN_S = 1795432800.0

_SAMPLES = Path(__file__).parent / "samples"
NCCL = (_SAMPLES / "nccl.log").read_bytes()


def test_nccls_own_breakdown_is_a_track_of_its_rank(a_start: MakeStart) -> None:
    start = a_start(_BEGAN_S).explained(nccl=parse_nccl(NCCL))
    rows = {row.name: row for row in start.breakdown.stages}
    assert rows["NCCL kernels"].max_s == pytest.approx(1.1)
    assert rows["NCCL kernels"].slowest_node == "n2/1"
    # Of two communicators of rank 1 the second was made in its second barrier.
    assert rows["NCCL bootstrap"].rank_count == 2
    assert rows["NCCL connections"].begins_s == pytest.approx(8.41)
    (track,) = [g for g in start.model.graph.groups if g.role == "NCCL" and "n2" in g.nodes]
    assert track.times[-1][0] == pytest.approx(8.9)
    # Who held the others is as it was: NCCL waits in its bootstrap.
    assert path_of(start) == path_of(a_start(_BEGAN_S).explained())


def test_nccl_of_ranks_that_met_nobody_is_left_out(a_start: MakeStart) -> None:
    slow = NCCL.replace(b"total 1.40", b"total 9.40")
    start = a_start(_BEGAN_S).explained(nccl=parse_nccl(slow))
    assert "NCCL kernels" not in rows_of(start)


def _span(name: str, begin_s: float, seconds: float, **more: Any) -> dict[str, Any]:
    begin = int((_BEGAN_S + begin_s) * 1e9)
    return {
        "traceId": "ab" * 16,
        "spanId": f"{abs(hash(name)):016x}"[:16],
        "name": name,
        "startTimeUnixNano": str(begin),
        "endTimeUnixNano": str(begin + int(seconds * 1e9)),
        **more,
    }


def _request(*spans: dict[str, Any], **resource: str) -> dict[str, Any]:
    attributes = [
        {"key": key.replace("_", "."), "value": {"stringValue": value}}
        for key, value in resource.items()
    ]
    return {
        "resourceSpans": [
            {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}
        ]
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_spans_below_the_launchers_are_stages(a_start: MakeStart, indent: int | None) -> None:
    """vLLM's parent is in `TRACEPARENT`; its host is the name of its container."""
    made = a_start(_BEGAN_S)
    below = made.span_id("start", "n2", 0)
    init = _span("Worker init", 4.5, 3, traceId=made.trace_id, parentSpanId=below)
    load = _span("Prepare model", 5, 2, traceId=made.trace_id, parentSpanId=init["spanId"])
    other = _span("Other trace", 5, 2, parentSpanId=init["spanId"])
    request = _request(init, load, other, service_name="vllm.worker", host_name="c0ffee")
    start = made.explained(otlp=parse_spans(json.dumps(request, indent=indent).encode()))
    rows = {row.name: row for row in start.breakdown.stages}
    assert (rows["Prepare model"].median_s, rows["Prepare model"].begins_s) == (2, 5)
    assert rows["Worker init"].slowest_node == "n2/0"
    assert "Other trace" not in rows
    (group,) = [one for one in start.model.graph.groups if one.role == "vllm.worker"]
    assert (group.nodes, group.shape.parents) == (["n2"], (-1, 0))


def test_spans_that_name_a_node_are_stages_while_it_starts(a_start: MakeStart) -> None:
    requests = [
        _request(_span("Warm up", 2, 1), _span("Request", 60, 1), host_name="n1", service_name="v"),
        _request(_span("Elsewhere", 2, 1), host_name="n7"),
        _request(_span("Ours", 2, 1), host_name="n1", service_name="bootseer"),
        _request(_span("Backwards", 3, -1), host_name="n1"),
    ]
    event = {
        "resourceLogs": [
            {
                "resource": requests[0]["resourceSpans"][0]["resource"],
                "scopeLogs": [
                    {
                        "logRecords": [
                            {"timeUnixNano": str(int((_BEGAN_S + 4) * 1e9)), "eventName": "loaded"},
                            {"timeUnixNano": "5", "body": {"stringValue": "a line of a log"}},
                        ]
                    }
                ],
            }
        ]
    }
    lines = [json.dumps(one) for one in [*requests, event]] + ["{torn", '{"resourceSpans": 7}']
    start = a_start(_BEGAN_S).explained(otlp=parse_spans("\n".join(lines).encode()))
    own = {"import torch", "first collective"}
    assert rows_of(start).keys() - own == {"Warm up", "loaded", "Backwards"}
    assert rows_of(start)["loaded"] == rows_of(start)["Backwards"] == 0


@pytest.mark.timeout(60)
def test_spans_within_each_other_are_followed_once(a_start: MakeStart) -> None:
    """Repeating each way to the outermost span would take hours."""
    made = a_start(_BEGAN_S)
    above, lines = made.span_id("start", "n1", 0), []
    for number in range(50_000):
        ids = {"traceId": made.trace_id, "spanId": f"{number:016x}", "parentSpanId": above}
        lines.append(json.dumps(_request(_span("deep", 1, 1, **ids))))
        above = ids["spanId"]
    known = parse_spans("\n".join(lines).encode())
    (found, rest) = (
        list(ForeignStages({"otlp": part}).for_node(made.stages("n1")))
        for part in (known, known[1:])
    )
    assert (len(found), len(rest)) == (50_000, 0)


def test_parents_in_a_circle_end(a_start: MakeStart) -> None:
    made = a_start(_BEGAN_S)
    ids = {"traceId": made.trace_id}
    one, two = _span("one", 1, 1, **ids), _span("two", 1, 1, **ids)
    one["parentSpanId"], two["parentSpanId"] = two["spanId"], one["spanId"]
    start = made.explained(otlp=parse_spans(json.dumps(_request(one, two)).encode()))
    assert "one" not in rows_of(start)


def _report(
    made: Start, *arguments: str, said: str | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bootseer", "--timeline-dir", str(made.directory), "report"]
    return subprocess.run(
        [*command, "llama", *arguments], input=said, capture_output=True, text=True, timeout=60
    )


def test_the_report_takes_files_in(tmp_path: Path, a_start: MakeStart) -> None:
    made = a_start(_BEGAN_S, "77")
    log, page, trace = tmp_path / "nccl.log", tmp_path / "page.html", tmp_path / "trace"
    log.write_bytes(NCCL)
    sacct = "JobID|Submit|Eligible|Start\n77|1795432740|1795432740|1795432790\n"
    views = ["--html", str(page), "--trace", str(trace)]
    named = ["--with", f"nccl={log}", "--with", "slurm=-"]
    shown = _report(made, *named, *views, said=sacct)
    assert shown.returncode == 0, shown.stderr
    assert "ready after 10.0 s, 70.0 s after it was submitted" in shown.stdout
    assert "50.00 s  queued on n1 (control plane)" in shown.stdout
    assert "NCCL kernels" in shown.stdout
    assert "What it would have been, since it was submitted" in shown.stdout
    assert "NCCL" in page.read_text()
    assert b"queued" in trace.read_bytes()
    document = json.loads(_report(made, *named, "--json", said=sacct).stdout)
    assert document["analysis"]["before_s"] == pytest.approx(60)
    assert document["analysis"]["since_submission_s"] == pytest.approx(70)
    alone = json.loads(_report(made, "--json").stdout)
    assert alone["analysis"]["before_s"] == 0
    assert alone["analysis"]["since_submission_s"] is None


def test_what_cannot_be_taken_in_is_one_sentence(tmp_path: Path, a_start: MakeStart) -> None:
    made = a_start(_BEGAN_S)
    for argument, code, words in (
        ("slurm", 2, "is not KIND=FILE"),
        ("pbs=x", 2, "is not KIND=FILE"),
        (f"kubernetes={tmp_path}/none", 10, "none"),
        ("kubernetes=-", 15, "is not valid JSON"),
    ):
        shown = _report(made, "--with", argument, said="no JSON")
        assert shown.returncode == code, shown.stderr
        assert words in shown.stderr
