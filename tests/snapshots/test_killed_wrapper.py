"""Kills of the process that runs a set-up: the set-up goes on, and its result is not shared."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bootseer.errors import BusyError
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.targets import locked
from bootseer.store import open_store
from testbed.mounts.snapshot_mounts import WAIT_S
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import done_by, environment_of, snapshot_run


def _start(node: Settings, request: SetupRequest) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        snapshot_run(request), env=environment_of(node), stderr=subprocess.PIPE, text=True
    )


def test_the_next_set_up_waits_for_the_orphan_of_the_first(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: the next set-up began beside the orphan, and files of both were stored."""
    node = make_node("a")
    log, gate, target = tmp_path / "log", tmp_path / "gate", tmp_path / "env"
    os.mkfifo(gate)
    text = f"echo begin >> {log}; mkdir -p {target}; cat {gate} >> {target}/file; echo end >> {log}"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    first = _start(node, request)
    wait_for(log.exists, "the begin of the first set-up")
    first.kill()
    with first:
        assert first.wait(WAIT_S) == -signal.SIGKILL
    with _start(node, request) as second:
        assert second.stderr is not None
        said = next(line for line in second.stderr if "waiting" in line)
        assert f"is setting up {target}" in said
        assert "process" in said
        assert log.read_text() == "begin\n"
        gate.write_text("of the first\n")
        wait_for(lambda: log.read_text().count("begin") == 2, "the begin of the second set-up")
        assert log.read_text() == "begin\nend\nbegin\n"
        gate.write_text("of the second\n")
        second.communicate(timeout=WAIT_S)
        assert second.returncode == 0
    # The second set-up began on the orphan's files, which are in its key.
    with open_store(node.store_url) as store:
        (manifest,) = catalogue.list_all(store)
    assert any(
        part.name.startswith("before") and part.value != "nothing" for part in manifest.parts
    )
    assert (target / "file").read_text() == "of the first\nof the second\n"


def test_what_a_set_up_leaves_running_keeps_no_lock(tmp_path: Path, make_node: MakeNode) -> None:
    node, target = make_node("a"), tmp_path / "env"
    text = f"sleep 600 & echo $! > {tmp_path}/pid; mkdir -p {target}; touch {target}/file"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    assert run_setup(node, request).how == "captured"
    try:
        assert run_setup(node, request, wait_s=0).how == "in place"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_who_holds_a_lock_is_named(tmp_path: Path) -> None:
    with locked(tmp_path, [tmp_path / "env"], deadline_s=0) as fds:
        holder = subprocess.Popen(["sleep", "600"], pass_fds=fds)
        with (
            pytest.raises(BusyError, match=f"process {holder.pid} on this node"),
            locked(tmp_path, [tmp_path / "env"], deadline_s=0),
        ):
            pass
        holder.kill()
        holder.wait(WAIT_S)


@pytest.mark.parametrize(("held", "wanted"), [("env", "env/deep"), ("env/deep", "env")])
def test_directories_that_lie_in_one_another_share_a_lock(
    tmp_path: Path, held: str, wanted: str
) -> None:
    with locked(tmp_path, [tmp_path / held], deadline_s=0) as fds:
        holder = subprocess.Popen(["sleep", "600"], pass_fds=fds)
        with locked(tmp_path, [tmp_path / "beside"], deadline_s=0):
            pass
        with (
            pytest.raises(BusyError, match=f"process {holder.pid} on this node"),
            locked(tmp_path, [tmp_path / wanted], deadline_s=0),
        ):
            pass
        holder.kill()
        holder.wait(WAIT_S)


@pytest.mark.parametrize("inner", [".", "deep"])
def test_a_set_up_within_a_set_up_waits_for_none(
    tmp_path: Path, make_node: MakeNode, inner: str
) -> None:
    """Otherwise it would wait for itself, for half an hour."""
    target = tmp_path / "env"
    words = snapshot_run(
        SetupRequest(command=["mkdir", f"{target}/x"], targets=[f"{target}/{inner}"])
    )
    text = f"mkdir -p {target}; {' '.join(words)} 2> {tmp_path}/said"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    node = make_node("a")
    done = done_by(snapshot_run(request), environment_of(node))
    assert done.returncode == 0, done.stderr
    assert (target / "x").is_dir()
    assert "runs within the set-up of" in (tmp_path / "said").read_text()


def test_what_another_node_has_stored_meanwhile_is_not_called_ours(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: a node that had lost its lease reported "stored snapshot"."""
    node, target = make_node("a"), tmp_path / "env"
    away = tmp_path / "away"
    back = tmp_path / "store/snapshots"
    text = f"mkdir -p {target}; touch {target}/file; perl -e 'rename(q({away}), q({back}))'"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    key = run_setup(node, request).fingerprint
    shutil.rmtree(target)
    # The snapshot of another node appears while the command runs.
    (tmp_path / "store/snapshots").rename(away)
    said: list[str] = []
    again = run_setup(make_node("b"), request, report=said.append)
    assert (again.how, again.fingerprint) == ("ran", key)
    assert any(line.startswith("warning: another node has stored snapshot") for line in said)
    assert not any(line.startswith("stored snapshot") for line in said)
    # The result is as good as the stored one: the next start finds it in place.
    assert run_setup(make_node("b"), request).how == "in place"
