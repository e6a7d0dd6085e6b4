"""A round of the soak has no findings, and a stopped soak continues."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from tests.soak.site import missing_tools


@pytest.mark.needs("mount", "fuse")
def test_a_round(tmp_path: Path) -> None:
    if missing := missing_tools():
        raise MissingError(f"the soak needs {', '.join(missing)}")
    for said in ("round 0: ", "seed 1, round 1, "):
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak", "--rounds", "1", "--folder", tmp_path],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((tmp_path / "state.json").read_text())["round"] == 1
        assert said in done.stdout
    assert "round 0: " not in done.stdout
