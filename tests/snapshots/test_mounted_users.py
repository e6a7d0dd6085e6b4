"""Users of mounted snapshots: the end of the last one, and kills."""

import contextlib
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.linux.processes import start_time
from bootseer.served.control import ask
from bootseer.served.overlays import overlay_at
from bootseer.served.service import live_mounts, take_lock
from bootseer.served.users import add_user, join
from bootseer.settings.config import Settings
from bootseer.snapshots import mounted
from bootseer.snapshots.environment import SetupResult, run_setup
from bootseer.snapshots.mounted import unmount_snapshot
from testbed.mounts.image_mounts import run_program
from testbed.mounts.snapshot_mounts import can_reflink, servers, wait_gone
from testbed.needs import MissingError
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import (
    SetupProcess,
    capture_and_remove,
    done_by,
    environment_of,
    runs,
    small_setup,
    snapshot_run,
    wait_uncovered,
)

pytestmark = pytest.mark.needs("mount", "fuse")


def test_it_stays_while_any_of_its_jobs_lives(tmp_path: Path, covering: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    with SetupProcess(node, request) as one, SetupProcess(node, request) as other:
        assert (one.how, other.how) == ("restored", "in place")
        assert other.ready_name_count == (node.restore_mode == "mount")
        pids = _server_pids(node)
        one.end()
        # A server that was wrong would have ended instead.
        wait_for(lambda: _is_watched(other.pid, pids), "a look at who else uses the mount")
        assert _server_pids(node) == pids
        assert (target / "d/file").read_text() == "Linux\n"
        other.end()
    wait_uncovered(target)
    wait_gone(node)
    with SetupProcess(node, request) as third:
        assert third.how == "restored"
        third.end()


def _server_pids(node: Settings) -> list[int]:
    """Return the ids of the processes that serve the only mount of a node."""
    ((state_dir, state),) = live_mounts(node.run_dir)
    pids = [state.pid]
    if node.restore_mode == "mount":
        pids.append(int(ask(state_dir, "status")["worker_pid"]))
    return pids


def _is_watched(pid: int, watchers: list[int]) -> bool:
    """Return whether one of `watchers` has a pidfd of `pid` (pidfd_open(2))."""
    for watcher in watchers:
        for path in Path(f"/proc/{watcher}/fdinfo").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if re.search(rf"^Pid:\s+{pid}$", path.read_text(), re.MULTILINE):
                    return True
    return False


def test_a_job_that_comes_and_goes_does_not_end_what_was_to_stay(
    tmp_path: Path, mounting: MakeNode
) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = mounting("b")
    with SetupProcess(node, request) as job:
        assert run_setup(node, request).how == "in place"
        job.end()
    ((state_dir, _),) = live_mounts(node.run_dir)
    # A new worker, whose first user has ended, does not end, either.
    os.kill(int(ask(state_dir, "status")["worker_pid"]), signal.SIGKILL)
    assert run_program(f"print(open({str(target / 'd/file')!r}).read())") == "Linux\n\n"
    assert overlay_at(target) is not None
    unmount_snapshot(node, target)
    wait_gone(node)


def test_nodes_that_start_at_once_share_one_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")

    def start(_: int) -> SetupResult:
        return run_setup(node, request)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(start, range(3)))
    assert sorted(result.how for result in results) == ["in place", "in place", "restored"]
    assert len(servers(node)) == 1


def test_a_killed_server_costs_a_new_mount(tmp_path: Path, covering: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    state_dir = _kill_server(node)
    again = run_setup(node, request)
    assert (again.how, again.mode) == ("restored", node.restore_mode)
    assert run_program(f"print(open({str(target / 'd/file')!r}).read())") == "Linux\n\n"
    assert not state_dir.exists()
    unmount_snapshot(node, target)
    wait_gone(node)


def test_a_server_that_is_being_killed_costs_a_new_mount(
    tmp_path: Path, mounting: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: while a killed server's threads end, its lock is still held; the set-up failed on
    it."""
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = mounting("b")
    run_setup(node, request)
    state_dir = _kill_server(node)
    lock = take_lock(state_dir, 10.0)

    def look(*arguments: Any) -> bool:
        os.close(lock)
        return join(*arguments)

    monkeypatch.setattr(mounted, "join", look)
    again = run_setup(node, request)
    assert (again.how, again.mode, runs(tmp_path)) == ("restored", "mount", 1)
    unmount_snapshot(node, target)
    wait_gone(node)


def _kill_server(node: Settings) -> Path:
    """Kill the only server with its supervisor; return its folder."""
    ((state_dir, _),) = live_mounts(node.run_dir)
    pids = _server_pids(node)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(start_time(pid) for pid in pids), "the end of both", interval_s=0.01)
    return state_dir


def test_a_killed_server_is_cleaned_up_where_it_has_mounted(
    tmp_path: Path, covering: MakeNode
) -> None:
    """Regression: a job in its own view removed the files below an overlay that stayed on the host.

    Each later set-up there failed, and its remains were stored.
    """
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    run_setup(node, request)
    state_dir = _kill_server(node)
    code = "import sys, pathlib; from bootseer.served.ending import sweep; "
    words = [sys.executable, "-c", code + "print(sweep(pathlib.Path(sys.argv[1])))"]
    apart = ["unshare", "--mount", *words, str(node.run_dir)]
    assert done_by(apart, environment_of(node)).stdout == "0\n"
    assert overlay_at(target) is not None
    assert state_dir.exists()
    assert run_setup(node, request).how == "restored"
    assert not state_dir.exists()
    (target / "new").write_text("can be written")
    unmount_snapshot(node, target)
    assert overlay_at(target) is None
    wait_gone(node)


def test_who_keeps_a_tree_watches_its_first_user_before_that_may_end(
    tmp_path: Path, mounting: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a run that ended at once was not found, and its linked environment was
    removed."""
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = replace(mounting("b"), restore_mode="link")
    if can_reflink(tmp_path):
        raise MissingError("files here can share their blocks: nobody keeps a tree to link them")
    opened: list[str] = []

    def look(*arguments: Any, **options: Any) -> None:
        for state in servers(node):
            opened.extend(map(os.readlink, Path(f"/proc/{state.pid}/fd").iterdir()))
        add_user(*arguments, **options)

    monkeypatch.setattr("bootseer.snapshots.mounting.add_user", look)
    assert run_setup(node, request).mode == "link"
    assert any("pidfd" in name for name in opened), opened
    unmount_snapshot(node, target)
    wait_gone(node)


@pytest.mark.parametrize("step", ["served", "covered"])
def test_a_run_that_is_killed_leaves_nothing_mounted(
    tmp_path: Path, covering: MakeNode, step: str
) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(covering("a"), request, target)
    node = covering("b")
    before = {"served": "make_private_directory", "covered": "add_user"}[step]
    code = (
        "import os, signal\n"
        "from bootseer.cli.main import main\n"
        "from bootseer.snapshots import mounting\n"
        f"mounting.{before} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main()"
    )
    killed = done_by([sys.executable, "-c", code, *snapshot_run(request)[3:]], environment_of(node))
    assert killed.returncode == -signal.SIGKILL
    # The next run does not wait for the server to notice the end.
    again = run_setup(node, request)
    assert (again.how, again.mode, runs(tmp_path)) == ("restored", node.restore_mode, 1)
    assert (target / "d/file").read_text() == "Linux\n"
    unmount_snapshot(node, target)
    wait_gone(node)
