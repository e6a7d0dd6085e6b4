"""`bootseer run` without image and checkpoint: the command's arguments, environment and files."""

import json
import os
import pty
import signal
import stat
import sys
from pathlib import Path

import pytest

from testbed.node import Node, wait_for_file

SHOW = """
import json, os, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv[1:], "environment": dict(os.environ),
    "stdin": sys.stdin.read(), "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "ignored": int(status["SigIgn"], 16), "blocked": int(status["SigBlk"], 16),
}))
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["/etc"], 126),
    ],
)
def test_exit_code(node: Node, command: list[str], code: int) -> None:
    done = node.run("run", "--", *command)
    assert done.returncode == code, done.stderr
    if code in (126, 127):
        assert done.stderr.count("\n") == 1
        assert command[0] in done.stderr


def test_a_script_that_names_no_interpreter_is_for_sh(node: Node) -> None:
    script = node.base / "train.sh"
    script.write_text('echo "trained $1"; exit 3\n')
    script.chmod(0o755)
    done = node.run("run", "--", script, "well")
    assert (done.returncode, done.stdout) == (3, "trained well\n")


def test_death_by_a_signal_is_the_jobs_own(node: Node) -> None:
    done = node.run("run", "--", "sh", "-c", "kill -USR1 $$")
    assert done.returncode == -signal.SIGUSR1


def test_wrong_usage(node: Node) -> None:
    for wrong, word in (
        ([], "COMMAND"),
        (["--bind", "/a:/b", "--", "true"], "--image"),
        (["--target", "/a", "--", "true"], "--setup"),
        (["--setup", "'open", "--", "true"], "cannot be parsed"),
        (["--setup", " ", "--", "true"], "empty"),
        (["--checkpoint", "hdfs://host/x", "--", "true"], "URL:DIR"),
    ):
        done = node.run("run", *wrong)
        assert done.returncode == 2
        assert word in done.stderr
        assert done.stdout == ""


def test_what_the_command_gets(node: Node) -> None:
    process = node.start("run", "--", "python3", "-c", SHOW, "a b", "", stdin=-1)
    out, err = process.communicate("for the job\n", timeout=30)
    assert process.returncode == 0, err
    assert err == ""
    got = json.loads(out)
    # The same process, with nothing of ours in it.
    assert got["pid"] == process.pid
    assert got["argv"] == ["a b", ""]
    assert got["stdin"] == "for the job\n"
    assert got["blocked"] == 0
    # Python itself ignores SIGPIPE and SIGXFSZ; whoever started the tests may ignore others.
    python_ignores = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert got["ignored"] & ~python_ignores == inherited_ignored() & ~python_ignores
    assert set(got["descriptors"]) <= {0, 1, 2, 3}  # 3 is its own look at the folder
    environment = got["environment"]
    assert environment["BOOTSEER_JOB"] == "job"
    assert environment["BOOTSEER_ATTEMPT"] == "0"
    assert environment["BOOTSEER_RANK"] == "0"
    assert environment["BOOTSEER_NODE"]
    assert environment["TRACEPARENT"].startswith("00-")
    timeline = Path(environment["BOOTSEER_TIMELINE"])
    assert stat.S_IMODE(timeline.stat().st_mode) == 0o600
    node.wait_clean()


def inherited_ignored() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return int(line.split()[1], 16)
    raise AssertionError


def test_a_broken_pipe_ends_the_job_as_usual(node: Node) -> None:
    # With SIGPIPE ignored, as Python leaves it, `yes` would complain instead of ending.
    done = node.run("run", "--", "bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert done.stdout == f"y\n{128 + signal.SIGPIPE}\n"
    assert done.stderr == ""


def test_what_nohup_ignores_stays_ignored(node: Node) -> None:
    script = "trap '' HUP; exec \"$@\""
    prefix = ("sh", "-c", script, "sh")
    done = node.run("run", "--", "sh", "-c", "kill -HUP $$; echo alive", prefix=prefix)
    assert done.stdout == "alive\n", done.stderr


def test_the_terminal_is_the_jobs(node: Node) -> None:
    ours, theirs = pty.openpty()
    code = "import os; print(os.isatty(0), os.isatty(1), os.tcgetpgrp(0) == os.getpgrp())"
    process = node.start(
        "run",
        *("--setup", "mkdir -p env", "--target", "env", "--", "python3", "-c", code),
        prefix=("setsid", "--ctty", "--wait"),
        stdin=theirs,
        stdout=theirs,
    )
    os.close(theirs)
    try:
        assert process.wait(60) == 0
        assert os.read(ours, 1000).decode().split() == ["True", "True", "True"]
    finally:
        os.close(ours)
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.needs("mount", "fuse")
def test_as_the_first_process_of_a_namespace(node: Node) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    done = node.run("run", "--", "sh", "-c", "echo $$; exit 5", prefix=prefix)
    assert (done.stdout, done.returncode) == ("1\n", 5), done.stderr


def test_stages_of_the_job_itself(node: Node) -> None:
    code = """
import bootseer
with bootseer.stage("load data", {"files": 3}):
    pass
bootseer.ready()
"""
    done = node.run("run", "--set", "trace_python=off", "--", "python3", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    spans = node.spans()
    assert set(spans) == {"start", "load data", "ready"}
    for name in ("load data", "ready"):
        assert spans[name]["parentSpanId"] == spans["start"]["spanId"]
        assert spans[name]["traceId"] == spans["start"]["traceId"]
        assert int(spans[name]["startTimeUnixNano"]) >= int(spans["start"]["endTimeUnixNano"])


def test_a_trace_around_the_job_is_joined(node: Node) -> None:
    outer = f"00-{'ab' * 16}-{'cd' * 8}-01"
    done = node.run("run", "--", "true", variables={"TRACEPARENT": outer})
    assert done.returncode == 0
    start = node.spans()["start"]
    assert (start["traceId"], start["parentSpanId"]) == ("ab" * 16, "cd" * 8)


def test_a_timeline_that_cannot_be_written_costs_one_warning(node: Node) -> None:
    (node.base / "timeline").write_text("a file is in the way")
    code = """
import os, bootseer
with bootseer.stage("x"):
    print("BOOTSEER_TIMELINE" in os.environ)
"""
    setup = ("--setup", "mkdir -p env", "--target", "env")
    done = node.run("run", *setup, "--", "python3", "-c", code)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("no timeline") == 1
    assert "Error" not in done.stderr


# Not for a python3 that is a script: its shell waits for every child before it becomes Python.
HAS_CHILD = """
import os
try:
    os.waitpid(-1, os.WNOHANG)
    print("a child")
except ChildProcessError:
    print("no child")
"""


@pytest.mark.parametrize("option", ["--job", "--workload"])
def test_whatever_a_job_is_called_it_has_no_child(node: Node, option: str) -> None:
    """`--job image run` was once taken for an image command, which begins a server at once."""
    done = node.run(option, "image", "run", "--", sys.executable, "-c", HAS_CHILD)
    assert done.stdout == "no child\n", done.stderr
    node.wait_clean()


def test_a_caller_finds_no_child_that_it_never_made(node: Node, tmp_path: Path) -> None:
    """A job that waits for all of its children must not wait for our servers."""
    mount = node.base / "mnt"
    checkpoint = f"{(tmp_path / 'ckpt').as_uri()}:{mount}"
    done = node.run("run", "--checkpoint", checkpoint, "--", sys.executable, "-c", HAS_CHILD)
    assert done.stdout == "no child\n", done.stderr
    node.wait_clean()
    wait_for_file(tmp_path / "ckpt")
