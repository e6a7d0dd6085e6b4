"""kill -9 at many steps of create and restore: nothing half visible, and the next run works."""

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
    driver = Path(__file__).with_name("crash_driver.py")
    # Each run asks `python3` about itself: ours answers at once, a shim of pyenv's runs ten.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PATH": path}
    done = subprocess.run(
        [sys.executable, str(driver), scenario, str(tmp_path), str(points)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= points - 1
    assert sum(line.endswith("killed") for line in lines) >= len(lines) // 2
