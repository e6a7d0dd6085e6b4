"""Timelines of Python processes below `bootseer run`, in unchanged programs."""

import socket
import sys

import pytest

from bootseer.report.explain import StartModel
from bootseer.report.graph import LAUNCHER, StartGraph, tracks_of
from bootseer.timeline.otlp import READY
from tests.bootseer.profile.collect.conftest import ProgramFolder

# Noted where they take a tenth of a second, as on a busy machine.
_IF_SLOW = ("python start", "import bootseer")


@pytest.mark.needs(modules=["torch"])
def test_a_torchrun_whose_rendezvous_failed_says_who_never_came(job: ProgramFolder) -> None:
    program = job.write("train.py", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for name in ("a", "b"):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint={endpoint}"]
        # One that has gone takes the store with it: the other one then fails at once.
        words.append(f"--rdzv-conf=is_host={name == 'a'},join_timeout=5,last_call_timeout=1")
        started.append(job.start(*words, str(program), BOOTSEER_NODE=name, BOOTSEER_SUBMISSION="s"))
    # The third node's launcher began, and its command failed before it came to the others.
    job.run("true", BOOTSEER_NODE="c", BOOTSEER_SUBMISSION="s")
    try:
        for one in started:
            output, _ = one.communicate(timeout=180)
            assert one.returncode == 1, output
    finally:
        for one in started:
            one.kill()
            one.wait(60)
    analysis = StartModel(StartGraph(tracks_of(job.stages(), 0))).analyse()
    assert not analysis.is_ready
    assert not analysis.blame
    assert not any(analysis.clocks.shift_s.values())
    (missed,) = analysis.missed
    assert (missed.barrier, sorted(missed.gave_up)) == ("rendezvous 7", ["a/0", "b/0"])
    assert (missed.came_count, missed.expected_count, missed.absent) == (2, 3, ("c",))
    report = job.report()
    assert "rendezvous 7: 2 of 3 came" in report
    assert "never came: c" in report


def test_slow_imports_are_noted_and_quick_processes_are_not(job: ProgramFolder) -> None:
    slow = job.write("slow.py", "import large")
    job.write("small.py", "")
    quick = job.write("quick.py", "import small")
    job.run("sh", "-c", f"{sys.executable} {quick}; {sys.executable} {slow}")
    assert set(job.tracks()) == {LAUNCHER, "slow.py"}
    assert job.names("slow.py") == ["python start", "import large"]
    (text,) = [
        line
        for file in (job.folder / "timeline").rglob("*.jsonl")
        for line in file.read_text().splitlines()
        if "bootseer.imports" in line
    ]
    assert "large.part" in text


def test_nothing_is_noted_where_it_is_not_wanted(job: ProgramFolder) -> None:
    slow = job.write("slow.py", "import large, os; assert 'BOOTSEER_LAUNCHED' not in os.environ")
    job.run(sys.executable, str(slow), options=("--set", "trace_python=off"))
    assert set(job.tracks()) == {LAUNCHER}


def test_the_environments_own_sitecustomize_runs_first(job: ProgramFolder) -> None:
    job.write("site/sitecustomize.py", "import builtins; builtins.chained = True")
    slow = job.write(
        "slow.py", "import large, sitecustomize; print(chained, sitecustomize.__file__)"
    )
    done = job.run(sys.executable, str(slow), PYTHONPATH=str(job.folder / "site"))
    assert done.stdout.split() == ["True", str(job.folder / "site/sitecustomize.py")]
    assert "import large" in job.names("slow.py")


def test_a_sitecustomize_that_fails_says_so_as_without_ours(job: ProgramFolder) -> None:
    job.write("site/sitecustomize.py", "1 / 0")
    slow = job.write("slow.py", "import large; print(1)")
    done = job.run(sys.executable, str(slow), PYTHONPATH=str(job.folder / "site"))
    assert (done.stdout, "ZeroDivisionError" in done.stderr) == ("1\n", True)
    assert "import large" in job.names("slow.py")


def test_a_program_that_says_itself_when_it_is_ready(job: ProgramFolder) -> None:
    program = job.write(
        "own.py",
        "import large, bootseer\n"
        "with bootseer.stage('own'): pass\n"
        "bootseer.ready()\n"
        "import importlib; importlib.reload(large)\n",
    )
    job.run(sys.executable, str(program))
    assert [one for one in job.names("own.py") if one not in _IF_SLOW] == [
        "import large",
        "own",
        READY,
    ]


def test_a_program_too_quick_to_be_watched_is_compared_with_those_that_are(
    job: ProgramFolder,
) -> None:
    program = job.write("own.py", "import bootseer\nwith bootseer.stage('own'): pass\n")
    job.run(sys.executable, str(program))
    assert [one for one in job.names("own.py") if one not in _IF_SLOW] == ["own"]


def test_children_are_processes_of_their_own(job: ProgramFolder) -> None:
    program = job.write(
        "parent.py",
        "import large, os, subprocess, sys\n"
        "if os.fork() == 0:\n"
        "    del sys.modules['large']; import large; os._exit(0)\n"
        "os.wait()\n"
        "subprocess.run([sys.executable, '-c', 'import large'], check=True)\n",
    )
    job.run(sys.executable, str(program))
    tracks = [track for track in tracks_of(job.stages(), 0) if track.role != LAUNCHER]
    assert len({track.process for track in tracks}) == 3
    first = next(track for track in tracks if not track.parent)
    assert {track.parent for track in tracks if track is not first} == {first.process}


def test_failed_imports_look_as_without_it(job: ProgramFolder) -> None:
    job.write("broken.py", "import large, nowhere")
    program = job.write(
        "program.py",
        "import traceback\ntry: import broken\nexcept ImportError: traceback.print_exc()",
    )
    seen = job.run(sys.executable, str(program)).stderr
    assert (
        seen == job.run(sys.executable, str(program), options=("--set", "trace_python=off")).stderr
    )
    assert "_find_and_load" not in seen
    job.write("broken.py", "import large; 1 / 0")
    program.write_text("import broken")
    failing = ("sh", "-c", f"{sys.executable} {program} || true")
    seen = job.run(*failing).stderr
    assert "ZeroDivisionError" in seen
    assert seen == job.run(*failing, options=("--set", "trace_python=off")).stderr


@pytest.mark.parametrize("flags", [["-I"], ["-S"], ["-E"], ["-X", "importtime"], ["-W", "error"]])
def test_flags_of_the_interpreter_are_respected(job: ProgramFolder, flags: list[str]) -> None:
    program = job.write(
        "program.py", "import sys; sys.path[:0] = [sys.argv[1]]; import large; print(1)"
    )
    done = job.run(sys.executable, *flags, str(program), str(job.folder))
    assert done.stdout == "1\n"


def test_a_timeline_that_cannot_be_written_costs_nothing(job: ProgramFolder) -> None:
    program = job.write(
        "program.py",
        "import os; os.environ['BOOTSEER_TIMELINE'] = '/proc/none/x'; import large; print(1)",
    )
    done = job.run(sys.executable, str(program))
    assert done.stdout == "1\n"
    assert "Traceback" not in done.stderr
