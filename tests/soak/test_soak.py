"""A round of the soak has no findings, and a stopped soak continues."""

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from tests.soak.__main__ import Soak
from tests.soak.site import missing_tools


@pytest.mark.needs("mount", "fuse")
def test_a_round(tmp_path: Path) -> None:
    if missing := missing_tools():
        raise MissingError(f"the soak needs {', '.join(missing)}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--rounds", "1", "--folder", tmp_path],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 0: " in done.stdout
    again = Soak(tmp_path, seed=2)
    assert (again.seed, again.round, again.findings) == (1, 1, [])
