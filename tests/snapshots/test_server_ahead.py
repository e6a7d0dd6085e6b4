"""A command that begins a mount's server before it knows whether it needs one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.prefetch.mount_state import live_mounts
from bootseer.snapshots.restoring.mounted import unmount_snapshot
from tests.cli.conftest import REPOSITORY
from tests.snapshots.conftest import MakeNode
from tests.support.image_mounts import skip_unless_fuse, skip_unless_root
from tests.support.snapshot_mounts import end_everything

pytestmark = [pytest.mark.fuse, pytest.mark.root]

# What runs a set-up has no other child then. Each thread has its own, and may end meanwhile.
_SET_UP = (
    'mkdir "$0" && echo $$ > "$0/shell" && '
    '{ cat /proc/$PPID/task/*/children > "$0/children" 2> /dev/null || true; }'
)


def test_it_ends_before_a_set_up_and_serves_as_itself(tmp_path: Path, make_node: MakeNode) -> None:
    """Whoever ends processes by the command line of a start must not end its server."""
    skip_unless_root()
    skip_unless_fuse()
    node, target = make_node("a"), tmp_path / "env"
    command = [sys.executable, "-m", "bootseer", "snapshot", "run", "--mode", "mount"]

    def run() -> None:
        subprocess.run(
            [*command, "--target", str(target), "--", "sh", "-c", _SET_UP, str(target)],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(REPOSITORY),
                "BOOTSEER_STORE": node.store_url,
                "BOOTSEER_CACHE_DIR": str(node.cache_dir),
                "BOOTSEER_RUN_DIR": str(node.run_dir),
            },
            cwd=tmp_path,
            timeout=60,
            check=True,
        )

    try:
        run()
        assert (target / "children").read_text().split() == [(target / "shell").read_text().strip()]
        shutil.rmtree(target)
        run()
        ((_, state),) = live_mounts(node)
        shown = Path(f"/proc/{state.pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert shown[:3] == ["python", "-m", "bootseer.prefetch.serve"]
        assert (target / "shell").exists()
        unmount_snapshot(node, target)
    finally:
        end_everything(tmp_path, node)
