"""Creating and restoring, killed or left without a store at many steps.

Nothing half done is visible, the set-up's result is in place, and the next run works.
"""

from pathlib import Path

import pytest

from testbed.needs import require
from tests.snapshots.support.driving import run_driver


@pytest.mark.parametrize(
    ("scenario", "points"),
    [
        ("restore_whole", 16),
        ("restore_difference", 16),
        ("restore_mounted", 8),
        ("restore_held", 4),
        ("capture_and_publish", 2),
    ],
)
def test_killed_at_many_steps(tmp_path: Path, scenario: str, points: int) -> None:
    if scenario in ("restore_mounted", "restore_held"):
        require("root", "fuse")
    lines = run_driver("crash_driver.py", scenario, tmp_path, points)
    assert len(lines) >= points - 1
    assert sum(line.endswith("killed") for line in lines) >= len(lines) // 2


@pytest.mark.parametrize(("scenario", "points"), [("restore", 4), ("capture", 4)])
def test_a_store_that_vanishes_at_many_steps(tmp_path: Path, scenario: str, points: int) -> None:
    """There is at most one warning, the environment is the set-up's result, and it ran at most
    once."""
    lines = run_driver("vanishing_driver.py", scenario, tmp_path, points)
    assert len(lines) == points
    ways = {line.rpartition(" ")[2] for line in lines}
    assert ways == {"ran", "captured" if scenario == "capture" else "restored"}
