"""The breakdown of a start: stages over the nodes, open stages, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bootseer.report.explain import Breakdown, break_down
from bootseer.report.graph import StartGraph, node_of
from bootseer.report.sources import TimelineFolder, list_starts, read_start
from bootseer.timeline import Timeline
from bootseer.timeline.otlp import Stage

_S = 10**9


def _stage(
    name: str,
    node: str,
    begin_s: float,
    end_s: float | None,
    *,
    rank: int = 0,
    restart: int = 0,
    **attributes: int,
) -> Stage:
    return Stage(
        name=name,
        trace_id="ab" * 16,
        span_id=f"{node}{rank}{name}",
        parent_id="",
        start_ns=int(begin_s * _S),
        end_ns=None if end_s is None else int(end_s * _S),
        attributes={f"bootseer.{key}": value for key, value in attributes.items()},
        resource={
            "host.name": node,
            "bootseer.rank": rank,
            "bootseer.job": "j",
            **({"bootseer.restart": restart} if restart else {}),
        },
    )


def _break_down(stages: list[Stage]) -> Breakdown | None:
    graph = StartGraph()
    for node in dict.fromkeys(map(node_of, stages)):
        graph.add_node([stage for stage in stages if node_of(stage) == node], 0)
    return break_down(graph)


def test_one_row_per_stage_with_the_slowest_node() -> None:
    breakdown = _break_down(
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


def _torchrun(ready: bool = True) -> list[Stage]:
    """Return two nodes whose clocks differ, each with two workers, of ranks 0 to 3."""
    stages = []
    for number, node in enumerate(("a", "b")):
        zero_s = 100.0 + 500 * number
        stages.append(_stage("start", node, zero_s, zero_s + 10, rank=number))
        stages.append(_stage("image", node, zero_s + 1, zero_s + 4, rank=number))
        for rank in (2 * number, 2 * number + 1):
            stages.append(_stage("load", node, zero_s + 12, zero_s + 13 + rank, rank=rank))
            if ready:
                stages.append(
                    _stage("ready", node, zero_s + 20 + rank, zero_s + 20 + rank, rank=rank)
                )
    return stages


def test_workers_are_measured_from_the_start_of_their_node() -> None:
    breakdown = _break_down(_torchrun())
    assert breakdown is not None
    assert (breakdown.node_count, breakdown.rank_count) == (2, 4)
    image, load = breakdown.stages
    assert (image.begins_s, image.node_count, image.rank_count) == (1, 2, 2)
    assert (load.begins_s, load.node_count, load.rank_count) == (12, 2, 4)
    assert (load.median_s, load.max_s, load.slowest_node) == (2.5, 4, "b/3")


def test_how_long_it_took_until_ready() -> None:
    breakdown = _break_down(_torchrun())
    assert breakdown is not None
    assert breakdown.ready is not None
    ready = breakdown.ready
    assert (ready.begins_s, ready.median_s, ready.max_s) == (0, 21.5, 23)
    assert (ready.slowest_node, ready.rank_count) == ("b/3", 4)
    silent = _break_down(_torchrun(ready=False))
    assert silent is not None
    assert silent.ready is None


def test_an_open_stage_names_where_it_hangs() -> None:
    stages = [*_torchrun(), _stage("load data", "b", 613, None, rank=3)]
    breakdown = _break_down(stages)
    assert breakdown is not None
    (row,) = [row for row in breakdown.stages if row.name == "load data"]
    assert (row.open_count, row.open_on) == (1, ("b/3",))


def test_what_restarted_workers_did_is_no_part_of_the_start() -> None:
    again = [_stage("load", "a", 9000, 9001, rank=rank, restart=2) for rank in (0, 1)]
    breakdown = _break_down([*_torchrun(), *again])
    assert breakdown is not None
    assert breakdown.restart_count == 2
    once = _break_down(_torchrun())
    assert once is not None
    assert breakdown.stages == once.stages


def test_no_stages_no_breakdown() -> None:
    assert _break_down([]) is None


def _report(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "--timeline-dir", str(directory), "report", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _start(
    directory: Path, submission: str, attempt: int, name: str, node: str = "n", rank: int = 0
) -> None:
    timeline = Timeline.start(
        directory, job="j", submission=submission, attempt=attempt, node=node, rank=rank
    )
    with timeline.span("start") as start:
        timeline.below(start).span(name).end()
    # Names begin with the second: else all of a test would be as old as each other.
    _start.count += 1  # type: ignore[attr-defined]
    stamp = f"20261123T0000{_start.count:02}Z"  # type: ignore[attr-defined]
    timeline.path.rename(timeline.path.with_name(stamp + timeline.path.name[16:]))


_start.count = 0  # type: ignore[attr-defined]


def test_the_command_shows_the_last_start(tmp_path: Path) -> None:
    for attempt in (0, 1):
        _start(tmp_path, "", attempt, f"image{attempt}")
    trace = tmp_path / "start.pftrace"
    shown = _report(tmp_path, "j", "--trace", str(trace))
    assert shown.returncode == 0, shown.stderr
    assert "image1" in shown.stdout
    assert "image0" not in shown.stdout
    assert b"launcher" in trace.read_bytes()
    encoded = json.loads(_report(tmp_path, "j", "--attempt", "0", "--json").stdout)
    assert encoded["attempt"] == 0
    assert encoded["stages"][0]["name"] == "image0"
    by_flag = ["--timeline-dir", str(tmp_path), "--job", "j", "--attempt", "0", "report", "--json"]
    command = [sys.executable, "-m", "bootseer", *by_flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["attempt"] == 0


def _names(stages: list[Stage]) -> set[str]:
    return {stage.name for stage in stages} - {"start"}


def test_two_submissions_of_one_name_are_two_starts(tmp_path: Path) -> None:
    _start(tmp_path, "100", 0, "first", "a")
    _start(tmp_path, "100", 1, "requeued", "a")
    # Of another one, on another node, with a lower attempt.
    _start(tmp_path, "101", 0, "another", "b")
    assert _names(read_start(TimelineFolder(tmp_path), "j")) == {"another"}
    assert _names(read_start(TimelineFolder(tmp_path), "j", submission="100")) == {"requeued"}
    assert _names(read_start(TimelineFolder(tmp_path), "j", 0, "100")) == {"first"}
    table = _report(tmp_path, "j", "--submission", "100").stdout
    assert "submission 100" in table
    assert "another" not in table
    missing = _report(tmp_path, "j", "--submission", "102")
    assert missing.returncode == 10
    assert "submission '102'" in missing.stderr


def test_without_a_submission_a_node_that_starts_again_begins_another_start(
    tmp_path: Path,
) -> None:
    _start(tmp_path, "", 0, "first", "a")
    _start(tmp_path, "", 0, "first", "b")
    assert len(read_start(TimelineFolder(tmp_path), "j")) == 4
    _start(tmp_path, "", 0, "second", "b")
    assert _names(read_start(TimelineFolder(tmp_path), "j")) == {"second"}
    _start(tmp_path, "", 0, "second", "a")
    assert len(read_start(TimelineFolder(tmp_path), "j")) == 4
    assert _names(read_start(TimelineFolder(tmp_path), "j")) == {"second"}


def test_a_rank_that_starts_again_in_a_submission_replaces_its_earlier_start(
    tmp_path: Path,
) -> None:
    for node, name in (("a", "first"), ("b", "first"), ("b", "again")):
        _start(tmp_path, "u-1", 0, name, node)
    assert _names(read_start(TimelineFolder(tmp_path), "j")) == {"first", "again"}
    assert len(read_start(TimelineFolder(tmp_path), "j")) == 4


def test_programs_of_a_job_without_a_name_are_told_apart(tmp_path: Path) -> None:
    """A named fault: two unrelated starts on two nodes were one start of the job "default"."""

    def run(node: str, *command: str) -> None:
        told = {name: value for name, value in os.environ.items() if "JOB" not in name}
        environ = {**told, "BOOTSEER_TIMELINE_DIR": str(tmp_path), "BOOTSEER_NODE": node}
        words = [sys.executable, "-m", "bootseer", "run", "--", "echo", *command]
        subprocess.run(words, env=environ, check=True, timeout=60, stdout=subprocess.DEVNULL)

    run("a", "train", "--node-rank=0", "10.0.0.1")
    run("b", "evaluate")
    run("c", "train", "--node-rank=12", "10.0.0.23")
    starts = list_starts(TimelineFolder(tmp_path), "default")
    nodes = {
        frozenset(str(stage.resource["host.name"]) for stage in start.stages()) for start in starts
    }
    assert nodes == {frozenset({"a", "c"}), frozenset({"b"})}


def test_runs_of_two_slurm_jobs_are_told_apart(tmp_path: Path) -> None:
    """Slurm starts both with one name and two ids, the second with torchrun's variables."""
    code = "import bootseer; bootseer.ready()"
    command = [sys.executable, "-m", "bootseer", "run", "--", sys.executable, "-c", code]
    base = {"BOOTSEER_TIMELINE_DIR": str(tmp_path), "SLURM_JOB_NAME": "train"}
    for job_id in ("7", "8"):
        environ = {**os.environ, **base, "SLURM_JOB_ID": job_id}
        subprocess.run(command, env=environ, check=True, timeout=60)
    old, new = (
        read_start(TimelineFolder(tmp_path), "train", submission=job_id) for job_id in ("7", "8")
    )
    assert len({stage.trace_id for stage in old} | {stage.trace_id for stage in new}) == 2
    assert {stage.resource["bootseer.submission"] for stage in new} == {"8"}
    table = _report(tmp_path, "train").stdout
    assert "submission 8" in table
    assert "until ready" in table


def test_an_unknown_job_is_one_sentence(tmp_path: Path) -> None:
    result = _report(tmp_path, "nobody")
    assert result.returncode == 10
    assert result.stderr.count("\n") == 1
    assert "no timeline of job 'nobody'" in result.stderr
