"""A job that changes between its starts on one node: only changed stages do any work."""

import shutil
from typing import Any

import pytest

from testbed.needs import require
from testbed.node import Node, attribute
from testbed.wheels import make_wheel

pytestmark = pytest.mark.needs("mount", "fuse")


class _Job:
    """Program with requirements, wheels that a real pip installs, and a checkpoint folder."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.wheels = node.base / "wheels"
        self.add("first", "1.0")
        self.code("import first; print(first.VERSION)")
        self.checkpoint = node.base.parent / "ckpt"

    def add(self, name: str, version: str) -> None:
        """Add a package to the requirements."""
        make_wheel(self.wheels, name, version, {f"{name}.py": f"VERSION = {version!r}\n"})
        with (self.node.base / "requirements.txt").open("a") as file:
            file.write(f"{name}=={version}\n")

    def code(self, text: str) -> None:
        (self.node.base / "train.py").write_text(
            "import os, sys\nsys.path.insert(0, 'packages')\n"
            f"{text}\nprint(sorted(os.listdir('mnt')))"
        )

    def save(self, step: int) -> None:
        """Save a checkpoint, as the job would on another node."""
        with_mount = ("--checkpoint", f"{self.checkpoint.as_uri()}:{self.node.base}/other")
        line = f"mkdir other/step-{step} && echo {step} > other/step-{step}/weights"
        done = self.node.run(
            "run", *with_mount, "--", "sh", "-c", line, variables={"BOOTSEER_JOB": "trainer"}
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> tuple[list[str], tuple[Any, Any], float]:
        """Return the output, how the stages were done, and the bytes that the environment moved."""
        setup = (
            "python3 -m pip install --quiet --no-index --find-links wheels --target packages "
            "--upgrade -r requirements.txt"
        )
        done = self.node.run(
            "run",
            *("--setup", setup, "--target", "packages", "--mode", "mount", "--linger", "10m"),
            *("--checkpoint", f"{self.checkpoint.as_uri()}:{self.node.base}/mnt"),
            *("--", "python3", "-B", "train.py"),
        )
        assert done.returncode == 0, done.stderr
        spans = self.node.spans()
        names = ("environment", "checkpoint")
        environment, checkpoint = (attribute(spans[one], "bootseer.how") for one in names)
        moved = attribute(spans["environment"], "bootseer.bytes")
        return done.stdout.splitlines(), (environment, checkpoint), float(moved or 0)


@pytest.fixture
def job(node: Node) -> _Job:
    require("mount", "fuse")
    job = _Job(node)
    job.save(1)
    lines, how, _ = job.start()
    assert (lines, how) == (["1.0", "['step-1']"], ("captured", "mounted"))
    # As on another node, where nothing is.
    shutil.rmtree(node.base / "packages")
    assert job.start()[1] == ("restored", "live")
    return job


def test_code_a_package_and_a_checkpoint(job: _Job) -> None:
    job.code("import first; print('new', first.VERSION)")
    assert job.start() == (["new 1.0", "['step-1']"], ("live", "live"), 0.0)
    job.save(2)
    assert job.start() == (["new 1.0", "['step-1', 'step-2']"], ("live", "live"), 0.0)
    job.add("second", "2.0")
    job.code("import first, second; print(first.VERSION, second.VERSION)")
    lines, (environment, checkpoint), _ = job.start()
    assert lines == ["1.0 2.0", "['step-1', 'step-2']"]
    assert environment.startswith("changed: ")
    assert checkpoint == "live"
    # From then on, that is the environment.
    assert job.start() == (lines, ("in place", "live"), 0.0)
