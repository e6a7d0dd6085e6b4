"""Create and restore, killed or left without their store at many steps: nothing half visible, the
set-up's result in place, and the next run works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.image_mounts import skip_unless_fuse, skip_unless_root

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("scenario", "points"),
    [
        ("restore_whole", 16),
        ("restore_difference", 16),
        ("restore_hardlinked", 6),
        ("restore_mounted", 8),
        ("restore_held", 4),
        ("capture_and_publish", 2),
    ],
)
def test_killed_at_many_steps(tmp_path: Path, scenario: str, points: int) -> None:
    if scenario in ("restore_mounted", "restore_held"):
        skip_unless_root()
        skip_unless_fuse()
    lines = _driven("crash_driver.py", scenario, tmp_path, points)
    assert len(lines) >= points - 1
    assert sum(line.endswith("killed") for line in lines) >= len(lines) // 2


@pytest.mark.parametrize(
    ("scenario", "points"), [("restore", 4), ("restore_hardlinked", 4), ("capture", 4)]
)
def test_a_store_that_vanishes_at_many_steps(tmp_path: Path, scenario: str, points: int) -> None:
    """One warning at most; what is in place is what the set-up makes, and it ran once at most."""
    lines = _driven("vanishing_driver.py", scenario, tmp_path, points)
    assert len(lines) == points
    ways = {line.rpartition(" ")[2] for line in lines}
    assert ways == {"ran", "captured" if scenario == "capture" else "restored"}


def _driven(driver: str, scenario: str, top: Path, points: int) -> list[str]:
    """What a driver prints."""
    # Each run asks `python3` about itself: ours answers at once, a shim of pyenv's runs ten.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PATH": path}
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
