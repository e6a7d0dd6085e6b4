"""The soak itself, for two rounds: that it finds nothing, and goes on where it was stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from tests.soak.site import missing_tools


@pytest.mark.needs("mount", "fuse")
def test_some_rounds(tmp_path: Path) -> None:
    if missing := missing_tools():
        raise MissingError(f"the soak needs {', '.join(missing)}")
    for rounds in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak", "--rounds", str(rounds), "--folder", tmp_path],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((tmp_path / "state.json").read_text())["round"] == rounds
