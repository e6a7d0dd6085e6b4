"""After a kill, stop or change, a worker ends as an ordinary one would, or starts ordinarily."""

import mmap
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.served.ending import sweep_one
from bootseer.served.service import services
from bootseer.served.status import status_entry
from testbed.needs import MissingError
from testbed.waiting import wait_for
from tests.bootseer.served.preload.conftest import PreloadingNode

STEPS = ("at once", "a guard is there", "the program runs")
# Prints its process id, and each line of its input.
WAITING = """
import heavy, os, signal, sys, time

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGWINCH", "SIGTSTP")

def told(number, frame):
    print("told", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(9)

child = os.fork()
for name in NAMES:
    if child:
        signal.signal(getattr(signal, name), told)
    elif name != "SIGTERM":
        signal.signal(getattr(signal, name), signal.SIG_IGN)
if child:
    print(os.getpid(), child, flush=True)
while True:
    # A signal that comes just before a sleep is told behind it.
    time.sleep(0.02)
"""


@pytest.fixture
def waiting(node: PreloadingNode) -> PreloadingNode:
    node.write("modules/heavy.py", "")
    node.write("program.py", WAITING)
    node.begin("heavy")
    return node


def _numbers(process: "subprocess.Popen[str]") -> tuple[int, int]:
    """Return the process ids of the worker and its child, once the worker prints them."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert len(words) == 2, process.communicate()
    return int(words[0]), int(words[1])


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_gone(pid: int) -> bool:
    return _state(pid) in ("", "Z")


def _forked(waiting: PreloadingNode, process: "subprocess.Popen[str]") -> tuple[int, int, int]:
    """Return the process ids of worker, child and guard; none is the started process."""
    worker, child = _numbers(process)
    guard = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    assert len({worker, guard, process.pid, waiting.preloader}) == 4
    return worker, child, guard


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGHUP", "SIGWINCH", "SIGTSTP"])
def test_signals_reach_the_worker(waiting: PreloadingNode, name: str) -> None:
    process = waiting.start()
    _forked(waiting, process)
    process.send_signal(getattr(signal, name))
    assert process.stdout is not None
    assert process.stdout.readline() == f"told {name}\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "told SIGTERM\n"
    assert process.wait(60) == 9


def test_a_signal_for_the_group_reaches_what_the_worker_has_started(
    waiting: PreloadingNode,
) -> None:
    process = waiting.start()
    _, child, _ = _forked(waiting, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 9
    wait_for(lambda: _is_gone(child) or _state(child) == "Z")


def test_the_worker_stops_and_goes_on_with_what_stands_for_it(waiting: PreloadingNode) -> None:
    process = waiting.start()
    worker, child, _ = _forked(waiting, process)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: _state(worker) == _state(child) == "T")
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: _state(worker) == _state(child) == "S")
    os.kill(worker, signal.SIGSTOP)
    # Its parent hears of it, as a shell would.
    assert os.waitpid(process.pid, os.WUNTRACED)[0] == process.pid
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: _state(process.pid) == _state(worker) == "S")
    process.terminate()
    assert process.wait(60) == 9


def test_a_killed_stand_in_takes_the_worker_with_it(waiting: PreloadingNode) -> None:
    process = waiting.start()
    worker, child, guard = _forked(waiting, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: all(_is_gone(pid) for pid in (worker, child, guard)))


def test_a_killed_guard_takes_the_worker_with_it(waiting: PreloadingNode) -> None:
    process = waiting.start()
    worker, child, guard = _forked(waiting, process)
    os.kill(guard, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: _is_gone(worker))
    os.kill(child, signal.SIGKILL)


def test_a_killed_worker_is_told_to_whoever_started_it(waiting: PreloadingNode) -> None:
    process = waiting.start()
    worker, child, guard = _forked(waiting, process)
    os.kill(worker, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: _is_gone(guard))
    os.kill(child, signal.SIGKILL)


def test_workers_outlive_a_killed_preloader_and_later_ones_start_ordinarily(
    waiting: PreloadingNode,
) -> None:
    process = waiting.start()
    _forked(waiting, process)
    waiting.kill_preloader()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "told SIGUSR1\n"
    process.terminate()
    assert process.wait(60) == 9
    waiting.write("program.py", "print('ran')")
    later = waiting.run()
    assert (later.stdout, later.returncode) == ("ran\n", 0)
    assert later.stderr.startswith("bootseer: started without the preloader: ")
    assert later.stderr.count("\n") == 1


def test_workers_outlive_their_launcher_as_ordinary_ones_do(waiting: PreloadingNode) -> None:
    process = waiting.start()
    _forked(waiting, process)
    preloader, run_dir = waiting.preloader, waiting.folder / "run"
    (service,) = services(run_dir)
    entry = status_entry(service, run_dir)
    assert (entry.kind, entry.what, entry.pid, entry.health) == ("preloader", "j", preloader, "ok")
    assert not sweep_one(service.folder)
    waiting.end_launcher()
    wait_for(lambda: _is_gone(preloader))
    # The worker does not count as one.
    assert status_entry(service, run_dir).health == "dead"
    assert sweep_one(service.folder)
    process.terminate()
    assert process.wait(60) == 9


def _wait_for_step(step: str, preloader: int, ran: Path, process: "subprocess.Popen[str]") -> None:
    children = Path(f"/proc/{preloader}/task/{preloader}/children")
    has_come: dict[str, Callable[[], object]] = {
        "at once": lambda: True,
        "a guard is there": children.read_text,
        "the program runs": ran.exists,
    }
    wait_for(lambda: has_come[step]() or process.poll() is not None, step, interval_s=0.001)


@pytest.mark.parametrize("step", STEPS)
def test_a_preloader_killed_at_each_step_costs_no_start(waiting: PreloadingNode, step: str) -> None:
    """The program runs exactly once, forked or ordinarily."""
    waiting.write("program.py", "import heavy; open('ran', 'a').close(); print('ran')")
    preloader = waiting.preloader
    process = waiting.start()
    _wait_for_step(step, preloader, waiting.folder / "ran", process)
    os.kill(preloader, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("ran\n", 0), errors


@pytest.mark.parametrize("step", STEPS)
def test_a_stand_in_killed_at_each_step_leaves_no_worker(
    waiting: PreloadingNode, step: str
) -> None:
    waiting.write(
        "program.py",
        "import os, time; open('ran', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)",
    )
    preloader = waiting.preloader
    process = waiting.start()
    _wait_for_step(step, preloader, waiting.folder / "ran", process)
    process.kill()
    process.wait(60)
    children = Path(f"/proc/{preloader}/task/{preloader}/children")
    wait_for(lambda: all(_is_gone(int(pid)) for pid in children.read_text().split()))
    ran = waiting.folder / "ran"
    pids = ran.read_text().split() if ran.exists() else []
    assert len(pids) <= 1
    wait_for(lambda: all(_is_gone(int(pid)) for pid in pids))


def test_forty_forks_leak_nothing(waiting: PreloadingNode) -> None:
    waiting.write("program.py", "import heavy")
    assert waiting.run().returncode == 0
    preloader = waiting.preloader

    def held() -> tuple[int, int, int]:
        status = Path(f"/proc/{preloader}/status").read_text()
        memory = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        children = Path(f"/proc/{preloader}/task/{preloader}/children").read_text().split()
        files = len(os.listdir(f"/proc/{preloader}/fd"))
        return files, sum(not _is_gone(int(pid)) for pid in children), int(memory.split()[1])

    files, children, memory_kib = held()
    for _ in range(5):
        processes = [waiting.start(stdout=None, stderr=None) for _ in range(8)]
        assert [process.wait(60) for process in processes] == [0] * 8
    # The first start's own may have been counted.
    wait_for(lambda: held()[0] <= files and held()[1] <= children, "as little as at first")
    assert held()[2] < memory_kib + 256


def test_a_fork_copies_the_tables_of_few_pages(node: PreloadingNode) -> None:
    with mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        try:
            memory.madvise(25)  # MADV_COLLAPSE
        except OSError as error:
            raise MissingError(
                f"this kernel makes no large pages when it is asked to: {error}"
            ) from error
    node.write("modules/heavy.py", "VALUE = bytearray(b'x') * (64 << 20)")
    node.write("program.py", "import heavy; print(len(heavy.VALUE))")
    node.begin("heavy")
    assert node.run().stdout == f"{64 << 20}\n"
    memory_of = Path(f"/proc/{node.preloader}/smaps_rollup").read_text(encoding="ascii")
    (size,) = re.findall(r"AnonHugePages: +(\d+) kB", memory_of)
    assert int(size) > 0
