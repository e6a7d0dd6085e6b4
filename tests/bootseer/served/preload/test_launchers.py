"""A launcher that is a Python program is forked as its workers are, and behaves as usual."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.waiting import wait_for
from tests.bootseer.served.preload.conftest import places

# The parts of torch's launcher that the preloader looks at.
RUN = """
import os, subprocess, sys
import torch.distributed.launcher.api

def main():
    if "--bare" not in sys.argv:
        os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(of_process("launcher")), flush=True)
    worker = subprocess.Popen(
        [os.getenv("PYTHON_EXEC", sys.executable), "-u", "train.py"],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0"},
        start_new_session=True,
    )
    sys.exit(worker.wait())

import json
from torch.look import of_process
if __name__ == "__main__":
    main()
"""
LOOK = """
import os, sys
VALUE = len(os.listdir("/proc/self/task"))

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

def frames(frame):
    return [frame.f_code.co_filename, *frames(frame.f_back)] if frame else []

def of_process(who):
    main = sys.modules["__main__"]
    return {
        "who": who, "pid": os.getpid(), "parent": parent("self"), "above": parent(parent("self")),
        "same": [sys.argv, sys.orig_argv, sys.executable, str(sys.flags), main.__file__,
                 getattr(main.__spec__, "name", ""), os.getcwd(),
                 os.getsid(0) == os.getpgrp() == os.getpid(),
                 open("/proc/self/cmdline").read(), frames(sys._getframe()),
                 sorted(os.listdir("/proc/self/fd")), sys.path,
                 sorted(set(os.environ) - {"BOOTSEER_PROCESS", "PYTHON_EXEC",
                                           "BOOTSEER_PRELOAD_PYTHON"})],
    }
"""
TRAIN = """
import json, os, sys, time
from torch.look import of_process

print(json.dumps(of_process("worker")), flush=True)
while os.path.exists("stays"):
    time.sleep(0.02)
sys.exit(6)
"""
SCRIPT = """#!{python}
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    sys.exit(main())
"""


class _Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = {
            # As packages that are installed for this user.
            "lib/torch/__init__.py": "import time; time.sleep(0.15)",
            "lib/torch/look.py": LOOK,
            "lib/torch/distributed/__init__.py": "",
            "lib/torch/distributed/run.py": RUN,
            "lib/torch/distributed/launcher/__init__.py": "",
            "lib/torch/distributed/launcher/api.py": "",
            "train.py": TRAIN,
            "bin/torchrun": SCRIPT.format(python=sys.executable),
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "bin/torchrun").chmod(0o755)

    def bootseer(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "bootseer", "--job", "j", *words],
            env={
                **os.environ,
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                **places(self.folder),
            },
            cwd=self.folder,
            start_new_session=options.pop("start_new_session", True),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[str]":
        return self.bootseer("run", "--preload", "--linger", "10m", "--", *command, **options)

    def run(self, *command: str, **options: Any) -> list[dict[str, Any]]:
        """Return the facts that the launcher and its worker print about themselves."""
        process = self.start(*command, **options)
        output, errors = process.communicate(timeout=100)
        assert (process.returncode, errors) == (6, "")
        both = [json.loads(line) for line in output.splitlines()]
        assert [one["who"] for one in both] == ["launcher", "worker"]
        return [{**one, "started": process.pid} for one in both]

    def end(self) -> None:
        self.bootseer("standby", "--end").communicate(timeout=100)

    def preloaders(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_one = (path / "cmdline").read_bytes().startswith(b"bootseer preload\0j")
                if is_one and str(self.folder).encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found


@pytest.fixture
def job(tmp_path: Path) -> Any:
    job = _Job(tmp_path)
    yield job
    (tmp_path / "stays").unlink(missing_ok=True)
    job.end()
    wait_for(lambda: not job.preloaders(), "the end of the preloaders")


COMMANDS = {
    "a script of the path": ("torchrun", "--rate", "ü"),
    "a script by its path": ("bin/torchrun", "", "--rate"),
    "a module": (sys.executable, "-m", "torch.distributed.run", "--rate"),
    "an unbuffered module": (sys.executable, "-u", "-m", "torch.distributed.run", "a"),
}


@pytest.mark.parametrize("how", COMMANDS)
def test_the_next_launcher_is_forked_and_is_what_it_was(job: _Job, how: str) -> None:
    command = COMMANDS[how]
    launcher, worker = job.run(*command)
    assert launcher["pid"] == launcher["started"]
    assert worker["parent"] == launcher["pid"]
    above = []
    for _ in range(2):
        its, of_worker = job.run(*command)
        assert its["same"] == launcher["same"]
        assert of_worker["same"] == worker["same"]
        # Behind a guard each is a preloader.
        assert its["pid"] != its["started"]
        above.append((its["above"], of_worker["above"]))
    assert above[0] == above[1]
    assert sorted(above[0]) == sorted(job.preloaders())


def test_a_launcher_in_a_session_of_others_starts_ordinarily_without_a_word(job: _Job) -> None:
    job.run("torchrun")
    launcher, worker = job.run("torchrun", start_new_session=False)
    assert launcher["pid"] == launcher["started"]
    assert [worker["above"]] == job.preloaders()


def test_another_command_of_the_launcher_starts_ordinarily(job: _Job) -> None:
    job.run("torchrun")
    launcher, worker = job.run(*COMMANDS["a module"])
    assert launcher["pid"] == launcher["started"]
    assert [worker["above"]] == job.preloaders()


def test_a_launcher_that_is_killed_takes_its_workers_with_it(job: _Job) -> None:
    job.run("torchrun")
    (job.folder / "stays").touch()
    process = job.start("torchrun")
    assert process.stdout is not None
    pids = [json.loads(process.stdout.readline())["pid"] for _ in range(2)]
    assert process.pid not in pids
    process.kill()
    process.communicate(timeout=100)
    wait_for(lambda: not any(map(_is_alive, pids)), "the end of the launcher and its worker")


def test_a_signal_reaches_the_launcher_and_is_how_it_ends(job: _Job) -> None:
    job.run("torchrun")
    (job.folder / "stays").touch()
    process = job.start("torchrun")
    assert process.stdout is not None
    launcher, worker = (json.loads(process.stdout.readline())["pid"] for _ in range(2))
    process.terminate()
    assert process.wait(timeout=100) == -signal.SIGTERM
    assert not _is_alive(launcher)
    assert _is_alive(worker), "its launcher ends it, if anybody does"
    os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=100)


def test_both_stand_by(job: _Job) -> None:
    job.run("torchrun")
    job.end()
    process = job.bootseer("standby", "--preload", "--for", "10m", "--", "torchrun")
    assert (*process.communicate(timeout=100), process.returncode) == ("", "", 0)
    wait_for(lambda: _imported(job) == 2, "the imports")
    launcher, worker = job.run("torchrun")
    assert sorted([launcher["above"], worker["above"]]) == sorted(job.preloaders())


def _imported(job: _Job) -> int:
    output, _ = job.bootseer("standby", "--status").communicate(timeout=100)
    return output.count(" modules are in process ")


def test_a_preloader_of_another_release_is_ended(job: _Job) -> None:
    job.run("torchrun")
    job.run("torchrun")
    before = job.preloaders()
    for file in (job.folder / "run/services").glob("preload-*/job/plan"):
        plan = json.loads(file.read_text())
        file.write_text(json.dumps({**plan, "release": "0.0.1"}))
    launcher, worker = job.run("torchrun")
    wait_for(lambda: not any(map(_is_alive, before)), "the end of those of the other release")
    assert sorted([launcher["above"], worker["above"]]) == sorted(job.preloaders())


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
