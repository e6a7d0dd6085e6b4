"""Deaths of servers, snapshotters and machines below a snapshotter's mounts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.fuse.kernel.unmount import detach
from bootseer.served.service import live_mounts
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import digest
from testbed.mounts.image_mounts import checksums_in_child
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for
from tests.prefetch.snapshotter.conftest import CHAINS, add_image, directories, lower_of, pull


def test_a_server_that_died_is_replaced_when_mounts_are_asked_for(
    node: ContainerdNode, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    first = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.kill_image_servers()
    second = lower_of(node.call("Mounts", key="c1"))
    assert second != first
    assert checksums_in_child([second / "top"]) == [digest(b"t")[7:]]
    wait_for(lambda: node.trees() == [second])


def test_a_dead_server_is_not_taken_for_alive_while_it_is_tidied_away(
    node: ContainerdNode, tmp_path: Path
) -> None:
    add_image(node, tmp_path)
    pull(node)
    first = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    ((state_dir, _),) = live_mounts(node.settings.run_dir)
    children = node.image_server_ids()
    held = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(state_dir)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert held.stdout is not None
        assert held.stdout.readline() == b"held\n"
        assert lower_of(node.call("Mounts", key="c1")) != first
    finally:
        held.kill()
        held.communicate()


_HOLD = """
import sys, time
from pathlib import Path
from bootseer.served.service import take_lock
while True:
    try:
        lock = take_lock(Path(sys.argv[1]), create=False)
        break
    except TimeoutError:
        time.sleep(0.001)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_mounts_outlive_the_snapshotter(
    node: ContainerdNode, tmp_path: Path, sign: signal.Signals
) -> None:
    add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.stop(node.snapshotter, sign)
    assert checksums_in_child([lower / "top"]) == [digest(b"t")[7:]]
    node.snapshotter = node.start_snapshotter()
    assert lower_of(node.call("Mounts", key="c1")) == lower
    assert lower_of(node.call("Prepare", key="c2", parent=CHAINS[-1])) == lower
    for key in ("c1", "c2", *reversed(CHAINS)):
        node.call("Remove", key=key)
    wait_for(lambda: not node.trees() and not list(live_mounts(node.settings.run_dir)))


@pytest.mark.parametrize("run_dir", ["on disk", "in memory"])
def test_a_start_mends_what_the_machines_end_left(
    node: ContainerdNode, tmp_path: Path, run_dir: str
) -> None:
    add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    before = directories(node)
    node.stop(node.snapshotter, signal.SIGKILL)
    node.kill_image_servers()
    detach(lower, lazy=True)
    if run_dir == "in memory":
        shutil.rmtree(node.settings.run_dir)
    (node.root / "snapshots/999/fs").mkdir(parents=True)
    (node.root / "snapshots/new-garbage").mkdir()
    (node.root / "trees/garbage").mkdir()
    node.snapshotter = node.start_snapshotter()
    # Without a request: restarted containers find it there.
    wait_for(lambda: len(node.trees()) == 1)
    assert checksums_in_child([node.trees()[0] / "top"]) == [digest(b"t")[7:]]
    wait_for(lambda: directories(node) == before)
    wait_for(
        lambda: [path.name for path in (node.root / "trees").iterdir()] == [node.trees()[0].name]
    )


def test_an_index_that_a_crash_tore_is_fetched_again(node: ContainerdNode, tmp_path: Path) -> None:
    record = add_image(node, tmp_path)
    pull(node)
    lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
    node.stop(node.snapshotter, signal.SIGKILL)
    node.kill_image_servers()
    detach(lower, lazy=True)
    kept = node.settings.cache_dir / "indexes" / record.index_digest.partition(":")[2]
    # Possible remains of a file that was renamed and not synced.
    kept.write_bytes(b"")
    node.snapshotter = node.start_snapshotter()
    lower = lower_of(node.call("Mounts", key="c1"))
    assert checksums_in_child([lower / "top"]) == [digest(b"t")[7:]]
