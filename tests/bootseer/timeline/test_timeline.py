"""Timelines are written at each start and end of a stage, and read whole or torn."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bootseer
from bootseer.report.decoding import decode
from bootseer.timeline import Timeline, otlp
from testbed.waiting import pause


def _start(directory: Path) -> Timeline:
    return Timeline.start(directory, job="train", submission="", attempt=2, node="n1", rank=3)


def test_a_stage_is_on_disk_from_its_start(tmp_path: Path) -> None:
    timeline = _start(tmp_path)
    span = timeline.span("image", {"bootseer.from": "store"})
    (stage,) = decode(timeline.path.read_bytes())
    assert (stage.name, stage.end_ns) == ("image", None)
    assert stage.resource["host.name"] == "n1"
    span.set("bootseer.bytes", 2**60)
    span.end()
    (stage,) = decode(timeline.path.read_bytes())
    assert stage.end_ns is not None
    assert stage.end_ns >= stage.start_ns
    assert stage.attributes["bootseer.bytes"] == 2**60
    assert stage.attributes["bootseer.from"] == "store"
    assert not stage.failed


def test_a_failed_stage_says_why(tmp_path: Path) -> None:
    timeline = _start(tmp_path)
    with pytest.raises(OSError, match="gone"), timeline.span("checkpoint"):
        raise OSError("gone")
    (stage,) = decode(timeline.path.read_bytes())
    assert stage.failed
    assert stage.message == "OSError: gone"


def test_a_stage_that_was_written_slowly_ends_after_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the time to write a begin was missing at the end of the stage."""
    timeline = _start(tmp_path)

    def append_slowly(line: bytes) -> None:
        Timeline.append(timeline, line)
        pause(0.05)

    with monkeypatch.context() as patched:
        patched.setattr(timeline, "append", append_slowly)
        whole = timeline.span("image")
    with timeline.span("start container"):
        pass
    whole.end()
    ends = {stage.name: stage.end_ns or 0 for stage in decode(timeline.path.read_bytes())}
    assert ends["image"] > ends["start container"]


def test_nodes_agree_on_the_trace_without_talking(tmp_path: Path) -> None:
    assert otlp.trace_id_of("train", 2) == otlp.trace_id_of("train", 2)
    assert otlp.trace_id_of("train", 2) != otlp.trace_id_of("train", 3)
    assert otlp.trace_id_of("train", 2, "7") == otlp.trace_id_of("train", 2, "7")
    ids = {otlp.trace_id_of("train", 2, submission) for submission in ("", "7", "8")}
    assert len(ids) == 3
    span = _start(tmp_path).span("x")
    assert otlp.parse_traceparent(span.traceparent) is not None
    assert span.traceparent.split("-")[1] == otlp.trace_id_of("train", 2)


def test_an_outer_traceparent_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    timeline = _start(tmp_path)
    timeline.span("x").end()
    (stage,) = decode(timeline.path.read_bytes())
    assert (stage.trace_id, stage.parent_id) == ("ab" * 16, "cd" * 8)


@pytest.mark.parametrize("text", ["", "00", "00-zz-yy-01", f"00-{'0' * 32}-{'0' * 16}-01"])
def test_a_malformed_traceparent_is_ignored(text: str) -> None:
    assert otlp.parse_traceparent(text) is None


def test_training_code_writes_to_the_same_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = _start(tmp_path)
    root = timeline.span("start")
    monkeypatch.setenv("BOOTSEER_TIMELINE", str(timeline.path))
    monkeypatch.setenv("TRACEPARENT", root.traceparent)
    monkeypatch.setenv("RANK", "not a number")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        # An abstract name that no other run of the tests on this machine has.
        name = f"bootseer-test-ready-{os.getpid()}"
        listener.bind("\0" + name)
        listener.settimeout(60)
        monkeypatch.setenv("BOOTSEER_READY_SOCKETS", f"nobody-here:1,{name}:secret")
        with bootseer.stage("load data", {"files": 3}):
            pass
        bootseer.ready()
        assert listener.recv(100) == b"ready secret"
    stages = {stage.name: stage for stage in decode(timeline.path.read_bytes())}
    assert set(stages) == {"start", "load data", "ready"}
    assert stages["load data"].parent_id == stages["start"].span_id
    assert stages["load data"].trace_id == stages["start"].trace_id


def test_each_worker_has_its_own_rank_and_says_when_it_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="7_1", attempt=0, node="n1", rank=1)
    assert timeline.path.parent == tmp_path / "j" / "0" / "7_1"
    code = "import bootseer\nbootseer.stage('load').end()"
    environ = {"BOOTSEER_TIMELINE": str(timeline.path), "BOOTSEER_NODE": "n1"}
    environ |= {"BOOTSEER_RANK": "1", "BOOTSEER_SUBMISSION": "7_1", "BOOTSEER_JOB": "j"}
    for worker in ({}, {"RANK": "0"}, {"RANK": "9", "TORCHELASTIC_RESTART_COUNT": "2"}):
        subprocess.run([sys.executable, "-c", code], env=environ | worker, check=True, timeout=60)
    resources = [stage.resource for stage in decode(timeline.path.read_bytes())]
    assert [resource["bootseer.rank"] for resource in resources] == [1, 0, 9]
    assert [resource.get("bootseer.restart") for resource in resources] == [None, None, 2]
    assert {resource["bootseer.submission"] for resource in resources} == {"7_1"}
    assert all(resource["bootseer.boot_id"] for resource in resources)


def test_nothing_happens_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOOTSEER_TIMELINE", raising=False)
    with bootseer.stage("x") as span:
        span.set("a", 1)
    bootseer.ready()


def test_an_unwritable_timeline_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    timeline = _start(blocker)
    timeline.span("a").end()
    timeline.span("b").end()
    assert len(caplog.records) == 1
    assert "no timeline for this start" in caplog.text


# Every file is full after so many bytes more: once in the middle of a line, and then at its end.
FULL_DISK = """
import os, resource, sys
from pathlib import Path
from bootseer.timeline import Timeline
timeline = Timeline.start(Path(sys.argv[1]), job="j", submission="", attempt=0, node="n", rank=0)
other = timeline.below(timeline.span("first"))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for name in ("second", "third"):
    size = timeline.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    timeline.span(name)
    timeline.span(name)
    assert timeline.path.stat().st_size == size + 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    other.note(f"{name} of another writer", 1, 1)
print(timeline.is_written, other.is_written, timeline.path)
"""


def test_a_full_disk_costs_only_what_found_no_room(tmp_path: Path) -> None:
    """Half a line was once joined by the next line, which was lost without a message."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    is_written, is_other_written, path = done.stdout.split()
    assert (is_written, is_other_written) == ("False", "True")
    assert done.stderr.count("no timeline for this start") == 1, done.stderr
    names = [stage.name for stage in decode(Path(path).read_bytes())]
    assert sorted(names) == ["first", "second of another writer", "third of another writer"]


def test_threads_and_processes_share_a_file(tmp_path: Path) -> None:
    timeline = _start(tmp_path)
    code = "import bootseer\nfor i in range(50):\n    with bootseer.stage('child'): pass\n"
    environ = {"BOOTSEER_TIMELINE": str(timeline.path), "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environ)

    def work() -> None:
        for _ in range(50):
            timeline.span("thread").end()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert child.wait(60) == 0
    stages = decode(timeline.path.read_bytes())
    assert sum(stage.name == "thread" for stage in stages) == 200
    assert sum(stage.name == "child" for stage in stages) == 50
    assert all(stage.end_ns for stage in stages)
    for line in timeline.path.read_bytes().splitlines():
        # A line that was being written for some milliseconds counted as cut off.
        assert not line or json.loads(line)


def test_the_file_is_private(tmp_path: Path) -> None:
    timeline = _start(tmp_path)
    timeline.span("a").end()
    assert timeline.path.stat().st_mode & 0o777 == 0o600
    assert timeline.path.parent.stat().st_mode & 0o077 == 0


def test_a_hostile_line_costs_no_other(tmp_path: Path) -> None:
    """A named fault: one line of brackets, or an endless number, ended every report."""
    stage = otlp.Stage("image", "0" * 32, "1" * 16, "", 5, 9, resource={"bootseer.rank": 0})
    good = otlp.encode_end(stage)
    lines = [
        b"[" * 200_000,
        good.replace(b'"5"', b"1e999"),
        good.replace(b'"5"', b'"' + b"9" * 400 + b'"'),
        good.replace(b'"9"', b'"-1"'),
        good.replace(b'"0"', b'"x"'),
        good.replace(b'{"intValue":"0"}', b'{"stringValue":[]}'),
        b"[" + b"[]," * 2**20 + b"[]]",
    ]
    assert all(line != good for line in lines)
    for line in lines:
        assert decode(line + b"\n" + good) == [stage]


@given(st.data())
def test_a_torn_or_foreign_file_gives_what_is_whole(data: st.DataObject) -> None:
    stage = otlp.Stage("x", "ab" * 16, "cd" * 8, "", 5, 9)
    whole = otlp.encode_start(stage) + otlp.encode_end(stage)
    cut = data.draw(st.integers(0, len(whole)))
    noise = data.draw(st.binary(max_size=50))
    stages = decode(whole[:cut] + b"\n" + noise + b'\n{"resourceSpans":[1]}\n[]\n7\n')
    assert len(stages) <= 1
    assert all(found.name == "x" for found in stages)
