"""A mounted environment whose store's folder vanishes and comes back."""

import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.mounted import unmount_snapshot
from testbed.mounts.snapshot_mounts import WAIT_S, wait_gone
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import capture_and_remove, small_setup

pytestmark = pytest.mark.needs("mount", "fuse")


@pytest.mark.parametrize("has_mount_point", [True, False])
def test_a_read_waits_until_the_store_is_back(
    tmp_path: Path, mounting: MakeNode, has_mount_point: bool
) -> None:
    """Regression: reads failed after milliseconds, in spite of a later deadline."""
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = replace(mounting("b"), deadline_s=60.0)
    run_setup(node, request)
    (tmp_path / "store").rename(tmp_path / "away")
    if has_mount_point:
        (tmp_path / "store").mkdir()
    with subprocess.Popen(["cat", target / "d/file"], stdout=subprocess.PIPE) as reader:
        # Long enough that a server which gives up early would have done so.
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(1.5)
        if has_mount_point:
            (tmp_path / "store").rmdir()
        (tmp_path / "away").rename(tmp_path / "store")
        assert reader.communicate(timeout=WAIT_S)[0] == b"Linux\n"
        assert reader.returncode == 0
    unmount_snapshot(node, target)
    wait_gone(node)


def test_a_set_up_is_not_stored_where_a_share_was(tmp_path: Path, make_node: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    node = make_node("a")
    capture_and_remove(node, request, target)
    (tmp_path / "store").rename(tmp_path / "away")
    said: list[str] = []
    assert run_setup(node, request, report=said.append).how == "ran"
    assert any("is its share mounted?" in line for line in said), said
    assert not (tmp_path / "store").exists()
    shutil.rmtree(target)
    (tmp_path / "away").rename(tmp_path / "store")
    assert run_setup(node, request).how == "restored"
