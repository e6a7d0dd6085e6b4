"""Signals at every stage of a start, and SIGKILL at any moment, leave no remains."""

import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from testbed import waiting
from testbed.node import Node, wait_for_file

SLEEPING_SETUP = "sh -c ': > deeper; sleep 600; true'; true"
SETUP = ("--setup", SLEEPING_SETUP, "--target", "env")
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def finish(process: "subprocess.Popen[str]") -> str:
    """Return the process's standard error, after its end."""
    _, err = process.communicate(timeout=60)
    return err


@pytest.mark.parametrize("number", STOPS)
def test_in_a_setup(node: Node, number: signal.Signals) -> None:
    with node.start("run", *SETUP, "--", "touch", "job-ran") as process:
        wait_for_file(node.base / "deeper")
        process.send_signal(number)
        err = finish(process)
    assert process.returncode == -number
    assert f"ended by {number.name}" in err
    assert "Traceback" not in err
    # Also the grandchild, which nobody waited for, and without any wait for it by us.
    assert node.processes() == {}
    assert not (node.base / "job-ran").exists()
    # The span of the stage has ended with the reason.
    assert node.spans()["environment"]["status"]["code"] == 2
    # Nothing of it is stored; the set-up runs again, undisturbed by any lock.
    again = node.run(
        "run", "--setup", "mkdir -p env; touch env/x", "--target", "env", "--", "ls", "env"
    )
    assert again.stdout == "x\n", again.stderr


IGNORING = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
_ASK = """
import signal
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
    print(signal.getsignal(number) == signal.SIG_IGN)
"""


def test_what_the_caller_ignores_stays_ignored(node: Node) -> None:
    """`nohup` and a shell's background jobs ignore signals for the start and the command."""
    with node.start("run", *SETUP, "--", "true", prefix=IGNORING) as process:
        wait_for_file(node.base / "deeper")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        process.terminate()
        err = finish(process)
    assert process.returncode == -signal.SIGTERM
    # Neither of the two was first.
    assert "ended by SIGTERM" in err
    assert node.processes() == {}
    asked = node.run("run", "--", "env", "python3", "-c", _ASK, prefix=IGNORING)
    # Of SIGPIPE Python itself says so, for its own sake.
    assert asked.stdout.split() == ["True", "True", "False", "True"]


@pytest.mark.needs("fuse")
def test_nothing_of_ours_is_in_the_session_of_the_job(node: Node, silent_url: str) -> None:
    """Ctrl-C would otherwise end the processes that mount or serve."""
    arguments = ("--checkpoint", f"{silent_url}:{node.base}/mnt", "--", "true")
    # Longer than anybody waits for the end of what mounts.
    deadline = {"BOOTSEER_DEADLINE": "200"}
    with node.start("run", *arguments, variables=deadline, start_new_session=True) as process:

        def are_apart() -> bool:
            found = {pid for pid, line in node.processes().items() if "job_mount" in line}
            return bool(found) and process.pid not in map(_session, found)

        waiting.wait_for(are_apart, "a session of the process that mounts")
        process.terminate()
        assert "does not end" not in finish(process)
    node.wait_clean()
    checkpoint = ("--checkpoint", f"{node.base}/ckpt:{node.base}/mnt")
    command = ("--", "sh", "-c", ": > up; exec sleep 600")
    with node.start("run", *checkpoint, *command, start_new_session=True) as process:
        wait_for_file(node.base / "up")
        servers = node.processes().keys() - {process.pid}
        assert servers
        assert process.pid not in map(_session, servers)
        process.kill()
        finish(process)
    node.wait_clean()


def _session(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


@pytest.mark.needs("fuse")
def test_servers_end_although_the_caller_ignores_signals(node: Node) -> None:
    """Our servers end with the job, even where SIGTERM is ignored, by which they are ended."""
    (node.base / "ckpt").mkdir()
    ignoring = ("sh", "-c", 'trap "" INT HUP TERM; exec "$@"', "sh")
    checkpoint = ("--checkpoint", f"{node.base}/ckpt:{node.base}/mnt")
    done = node.run("run", *checkpoint, "--", "touch", "mnt/file", prefix=ignoring)
    assert (done.returncode, done.stderr) == (0, "")
    node.wait_clean()
    assert (node.base / "ckpt/file").exists()


def test_a_setup_may_tidy_up(node: Node) -> None:
    """The set-up was once killed at once by the function that waited for it."""
    script = "trap ': > tidied; exit 5' TERM; : > deeper; while :; do sleep 0.1; done"
    (node.base / "setup.sh").write_text(script)
    with node.start("run", "--setup", "sh setup.sh", "--target", "env", "--", "true") as process:
        wait_for_file(node.base / "deeper")
        process.terminate()
        finish(process)
    assert process.returncode == -signal.SIGTERM
    assert (node.base / "tidied").exists()


_COUNTING = """
import os, signal, time
def count(number, frame):
    with open("interrupts", "a") as file:
        file.write("x")
continued = []
signal.signal(signal.SIGINT, count)
signal.signal(signal.SIGCONT, lambda number, frame: continued.append(number))
open("deeper", "w").close()
# A start stops what it ends, and continues it when it has told it all: no second SIGINT comes then.
while not (continued and os.path.exists("interrupts")):
    time.sleep(0.02)
"""


def test_ctrl_c_reaches_a_setup_once(node: Node) -> None:
    """The terminal sends it to the whole foreground; we once sent it to the set-up once more."""
    (node.base / "setup.py").write_text(_COUNTING)
    master, terminal = pty.openpty()
    # The terminal becomes that of a new session, as of a login.
    prefix = ("setsid", "--ctty", "--wait")
    arguments = ("--setup", "python3 setup.py", "--target", "env", "--", "true")
    with node.start("run", *arguments, prefix=prefix, stdin=terminal) as process:
        os.close(terminal)
        wait_for_file(node.base / "deeper")
        os.write(master, b"\x03")
        finish(process)
    os.close(master)
    assert (node.base / "interrupts").read_text() == "x"


def test_a_setup_that_ignores_the_signal_is_killed(node: Node) -> None:
    # It has always a new child, which lives long enough to be found if it were left.
    setup = "sh -c 'trap \"\" TERM; : > deeper; while :; do sleep 300; done'; true"
    with node.start("run", "--setup", setup, "--target", "env", "--", "true") as process:
        wait_for_file(node.base / "deeper")
        process.terminate()
        finish(process)
    assert process.returncode == -signal.SIGTERM
    # A killed process may take a moment to be gone.
    waiting.wait_for(lambda: node.processes() == {}, "the end of all processes")


@pytest.mark.needs("mount", "fuse")
def test_as_the_first_process_of_a_namespace(node: Node) -> None:
    """The first process has no default action for any signal: its container would never stop."""
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with node.start("run", *SETUP, "--", "true", prefix=prefix) as process:
        wait_for_file(node.base / "deeper")
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        subprocess.run(["kill", "-TERM", inner], check=True)
        finish(process)
    assert process.returncode == 128 + signal.SIGTERM
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_while_a_checkpoint_is_being_mounted(node: Node, silent_url: str) -> None:
    mount = node.base / "mnt"
    with node.start(
        "run", "--checkpoint", f"{silent_url}:{mount}", "--", "touch", "job-ran"
    ) as process:
        # Not of the path: to look at what is being mounted takes until it serves.
        waiting.wait_for(node.mounts, "the mount")
        process.terminate()
        finish(process)
    assert process.returncode == -signal.SIGTERM
    assert not (node.base / "job-ran").exists()
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_in_a_setup_with_a_checkpoint_mounted(node: Node, store_url: str) -> None:
    mount = node.base / "mnt"
    # It keeps a file of the mount open, as a set-up that reads weights would.
    setup = f"until exec 9> {mount}/x; do sleep 0.1; done; touch deeper; sleep 600; true"
    url = f"{store_url}-ckpt"
    with node.start(
        "run",
        *("--checkpoint", f"{url}:{mount}"),
        *("--setup", setup, "--target", "env", "--", "true"),
    ) as process:
        wait_for_file(node.base / "deeper")
        process.terminate()
        finish(process)
    assert process.returncode == -signal.SIGTERM
    node.wait_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.needs("fuse")
def test_after_exec_it_is_the_jobs(node: Node, store_url: str, number: signal.Signals) -> None:
    mount = node.base / "mnt"
    Path(f"{node.base}/ckpt").mkdir()
    with node.start(
        "run",
        *("--checkpoint", f"{node.base}/ckpt:{mount}"),
        *("--", "sh", "-c", "echo hello > mnt/file; touch up; exec sleep 600"),
    ) as process:
        wait_for_file(node.base / "up")
        process.send_signal(number)
        assert finish(process) == ""
    assert process.returncode == -number
    node.wait_clean()


@pytest.mark.needs("fuse")
def test_kill_9_at_each_step(node: Node, store_url: str) -> None:
    """Remains are removed without help, except those of a set-up itself; the next start works."""
    mount = node.base / "mnt"
    arguments = (
        *("--checkpoint", f"{store_url}-ckpt:{mount}"),
        *("--setup", "mkdir -p env && echo data > env/x", "--target", "env"),
        *("--", "sh", "-c", "cat env/x && echo $$ > mnt/file && cat mnt/file"),
    )
    steps = ("nothing yet", "its timeline", "an environment", "a server", "a mount", "the command")
    # The environment is made in the first ones, and found in the others.
    for round_number, step in enumerate((*steps, *steps)):
        with node.start("run", *arguments) as process:
            node.kill_at(process, step)
        if round_number % 3 == 2:
            # At once, while the servers of the killed one are still going.
            done = node.run("run", *arguments)
            assert done.returncode == 0, (step, done.stderr)
            assert done.stdout.startswith("data\n")
    node.wait_clean()
    left = [path for path in (Path(store_url.removeprefix("file://"))).rglob("*") if path.is_file()]
    hidden = [path for path in left if path.name.startswith(".")]
    assert [path.name for path in hidden] == [".bootseer.store"], left


@pytest.mark.needs("fuse")
def test_a_mount_whose_server_was_killed_is_replaced(node: Node, store_url: str) -> None:
    mount = node.base / "mnt"
    arguments = ("--checkpoint", f"{store_url}-ckpt:{mount}", "--")
    with node.start("run", *arguments, "sh", "-c", ": > up; exec sleep 600") as process:
        wait_for_file(node.base / "up")
        # Until none is left: one of them may begin another.
        while servers := node.processes().keys() - {process.pid}:
            for pid in servers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=60)
    assert [one.path for one in node.mounts()] == [mount]
    done = node.run("run", *arguments, "sh", "-c", "echo new > mnt/file; cat mnt/file")
    assert (done.returncode, done.stdout) == (0, "new\n"), done.stderr
    node.wait_clean()
