"""Mounted snapshots: reads and writes of a job, and unmounting."""

import os
import shutil
import sys
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BusyError, InvalidInputError
from bootseer.served.control import ask
from bootseer.served.overlays import overlay_at
from bootseer.served.processes import TREE, start
from bootseer.served.service import live_mounts
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.snapshots.restore import restore_snapshot
from testbed.mounts.image_mounts import run_program
from testbed.mounts.snapshot_mounts import wait_gone
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.crash_driver import DELTA, make_base
from tests.snapshots.support.mounted_jobs import capture_and_remove, runs, small_setup

pytestmark = pytest.mark.needs("mount", "fuse")


def test_a_mounted_tree_is_the_original(tmp_path: Path, covering: MakeNode) -> None:
    target = tmp_path / "work/env"
    make_zoo(tmp_path / "zoo")
    target.parent.mkdir()
    request = SetupRequest(
        command=["cp", "-a", str(tmp_path / "zoo"), str(target)], targets=[str(target)]
    )
    original = describe(tmp_path / "zoo")
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    said: list[str] = []
    result = run_setup(node, request, report=said.append)
    assert (result.how, result.mode) == ("restored", node.restore_mode)
    assert result.mode_reason in said[-1]
    assert result.moved_bytes < 100_000 or result.mode == "link"
    assert overlay_at(target) is not None
    assert differences(original, describe(target)) == []
    again = run_setup(node, request)
    assert (again.how, again.mode) == ("in place", node.restore_mode)
    unmount_snapshot(node, target)
    assert overlay_at(target) is None
    assert list(target.iterdir()) == []
    wait_gone(node)


def test_a_mounted_difference_is_the_original(tmp_path: Path, covering: MakeNode) -> None:
    target = tmp_path / "work/env"
    make_base(target)
    base = describe(target)
    request = SetupRequest(command=["sh", "-e", "-c", DELTA, str(target)], targets=[str(target)])
    run_setup(covering("a"), request)
    original = describe(target)
    shutil.rmtree(target)
    make_base(target)
    node = covering("b")
    assert run_setup(node, request).mode == node.restore_mode
    assert differences(original, describe(target)) == []
    assert run_setup(node, request).how == "in place"
    unmount_snapshot(node, target)
    # The mount was not changed.
    assert differences(base, describe(target)) == []
    wait_gone(node)


def test_what_a_job_writes_goes_with_the_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    (target / "d/file").write_text("changed")
    (target / "d").rename(target / "moved")
    (target / "new").write_text("new")
    assert (target / "moved/file").read_text() == "changed"
    unmount_snapshot(node, target)
    assert run_setup(node, request).how == "restored"
    assert (target / "d/file").read_text() == "Linux\n"
    assert sorted(os.listdir(target)) == ["d"]
    assert runs(tmp_path) == 1
    # A mount with changes does not fit the request: the set-up runs on top of it.
    (target / "new").write_text("new")
    assert run_setup(node, request).how == "captured"
    assert runs(tmp_path) == 2
    assert (target / "new").read_text() == "new"
    assert not unmount_snapshot(node, target)
    # An emptied mount fits again, and the snapshot is mounted on top of it.
    run_setup(node, request)
    shutil.rmtree(target / "d")
    run_setup(node, request)
    assert unmount_snapshot(node, target)
    assert not unmount_snapshot(node, target)


def test_unmounting(tmp_path: Path, covering: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    with pytest.raises(InvalidInputError, match="no snapshot is mounted"):
        unmount_snapshot(node, target)
    run_setup(node, request)
    with (target / "d/file").open() as file:
        with pytest.raises(BusyError, match="--lazy"):
            unmount_snapshot(node, target)
        # Regression: a mount could not be unmounted by a symbolic link to it.
        link = tmp_path / "link"
        link.symlink_to(target)
        unmount_snapshot(node, link, lazy=True)
        assert file.read() == "Linux\n"
    wait_gone(node)


def test_unmounting_what_runs_this_command(tmp_path: Path, covering: MakeNode) -> None:
    """Regression: the message blamed the user's processes."""
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    # The loader does this with libraries and the interpreter itself.
    with (target / "d/file").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ):
        file.close()
        with pytest.raises(BusyError, match="the Python that runs this command lies in it"):
            unmount_snapshot(node, target)
    unmount_snapshot(node, target)
    wait_gone(node)


_IMPORT = """
import sys
sys.path.insert(0, {path!r})
import package.module
print(package.module.VALUE)
"""


def test_compiled_files_stay_valid_and_a_second_node_replays(
    tmp_path: Path, mounting: MakeNode
) -> None:
    target = tmp_path / "env"
    source = tmp_path / "source/package"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "module.py").write_text("VALUE = 42\n" + f"# {'x' * 100}\n" * 500)
    (source / "never-read").write_bytes(os.urandom(20_000_000))
    for path in source.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    text = f"cp -a {source.parent} {target}; {sys.executable} -m compileall -q {target}"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    capture_and_remove(mounting("a"), request, target)
    code = _IMPORT.format(path=str(target))
    faults = []
    for name in ("b", "c"):
        node = mounting(name)
        assert run_setup(node, request).mode == "mount"
        ((state_dir, state),) = live_mounts(node.run_dir)
        compiled = sorted(target.rglob("*.pyc"))
        times = [path.stat().st_mtime_ns for path in compiled]
        assert run_program(code) == "42\n"
        assert [path.stat().st_mtime_ns for path in compiled] == times
        written = list((Path(state.scratch) / "upper").iterdir())
        assert written == [], "something was compiled anew"
        status = ask(state_dir, "status")
        faults.append(status["faults"]["fault_count"])
        assert status["moved"]["fetched_bytes"] < 5_000_000
        unmount_snapshot(node, target)
        wait_gone(node)
    # A read before the prefetch is not counted as the replay's.
    assert faults[0] > faults[1]


def test_a_server_that_was_begun_ahead_serves_the_mount(
    tmp_path: Path, make_node: MakeNode
) -> None:
    target = tmp_path / "env"
    target.mkdir()
    (target / "file").write_text("content")
    node = make_node("a")
    key = create_snapshot(node, [str(target)]).fingerprint
    shutil.rmtree(target)
    node = replace(node, restore_mode="mount")
    with start(TREE, node.run_dir) as process:
        restore_snapshot(node, key, process=process)
        cover = overlay_at(target)
        assert cover is not None
        assert cover.id == process.identity
    assert (target / "file").read_text() == "content"
    unmount_snapshot(node, target)
