"""Several processes read a start as one process does."""

import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.profile.publish.outgoing import encode, outgoing
from bootseer.report.explain import StartModel, break_down
from bootseer.report.export import analysis_document
from bootseer.report.read import read_graph
from bootseer.report.sources import (
    StartFiles,
    StoredTimelines,
    TimelineFolder,
    find_start,
    pack,
)
from bootseer.store import open_store
from bootseer.timeline.stored import key_of
from testbed.starts.generate import Recipe, some_faults
from testbed.starts.timelines import write_timelines
from testbed.waiting import wait_for

_READ = """
import os, pathlib, sys
import msgspec
from bootseer.report.explain import break_down
from bootseer.report.sources import TimelineFolder, find_start
from bootseer.report.explain import StartModel
from bootseer.report.read import read_graph
from bootseer.report.export import analysis_document
from bootseer.report.page import to_page
forks = 0
def count():
    global forks
    forks += 1
os.register_at_fork(after_in_parent=count)
graph = read_graph(find_start(TimelineFolder(pathlib.Path(sys.argv[1])), "j"), int(sys.argv[2]))
found = break_down(graph)
model = StartModel(graph)
analysis = model.analyse()
sys.stdout.buffer.write(msgspec.json.encode([found, analysis_document(analysis)]))
print(to_page("", model, analysis))
print("forks:", forks, file=sys.stderr)
"""


def _read(folder: Path, process_count: int) -> "subprocess.CompletedProcess[bytes]":
    """Run the report in a process of its own, since this one has threads and cannot be forked."""
    command = [sys.executable, "-c", _READ, str(folder), str(process_count)]
    return subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    faults = tuple(some_faults(5, 300, severity=2.5))
    write_timelines(tmp_path, Recipe(300, 1, faults), job="j", submission="s")
    one, two = _read(tmp_path, 1), _read(tmp_path, 2)
    assert one.stderr == b"forks: 0\n"
    assert two.stderr == b"forks: 2\n"
    assert one.stdout == two.stdout
    assert len(one.stdout) > 10_000


def _explained(files: StartFiles, process_count: int) -> object:
    graph = read_graph(files, process_count)
    return break_down(graph), analysis_document(StartModel(graph).analyse())


def test_processes_that_are_given_a_stored_start_find_what_one_finds(tmp_path: Path) -> None:
    folder, url = tmp_path / "timelines", (tmp_path / "store").as_uri()
    write_timelines(folder, Recipe(140, 1), job="j", submission="s")
    with open_store(url) as store:
        for path in folder.rglob("*.jsonl"):
            key = key_of("j", "s", 0, path.stem)
            store.publish(key, pack(encode(outgoing([path]))), replace=True)
        files = find_start(StoredTimelines(store), "j")
        assert not files.are_local
        one, two = (_explained(files, count) for count in (1, 2))
        assert one == two
        # An object that no process can read is left out, by whichever reads it.
        broken = key_of("j", "s", 0, files.files[0].name)
        store.publish(broken, b"no zstd", replace=True)
        assert len(read_graph(files, 2).nodes) == 139


def test_parts_of_a_start_are_whole_nodes(tmp_path: Path) -> None:
    write_timelines(tmp_path, Recipe(10, 1), job="j", submission="s")
    files = find_start(TimelineFolder(tmp_path), "j")
    parts = files.parts(4)
    assert [len(part.files) for part in parts] == [4, 4, 2]
    names = [file.name for part in parts for file in part.files]
    assert names == sorted(file.name for file in files.files)


_IN_ORDER = """
import os, signal, sys
from bootseer.report.read import in_order
def square(number):
    if number == 7 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 7 and sys.argv[1] == "raises":
        raise ValueError("seven")
    return number, number * number * b"x", os.getpid()
try:
    for number, squared, pid in in_order(square, range(30), 3):
        assert len(squared) == number * number and pid != os.getpid()
        print(number, end=" ")
except Exception as error:
    print(type(error).__name__, error)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no children")
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ends", " 28 29 no children"),
        ("raises", " 5 6 ValueError seven\nno children"),
        ("killed", " 5 6 BootseerError a process that reads timelines was killed"),
    ],
)
def test_results_come_in_order_and_no_process_is_left(what: str, said: str) -> None:
    command = [sys.executable, "-c", _IN_ORDER, what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert said in done.stdout
    assert "no children" in done.stdout


_KILLED = """
import os, time
from bootseer.report.read import in_order
found = in_order(lambda number: (os.getpid(), bytes(10**7)), range(1000), 2)
print(next(found)[0], next(found)[0], flush=True)
time.sleep(60)
"""


def test_of_a_killed_report_no_process_is_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    assert len(set(pids)) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ends")


_IN_BACKGROUND = """
import os, sys
from bootseer.report.read import in_background
def work():
    if sys.argv[1] == "raises":
        raise ValueError("seven")
    return os.getpid()
try:
    with in_background(work) as result:
        if sys.argv[1] == "ends":
            print(result() != os.getpid(), end=" ")
        elif sys.argv[1] == "raises":
            result()
except ValueError as error:
    print(error, end=" ")
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no children")
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ends", "True no children"),
        ("raises", "seven no children"),
        ("unasked", "no children"),
    ],
)
def test_a_call_in_the_background_leaves_no_process(what: str, said: str) -> None:
    command = [sys.executable, "-c", _IN_BACKGROUND, what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == said
