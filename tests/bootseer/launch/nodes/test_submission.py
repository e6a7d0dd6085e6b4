"""The submission that a launch belongs to, with and without a scheduler."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bootseer.report.decoding import decode
from bootseer.report.explain import break_down
from bootseer.report.read import read_graph
from bootseer.report.sources import TimelineFolder, list_starts
from bootseer.store.local.backend import LocalBackend
from bootseer.store.objects.lease import agree_on_token
from bootseer.timeline.otlp import Stage

_CLEAR = ("SLURM", "TORCHELASTIC", "BOOTSEER", "TRACEPARENT", "RANK", "PET_", "MASTER_")


def _begin(
    folder: Path, node: str, command: Sequence[str] = ("true",), **variables: str
) -> "subprocess.Popen[bytes]":
    """Begin a start on one of the nodes whose files are below `folder`."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_CLEAR)},
        "BOOTSEER_TIMELINE_DIR": str(folder / "timelines"),
        "BOOTSEER_CACHE_DIR": str(folder / node / "cache"),
        "BOOTSEER_RUN_DIR": str(folder / node / "run"),
        "BOOTSEER_NODE": node,
        "BOOTSEER_PUBLISH_TIMELINES": "off",
        **variables,
    }
    words = [sys.executable, "-m", "bootseer", "--job", "j", "run", "--", *command]
    return subprocess.Popen(words, env=environ, stderr=subprocess.PIPE)


def _run(folder: Path, *nodes: str, command: Sequence[str] = ("true",), **variables: str) -> None:
    """Run a start on several nodes at once."""
    for one in [_begin(folder, node, command, **variables) for node in nodes]:
        _, said = one.communicate(timeout=100)
        assert one.returncode == 0, said


def _stages(folder: Path) -> list[Stage]:
    files = sorted(folder.rglob("*.jsonl"))
    return [stage for file in files for stage in decode(file.read_bytes())]


def _submissions(folder: Path) -> dict[str, set[str]]:
    """Return the nodes of each submission."""
    found: dict[str, set[str]] = {}
    for stage in _stages(folder):
        name = str(stage.resource.get("bootseer.submission", ""))
        found.setdefault(name, set()).add(str(stage.resource["host.name"]))
    return found


def test_nodes_that_nobody_tells_agree_by_their_folder_of_timelines(tmp_path: Path) -> None:
    for _ in range(3):
        _run(tmp_path, "a", "b", "c")
    found = _submissions(tmp_path)
    assert list(found.values()) == [{"a", "b", "c"}] * 3
    assert "" not in found
    traces = {stage.trace_id for stage in _stages(tmp_path)}
    assert len(traces) == 3
    starts = list_starts(TimelineFolder(tmp_path / "timelines"), "j")
    assert [len(start.files) for start in starts] == [3, 3, 3]


def test_a_node_that_begins_long_after_the_others_begins_another(tmp_path: Path) -> None:
    _run(tmp_path, "a")
    for path in (tmp_path / "timelines/j/.submissions").rglob("*"):
        os.utime(path, (1, 1))
    _run(tmp_path, "b")
    assert sorted(map(sorted, _submissions(tmp_path).values())) == [["a"], ["b"]]


def test_nodes_without_a_common_folder_agree_by_their_store(tmp_path: Path) -> None:
    def run() -> None:
        for node in ("a", "b"):
            own = str(tmp_path / node / "timelines")
            store = str(tmp_path / "store")
            here = {"BOOTSEER_TIMELINE_DIR": own, "BOOTSEER_STORE": store}
            _run(tmp_path, node, BOOTSEER_PUBLISH_TIMELINES="on", **here)

    run()
    run()
    found = _submissions(tmp_path)
    assert list(found.values()) == [{"a", "b"}, {"a", "b"}]


def test_jobs_of_one_name_at_one_time_are_told_apart_by_their_rendezvous(tmp_path: Path) -> None:
    for name, nodes in (("x", "ab"), ("y", "cd")):
        _run(tmp_path, *nodes, command=("true", "--rdzv-id", name, "--node-rank=1"))
    assert sorted(map(sorted, _submissions(tmp_path).values())) == [["a", "b"], ["c", "d"]]


def test_a_store_that_does_not_answer_keeps_no_start_waiting(tmp_path: Path) -> None:
    _run(tmp_path, "a", BOOTSEER_STORE="hdfs://127.0.0.1:9", BOOTSEER_PUBLISH_TIMELINES="on")
    assert _submissions(tmp_path) == {"": {"a"}}


def test_a_requeue_is_an_attempt_of_the_same_submission(tmp_path: Path) -> None:
    for count in ("", "1"):
        _run(tmp_path, "a", "b", SLURM_JOB_ID="7", SLURM_RESTART_COUNT=count)
    starts = list_starts(TimelineFolder(tmp_path / "timelines"), "j")
    assert sorted((one.submission, one.attempt) for one in starts) == [("7", 0), ("7", 1)]
    assert len({stage.trace_id for stage in _stages(tmp_path)}) == 2


def test_tasks_of_a_node_are_one_node(tmp_path: Path) -> None:
    for number in range(4):
        rank = {"SLURM_JOB_ID": "7", "SLURM_PROCID": str(number)}
        _run(tmp_path, "ab"[number // 2], **rank)
    (start,) = list_starts(TimelineFolder(tmp_path / "timelines"), "j")
    breakdown = break_down(read_graph(start, 0))
    assert breakdown is not None
    assert (breakdown.node_count, breakdown.rank_count) == (2, 4)


def test_who_had_an_agreement_before_begins_another(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)

    def ask(*known: str) -> str:
        return agree_on_token(backend, "k", ttl_s=600, owner="n", is_used=lambda one: one in known)

    first = ask()
    assert ask() == first
    second = ask(first)
    assert second != first
    assert ask(first) == second
