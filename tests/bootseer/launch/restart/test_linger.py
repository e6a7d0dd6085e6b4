"""`bootseer run --linger` keeps mounts for the job's next start on the node, and for no other."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.linux.processes import wait_readable
from bootseer.served.service import ATTENDING, ServiceState, lock_new, new_service_dir, write_state
from testbed.needs import require
from testbed.node import Node, attribute, wait_for_file
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount", "fuse")

SETUP = "echo ran >> ../count; mkdir -p env; echo {} > env/x"
SHOW = "cat env/x; ls mnt"


@pytest.fixture
def one(node: Node) -> Node:
    """Return a node whose store has the environments "a" and "b"; neither is on the node."""
    require("mount", "fuse")
    for text in ("a", "b"):
        assert node.run("run", *_setup(text), "--", "true").returncode == 0
        (node.base / "env/x").unlink()
        (node.base / "env").rmdir()
    return node


def _setup(text: str) -> tuple[str, ...]:
    return ("--setup", SETUP.format(text), "--target", "env", "--mode", "mount")


def _checkpoint(node: Node, name: str = "ckpt") -> tuple[str, ...]:
    return ("--checkpoint", f"{(node.base.parent / name).as_uri()}:{node.base}/mnt")


def _start(node: Node, line: str, text: str = "a", name: str = "ckpt", linger: str = "10m") -> str:
    done = node.run(
        "run",
        *(*_setup(text), *_checkpoint(node, name), "--linger", linger, "--", "sh", "-c", line),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _how(node: Node) -> tuple[Any, Any]:
    spans = node.spans()
    names = ("environment", "checkpoint")
    environment, checkpoint = (attribute(spans[name], "bootseer.how") for name in names)
    return environment, checkpoint


def _bootseer(node: Node, *words: object) -> str:
    command = [sys.executable, "-m", "bootseer", *map(str, words)]
    return subprocess.run(
        command, env=node.environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _served(node: Node) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(_bootseer(node, "status", "--json"))["served"]:
        if entry["pid"]:  # else it is of another test
            found.setdefault(entry["kind"], []).append(entry)
    return found


def _servers(node: Node) -> list[int]:
    return sorted(
        entry["pid"]
        for kind, entries in _served(node).items()
        if kind in ("environment", "checkpoints")
        for entry in entries
    )


def _end(node: Node) -> None:
    for entry in _served(node)["attendant"]:
        os.kill(entry["pid"], signal.SIGTERM)
    node.wait_clean()
    assert list((node.base / "env").iterdir()) == []


def test_the_next_start_finds_all_live(one: Node) -> None:
    assert _start(one, f"touch mnt/step-1; {SHOW}") == "a\nstep-1\n"
    servers = _servers(one)
    assert _how(one) == ("restored", "mounted")
    # The code is another one, and so nothing of ours runs.
    assert _start(one, f"touch mnt/step-2; {SHOW}") == "a\nstep-1\nstep-2\n"
    assert (_how(one), _servers(one)) == (("live", "live"), servers)
    assert (one.base.parent / "count").read_text() == "ran\nran\n"
    wait_for(lambda: len(_served(one)["attendant"]) == 1, "the end of the first one's process")
    (lingering,) = _served(one)["attendant"]
    assert lingering["until_s"] > lingering["since_s"]
    # Its work must not slow a job.
    assert os.getpriority(os.PRIO_PROCESS, lingering["pid"]) > os.getpriority(os.PRIO_PROCESS, 0)
    assert "job (for another 10 min)" in _bootseer(one, "status")
    # Without the option all is taken over as well, and goes with the job.
    assert _start(one, SHOW, linger="off") == "a\nstep-1\nstep-2\n"
    assert _how(one) == ("live", "live")
    one.wait_clean()


def test_a_start_that_mounts_nothing_lets_go_of_all(one: Node) -> None:
    """Lingering mounts of the job once kept their memory until their time was over."""
    _start(one, "true")
    assert _servers(one) != []
    assert one.run("run", "--", "true").returncode == 0
    one.wait_clean()


def test_another_start_of_a_job_that_runs_ends_nothing_of_it(node: Node) -> None:
    words = ("run", *_checkpoint(node), "--linger", "10m", "--", "sh", "-c")
    with node.start(*words, "touch mnt/up; while [ ! -e go ]; do sleep 0.05; done") as process:
        wait_for_file(node.base.parent / "ckpt/up")
        assert node.run("run", "--", "true").returncode == 0
        (node.base / "go").touch()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert node.run(*words, "true").returncode == 0
    assert attribute(node.spans()["checkpoint"], "bootseer.how") == "live"
    assert node.run("run", "--", "true").returncode == 0
    node.wait_clean()


def test_a_process_with_the_number_of_a_lingering_one_is_left_alone(node: Node) -> None:
    """Containers with PID namespaces of their own may share the run folder."""
    folder = new_service_dir(node.base / "run", "start-stranger")
    with subprocess.Popen(["sleep", "600"]) as stranger:
        state = ServiceState(
            id=folder.name,
            reference="job",
            index_digest="",
            workload="",
            directory="",
            pid=stranger.pid,
            pid_started="1",
            started_ns=1,
            purpose=ATTENDING,
        )
        write_state(folder, state)
        lock = lock_new(folder)
        try:
            for options in ((), ("--linger", "1s")):
                done = node.run("run", *options, "--", "true")
                assert (done.returncode, done.stderr) == (0, "")
            assert stranger.poll() is None
        finally:
            os.close(lock)
            stranger.kill()


def test_another_setup_and_the_same_checkpoint(one: Node) -> None:
    _start(one, "touch mnt/step-1")
    assert _start(one, SHOW, text="b") == "b\nstep-1\n"
    assert _how(one) == ("changed: restored", "live")
    _end(one)


def test_another_checkpoint_folder_and_the_same_setup(one: Node) -> None:
    _start(one, "touch mnt/step-1")
    assert _start(one, SHOW, name="other") == "a\n"
    assert _how(one) == ("live", "changed")
    _end(one)


def test_what_the_job_wrote_to_its_environment_is_not_handed_on(one: Node) -> None:
    _start(one, "echo mine > env/x")
    assert _start(one, SHOW) == "a\n"
    assert _how(one) == ("changed: restored", "live")
    _end(one)


def test_it_ends_by_itself(one: Node) -> None:
    _start(one, "true", linger="1s")
    one.wait_clean()
    assert list((one.base / "env").iterdir()) == []


def test_unmounting_ends_it_at_once(one: Node) -> None:
    _start(one, "true")
    _bootseer(one, "unmount", one.base / "mnt")
    _bootseer(one, "unmount", one.base / "env")
    assert _servers(one) == []
    _end(one)


def test_the_job_keeps_its_mounts_when_the_lingering_process_is_killed(one: Node) -> None:
    job = (*_setup("a"), *_checkpoint(one), "--linger", "10m", "--", "sh", "-c")
    line = "touch mnt/up; while [ ! -e go ]; do sleep 0.05; done; touch mnt/end; cat env/x"
    with one.start("run", *job, line) as process:
        wait_for_file(one.base.parent / "ckpt/up")
        (lingering,) = _served(one)["attendant"]
        assert lingering["until_s"] is None
        os.kill(lingering["pid"], signal.SIGKILL)
        busy = one.run("run", *_checkpoint(one), "--", "true")
        assert busy.returncode == 19, busy.stderr
        Path(one.base / "go").touch()
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "a\n")
    # What is left of the killed process is nothing but a folder, which the next server removes.
    assert one.run("run", *_checkpoint(one), "--", "true").returncode == 0
    one.wait_clean()


def test_a_process_that_is_ending_its_lingering_is_no_job(one: Node) -> None:
    """The start after the next once found its mounts in use by the first one's attendant."""
    _start(one, "touch mnt/step-1")
    servers = _servers(one)
    (ending,) = _served(one)["attendant"]
    os.kill(ending["pid"], signal.SIGSTOP)
    # As it does itself, some time before it has ended.
    for path in (one.base / "run/services").glob("start-*/*"):
        path.unlink()
    assert _start(one, SHOW) == "a\nstep-1\n"
    assert (_how(one), _servers(one)) == (("live", "live"), servers)
    os.kill(ending["pid"], signal.SIGKILL)
    _end(one)


def test_a_server_that_does_not_answer_is_replaced(one: Node) -> None:
    _start(one, "touch mnt/step-1")
    (entry,) = _served(one)["checkpoints"]
    for pid in (entry["pid"], entry["worker_pid"]):
        os.kill(pid, signal.SIGSTOP)
    assert _start(one, SHOW) == "a\nstep-1\n"
    assert _how(one) == ("live", "changed")
    _end(one)


def test_a_killed_server_is_replaced(one: Node) -> None:
    _start(one, "true")
    for kind in ("environment", "checkpoints"):
        (entry,) = _served(one)[kind]
        # The supervisor first: it would replace its worker.
        for pid in (entry["pid"], entry["worker_pid"]):
            if pid:
                process = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                assert wait_readable([process], 30.0)
                os.close(process)
    assert _start(one, SHOW) == "a\n"
    _end(one)
