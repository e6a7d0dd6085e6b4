"""`bootseer run --preload -- python ...`: the wrapper becomes the stand-in of the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

TRAIN = """
import os, sys
print("large" in sys.modules, sys.argv, os.environ.get("PYTHON_EXEC"), flush=True)
import large
print(large.VALUE, os.getppid() == int(sys.argv[1]), flush=True)
sys.exit(6)
"""


def _start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "bootseer", "--job", "j", "run", *options, "--"),
            *(sys.executable, "-u", "train.py", str(os.getpid())),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(folder / "lib"),
            "PYTHONUSERBASE": str(folder),
            "BOOTSEER_TIMELINE_DIR": str(folder / "timeline"),
            "BOOTSEER_STORE": str(folder / "store"),
            "BOOTSEER_CACHE_DIR": str(folder / "cache"),
            "BOOTSEER_RUN_DIR": str(folder / "run"),
        },
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # As a package that is installed for this user.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/large.py").write_text("import time; time.sleep(0.15); VALUE = 5")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def _outcome(process: "subprocess.Popen[str]") -> tuple[list[str], str, int]:
    output, errors = process.communicate(timeout=100)
    return output.splitlines(), errors, process.returncode


def test_a_program_is_forked_from_its_second_start_on(folder: Path) -> None:
    words = f"False ['train.py', '{os.getpid()}'] None"
    assert _outcome(_start(folder)) == ([words, "5 True"], "", 6), "without --preload"
    assert not (folder / "cache/preload").exists()
    assert _outcome(_start(folder, "--preload")) == ([words, "5 True"], "", 6)
    assert (folder / "cache/preload/j.json").exists()
    # Its parent is the guard now.
    assert _outcome(_start(folder, "--preload")) == ([words, "5 False"], "", 6)
    assert _outcome(_start(folder, "--preload", "--no-preload")) == ([words, "5 True"], "", 6)
    wait_for(lambda: not any((folder / "run/preload").iterdir()), "the end of the preloaders")


def test_two_starts_of_one_job_have_preloaders_of_their_own(folder: Path) -> None:
    _outcome(_start(folder, "--preload"))
    both = [_start(folder, "--preload") for _ in range(2)]
    for process in both:
        lines, errors, code = _outcome(process)
        assert (lines[1], errors, code) == ("5 False", "", 6)
    wait_for(lambda: not any((folder / "run/preload").iterdir()), "the end of the preloaders")
