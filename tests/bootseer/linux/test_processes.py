"""Processes named by id and start time, and children that are killed."""

import os
import signal
import subprocess
import sys

import pytest

from bootseer.linux.processes import ProcessId, kill_child, reap


def test_a_process_that_has_the_id_of_another_is_not_reached() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        for started in ("1", ""):
            other = ProcessId(process.pid, started)
            assert not other.lives()
            assert not other.kill(signal.SIGKILL)
            with pytest.raises(ProcessLookupError):
                other.open()
        assert process.poll() is None
        named = ProcessId.of(process.pid)
        assert named.lives()
        assert named.kill(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert not named.lives()
        assert not named.kill(signal.SIGKILL)


def test_a_killed_child_is_waited_for_with_a_deadline() -> None:
    ending = os.posix_spawnp("sh", ["sh", "-c", "exit 3"], os.environ)
    assert reap(ending, 60) == 3
    # It is no child any more.
    assert reap(ending, 60) is None
    sleeping = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    assert reap(sleeping, 0) is None
    assert kill_child(sleeping) == -signal.SIGKILL


def test_what_a_copy_of_this_process_tells_is_whole_or_nothing() -> None:
    """A long answer was once cut at 64 KiB."""
    code = (
        "import os, signal\n"
        "from bootseer.linux.processes import run_forked\n"
        "assert run_forked(lambda: b'x' * 300_000, 60) == b'x' * 300_000\n"
        "assert run_forked(lambda: signal.pause() or b'x', 0.1) == b''\n"
        "assert run_forked(lambda: os._exit(0), 60) == b''\n"
        "assert run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL) or b'x', 60) == b''\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_that_end_are_waited_for() -> None:
    code = """
import threading
from bootseer.linux.processes import wait_single_threaded
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
assert not wait_single_threaded(0.05)
stop.set()
assert wait_single_threaded(30)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
