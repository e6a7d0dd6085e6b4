"""Child processes of a saving program: they inherit its descriptors and close them."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.fuse.kernel.operations import Caller
from bootseer.store import open_backend
from testbed.waiting import wait_for
from tests.fuse.striped.support.harness import Driver, storage_on
from tests.fuse.striped.support.mounting import MIB, checkpoints, end

pytestmark = pytest.mark.needs("fuse")

OLD = random.Random(1).randbytes(5 * MIB + 3)
NEW = random.Random(2).randbytes(9 * MIB + 5)


@pytest.fixture
def elsewhere(url: str) -> Iterator[Driver]:
    """Another node on the same storage."""
    with storage_on(open_backend(url), unit=MIB) as storage:
        driver = Driver(storage)
        yield driver
        driver.fs.destroyed()


def _fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _inherit() -> None:
    """Start a child that keeps the descriptor over exec, and closes it at its end."""
    subprocess.run([sys.executable, "-S", "-c", "pass"], close_fds=False, check=True)


def _be_killed() -> None:
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def _work() -> None:
    worker = multiprocessing.get_context("fork").Process(target=os.getpid)
    worker.start()
    worker.join()


CHILDREN = [
    lambda: subprocess.run(["true"], check=True),
    lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0),
    _fork,
    _inherit,
    _be_killed,
    _work,
]
NAMES = ["subprocess", "posix_spawn", "fork", "inherited", "killed", "multiprocessing"]


@pytest.mark.parametrize("child", CHILDREN, ids=NAMES)
def test_a_child_process_publishes_nothing_of_its_parents_save(
    here: Path, elsewhere: Driver, child: Callable[[], object]
) -> None:
    (here / "f").write_bytes(OLD)
    file = os.open(here / "f", os.O_WRONLY | os.O_TRUNC)
    os.set_inheritable(file, True)
    child()  # before anything is written
    assert elsewhere.read("f") == OLD
    os.write(file, NEW[: 5 * MIB])
    child()
    assert elsewhere.read("f") == OLD
    os.write(file, NEW[5 * MIB :])
    os.close(file)
    # Published when close returns, not later.
    assert elsewhere.read("f") == NEW


def test_a_child_that_writes_publishes_when_it_ends(here: Path, elsewhere: Driver) -> None:
    with (here / "f").open("wb") as file:
        subprocess.run(["echo", "from the child"], stdout=file, check=True)
        assert elsewhere.read("f") == b"from the child\n"
        subprocess.run(["true"], stdout=file, check=True)
        file.write(b"from the parent\n")
    assert elsewhere.read("f") == b"from the child\nfrom the parent\n"


HALF = """
import os, subprocess, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
os.set_inheritable(file, True)
os.write(file, bytes(6 * 2**20))
if os.fork() == 0:
    # A worker that lives on with the descriptor and has never written.
    print("ready", flush=True)
    sys.stdin.readline()
    os._exit(0)
time.sleep(600)
"""


def test_a_killed_writer_with_living_children_publishes_nothing(
    here: Path, elsewhere: Driver
) -> None:
    (here / "f").write_bytes(OLD)
    writer = subprocess.Popen(
        [sys.executable, "-S", "-c", HALF, here / "f"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == b"ready\n"
        writer.kill()
        writer.wait(60)
        assert elsewhere.read("f") == OLD
        (here / "f").rename(here / "g")
        assert elsewhere.read("g") == OLD
        writer.stdin.close()
        assert writer.stdout.read() == b""  # the child has ended
        assert elsewhere.read("g") == OLD
    finally:
        end(writer)
    # The kernel reports the last close a moment later.
    (here / "g").unlink()
    wait_for(lambda: not list(here.iterdir()), "an empty folder")


def test_another_process_in_the_place_of_a_killed_writer_publishes_nothing(
    elsewhere: Driver,
) -> None:
    """The kernel soon reuses the table of open files of an ended process for another one."""
    elsewhere.write("f", OLD)
    file = elsewhere.open("f", os.O_WRONLY | os.O_TRUNC)
    with subprocess.Popen(["sleep", "60"]) as writer:
        caller = Caller(0, 0, writer.pid, lock_owner=7)
        elsewhere.fs.write(caller, *file, 0, memoryview(b"half"), 0)
        writer.kill()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        elsewhere.fs.flush(caller, *file)
    elsewhere.fs.flush(Caller(0, 0, os.getpid(), lock_owner=7), *file)
    assert elsewhere.read("f") == OLD


def test_a_close_reports_the_failure_of_its_own_process(tmp_path: Path, mountpoint: Path) -> None:
    url = (tmp_path / "stored").as_uri()
    with checkpoints(tmp_path, mountpoint, url):
        file = os.open(mountpoint / "f", os.O_WRONLY | os.O_CREAT)
        os.set_inheritable(file, True)
        os.ftruncate(file, 64 * MIB)
        os.write(file, b"begun")
        _fork()
        # More than a unit of the announced size was not written.
        with pytest.raises(OSError, match="not supported"):
            os.close(file)


def test_a_writer_that_executes_another_program_publishes(
    url: str, tmp_path: Path, mountpoint: Path
) -> None:
    """Regression: exec and the server waited for each other until the request's deadline.

    The close that exec makes waited for the caller's `stat` below /proc, which the kernel gives
    only after exec.
    """
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "os.write(fd, b'abc')\n"
        "os.execv('/bin/true', ['true'])\n"
    )
    with checkpoints(tmp_path, mountpoint, url):
        path = mountpoint / "f"
        subprocess.run([sys.executable, "-c", code, path], check=True, timeout=120)
        done = subprocess.run(["cat", path], capture_output=True, check=True, timeout=120)
        assert done.stdout == b"abc"
