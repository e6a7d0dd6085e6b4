"""Nodes that wait for another node's set-up: the report names that node."""

import subprocess
from pathlib import Path

import pytest

from bootseer.report.decoding import decode
from bootseer.report.explain import StartModel
from bootseer.report.graph import StartGraph, tracks_of
from bootseer.timeline.otlp import WAITED_FOR, Stage
from testbed.node import Node
from testbed.waiting import wait_for

# Each node has the folder of the set-up for itself, under one name.
_OWN_FOLDER = 'mount --bind "$0" "$1"; cd "$1"; shift; exec "$@"'


def _stages(*nodes: Node) -> list[Stage]:
    files = [file for node in nodes for file in (node.base / "timeline").rglob("*.jsonl")]
    return [stage for file in files for stage in decode(file.read_bytes())]


def _waits(node: Node) -> list[Stage]:
    return [stage for stage in _stages(node) if stage.name == "wait for set-up"]


@pytest.mark.needs("mount", "fuse")
def test_a_node_that_waits_for_a_set_up_says_for_whose(tmp_path: Path) -> None:
    work, go = tmp_path / "work", tmp_path / "go"
    work.mkdir()
    began = tmp_path / "began"
    script = f"touch {began}; until test -e {go}; do sleep 0.05; done; mkdir env; echo a > env/x"
    holder, other, later = (Node(tmp_path / name, str(tmp_path / "store")) for name in "hol")

    def start(node: Node) -> "subprocess.Popen[str]":
        own = node.base / "work"
        own.mkdir()
        prefix = ("unshare", "--mount", "sh", "-ec", _OWN_FOLDER, str(own), str(work))
        options = ("--setup", script, "--target", "env", "--mode", "extract")
        names = {"BOOTSEER_NODE": node.base.name, "BOOTSEER_SUBMISSION": "7"}
        return node.start("run", *options, "--", "cat", "env/x", prefix=prefix, variables=names)

    with start(holder) as first:
        wait_for(began.exists)
        with start(other) as second:
            wait_for(lambda: bool(_waits(other)))
            go.touch()
            assert (second.communicate(timeout=60)[0], second.returncode) == ("a\n", 0)
        assert (first.communicate(timeout=60)[0], first.returncode) == ("a\n", 0)
    assert [stage.attributes[WAITED_FOR] for stage in _waits(other)] == ["h"]
    assert _waits(holder) == []
    # Who begins when it is stored has not waited for anybody.
    with start(later) as third:
        assert (third.communicate(timeout=60)[0], third.returncode) == ("a\n", 0)
    assert _waits(later) == []

    stages = _stages(holder, other)
    model = StartModel(StartGraph(tracks_of(stages, min(stage.start_ns for stage in stages))))
    analysis = model.analyse()
    assert analysis.replay_error_s == pytest.approx(0, abs=1e-6)
    # On a busy machine the other's own begin may be the longer part.
    assert ("h", "environment") in {(one.node, str(one.label)) for one in analysis.path}
