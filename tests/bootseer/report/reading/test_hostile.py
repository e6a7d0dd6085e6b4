"""`bootseer report` answers for any timelines that nodes, programs and file systems leave."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.report.decoding import decode
from bootseer.report.sources import TOGETHER_BYTES_MAX, TimelineFolder, find_start
from bootseer.timeline.otlp import Stage, Value, encode_end, encode_start
from testbed.starts.generate import InjectedFault, Recipe, node_name
from testbed.starts.timelines import write_timelines

_EVIL = "\x1b]0;owned\x07\x1b[2J</script><script>document.title='owned'</script>\u202e"


def _report(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bootseer",
            "--timeline-dir",
            str(folder),
            "report",
            "j",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done


def _timelines(folder: Path) -> list[Path]:
    return sorted((folder / "j").rglob("*.jsonl"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "timelines"
    faults = (InjectedFault(node_name(2), "slow disk", 4.0),)
    write_timelines(place, Recipe(6, 2, faults), job="j", submission="s")
    return place


def test_torn_lines_and_missing_nodes_cost_what_they_held(folder: Path) -> None:
    files = _timelines(folder)
    for number, file in enumerate(files[3:5]):
        data = file.read_bytes()
        file.write_bytes(
            data[: len(data) // 2] + b"\0\xff{" * number + b"\n" + data[len(data) // 3 :]
        )
    files[5].unlink()
    done = _report(folder, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["node_count"] == 5
    assert [one["node"] for one in found["analysis"]["stragglers"]] == [node_name(2)]
    assert found["analysis"]["stragglers"][0]["cause"] == "slow disk"


def test_clocks_an_hour_apart_change_no_answer(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    clocks = {node_name(1): 3600.0, node_name(4): -1800.0}
    recipe = Recipe(6, 2, (InjectedFault(node_name(2), "slow disk", 4.0),), clock_s=clocks)
    write_timelines(other, recipe, job="j", submission="s")
    told, right = (json.loads(_report(one, "--json").stdout) for one in (other, folder))
    assert told["analysis"]["ready_s"] == pytest.approx(right["analysis"]["ready_s"], abs=0.05)
    names = [[one["node"] for one in found["analysis"]["stragglers"]] for found in (told, right)]
    assert names[0] == names[1] == [node_name(2)]
    assert "clocks of 2 nodes are off by a second or more" in _report(other).stdout


def test_hostile_names_reach_neither_terminal_nor_page(folder: Path, tmp_path: Path) -> None:
    second = 1_790_000_000 * 10**9
    for number in range(4):
        resource: dict[str, Value] = {"host.name": f"{_EVIL}{number}", "bootseer.job": _EVIL}
        end = second + (1 + 20 * (number == 3)) * 10**9
        stages = (
            Stage("start", "t", f"a{number}", "", second, end + 10**9, True, _EVIL, {}, resource),
            Stage(_EVIL, "t", f"b{number}", f"a{number}", second, end, True, _EVIL, {}, resource),
        )
        lines = map(encode_end, stages)
        (folder / "j" / "0" / "s" / f"20261124T000000Z-1-evil-{number}.jsonl").write_bytes(
            b"".join(lines)
        )
    page = tmp_path / "start.html"
    for arguments in ((), ("--list",), ("--history",), ("--html", str(page))):
        done = _report(folder, *arguments)
        assert done.returncode == 0, done.stderr
        for text in (done.stdout, done.stderr):
            assert all(c.isprintable() or c == "\n" for c in text)
    text = page.read_text()
    assert text.count("<script>") == 1
    assert "\x1b" not in text
    assert "owned" in text


def test_what_is_no_timeline_is_left_out(folder: Path) -> None:
    right = _report(folder)
    assert right.stderr == ""
    place = folder / "j" / "0" / "s"
    os.mkfifo(place / "20261123T000001Z-1-fifo-0.jsonl")
    (place / "20261123T000001Z-1-folder-0.jsonl").mkdir()
    (place / "20261123T000001Z-1-away-0.jsonl").symlink_to("/dev/zero")
    sparse = place / "20261123T000001Z-1-sparse-0.jsonl"
    with sparse.open("wb") as file:
        file.truncate(100 * 10**9)
    done = _report(folder)
    assert done.stdout == right.stdout
    assert done.stderr == (
        "bootseer: warning: 1 of 7 timelines are left out, 100.0 GB: of a start those of "
        "up to 64 MiB are read, the smaller ones first, and 8 GiB together\n"
    )


def test_of_a_hundred_gigabytes_the_smaller_timelines_are_read(folder: Path) -> None:
    """Each timeline is as small as ours may be; together they exceed the limit of a start."""
    place = folder / "j" / "0" / "s"
    for number in range(1600):
        path = place / f"20261123T000001Z-1-large{number}-0.jsonl"
        with path.open("wb") as file:
            file.truncate(64 * 1024**2)
    right_names = {node_name(number) for number in range(6)}
    start = find_start(TimelineFolder(folder), "j")
    bounded = start.bounded()
    assert sum(file.size_bytes for file in bounded.files) <= TOGETHER_BYTES_MAX
    assert {file.name.split("-")[2] for file in bounded.files} >= right_names
    assert len(start.files) - len(bounded.files) > 1400


def test_a_killed_report_leaves_the_page_that_was_there(folder: Path, tmp_path: Path) -> None:
    """The kill comes before the new page is in its place."""
    page = tmp_path / "start.html"
    page.write_text("the one before")
    code = (
        "import os, pathlib, sys\n"
        "def late(path, target):\n"
        "    print('written', flush=True)\n"
        "    import time; time.sleep(60)\n"
        "pathlib.Path.replace = late\n"
        "from bootseer.cli.command_tree import cli\n"
        "cli(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "--timeline-dir", str(folder), "report", "j", "--html"]
    process = subprocess.Popen([*command, str(page)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert page.read_text() == "the one before"
    assert _report(folder, "--html", str(page)).returncode == 0
    assert page.read_text().endswith("</html>\n")
    (tmp_path / "folder").mkdir()
    refused = _report(folder, "--html", str(tmp_path / "folder" / "missing" / "start.html"))
    assert refused.returncode != 0
    assert refused.stderr.count("\n") == 1


def test_a_begin_is_read_only_where_its_stage_has_not_ended() -> None:
    """Begins of ended stages are recognised by their text alone, which must be certain."""
    resource: dict[str, Value] = {"host.name": "n", "x": 'a "spanId":"1" b'}
    stages = [
        Stage(f'"spanId":"{number}"', "t", str(number), "", number, number + 5, resource=resource)
        for number in range(3)
    ]
    lines = [encode_start(one) for one in stages]
    lines += [encode_end(one) for one in stages[:2]]
    two = json.loads(lines[0])
    two["resourceLogs"] += json.loads(encode_start(stages[2]._replace(span_id="4")))["resourceLogs"]
    found = decode(b"".join([*lines, json.dumps(two).encode() + b"\n", lines[2][:-20] + b"\n"]))
    assert {(one.span_id, one.end_ns) for one in found} == {
        *(("0", 5), ("1", 6), ("2", None), ("4", None)),
    }
    assert {one.name for one in found} == {one.name for one in stages}
