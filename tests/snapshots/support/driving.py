"""Runs a driver, which breaks captures and restores at many steps, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from testbed.paths import REPOSITORY


def run_driver(driver: str, scenario: str, top: Path, points: int) -> list[str]:
    """Run a driver and return the lines of its output."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
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
