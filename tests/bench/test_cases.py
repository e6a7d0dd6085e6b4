"""The declared cases, the command line, and that the published tables are those of the results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases.launch import sample_of
from bench.catalogue import all_cases
from bench.machine.environment import file_system_of
from bench.model import Case
from bench.reporting import generated_page
from bench.reporting.summary import problems
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import process_tree, run_json, tree_cpu_s


@pytest.mark.parametrize("case", all_cases().values(), ids=lambda case: case.name)
def test_declaration_is_valid(case: Case) -> None:
    assert problems(case) == []


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_list_names_every_case() -> None:
    done = bench("--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(all_cases())


def test_an_unknown_case_is_a_usage_error() -> None:
    done = bench("no-such-case")
    assert done.returncode == 2
    assert "--list" in done.stderr
    assert bench().returncode == 2


def test_published_tables_are_those_of_the_results() -> None:
    results = generated_page.load_results(REPOSITORY / "bench" / "results")
    readme, page = REPOSITORY / "README.md", REPOSITORY / "docs" / "benchmarks.md"
    stale = [
        path.name
        for path, written in (
            (readme, generated_page.readme(readme.read_text(), results)),
            (page, generated_page.benchmarks(page.read_text(), results, all_cases())),
        )
        if path.read_text() != written
    ]
    assert stale == [], "run `python -m bench --report`"


def test_launch_reads_the_demo_document() -> None:
    stage = {"first_s": 8.0, "second_s": 2.0, "first_bytes": 300, "second_bytes": 30, "ratio": 4}
    document = {
        "stages": {"image": stage, "environment": stage, "checkpoint": stage},
        "total": {"first_s": 24.0, "second_s": 6.0, "first_cpu_s": 9.0, "second_cpu_s": 4.0},
        "image": {"bytes": 1000, "touched_share": 0.1},
    }
    second = sample_of(document, "second")
    assert (second.wall_s, second.moved_bytes) == (6.0, 90)
    assert second.figures["image_moved_bytes"] == 30
    assert second.figures["image_s"] == 2.0
    assert sample_of(document, "first").wall_s == 24.0


SPIN = """
import subprocess, sys, time
def spin(seconds):
    while time.process_time() < seconds:
        pass
if len(sys.argv) == 1:
    # One child that has ended, one that lives, and itself.
    subprocess.run([sys.executable, __file__, "ends"], check=True)
    child = subprocess.Popen([sys.executable, __file__, "lives"], stdout=subprocess.PIPE)
    child.stdout.readline()
spin(0.3)
if sys.argv[1:] != ["ends"]:
    print("done", flush=True)
    sys.stdin.read()
"""


def test_cpu_of_a_process_and_its_children_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "spin.py"
    program.write_text(SPIN)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() != b"done\n":
            assert process.poll() is None
        assert len(process_tree(process.pid)) == 2
        assert tree_cpu_s(process.pid) >= 0.8
    finally:
        process.communicate(timeout=60)
    assert tree_cpu_s(process.pid) == 0


def test_a_command_that_fails_or_hangs_ends_with_a_reason() -> None:
    printing = [sys.executable, "-c", "import json, sys; json.dump({'a': 1}, sys.stdout)"]
    assert run_json(printing, timeout_s=30) == {"a": 1}
    with pytest.raises(RuntimeError, match="no such thing"):
        run_json([sys.executable, "-c", "raise SystemExit('no such thing')"], timeout_s=30)
    with pytest.raises(RuntimeError, match="did not end"):
        run_json(["sleep", "60"], timeout_s=0.1)


def test_reader_reads_everything(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(300_000))
    done = subprocess.run(
        [sys.executable, "-m", "bench.reader", str(path), "65536"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["read_bytes"] == figures["size_bytes"] == 300_000


def test_file_system_is_found() -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(Path("/")) != "unknown"


MOUNT = """
import pathlib, sys
from bench.machine.libfuse import build_passthrough
from testbed.needs import MissingError
from testbed.processes import fuse_connection, mounted, run_json, tree_cpu_s
work = pathlib.Path(sys.argv[1])
try:
    program = str(build_passthrough(work))
    command = [program, "-f", "-o", f"source={work / 'source'}", str(work / "mount")]
    with mounted(command, work / "mount", work / "log") as server:
        reader = [sys.executable, "-m", "bench.reader", str(work / "mount" / "data"), "4096"]
        assert run_json(reader, timeout_s=20)["read_bytes"] == 10_000
        assert tree_cpu_s(server.pid) >= 0
except MissingError as reason:
    print("skipped:", reason)
assert fuse_connection(work / "mount") is None
try:
    with mounted([sys.executable, "-c", "raise SystemExit('no luck')"], work / "m2", work / "l2"):
        raise AssertionError("mounted?")
except MissingError as reason:
    assert "no luck" in str(reason)
"""


@pytest.mark.needs("fuse")
def test_a_server_is_mounted_measured_and_unmounted(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "data").write_bytes(bytes(10_000))
    # In a process of its own: should a mount get stuck, this one does not.
    done = subprocess.run(
        [sys.executable, "-c", MOUNT, str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped:"):
        raise MissingError(done.stdout.strip())
