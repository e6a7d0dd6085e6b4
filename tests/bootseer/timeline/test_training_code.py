"""`import bootseer` in an environment of the training code's own, without our dependencies."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from bootseer.report.decoding import decode
from testbed.paths import REPOSITORY

# The calls of a training program; every import must be of the standard library.
TRAIN = """
import importlib.abc, sys

class Foreign(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] in {*sys.stdlib_module_names, "bootseer"}, name

sys.meta_path.insert(0, Foreign())
import bootseer
with bootseer.stage("load", {"files": 3}) as span:
    span.set("bootseer.bytes", 7)
bootseer.ready()
print(bootseer.__file__)
"""


def test_stages_take_nothing_but_the_standard_library(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "BOOTSEER_TIMELINE": str(timeline)}
    # Without site-packages, so that nothing else could be found.
    command = [sys.executable, "-S", "-c", TRAIN]
    subprocess.run(command, env=environ, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert [stage.name for stage in decode(timeline.read_bytes())] == ["load", "ready"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with this checkout, installed by `pip install --no-deps`."""
    folder = tmp_path_factory.mktemp("bare")
    # Building writes beside what is built.
    copy = folder / "checkout"
    skipped = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=skipped)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=copy, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 3_000_000
    environment = folder / "environment"
    # The pip that runs these tests installs into it: to make one there takes most of the time.
    venv.create(environment, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install"]
    words = [*pip, "--no-index", "--no-deps", str(wheel)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return environment


def test_installed_without_dependencies_stages_are_written(bare: Path, tmp_path: Path) -> None:
    """A complete installation starts the job, which trains in an environment of its own."""
    run = [sys.executable, "-m", "bootseer", "--timeline-dir", str(tmp_path), "--job", "j", "run"]
    done = subprocess.run(
        [*run, "--", str(bare / "bin/python"), "-c", TRAIN],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "BOOTSEER_TRACE_PYTHON": "off"},
    )
    assert done.returncode == 0, done.stderr
    assert str(bare) in done.stdout
    (timeline,) = tmp_path.rglob("*.jsonl")
    names = [stage.name for stage in decode(timeline.read_bytes())]
    assert names == ["start", "load", "ready"]


def test_installed_without_dependencies_a_command_says_what_it_lacks(bare: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": ""}
    for arguments in (["report"], ["run", "--", "true"], ["image", "mount", "x", "y"]):
        command = [str(bare / "bin/bootseer"), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environ, cwd=bare
        )
        assert done.returncode == 18
        assert done.stderr.count("\n") == 1
        assert "without --no-deps" in done.stderr
