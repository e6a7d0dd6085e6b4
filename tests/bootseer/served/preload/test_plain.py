"""`bootseer run --preload -- python ...`: the wrapper becomes a stand-in of the program."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.waiting import wait_for

TRAIN = """
import os, sys
print("large" in sys.modules, sys.argv, os.environ.get("PYTHON_EXEC"), flush=True)
import large
print(large.VALUE, os.getppid() == int(sys.argv[1]), flush=True)
sys.exit(6)
"""


def _start(folder: Path, *options: str, node: str = "a") -> "subprocess.Popen[str]":
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
            "BOOTSEER_CACHE_DIR": str(folder / node / "cache"),
            "BOOTSEER_RUN_DIR": str(folder / node / "run"),
            "BOOTSEER_NODE": node,
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
    assert not (folder / "a/cache/preload").exists()
    assert _outcome(_start(folder, "--preload")) == ([words, "5 True"], "", 6)
    assert (folder / "a/cache/preload/j.json").exists()
    # Its parent is the guard now.
    assert _outcome(_start(folder, "--preload")) == ([words, "5 False"], "", 6)
    wait_for(lambda: not _preloaders(folder), "the end of the preloaders")


def test_two_starts_of_one_job_have_preloaders_of_their_own(folder: Path) -> None:
    _outcome(_start(folder, "--preload"))
    both = [_start(folder, "--preload") for _ in range(2)]
    for process in both:
        lines, errors, code = _outcome(process)
        assert (lines[1], errors, code) == ("5 False", "", 6)
    wait_for(lambda: not _preloaders(folder), "the end of the preloaders")


def test_another_node_imports_what_the_first_one_has(folder: Path) -> None:
    """The process that publishes caches also publishes the record to the store."""
    (folder / "kept").mkdir()
    shared = folder / "store/preload/j.json"
    options = ("--preload", "--keep", str(folder / "kept"))
    assert _outcome(_start(folder, *options))[0][1] == "5 True"
    wait_for(shared.exists, "the record in the store")
    # No other process publishes: files written here stay.
    wait_for(lambda: not _attendants(folder), "the end of the process that publishes")
    assert (
        _outcome(_start(folder, "--preload", "--set", "keep_caches=off", node="b"))[0][1]
        == "5 False"
    )
    # What is none there is no reason not to start.
    for text in ("[]", "{", '{"version": 1, "executable": "/bin/sh", "words": 7}'):
        shared.write_text(text)
        started = _start(folder, "--preload", "--set", "keep_caches=off", node=f"node-{len(text)}")
        assert _outcome(started)[0][1] == "5 True"


def _preloaders(folder: Path) -> list[Path]:
    return list((folder / "a/run/services").glob("preload-*"))


def _attendants(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if (
                b"launch.attendant" in words
                and str(folder).encode() in (path / "environ").read_bytes()
            ):
                found.append(path.name)
    return found
