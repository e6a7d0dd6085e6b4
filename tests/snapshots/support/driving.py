"""Runs a driver, which breaks captures and restores at many steps, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from testbed.paths import REPOSITORY


def driven(driver: str, scenario: str, top: Path, points: int) -> list[str]:
    """What a driver prints."""
    # Each run asks `python3` about itself: ours answers at once, a shim of pyenv's runs ten.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": path}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(driver)), scenario, str(top), str(points)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
