"""Imported modules stay for the job's next start: with `--linger`, and by `bootseer standby`."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.waiting import wait_for
from tests.bootseer.served.preload.conftest import places

TRAIN = """
import sys
from pathlib import Path
import large

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

# Behind the guard is the preloader.
print(large.VALUE, parent(parent("self")), flush=True)
"""


class _Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # As a package that is installed for this user.
        (folder / "lib").mkdir()
        self.module = folder / "lib/large.py"
        self.module.write_text("import time; time.sleep(0.15); VALUE = 5")
        (folder / "train.py").write_text(TRAIN)

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "bootseer", "--job", "j", *words],
            env={
                **os.environ,
                **places(self.folder),
            },
            cwd=self.folder,
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def prepare(self, *words: str) -> None:
        done = self.call(*words, "--preload", "--", sys.executable, "-u", "train.py")
        assert done.returncode == 0, done.stderr

    def run(self, linger: str = "10m") -> tuple[str, int]:
        """Return the program's output, and the process id of its preloader."""
        words = ("run", "--preload", "--linger", linger, "--", sys.executable, "-u", "train.py")
        done = self.call(*words)
        assert (done.returncode, done.stderr) == (0, "")
        value, pid = done.stdout.split()
        return value, int(pid)

    def folders(self) -> list[Path]:
        return list((self.folder / "run/services").glob("preload-*"))

    def wait_clean(self) -> None:
        wait_for(lambda: not self.folders(), "the end of the preloaders")


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    job = _Job(tmp_path)
    job.prepare("run")
    return job


def test_the_next_start_is_forked_from_the_same_process(job: _Job) -> None:
    value, pid = job.run()
    assert value == "5"
    assert job.run() == ("5", pid)
    assert job.run() == ("5", pid)
    wait_for(lambda: len(job.folders()) == 1, "the end of the start that recorded")
    # Without the option it is taken over as well, and goes with the job.
    assert job.run(linger="off") == ("5", pid)
    job.wait_clean()
    wait_for(lambda: not _is_alive(pid), "its end")


def test_it_goes_by_itself(job: _Job) -> None:
    job.run(linger="1s")
    job.wait_clean()


def test_a_changed_module_ends_it(job: _Job) -> None:
    _, pid = job.run()
    job.module.write_text("import time; time.sleep(0.15); VALUE = 678")
    value, other = job.run()
    assert value == "678"
    assert other != pid
    wait_for(lambda: not _is_alive(pid), "the end of the one that lingered")
    assert job.call("standby", "--end").returncode == 0
    job.wait_clean()


def test_a_killed_one_costs_nothing_but_time(job: _Job) -> None:
    _, pid = job.run()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _is_alive(pid), "its end")
    value, other = job.run(linger="off")
    assert (value, other != pid) == ("5", True)
    job.wait_clean()


def test_one_that_does_not_answer_is_left(job: _Job) -> None:
    _, pid = job.run()
    os.kill(pid, signal.SIGSTOP)
    value, other = job.run(linger="off")
    assert (value, other != pid) == ("5", True)
    wait_for(lambda: not _is_alive(pid), "its end")
    job.wait_clean()


def test_a_start_is_forked_from_what_stands_by(job: _Job) -> None:
    job.wait_clean()
    job.prepare("standby", "--for", "10m")
    (folder,) = job.folders()
    held = json.loads((folder / "state.json").read_text())["pid"]

    def shown() -> str:
        done = job.call("standby", "--status")
        assert done.returncode == 0, done.stderr
        return done.stdout

    wait_for(lambda: " modules are in process " in shown(), "the imports")
    assert re.search(r"^expected: [0-9.]+ s until", shown(), re.MULTILINE)
    assert any(line.startswith("preloader ") for line in shown().splitlines())
    assert job.run(linger="off") == ("5", held)
    job.wait_clean()
    wait_for(lambda: not _is_alive(held), "its end")


def test_standby_names_what_it_needs(job: _Job) -> None:
    done = job.call("standby", "--preload")
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
