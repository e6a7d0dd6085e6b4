"""Several starts of one job: listed, compared and watched."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import InvalidInputError
from bootseer.report.explain import (
    Repeated,
    StageProgress,
    StartModel,
    WhatIf,
    compare_starts,
    history_of,
    progress,
)
from bootseer.report.graph import StartGraph
from bootseer.timeline import Timeline
from bootseer.timeline.otlp import Stage, encode_start
from testbed.starts.generate import InjectedFault, Recipe, node_name, tracks
from testbed.starts.timelines import write_timelines
from tests.bootseer.cli.json_page import documented, keys

_SLOW = InjectedFault(node_name(2), "slow disk", 3.0)


def _run(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(cli, ["--timeline-dir", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        faults = (_SLOW,) if number >= 2 else ()
        recipe = Recipe(4, 2, faults, seed=number)
        write_timelines(tmp_path, recipe, job="j", submission=f"s{number}")
    return tmp_path


def test_changes_add_up_to_the_difference() -> None:
    before = StartModel(StartGraph(tracks(Recipe(4, 2)))).analyse()
    after = StartModel(StartGraph(tracks(Recipe(4, 2, (_SLOW,))))).analyse()
    changes = compare_starts(before, after)
    assert changes[0].stage == "load checkpoint"
    more = sum(change.more_s for change in changes)
    assert more == pytest.approx(after.ready_s - before.ready_s)


def test_looking_back_names_what_is_slower_and_who_is_slow_again() -> None:
    starts = [
        StartModel(
            StartGraph(tracks(Recipe(6, 2, (_SLOW,) if seed >= 3 else (), seed=seed)))
        ).analyse()
        for seed in range(6)
    ]
    history = history_of(starts)
    assert history.trend_s > 1
    assert history.repeated == (Repeated(node_name(2), 3),)
    assert history_of(starts[:4]).slower[0].stage == "load checkpoint"
    assert history_of([]).trend_s == 0


def test_the_command_lists_and_compares(folder: Path) -> None:
    listed = _run(folder, "report", "j", "--list")
    assert [line.split()[0] for line in listed.splitlines()[2:]] == ["s3:0", "s2:0", "s1:0", "s0:0"]
    assert "trend: +" in _run(folder, "report", "j", "--history")
    assert f"{node_name(2)} in 2 of 4 starts" in _run(folder, "report", "j", "--history")
    compared = _run(folder, "report", "j", "--compare", "s0:0")
    assert "critical path against start s0:0: +" in compared
    document = json.loads(
        _run(folder, "report", "j", "--submission", "s3", "--compare", "previous", "--json")
    )
    assert document["comparison"]["start"] == "s2:0"
    assert document["analysis"]["is_ready"] is True
    history = json.loads(_run(folder, "report", "j", "--history", "--json"))
    assert len(history["starts"]) == 4
    assert history["history"]["repeated"] == [{"node": node_name(2), "start_count": 2}]
    found = {
        key
        for one in (document, history)
        for key in keys(one, "", frozenset(("shift_s",)))
        if not key.startswith(("total.", "ready."))
    }
    sample = {f"history.slower[].{name}" for name in ("stage", "before_s", "after_s")}
    page = (
        set(documented()["report"])
        - sample
        - {"analysis.clocks.apart[]", "analysis.clocks.shift_s.*", "stages[].notes[]"}
        - {"analysis.delay"}
    )
    # No stage is open or has failed, nobody gave up at a barrier, and there are no requests.
    without = (
        "stages[].open",
        "analysis.missed_barriers[]",
        "analysis.requests[]",
        "analysis.fan_out.",
        "failure.",
    )
    assert found >= {key for key in page if "`" not in key and not key.startswith(without)}


def test_a_list_computes_nothing_that_it_does_not_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []
    asked = StartModel.what_if

    def counted(model: StartModel, name: str, change: Any) -> WhatIf:
        changes.append(name)
        return asked(model, name, change)

    monkeypatch.setattr(StartModel, "what_if", counted)
    _run(folder, "report", "j", "--list")
    # By how much a node must be slower to be named depends on it.
    assert changes == ["no stragglers"] * 4


def test_a_page_shows_how_two_starts_differ(folder: Path) -> None:
    page = folder / "start.html"
    _run(folder, "report", "j", "--compare", "s0:0", "--html", str(page))
    assert '"comparison":{"start":"s0:0","ready_s":' in page.read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["j", "start.html"]


def test_names_of_starts_that_are_none(folder: Path) -> None:
    for name, why in (("s0", "is no start"), ("s0:9", "no timeline of attempt 9")):
        arguments = ["--timeline-dir", str(folder), "report", "j", "--compare", name]
        done = CliRunner().invoke(cli, arguments)
        assert why in str(done.exception)


def _stage(name: str, node: str, begin_s: float, end_s: float | None) -> Stage:
    return Stage(
        name=name,
        trace_id="",
        span_id=f"{node}{name}",
        parent_id="",
        start_ns=int(begin_s * 1e9),
        end_ns=None if end_s is None else int(end_s * 1e9),
        resource={"host.name": node, "bootseer.rank": 0},
    )


def test_progress_names_what_hangs() -> None:
    stages = [_stage("image", node, 0, 4) for node in "abc"] + [_stage("image", "d", 0, None)]
    earlier = StartModel(StartGraph(tracks(Recipe(3, 1)))).analyse()
    early = progress(stages, 6 * 10**9, 3.0)
    assert (early.hanging, early.expected_s) == ((), None)
    late = progress(stages, 20 * 10**9, 3.0, [earlier.ready_s])
    assert [(one.node, one.stage, one.median_s) for one in late.hanging] == [("d", "image", 4.0)]
    assert late.stages == (StageProgress("image", 1, 3),)
    assert late.expected_s == earlier.ready_s


def test_watch_follows_a_start_until_it_is_ready(tmp_path: Path) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node="n", rank=0)
    timeline.append(encode_start(_stage("image", "n", time.time(), None)))
    assert "image: open on 1, done on 0" in _run(tmp_path, "watch", "j", "--once")
    timeline.span("image").end()
    other = tmp_path / "other"
    write_timelines(other, Recipe(3, 2), job="j")
    shown = _run(other, "watch", "j", "--every", "0.1")
    assert "3 node(s), 6 process(es) ready" in shown
    document = json.loads(_run(other, "watch", "j", "--json"))
    assert document["ready_count"] == 6


def _watched(folder: Path, *, since_s: float = 0.0) -> str:
    """Return the output of `watch` for a start whose timelines are `since_s` seconds old."""
    now = time.time()
    for path in folder.rglob("*.jsonl"):
        os.utime(path, (now - since_s, now - since_s))
    done = CliRunner().invoke(cli, ["--timeline-dir", str(folder), "watch", "j"])
    assert done.exit_code == 0, done.output
    return done.stderr


def test_watch_says_why_it_ends(tmp_path: Path) -> None:
    """`watch` followed a failed start, or one whose job is never ready, for ten minutes.

    It then ended without a message that the start was over.
    """
    write_timelines(tmp_path / "ready", Recipe(2, 1), job="j")
    assert "the start is over: 2 process(es) are ready" in _watched(tmp_path / "ready")
    timeline = Timeline.start(
        tmp_path / "failed", job="j", submission="s", attempt=0, node="n", rank=0
    )
    with pytest.raises(InvalidInputError), timeline.span("start"):
        raise InvalidInputError("no such image")
    failed = _watched(tmp_path / "failed")
    assert "the start has failed on n: InvalidInputError: no such image" in failed
    timeline = Timeline.start(
        tmp_path / "silent", job="j", submission="s", attempt=0, node="n", rank=0
    )
    timeline.span("image").end()
    assert "nothing is under way" in _watched(tmp_path / "silent", since_s=100)
    timeline = Timeline.start(
        tmp_path / "hung", job="j", submission="s", attempt=0, node="n", rank=0
    )
    timeline.span("image")
    assert "nothing is under way" in _watched(tmp_path / "hung", since_s=1000)
